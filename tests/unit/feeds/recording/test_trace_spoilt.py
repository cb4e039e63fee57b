"""Traces that are torn, spoilt, of a newer kvdiag, or none at all: read in part, or refused in one line."""

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.commands.printing import print_diagnosis
from kvdiag.diagnosis import diagnose
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import FORMAT, MAX_LINE_BYTES, read_trace
from kvdiag.model import Timeline
from kvdiag.model.codec import to_plain
from tests.builders import runs, worlds
from tests.builders.answers import containing
from tests.unit.feeds.recording.small_traces import (
    CUT_OFF,
    FACTS_SEEN,
    HEADER,
    LINES,
    MARK,
    NO_TRACE,
    SAMPLES,
    line,
    refusal,
    write,
)


@settings(deadline=None)
@given(cut=st.integers(0, len(HEADER) + sum(map(len, LINES))))
def test_torn_line_is_dropped(folder: Path, cut: int) -> None:
    """Of a trace that was cut off anywhere all whole lines are read; without its header it is no trace."""
    path = folder / "torn.jsonl"
    path.write_bytes((HEADER + b"".join(LINES))[:cut])
    if cut < len(HEADER) - 1:
        assert NO_TRACE == refusal(path)
        return
    actual = read_trace(path)
    whole = max(path.read_bytes().count(b"\n") - 1, 0)
    assert (Timeline(samples=SAMPLES[:whole]), CUT_OFF) == actual


@settings(deadline=None)
@given(part=st.floats(0.0, 1.0))
def test_torn_packed_trace_loses_its_end(folder: Path, part: float) -> None:
    """Of a packed trace that was cut off anywhere the lines before the cut are read."""
    path = folder / "torn.jsonl.gz"
    write(path, Timeline(samples=SAMPLES), FACTS_SEEN)
    packed = path.read_bytes()
    path.write_bytes(packed[: int(len(packed) * part)])

    try:
        timeline, facts = read_trace(path)
    except KvdiagError:
        assert NO_TRACE == refusal(path)
        return

    assert SAMPLES[: len(timeline.samples)] == timeline.samples
    assert facts in (FACTS_SEEN, CUT_OFF)
    assert (facts == FACTS_SEEN) <= (timeline.samples == SAMPLES)
    assert part < 1.0 or facts == FACTS_SEEN


BAD_LINES = [
    pytest.param(b"\n", "not valid JSON", id="empty"),
    pytest.param(b"hello\n", "not valid JSON", id="not JSON"),
    pytest.param(LINES[1][:-20] + b"\n", "not valid JSON", id="torn, and more behind it"),
    pytest.param(b"\xff\xff\n", "0xff", id="not text"),
    pytest.param(b"[]\n", "not a JSON object", id="a list"),
    pytest.param(b"{}\n", "neither a sample", id="an empty object"),
    pytest.param(HEADER, "neither a sample", id="a second header"),
    pytest.param(b'{"end":1}\n', "the trace's end", id="the end of another trace"),
    pytest.param(line(sample=to_plain(SAMPLES[0]), mark=to_plain(MARK)), "neither a sample", id="both"),
    pytest.param(line(sample=5), "Sample must be an object", id="a number for a sample"),
    pytest.param(line(sample={"at_seconds": 1, "colour": 1}), "Sample has no field 'colour'", id="an unknown field"),
    pytest.param(line(sample={}), "at_seconds", id="no time"),
    pytest.param(line(sample={"at_seconds": True}), "Sample.at_seconds", id="True for 1"),
    pytest.param(b'{"sample":{"at_seconds":NaN}}\n', "NaN is not a number", id="NaN"),
    pytest.param(b'{"sample":{"at_seconds":-Infinity}}\n', "-Infinity is not a number", id="infinity"),
    pytest.param(b'{"sample":{"at_seconds":1e999}}\n', "Sample.at_seconds", id="beyond a float"),
    pytest.param(b'{"sample":{"at_seconds":1' + b"0" * 400 + b"}}\n", "Sample.at_seconds", id="401 digits"),
    pytest.param(
        b'{"sample":{"at_seconds":1' + b"0" * 5000 + b"}}\n", "Exceeds the limit (4300", id="more digits than are read"
    ),
    pytest.param(b'{"sample":' + b"[" * 60_000 + b"\n", "nested too deeply", id="nested without end"),
    pytest.param(
        line(sample={"at_seconds": 1, "engines": [{"engine": "0", "requests_running": -1}]}),
        "requests_running is -1",
        id="an impossible reading",
    ),
    pytest.param(
        line(mark={"at_seconds": 1, "step": "x", "cycle": 0, "phase": "middle"}),
        "Mark.phase is 'middle'",
        id="an unknown phase",
    ),
    pytest.param(b'{"sample":"' + b"x" * MAX_LINE_BYTES + b'"}\n', "longer than 4 MiB", id="a line without end"),
    pytest.param(line(sample={"at_seconds": 0.5}), "previous sample", id="back in time"),
]


@pytest.mark.parametrize(("bad", "problem"), BAD_LINES)
def test_bad_line_is_named(tmp_path: Path, bad: bytes, problem: str) -> None:
    """A bad line that is not the torn last one is an error with its number and what is wrong, and not skipped."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER + LINES[0] + LINES[1] + bad + LINES[2])
    actual = refusal(path)
    assert actual.startswith("TRACE, line 4: ")
    assert problem in actual
    assert len(actual) < 250


def test_marks_back_in_time_are_named(tmp_path: Path) -> None:
    """A mark that is older than the one before it is an error with its number; samples do not matter to it."""
    path = tmp_path / "trace.jsonl"
    earlier = {**to_plain(MARK), "at_seconds": 1.0}
    path.write_bytes(HEADER + LINES[4] + line(mark=to_plain(MARK)) + line(mark=earlier) + LINES[4])
    assert containing("TRACE, line 4: ", "previous mark") == refusal(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"", NO_TRACE, id="empty"),
        pytest.param(b"\n", NO_TRACE, id="an empty line"),
        pytest.param(b"vllm:num_requests_running 1.0\n", NO_TRACE, id="a metrics page"),
        pytest.param(b'{"schema_version": 1}\n', NO_TRACE, id="a diagnosis"),
        pytest.param(b"[1]\n", NO_TRACE, id="a list"),
        pytest.param(b"\x00" * (MAX_LINE_BYTES + 5), NO_TRACE, id="a disk image"),
        pytest.param(b"[" * 100_000, NO_TRACE, id="nested without end"),
        pytest.param(LINES[0], NO_TRACE, id="a trace without its header"),
        pytest.param(line(kvdiag_trace=True, facts={}), NO_TRACE, id="True for version 1"),
        pytest.param(line(kvdiag_trace="1", facts={}), NO_TRACE, id="text for version 1"),
        pytest.param(line(kvdiag_trace=0, facts={}), NO_TRACE, id="version 0"),
        pytest.param(line(kvdiag_trace=1), "line 1: Facts", id="no facts"),
        pytest.param(line(kvdiag_trace=1, facts={"colour": 1}), "Facts has no field 'colour'", id="unknown fact"),
        pytest.param(line(kvdiag_trace=1, facts={"forced": 1}), "line 1: Facts.forced", id="a fact of another type"),
        pytest.param(line(kvdiag_trace=2, kvdiag_version="0.9.0", facts={"colour": 1}), "use kvdiag 0.9.0", id="newer"),
        pytest.param(line(kvdiag_trace=2), "format 2", id="newer, by whom?"),
        pytest.param(gzip.compress(b"")[:10], NO_TRACE, id="a torn empty gzip"),
        pytest.param(b"\x1f\x8b" + b"garbage" * 9, "Unknown compression method", id="no gzip"),
        pytest.param(gzip.compress(HEADER)[:-8] + bytes(8), "CRC check failed", id="gzip, spoilt sum"),
    ],
)
@pytest.mark.parametrize("more", [b"", LINES[0]], ids=["alone", "with lines"])
def test_what_is_no_trace_is_told(tmp_path: Path, content: bytes, message: str, more: bytes) -> None:
    """A file that is something else, or from the future, is one line that says so."""
    path = tmp_path / "trace.jsonl"
    packed = content.startswith(b"\x1f\x8b")
    path.write_bytes(content if packed else content + more)
    assert containing(message) == refusal(path)


def test_missing_file_is_told(tmp_path: Path) -> None:
    """A file that is not there, or a folder, says so."""
    actual = [refusal(tmp_path / "nowhere.jsonl"), refusal(tmp_path)]
    assert [containing("TRACE", "No such file"), "TRACE is not a file"] == actual


def test_packed_bomb_is_refused(tmp_path: Path) -> None:
    """A few kilobytes that unpack to gigabytes are given up at the first line too long, in bounded memory."""
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb") as file:
        file.write(HEADER)
        for _ in range(64):
            file.write(bytes(2**20))
    assert "TRACE, line 2: longer than 4 MiB" == refusal(path)


SMALL_RUN = runs.run(worlds.World(workloads={}, gpus=1))
SPARSE = Timeline(samples=SMALL_RUN.samples[::6], marks=SMALL_RUN.marks)
"""A whole healthy run, thinned out."""

ODD_VALUES: Sequence[Any] = (
    *(None, True, False, "", "x" * 300, "\ud800", "\x1b[2J", [], {}, -1, 0, 1, 2, 2**31, 2**53, 10**400),
    *(-0.0, 0.5, 1e-320, 1e308, "0", "nvml", "concurrent"),
)


def spoil(value: Any, draw: random.Random) -> Any:
    """A copy of a JSON value of which one part, at any depth, is something else, mostly of the same kind."""
    if isinstance(value, Mapping) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        return {**value, name: spoil(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], spoil(value[at], draw), *value[at + 1 :]]
    alike = [odd for odd in ODD_VALUES if type(odd) is type(value)]
    return draw.choice(alike if alike and draw.random() < 0.9 else ODD_VALUES)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), times=st.integers(1, 6))
def test_no_trace_does_harm(folder: Path, seed: int, times: int) -> None:
    """A trace of which any values are changed is either refused in one line or judged and printed without an error."""
    draw = random.Random(seed)  # noqa: S311 - any values will do
    facts = to_plain(worlds.facts(worlds.World()))
    entries = [{"sample": to_plain(one)} for one in SPARSE.samples] + [{"mark": to_plain(one)} for one in SPARSE.marks]
    for _ in range(times):
        if draw.random() < 0.4:
            facts = spoil(facts, draw)
        else:
            at = draw.randrange(len(entries))
            entries[at] = spoil(entries[at], draw)
    path = folder / "spoilt.jsonl"
    path.write_bytes(
        line(kvdiag_trace=FORMAT, facts=facts) + b"".join(json.dumps(one).encode() + b"\n" for one in entries)
    )

    try:
        timeline, read_facts = read_trace(path)
    except KvdiagError:
        assert "\n" not in refusal(path)
        return
    diagnosis = diagnose(timeline, read_facts)

    print_diagnosis(diagnosis, "json")
    print_diagnosis(diagnosis, "text")
