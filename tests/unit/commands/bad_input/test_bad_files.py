"""Unreadable traces, unwritable destinations, and outputs whose reader has closed its end."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag.model import Facts, Sample
from kvdiag.model.codec import to_plain
from tests.fixtures.hostile import Hostile
from tests.integration.vllm.cli import kvdiag
from tests.unit.commands.bad_input.refusals import PAGE, SERVER, call, listed, refusal


def line(**value: object) -> bytes:
    """One line of a trace."""
    return json.dumps(value).encode() + b"\n"


HEADER = line(kvdiag_trace=1, kvdiag_version="0.1.0", facts=to_plain(Facts(url="http://127.0.0.1:8000")))
SAMPLES = b"".join(line(sample=to_plain(Sample(at_seconds=float(number)))) for number in range(9))
BAD_TRACES = {
    "missing": None,
    "empty": b"",
    "a metrics page": PAGE.encode(),
    "an engine's log": b"INFO 11-20 [core.py] out of memory\n",
    "a black box": line(kvdiag_black_box=1),
    "binary": b"\x7fELF\0\0",
    "torn in its header": HEADER[:40],
    "torn in its packed header": gzip.compress(HEADER)[:15],
    "newer": line(kvdiag_trace=2, kvdiag_version="0.9.0\n\x1b[2J"),
    "a corrupt line": HEADER + SAMPLES + b"garbage\n" + SAMPLES,
    "a reading of NaN": HEADER + b'{"sample":{"at_seconds":NaN}}\n',
    "a field that would clear the screen": HEADER + line(sample={"at_seconds": 1, "a\nb\x1b[2J": 1}),
    "corrupt, packed": b"\x1f\x8b" + b"garbage" * 99,
}


def test_bad_trace_is_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """A trace that is missing, torn, corrupt, newer, or none is one line that says which."""
    path = tmp_path / "trace.jsonl"
    messages = {}
    for name, content in BAD_TRACES.items():
        if content is not None:
            path.write_bytes(content)
        messages[name] = refusal("diagnose", str(path)).replace(str(path), "TRACE")
    golden("errors/traces.txt", listed(messages))


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
    """An unwritable trace destination is an error before the first request to the server."""
    (tmp_path / "link").symlink_to("elsewhere")
    with Hostile(SERVER) as server:
        actual = call("run", "--url", server.url, "--record", str(tmp_path / place))
    problems = {
        "nowhere/trace.jsonl": "No such file or directory",
        ".": "Is a directory",
        "link": "it is a symbolic link",
    }
    # A full disk shows with the first bytes; the gap of a host without GPUs may be logged by then.
    said = f"kvdiag: cannot record to {tmp_path / place}: {problems.get(place, 'No space left on device')}"
    assert (3, "") == (actual.code, actual.stdout)
    assert actual.stderr.splitlines()[-1].startswith(said)
    assert "/v1/completions" not in server.requests


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    """A trace that can be judged."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER + SAMPLES)
    return path


@pytest.mark.parametrize("output", ["text", "json"])
def test_reader_that_has_gone_is_no_verdict(small_trace: Path, output: str) -> None:
    """When the output's reader has closed the pipe, kvdiag exits 3 and writes nothing to stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "kvdiag", "diagnose", str(small_trace), "--output", output]
    try:
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (3, "") == (done.returncode, done.stderr)


def test_disk_without_room_for_the_output_is_told(small_trace: Path) -> None:
    """A result that cannot be written to a full disk exits 3 with one line on stderr."""
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
