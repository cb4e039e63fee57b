"""The example of docs/python.md and examples/, run as it stands on a real Prometheus."""

import re
from pathlib import Path

import pytest

import kvdiag
from tests.integration.prometheus.histories import END_SECONDS

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "python.md"
FILE = ROOT / "examples" / "find_a_leak.py"
MAX_LINES = 15


def test_the_example_finds_the_leak(history: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Two replicas, of which one grows by 2,000 MB an hour: it alone is a fault, at that rate, within 15 lines."""
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert len(example.splitlines()) <= MAX_LINES
    assert FILE.read_text(encoding="utf-8").endswith(f'"""\n\n{example}')
    given = {
        '"http://prometheus:9090"': repr(history),
        'namespace="llm"': 'namespace="leak"',
        'window="24h"': f'window="24h", end="{END_SECONDS}"',
        '"1h"': '"30min"',
    }
    for there, here in given.items():
        assert there in example
        example = example.replace(there, here)
    exec(compile(example, PAGE.name, "exec"), {})  # noqa: S102 - the page's own example
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if not line.startswith("  ")]
    assert ["leak/vllm-0: ok", "leak/vllm-1: fault"] == sorted(": ".join(line.split(": ")[:2]) for line in lines)
    (rate,) = re.findall(r"device memory: \+(\d+) MiB/h over", printed)
    assert float(rate) == pytest.approx(2000e6 / 2**20 / 2, rel=0.1)


def test_no_replica_is_an_error_and_no_empty_list(history: str) -> None:
    """A loop over none would find nothing wrong."""
    with pytest.raises(kvdiag.KvdiagError, match="--match"):
        kvdiag.read_prometheus(history, match='namespace="of-nobody"', end=END_SECONDS)
