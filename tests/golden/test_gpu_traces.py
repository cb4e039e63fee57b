"""What a real GPU has shown, judged again: every trace in tests/golden/traces/gpu."""

import json
from pathlib import Path

import pytest

from tests.integration.gpu.scenarios import recorded, replay

FOLDER = Path(__file__).parent / "traces" / "gpu"
NONE_YET = "no run on a real GPU is committed in tests/golden/traces/gpu: `make gpu-check` makes one"


@pytest.mark.parametrize(
    "trace",
    recorded(FOLDER) or [pytest.param(None, marks=pytest.mark.skip(reason=NONE_YET))],
    ids=lambda trace: trace.name if trace else "none yet",
)
def test_recorded_gpu_is_judged_rightly(trace: Path) -> None:
    """Each fault is called what it is, on the GPU that figures.json names."""
    figures = replay(trace)
    assert [] == [figure for figure in figures if figure.ok is False]
    assert "standin" not in json.loads((FOLDER / "figures.json").read_text())["machine"]["driver"]
