"""`kvdiag diagnose --postmortem` as a user runs it: verdicts, exit codes, and bad input in one line."""

import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

from kvdiag.feeds.recording.trace import TraceWriter
from tests.builders.runs import run
from tests.builders.worlds import World
from tests.builders.worlds import facts as facts_of
from tests.unit.commands.bad_input.refusals import call as kvdiag
from tests.unit.commands.bad_input.refusals import refusal

ROOT = Path(__file__).parents[3]
FAILURES = ROOT / "tests" / "fixtures" / "failures"
SCHEMA = json.loads((ROOT / "kvdiag" / "outputs" / "documents" / "diagnosis.schema.json").read_text())
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 1.00 GiB is free.\n"
)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("vllm-0.32-capture.log", "spike.graph_capture"),
        ("vllm-0.11-logprobs.log", "spike.activation"),
        ("vllm-0.8-sampler.log", "spike.activation"),
    ],
)
def test_log_gets_its_verdict(name: str, verdict: str) -> None:
    """The headline is the cause, the exit code that of a fault, the document as its schema says."""
    text = kvdiag("diagnose", "--postmortem", str(FAILURES / name))
    document = kvdiag("diagnose", "--postmortem", str(FAILURES / name), "--output", "json")
    jsonschema.validate(document.document, SCHEMA)
    assert (2, 2) == (text.code, document.code)
    assert text.stdout.startswith(f"FAULT  {verdict}: ")
    assert "fault" == document.finding(verdict)["status"]
    assert "by 0." in document.finding(verdict)["remedy"]


def test_message_on_standard_input() -> None:
    """A bare message, piped in, is enough for a verdict."""
    command = [sys.executable, "-m", "kvdiag", "diagnose", "--postmortem", "-"]
    done = subprocess.run(command, input=OOM, capture_output=True, text=True, check=False, timeout=60)
    assert (2, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("FAULT  spike.activation: 2.00 GiB ")


@pytest.mark.parametrize("packed", [False, True])
def test_trace_is_known_by_its_content(tmp_path: Path, packed: bool) -> None:
    """A trace is recognised by its content under any file name, and is judged together with the error message."""
    world = World(device_growth_bytes=64 * 2**20)
    trace = tmp_path / ("kept.gz" if packed else "kept")
    with TraceWriter(trace, facts_of(world)) as writer:
        timeline = run(world)
        for sample in timeline.samples:
            writer.add(sample)
        for mark in timeline.marks:
            writer.add(mark)
    (tmp_path / "log").write_text(OOM)
    alone = kvdiag("diagnose", "--postmortem", str(trace), "--output", "json")
    both = kvdiag("diagnose", "--postmortem", str(trace), str(tmp_path / "log"), "--output", "json")
    assert {"leak.device_torch", "leak.device_non_torch"} & {
        one["id"] for one in alone.document["findings"] if one["status"] == "fault"
    }
    assert ("suspect", 2) == (both.finding("spike.activation")["status"], both.code)


def test_log_without_a_failure_is_no_missing_data() -> None:
    """A log without a failure is no gap: alone it gives exit code 3, with another log it is listed as a source."""
    clean = str(ROOT / "tests" / "fixtures" / "logs" / "vllm-0.32.0-cpu-llama.log")
    failed = str(FAILURES / "vllm-0.32-capture.log")
    alone, both = (kvdiag("diagnose", "--postmortem", *logs, "--output", "json") for logs in ([clean], [clean, failed]))

    assert (3, []) == (alone.code, alone.document["gaps"])
    assert (2, []) == (both.code, both.document["gaps"])
    evidence = {one["name"]: one["value"] for one in both.finding("spike.graph_capture")["evidence"]}
    assert "vllm-0.32.0-cpu-llama.log" in evidence["sources"]


def test_packed_log_is_read(tmp_path: Path) -> None:
    """A rotated log needs no unpacking."""
    (tmp_path / "log.1.gz").write_bytes(gzip.compress(OOM.encode()))
    assert 2 == kvdiag("diagnose", "--postmortem", str(tmp_path / "log.1.gz")).code


def test_log_that_is_given_is_not_asked_for(tmp_path: Path) -> None:
    """A log whose end does not show the server's state leads to a request for its beginning alone."""
    (tmp_path / "log").write_text(OOM)
    actual = kvdiag("diagnose", "--postmortem", "--log", str(tmp_path / "log"), "--output", "json")
    assert "--log" not in actual.not_ok
    assert "add the log" in actual.finding("spike.activation")["summary"]


def test_log_without_a_failure_is_unknown(tmp_path: Path) -> None:
    """A healthy log says nothing about memory that ran out; that is not ok, and not an error."""
    (tmp_path / "log").write_text("INFO all is well\n")
    actual = kvdiag("diagnose", "--postmortem", str(tmp_path / "log"), "--output", "json")
    assert (3, "unknown") == (actual.code, actual.document["worst"])
    assert "no out-of-memory failure" in actual.not_ok


def test_bad_input_is_one_line(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """Every file that is nothing of the kind is named with its reason."""
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "blank").write_bytes(b" \n")
    (tmp_path / "binary").write_bytes(os.urandom(64) + b"\0" * 64)
    (tmp_path / "box").write_text('{"kvdiag_black_box": 1}')
    (tmp_path / "later").write_text('{"kvdiag_black_box": 9}')
    (tmp_path / "agent").write_text('{"kvdiag_agent": 1}')
    (tmp_path / "torn.gz").write_bytes(gzip.compress(OOM.encode())[:20])
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "kvdiag-00000001.jsonl.gz").write_bytes(b"")
    names = ("none", "empty", "blank", "binary", "box", "later", "agent", "torn.gz", "record")
    refusals = [refusal("diagnose", "--postmortem", str(tmp_path / name)) for name in names]
    golden("errors/postmortem_files.txt", "".join(f"{one.replace(f'{tmp_path}/', '')}\n" for one in refusals))
    assert "pipe is empty" == refusal("diagnose", "--postmortem", str(tmp_path / "pipe"))
    assert refusal("diagnose", "--postmortem", "--log", str(tmp_path)).startswith(f"{tmp_path} is a folder: ")


def test_folder_without_a_black_box_is_unknown(tmp_path: Path) -> None:
    """A server with an agent that did not run out of memory leaves none; so does any other folder."""
    actual = kvdiag("diagnose", "--postmortem", str(tmp_path), "--output", "json")
    assert 3 == actual.code
    assert "no allocation failed" in actual.not_ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--postmortem"], "--postmortem needs files to read"),
        (["--log", "x"], "--log, --black-box and"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str) -> None:
    """The options belong together."""
    actual = refusal("diagnose", *arguments)
    assert actual.startswith(message)
    assert actual.endswith(" (see kvdiag diagnose --help)")


def test_file_that_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    """The reason is the system's."""
    (tmp_path / "log").symlink_to(tmp_path / "log")
    actual = refusal("diagnose", "--postmortem", str(tmp_path / "log"))
    assert f"cannot read {tmp_path}/log: {os.strerror(errno.ELOOP)}" == actual
