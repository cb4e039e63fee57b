"""`kvdiag fit` against vLLM 0.32 itself: the model predicts what the engine reports, by its page and by its log."""

from pathlib import Path

import pytest

from tests.integration.vllm.cli import kvdiag
from tests.integration.vllm.conftest import VllmHome
from tests.integration.vllm.engine import Engine

pytestmark = pytest.mark.real_vllm

EXACT = {"capacity_tokens": 0.0, "max_concurrency": 0.0}


@pytest.mark.parametrize("named", [True, False])
def test_a_page_is_predicted_exactly(server: Engine, vllm: VllmHome, named: bool, tmp_path: Path) -> None:
    """With MODEL and without it: the server's own folder is read then."""
    model = [str(vllm.models / "llama")] if named else []
    result = kvdiag("fit", *model, "--calibrate", server.url, "--output", "json", env={"XDG_DATA_HOME": str(tmp_path)})
    found = {one["figure"]: one["drift_ratio"] for one in result.document["comparisons"]}
    assert (0, {"num_blocks": 0.0, **EXACT}) == (result.code, found)


def test_a_log_is_predicted_exactly(server: Engine, vllm: VllmHome, tmp_path: Path) -> None:
    """The server's own startup log, while it runs."""
    result = kvdiag(
        "fit",
        str(vllm.models / "llama"),
        "--from-log",
        str(server.log),
        "--output",
        "json",
        env={"XDG_DATA_HOME": str(tmp_path)},
    )
    found = {one["figure"]: one["drift_ratio"] for one in result.document["comparisons"]}
    assert (0, EXACT) == (result.code, found)


def test_another_model_is_named(server: Engine, vllm: VllmHome, tmp_path: Path) -> None:
    """Both by the page, whose server has its config in a folder, and by the log."""
    wrong = str(vllm.models / "gemma3")
    results = [
        kvdiag("fit", wrong, *source, env={"XDG_DATA_HOME": str(tmp_path)})
        for source in (("--calibrate", server.url), ("--from-log", str(server.log)))
    ]
    assert [(3, True), (3, True)] == [(one.code, "are different models" in one.stderr) for one in results]
