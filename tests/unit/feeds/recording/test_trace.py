"""Traces written and read again, and places where none can be written."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import MAX_ABOUT_CHARACTERS, TraceWriter, read_trace
from kvdiag.model import Facts, Gap, Sample, Timeline
from tests.builders import runs, worlds
from tests.builders.answers import containing
from tests.unit.feeds.recording.small_traces import CUT_OFF, FACTS_SEEN, HEADER, LINES, MARK, SAMPLES, write
from tests.unit.feeds.strategies import FACTS, TIMELINES

SUFFIXES = ("jsonl", "jsonl.gz")


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(timeline=TIMELINES, facts=FACTS)
def test_timeline_comes_back(folder: Path, suffix: str, timeline: Timeline, facts: Facts) -> None:
    """What was recorded is read again as the same timeline of the same server, packed or not."""
    path = folder / f"round-trip.{suffix}"
    write(path, timeline, facts)
    assert (timeline, facts) == read_trace(path)


WHOLE = HEADER + b"".join(LINES) + b'{"end":%d}\n' % len(LINES)


@pytest.mark.parametrize(
    "content",
    [gzip.compress(WHOLE), "".join(f"{json.dumps(json.loads(one))}\n" for one in WHOLE.splitlines()).encode()],
    ids=["packed under any name", "rewritten with spaces by a JSON tool"],
)
def test_trace_is_known_by_its_content(tmp_path: Path, content: bytes) -> None:
    """Neither its name nor its spacing matters."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    assert (Timeline(samples=SAMPLES), FACTS_SEEN) == read_trace(path)


def test_early_traces_name_the_engine_as_a_source(tmp_path: Path) -> None:
    """Traces of before the seam have the engine's name where gaps now say `engine`, in facts and samples."""
    path = tmp_path / "trace.jsonl"
    gap, other = Gap("engine", "failed", "no answer"), Gap("nvml", "failed", "no answer")
    write(path, Timeline(samples=(Sample(at_seconds=1.0, gaps=(gap, other)),)), Facts(gaps=(gap,)))
    text = path.read_text().replace('"source":"engine"', '"source":"vllm"')
    path.write_text("".join(line for line in text.splitlines(keepends=True) if "crc32" not in line) + '{"end":1}\n')
    timeline, facts = read_trace(path)
    assert (["engine", "nvml"], ["engine"]) == (
        [one.source for one in timeline.samples[0].gaps],
        [one.source for one in facts.gaps[:1]],
    )


def test_sample_takes_few_bytes(tmp_path: Path) -> None:
    """An engine reading as live ones are takes no more than 400 bytes, so that an hour at 10 Hz fits on any disk."""
    path = tmp_path / "trace.jsonl"
    timeline = runs.run()
    write(path, timeline, worlds.facts(worlds.World()))
    assert path.stat().st_size / len(timeline.samples) < 400


def test_trace_is_readable_while_it_grows(tmp_path: Path) -> None:
    """Each line is on disk as soon as it was added: a kill loses the line being written, and no other."""
    paths = [tmp_path / f"trace.{suffix}" for suffix in SUFFIXES]
    writers = [TraceWriter(path, FACTS_SEEN) for path in paths]
    for writer in writers:
        writer.add(SAMPLES[0])
        writer.add(MARK)
    actual = [read_trace(path) for path in paths]
    for writer in writers:
        writer.close()
    assert [(Timeline(samples=SAMPLES[:1], marks=(MARK,)), CUT_OFF)] * 2 == actual


def test_trace_may_say_about_itself_what_it_likes(tmp_path: Path) -> None:
    """What a header says about its trace stands there for people, and is neither judged nor in the way."""
    about = {"incident": "a name", "sources": ["https://example.org"], "assumed": {"noise": [1, 2.5, None]}}
    with TraceWriter(tmp_path / "trace.jsonl", FACTS_SEEN, about) as trace:
        trace.add(SAMPLES[0])
    with (tmp_path / "trace.jsonl").open() as file:
        assert about == json.loads(file.readline())["about"]
    assert (Timeline(samples=SAMPLES[:1]), FACTS_SEEN) == read_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize("about", [{"text": "x" * MAX_ABOUT_CHARACTERS}, {"ratio": float("nan")}])
def test_trace_says_no_novel_about_itself(tmp_path: Path, about: Mapping[str, Any]) -> None:
    """A header that would be too long, or no JSON, is refused before there is a file."""
    with pytest.raises(ValueError, match=r"`about` has|JSON"):
        TraceWriter(tmp_path / "trace.jsonl", FACTS_SEEN, about)
    assert not (tmp_path / "trace.jsonl").exists()


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    """A trace that was closed can be closed again, as an interrupted run may do."""
    path = tmp_path / "trace.jsonl.gz"
    with TraceWriter(path, FACTS_SEEN) as writer:
        writer.close()
    assert (Timeline(samples=()), FACTS_SEEN) == read_trace(path)


def test_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A trace in a folder that does not exist is refused before anything is recorded."""
    with pytest.raises(KvdiagError) as caught:
        TraceWriter(tmp_path / "nowhere" / "trace.jsonl", FACTS_SEEN)
    assert containing(f"{tmp_path}/nowhere/trace.jsonl", "No such file") == str(caught.value)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_full_disk_is_told(tmp_path: Path, name: str) -> None:
    """A disk without room for the first line is one error, and closing the file is no second one."""
    # A file that takes nothing, since it is the name that says whether to pack
    path = tmp_path / name
    with pytest.raises(KvdiagError) as caught:
        TraceWriter(path, FACTS_SEEN, opened=lambda _: os.open("/dev/full", os.O_WRONLY))
    assert f"cannot record to {path}: No space left on device" == str(caught.value)


FILL = """
import resource, sys
from pathlib import Path
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Facts, Sample
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    with TraceWriter(Path(sys.argv[1]), Facts()) as trace:
        for number in range(10_000):
            trace.add(Sample(at_seconds=float(number)))
except KvdiagError as error:
    print(error)
"""


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_disk_that_fills_up_is_told(tmp_path: Path, suffix: str) -> None:
    """When no more can be written one error says so, and what was written before can be read."""
    path = tmp_path / f"trace.{suffix}"
    # A process may write 4 KiB and no more
    done = subprocess.run(
        [sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (f"cannot record to {path}: File too large\n", "") == (done.stdout, done.stderr)
    timeline, _ = read_trace(path)
    assert [float(number) for number in range(len(timeline.samples))] == [one.at_seconds for one in timeline.samples]
    assert len(timeline.samples) > 50
