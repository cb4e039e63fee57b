"""`kvdiag baseline` on recorded runs: kept, compared, refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.commands import main

TRACES = Path(__file__).parents[2] / "golden" / "traces"
RUN = TRACES / "vllm-0.32.0-soak-healthy.jsonl.gz"
LEAK = TRACES / "vllm-0.32.0-soak-leak.jsonl.gz"


def compared(capsys: pytest.CaptureFixture[str], *args: str | Path) -> tuple[int, dict[str, Any]]:
    """The exit code, and the outcomes by name."""
    code = main(["baseline", "compare", *map(str, args), "--output", "json"])
    changes = json.loads(capsys.readouterr().out)["changes"]
    return code, {one["name"]: one["outcome"] for one in changes}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline of a healthy run of a real vLLM."""
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    assert 0 == main(["baseline", "save", str(RUN), str(path)])
    return path


def test_a_trace_is_its_own_baseline(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved and compared with the trace that it comes from: 0, and all the same."""
    code, outcomes = compared(capsys, saved, RUN)
    assert (0, {"same"}) == (code, set(outcomes.values()))
    assert "idle.host_anonymous" in outcomes


def test_a_baseline_is_not_written_over_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace can be measured again, and what it says cannot be had from a baseline."""
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(RUN.read_bytes())
    assert 3 == main(["baseline", "save", str(trace), str(trace)])
    assert f"cannot write {trace}: " in capsys.readouterr().err
    assert RUN.read_bytes() == trace.read_bytes()


def test_a_leak_is_worse_than_none(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A vLLM that keeps blocks, held against one that does not, ends with 2."""
    code, outcomes = compared(capsys, saved, LEAK)
    assert (2, "worse") == (code, outcomes["leak.kv_blocks"])


def test_a_person_reads_both_sides(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who is compared, each figure, and how many of each kind, in 80 columns."""
    code = main(["baseline", "compare", str(saved), str(RUN)])
    told = capsys.readouterr().out
    assert 0 == code
    assert "before  vllm 0.32.0" in told
    assert "pool.capacity_tokens" in told
    assert max(map(len, told.splitlines())) <= 80


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not a kvdiag trace"),
        ("{}", "is not a baseline"),
        ('{"kvdiag_baseline": 7}', "is not a baseline"),
        (None, "cannot read"),
    ],
)
def test_a_file_that_is_neither(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, words: str
) -> None:
    """One line, and 3."""
    path = tmp_path / "file"
    if content is not None:
        path.write_text(content)
    code = main(["baseline", "compare", str(saved), str(path)])
    told = capsys.readouterr().err
    assert (3, 1) == (code, len(told.splitlines()))
    assert words in told


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A baseline that cannot be kept is an error."""
    code = main(["baseline", "save", str(RUN), str(tmp_path / "none" / "file")])
    assert (3, "cannot write") == (code, "cannot write" if "cannot write" in capsys.readouterr().err else None)
