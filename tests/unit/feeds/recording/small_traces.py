"""A small timeline, the lines of its trace, and the error for a trace that cannot be read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import FORMAT, TraceWriter, read_trace
from kvdiag.model import Engine, Facts, Gap, Mark, Sample, Timeline, Workload
from kvdiag.model.codec import to_plain
from tests.builders.answers import containing

FACTS_SEEN = Facts(url="http://127.0.0.1:8000", model="tiny")
CUT_OFF = replace(FACTS_SEEN, gaps=(Gap("trace", "failed", containing("the trace is incomplete")),))
SAMPLES = tuple(
    Sample(at_seconds=float(number), engines=(Engine(engine="0", requests_running=number),)) for number in range(5)
)
MARK = Mark(
    at_seconds=2.0,
    step="single_request",
    cycle=0,
    phase="offer",
    workload=Workload(requests=1, prompt_tokens=512, max_tokens=64),
)


def write(path: Path, timeline: Timeline, facts: Facts) -> None:
    """Record a timeline as a run does: samples and marks as they came."""
    entries: list[Sample | Mark] = [*timeline.samples, *timeline.marks]
    entries.sort(key=lambda entry: entry.at_seconds)
    with TraceWriter(path, facts) as trace:
        for entry in entries:
            trace.add(entry)


def line(**value: object) -> bytes:
    """One line of a trace."""
    return json.dumps(value).encode() + b"\n"


HEADER = line(kvdiag_trace=FORMAT, kvdiag_version="0.1.0", facts=to_plain(FACTS_SEEN))
LINES = [line(sample=to_plain(sample)) for sample in SAMPLES]


def refusal(path: Path) -> str:
    """The error for a trace that cannot be read, without the file's name."""
    with pytest.raises(KvdiagError) as caught:
        read_trace(path)
    return str(caught.value).replace(str(path), "TRACE")


NO_TRACE = containing("not a kvdiag trace")
