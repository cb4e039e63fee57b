"""Traces that cannot be read, places that cannot be written, and outputs that nobody takes."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdiag.model import Facts, Sample
from kvdiag.model.codec import to_plain
from tests.fixtures.hostile import Hostile
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.refusals import PAGE, SERVER, call, refusal


def line(**value: object) -> bytes:
    """One line of a trace."""
    return json.dumps(value).encode() + b"\n"


HEADER = line(kvdiag_trace=1, kvdiag_version="0.1.0", facts=to_plain(Facts(url="http://127.0.0.1:8000")))
SAMPLES = b"".join(line(sample=to_plain(Sample(at_seconds=float(number)))) for number in range(9))
NO_TRACE = "TRACE is not a kvdiag trace: its first line is not a header"
A_LOG = f"{NO_TRACE}; if it is an engine log, add --postmortem"
A_BOX = f"{NO_TRACE}; to read an agent's black box, add --postmortem"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(None, "cannot read TRACE: No such file or directory", id="missing"),
        pytest.param(b"", NO_TRACE, id="empty"),
        pytest.param(PAGE.encode(), A_LOG, id="a metrics page"),
        pytest.param(b"INFO 11-20 [core.py] out of memory\n", A_LOG, id="an engine's log"),
        pytest.param(line(kvdiag_black_box=1), A_BOX, id="a black box"),
        pytest.param(b"\x7fELF\0\0", NO_TRACE, id="binary"),
        pytest.param(HEADER[:40], NO_TRACE, id="torn in its header"),
        pytest.param(gzip.compress(HEADER)[:15], NO_TRACE, id="torn in its packed header"),
        pytest.param(
            line(kvdiag_trace=2, kvdiag_version="0.9.0\n\x1b[2J"),
            "TRACE is a trace of format 2, this kvdiag reads 1: use kvdiag 0.9.0 [2J",
            id="newer",
        ),
        pytest.param(
            HEADER + SAMPLES + b"garbage\n" + SAMPLES,
            "TRACE, line 11: Expecting value: line 1 column 1 (char 0)",
            id="a corrupt line",
        ),
        pytest.param(
            HEADER + b'{"sample":{"at_seconds":NaN}}\n', "TRACE, line 2: NaN is not a number", id="a reading of NaN"
        ),
        pytest.param(
            HEADER + line(sample={"at_seconds": 1, "a\nb\x1b[2J": 1}),
            r"TRACE, line 2: Sample has no field 'a\nb\x1b[2J'",
            id="a field that would clear the screen",
        ),
        pytest.param(
            b"\x1f\x8b" + b"garbage" * 99,
            "cannot read TRACE: Unknown compression method: the file is damaged",
            id="corrupt, packed",
        ),
    ],
)
def test_bad_trace_is_told(tmp_path: Path, content: bytes | None, message: str) -> None:
    """A trace that is missing, torn, corrupt, newer, or none is one line that says which."""
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_bytes(content)
    actual = refusal("diagnose", str(path))
    assert message == actual.replace(str(path), "TRACE")


def test_torn_trace_is_judged_without_its_last_line(tmp_path: Path) -> None:
    """A trace whose writer was killed is judged by its whole lines, as if the last one had never been begun."""
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    whole.write_bytes(HEADER + SAMPLES)
    torn.write_bytes(HEADER + SAMPLES + b'{"sample":{"at_sec')
    expected, actual = (call("diagnose", str(path), "--output", "json") for path in (whole, torn))
    assert expected == actual
    assert (3, "unknown") == (actual.code, actual.document["worst"])


@pytest.mark.parametrize("place", ["nowhere/trace.jsonl", ".", "/dev/full", "link"])
def test_place_for_the_trace_is_checked_first(tmp_path: Path, place: str) -> None:
    """A trace that cannot be written is said before anything is asked of the server."""
    (tmp_path / "link").symlink_to("elsewhere")
    with Hostile(SERVER) as server:
        actual = refusal("run", "--url", server.url, "--record", str(tmp_path / place))
    problems = {
        "nowhere/trace.jsonl": "No such file or directory",
        ".": "Is a directory",
        "link": "it is a symbolic link; give the file itself",
    }
    assert f"cannot record to {tmp_path / place}: {problems.get(place, 'No space left on device')}" == actual
    assert "/v1/completions" not in server.requests


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    """A trace that can be judged."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER + SAMPLES)
    return path


@pytest.mark.parametrize("output", ["text", "json"])
def test_reader_that_has_gone_is_no_verdict(small_trace: Path, output: str) -> None:
    """When nobody reads the output any more kvdiag ends quietly, with the exit code that claims nothing."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kvdiag", "diagnose", str(small_trace), "--output", output]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (3, "") == (done.returncode, done.stderr)


def test_disk_without_room_for_the_output_is_told(small_trace: Path) -> None:
    """A result that cannot be written is an error, and not an empty file beside a verdict."""
    command = [sys.executable, "-m", "kvdiag", "diagnose", str(small_trace), "--output", "json"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (3, 1, True) == (done.returncode, done.stderr.count("\n"), "No space left" in done.stderr)


def test_text_goes_out_in_any_encoding(tmp_path: Path) -> None:
    """A model's name that the terminal's encoding does not have is shown with question marks."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line(kvdiag_trace=1, facts={"model": "modèle"}) + SAMPLES)
    actual = kvdiag("diagnose", str(path), env={"PYTHONIOENCODING": "ascii"})
    assert (3, "") == (actual.code, actual.stderr)
    assert "mod?le" in actual.stdout
