"""Bits that flip on disk: what was altered is never read as if it had been recorded so."""

import gzip
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.limits import Limits
from kvdiag.errors import KvdiagError
from kvdiag.feeds.daemon.retention import Retention
from kvdiag.feeds.recording.folder_timeline import read_segments
from kvdiag.feeds.recording.restore import reload
from kvdiag.feeds.recording.segment_store import HISTORY, KEPT_SECONDS, SegmentStore
from kvdiag.feeds.recording.trace import CHECK_EVERY, CUT_OFF, DamagedError, TraceWriter, read_trace
from kvdiag.model import Engine, Facts, Sample

FACTS = Facts(url="http://127.0.0.1:8000", model="tiny", server_pids=(7,))
SAMPLES = tuple(
    Sample(at_seconds=1000.0 + number, engines=(Engine(engine="0", requests_running=number % 7),))
    for number in range(40)
)
FLIPS = 400
HEADER_PLACE = 60
"""Behind gzip's own header, which has the file's name, and within the first line."""


def write(path: Path, *samples: Sample, ended: bool = True) -> Path:
    """One segment; without its end, where its recorder was killed."""
    trace = TraceWriter(path, FACTS)
    for sample in samples:
        trace.add(sample)
    before = path.read_bytes()
    trace.close()
    if not ended:
        path.write_bytes(before)
    return path


def flip(path: Path, place: int, bit: int) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("ended", [True, False], ids=["whole", "killed"])
def test_no_flipped_bit_is_read_as_it_stands(tmp_path: Path, ending: str, *, ended: bool) -> None:
    """It is refused, makes no difference, or stands in the few samples after the last checksum of what was cut off."""
    path = write(tmp_path / f"trace.{ending}", *SAMPLES, ended=ended)
    content = path.read_bytes()
    checked = len(SAMPLES) // CHECK_EVERY * CHECK_EVERY - CHECK_EVERY
    generator = random.Random(7)  # noqa: S311 - the same places each time
    refused = 0

    for _ in range(FLIPS):
        path.write_bytes(content)
        flip(path, generator.randrange(len(content)), generator.randrange(8))

        try:
            timeline, facts = read_trace(path)
        except KvdiagError:
            refused += 1
            continue

        if CUT_OFF in facts.gaps:
            sure = min(len(timeline.samples) // CHECK_EVERY * CHECK_EVERY, checked)
            assert SAMPLES[:sure] == timeline.samples[:sure]
        else:
            assert (SAMPLES, FACTS) == (timeline.samples, facts)
    assert FLIPS // 2 < refused


def test_gzips_own_checksum_is_compared(tmp_path: Path) -> None:
    """Of a trace from before there were others, too: it stands behind the line that ends it."""
    path = write(tmp_path / "trace.jsonl", *SAMPLES[:3])
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if not line.startswith(b'{"end"')]
    packed = gzip.compress(b"".join(lines) + b'{"end":3}\n')
    path.write_bytes(packed)
    assert SAMPLES[:3] == read_trace(path)[0].samples
    flip(path, len(packed) - 8, 0)
    with pytest.raises(DamagedError):
        read_trace(path)


def test_a_torn_trailer_is_no_whole_trace(tmp_path: Path) -> None:
    """Without any checksum nothing says that it is as it was written."""
    path = write(tmp_path / "trace.jsonl", *SAMPLES[:3])
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if not line.startswith(b'{"end"')]
    path.write_bytes(gzip.compress(b"".join(lines) + b'{"end":3}\n')[:-4])
    assert (CUT_OFF,) == read_trace(path)[1].gaps


def test_nothing_stands_behind_the_end(tmp_path: Path) -> None:
    """Another trace, or anything else, put behind one is not left unread without a word."""
    path = write(tmp_path / "trace.jsonl", *SAMPLES[:3])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DamagedError):
        read_trace(path)


@pytest.mark.parametrize("damage", ["header", "middle", "emptied by a power loss"])
@pytest.mark.parametrize("which", ["b", "c"])
def test_a_damaged_segment_is_left_out_with_a_gap(tmp_path: Path, damage: str, which: str) -> None:
    """Those around it are judged, and nothing that they show makes it ok."""
    for name, first in (("a", 0), ("b", 10), ("c", 20), ("d", 30)):
        write(tmp_path / f"{name}.jsonl.gz", *SAMPLES[first : first + 10])
    path = tmp_path / f"{which}.jsonl.gz"
    size = path.stat().st_size
    if damage == "header":
        flip(path, HEADER_PLACE, 0)
    elif damage == "middle":
        flip(path, size // 2, 3)
    else:
        path.write_bytes(path.read_bytes()[: size // 2].ljust(size, b"\0"))

    timeline, facts = read_segments(tmp_path)

    first = {"b": 10, "c": 20}[which]
    assert SAMPLES[:first] + SAMPLES[first + 10 :] == timeline.samples
    assert [("recorder", "failed", True)] == [
        (gap.source, gap.kind, path.name in gap.reason) for gap in facts.gaps if gap.kind == "failed"
    ]
    assert "ok" != diagnose(timeline, facts, Limits()).worst


def test_a_folder_of_damaged_segments_is_an_error(tmp_path: Path) -> None:
    """Nothing is left to judge."""
    write(tmp_path / "a.jsonl.gz", *SAMPLES).write_bytes(b"\x1f\x8b" + bytes(64))
    with pytest.raises(KvdiagError):
        read_segments(tmp_path)


@pytest.mark.parametrize("place", [HEADER_PLACE, -50], ids=["header", "samples"])
def test_a_daemon_goes_on_without_what_is_damaged_and_says_so(tmp_path: Path, place: int) -> None:
    """The newest sample has the gap, so the daemon's diagnosis reports the damage for a day."""
    for first in (0, 20):
        segments = SegmentStore(tmp_path, max_bytes=2**22)
        segments.begin(FACTS)
        for sample in SAMPLES[first : first + 20]:
            segments.add(sample)
        segments.close()
    damaged = min(path for path in tmp_path.iterdir() if path.suffix == ".gz")
    flip(damaged, place % damaged.stat().st_size, 1)

    before = reload(tmp_path, now_seconds=1100.0, url=FACTS.url)

    assert before is not None
    assert not list((tmp_path / HISTORY).iterdir())
    *samples, last = before.tail
    assert list(SAMPLES[20:]) == samples
    assert [("recorder", "failed", True)] == [(gap.source, gap.kind, damaged.name in gap.reason) for gap in last.gaps]
    assert replace(last, gaps=()) == Sample(at_seconds=1100.0)


@pytest.mark.parametrize("url", [FACTS.url, "http://127.0.0.1:9000"], ids=["this server", "another"])
def test_damage_is_known_where_nothing_else_is(tmp_path: Path, url: str) -> None:
    """It stays known to the server's next process, until it is a day old."""
    (tmp_path / HISTORY).mkdir()
    write(tmp_path / "kvdiag-00000001.jsonl.gz", *SAMPLES)
    damaged = tmp_path / "kvdiag-00000002.jsonl.gz"
    flip(write(damaged, *SAMPLES), HEADER_PLACE, 1)
    if url == FACTS.url:
        (tmp_path / "kvdiag-00000001.jsonl.gz").unlink()

    before, kept = reload(tmp_path, now_seconds=1100.0, url=url), Retention()

    assert before is not None
    for sample in before.tail:
        kept.add(sample)
    kept.begin_life(1101.0, before.facts)
    assert [damaged.name in gap.reason for sample in kept.samples() for gap in sample.gaps] == [True]
    os.utime(damaged, (1000.0, 1000.0))
    assert reload(tmp_path, now_seconds=1100.0 + KEPT_SECONDS, url=url) is None
