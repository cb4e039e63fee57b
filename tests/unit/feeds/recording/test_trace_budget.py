"""Traces that unpack to more than a machine has: read within a budget of memory and values, or refused."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdiag.feeds.daemon.retention import thinned
from kvdiag.feeds.recording.budget import THINNED, Budget, TooLongError
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.feeds.recording.trace import TraceWriter, read_trace
from kvdiag.model import Engine, Facts, Mark, Sample

HEADER = b'{"kvdiag_trace":1,"kvdiag_version":"0","facts":{"url":"http://127.0.0.1:8000"}}\n'
MIB = 2**20
SMALL = 16
"""What the everyday cases divide the budget and the recording by."""

MAX_RESIDENT_BYTES = {SMALL: 96 * MIB, 1: 512 * MIB}

JUDGE = """
import json, re, sys
from pathlib import Path
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.budget import MAX_BYTES, MAX_MEMORY_BYTES, MAX_VALUES, WORK_BYTES, Budget
from kvdiag.feeds.recording.trace import read_trace
from kvdiag.outputs.documents import diagnosis_document
share = int(sys.argv[2])
budget = Budget(
    unpacked_bytes=MAX_BYTES // share,
    values=MAX_VALUES // share,
    memory_bytes=MAX_MEMORY_BYTES // share,
    work_bytes=WORK_BYTES // share,
)
try:
    timeline, facts = read_trace(Path(sys.argv[1]), budget=budget)
    json.dumps(diagnosis_document.document(diagnose(timeline, facts, Limits())))
except KvdiagError as refusal:
    print(refusal)
# ru_maxrss would hold what the test runner had when it started this program.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def lines(line: Callable[[int], str], count: int) -> Iterator[bytes]:
    """Lines of samples, a second apart."""
    return (line(number).encode() + b"\n" for number in range(count))


def engines(labels: list[str]) -> str:
    """A list of engines that report only their labels."""
    return json.dumps([{"engine": label} for label in labels], separators=(",", ":"))


CROWD = engines([f"engine {number % 500}" for number in range(1_000)])
WIDE = "a" * 1_000_000

BOMBS: dict[str, tuple[Callable[[int], str], int]] = {
    "samples of nothing": (lambda _: '{"sample":{"at_seconds":1}}', 1_100_000),
    "crowds": (lambda at: f'{{"sample":{{"at_seconds":{at},"engines":{CROWD}}}}}', 1_400),
    "texts": (
        lambda at: (
            f'{{"sample":{{"at_seconds":{at},"gaps":[{{"source":"{at}{WIDE}\\u4e2d","kind":"failed","reason":""}}]}}}}'
        ),
        64,
    ),
    "objects": (lambda at: f'{{"sample":{{"at_seconds":{at},"engines":[{"{}," * 900_000}{{}}]}}}}', 16),
    "a sample in each minute": (
        lambda at: f'{{"sample":{{"at_seconds":{at * 60},"engines":[{{"engine":"0","requests_running":{at}}}]}}}}',
        150_000,
    ),
}


@pytest.mark.parametrize(
    ("bomb", "share"),
    [*((bomb, SMALL) for bomb in BOMBS), pytest.param("a sample in each minute", 1, marks=pytest.mark.long)],
)
def test_no_trace_takes_more_memory_than_a_container_has(tmp_path: Path, bomb: str, share: int) -> None:
    """Reading, judging and rendering in a process of its own: it gives a verdict, or refuses."""
    path, (line, count) = tmp_path / "bomb.jsonl.gz", BOMBS[bomb]
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(HEADER)
        for one in lines(line, count // share):
            file.write(one)
    command = [sys.executable, "-c", JUDGE, str(path), str(share)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(told.splitlines()[-1]) < MAX_RESIDENT_BYTES[share]


def test_a_budget_of_values_ends_the_reading(tmp_path: Path) -> None:
    """Not after all of it has been unpacked."""
    path = tmp_path / "long.jsonl"
    path.write_bytes(HEADER + b'{"sample":{"at_seconds":1}}\n' * 1_000)
    budget = Budget(values=1_900)
    with pytest.raises(TooLongError):
        read_trace(path, budget=budget)
    assert -20 < budget.values < 0


def samples(minutes: int) -> tuple[Sample, ...]:
    """A sample a second."""
    return tuple(
        Sample(
            at_seconds=float(second),
            engines=(Engine(engine="0", requests_running=second % 5, kv_usage_ratio=second % 7 / 10),),
        )
        for second in range(60 * minutes)
    )


def write(path: Path, entries: tuple[Sample | Mark, ...]) -> Path:
    """A trace of these."""
    with TraceWriter(path, Facts(url="http://127.0.0.1:8000")) as trace:
        for entry in entries:
            trace.add(entry)
    return path


@pytest.fixture
def little() -> Budget:
    """A budget of four minutes or so."""
    return Budget(memory_bytes=2**18, work_bytes=2**16)


def test_a_long_trace_is_thinned_as_a_daemon_thins(tmp_path: Path, little: Budget) -> None:
    """The newest samples are whole, the older ones are those that a daemon keeps of each minute, and a gap says it."""
    whole = samples(20)
    path = write(tmp_path / "long.jsonl", whole)
    timeline, facts = read_trace(path, budget=little)
    assert (THINNED,) == facts.gaps
    assert whole[-5:] == timeline.samples[-5:]
    assert set(timeline.samples) <= set(whole)
    assert set(thinned(whole[:60])) <= set(timeline.samples)
    assert len(timeline.samples) < len(whole) // 2


def test_test_steps_are_never_thinned(tmp_path: Path, little: Budget) -> None:
    """Each of their samples is compared with what had to be there: a trace that is too long for that is refused."""
    mark = Mark(at_seconds=0.0, step="baseline", cycle=0, phase="begin")
    path = write(tmp_path / "long.jsonl", (mark, *samples(20)))
    with pytest.raises(TooLongError):
        read_trace(path, budget=little)


def test_the_oldest_segments_are_left_out_where_all_are_too_many(tmp_path: Path) -> None:
    """The newest are read first, and a gap says how many are not."""
    whole = samples(8)
    for number in range(8):
        write(tmp_path / f"kvdiag-{number:08d}.jsonl.gz", whole[60 * number : 60 * number + 60])
    timeline, facts = read_segments(tmp_path, budget=Budget(values=4_000))
    assert 60 <= len(timeline.samples) < len(whole)
    assert whole[-len(timeline.samples) :] == timeline.samples
    (gap,) = facts.gaps
    left = 8 - len(timeline.samples) // 60
    assert ("absent", True) == (gap.kind, f"{left - 1} segments before it" in gap.reason)
