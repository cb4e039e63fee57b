"""A recorder's folder: rotated, packed, torn and mixed segments, put together into one timeline."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.commands import main
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.folder_timeline import MAX_SEGMENTS, read_segments
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Facts, Sample
from tests.builders.answers import containing
from tests.builders.values import engine, pool

FACTS = Facts(url="http://127.0.0.1:8000", model="tiny", pools=(pool(),), server_pids=(7,))
SAMPLES = tuple(Sample(at_seconds=float(number), engines=(engine(),)) for number in range(12))


def write(path: Path, *samples: Sample, facts: Facts = FACTS) -> Path:
    """One segment."""
    with TraceWriter(path, facts) as trace:
        for sample in samples:
            trace.add(sample)
    return path


def refusal(folder: Path) -> str:
    """Why a folder is refused."""
    with pytest.raises(KvdiagError) as problem:
        read_segments(folder)
    return str(problem.value)


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, 11), max_size=4), names=st.permutations("abcde"))
def test_segments_are_put_together_by_time(
    tmp_path_factory: pytest.TempPathFactory, cuts: set[int], names: list[str]
) -> None:
    """With any rotation and any file names the timeline is that of one file."""
    folder = tmp_path_factory.mktemp("segments")
    edges = [0, *sorted(cuts), len(SAMPLES)]
    for name, first, last in zip(names, edges, edges[1:], strict=False):
        write(folder / f"{name}.jsonl{'.gz' if first % 2 else ''}", *SAMPLES[first:last])
    timeline, facts = read_segments(folder)
    assert SAMPLES == timeline.samples
    assert FACTS == facts


@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_killed_recorder_loses_its_last_line_alone(tmp_path: Path, packed: str) -> None:
    """A torn line in any segment ends that segment and is reported as a gap; the samples of the others are read."""
    torn = write(tmp_path / "a.jsonl", *SAMPLES[:6])
    lines = torn.read_bytes().splitlines(keepends=True)
    torn.write_bytes(b"".join(lines[:-2]) + lines[-2][:20])
    write(tmp_path / f"b.jsonl{packed}", *SAMPLES[6:])
    timeline, facts = read_segments(tmp_path)
    assert SAMPLES[:5] + SAMPLES[6:] == timeline.samples
    assert [containing("a.jsonl is incomplete")] == [gap.reason for gap in facts.gaps]
    assert {("recorder", "absent")} == {(gap.source, gap.kind) for gap in facts.gaps}


@pytest.mark.parametrize("name", ["z.jsonl", "z.jsonl.gz"])
@pytest.mark.parametrize("left", [0, 9])
def test_a_segment_that_was_just_begun_holds_nothing(tmp_path: Path, name: str, left: int) -> None:
    """A recorder can be killed before its first line is whole."""
    write(tmp_path / "a.jsonl", *SAMPLES)
    begun = write(tmp_path / name, *SAMPLES)
    begun.write_bytes(begun.read_bytes()[:left])
    timeline, facts = read_segments(tmp_path)
    assert SAMPLES == timeline.samples
    assert [containing(f"{name} is empty")] == [gap.reason for gap in facts.gaps]


def test_another_pool_is_read_by_its_own_facts(tmp_path: Path) -> None:
    """After a restart with a pool of another size the usage of before is read by the facts of before."""
    write(tmp_path / "a.jsonl", *SAMPLES[:6], facts=replace(FACTS, pools=(pool(usable_blocks=99),), server_pids=(3,)))
    write(tmp_path / "b.jsonl", *SAMPLES[6:9])
    write(tmp_path / "c.jsonl", *SAMPLES[9:], facts=replace(FACTS, server_pids=(8,)))
    timeline, facts = read_segments(tmp_path)
    assert (SAMPLES, (7, 8), ()) == (timeline.samples, facts.server_pids, facts.gaps)
    before = replace(FACTS, pools=(pool(usable_blocks=99),), server_pids=(3,))
    assert ((SAMPLES[6].at_seconds, before),) == timeline.earlier_facts


def test_what_is_no_recorders_folder_is_told(tmp_path: Path) -> None:
    """No segment, none with a sample, two servers, a bad line, or no folder at all."""
    empty, bare, mixed, bad = (tmp_path / name for name in ("empty", "bare", "mixed", "bad"))
    for folder in (empty, bare, mixed, bad):
        folder.mkdir()
    (empty / "notes.txt").touch()
    write(bare / "a.jsonl")
    write(mixed / "a.jsonl", *SAMPLES[:6])
    write(mixed / "b.jsonl", *SAMPLES[6:], facts=replace(FACTS, url="http://127.0.0.1:8001"))
    (bad / "a.jsonl").write_text('{"some": "log"}\n')

    assert containing(str(empty), "*.jsonl.gz") == refusal(empty)
    assert containing(str(bare), "no sample") == refusal(bare)
    assert containing(str(mixed), "http://127.0.0.1:8000", "http://127.0.0.1:8001") == refusal(mixed)
    assert containing(f"{bad / 'a.jsonl'} is not a kvdiag trace") == refusal(bad)
    assert f"cannot read {tmp_path / 'none'}: No such file or directory" == refusal(tmp_path / "none")


def test_segments_of_the_same_time_are_of_several_servers(tmp_path: Path) -> None:
    """Traces without an address are not joined if they overlap by over a minute; less is a clock correction."""
    first, last = SAMPLES[0], replace(SAMPLES[0], at_seconds=SAMPLES[0].at_seconds + 600.0)
    for name, back in (("fleet", 61.0), ("clock", 59.0)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.jsonl", first, last)
        write(
            tmp_path / name / "b.jsonl",
            replace(first, at_seconds=last.at_seconds - back),
            facts=replace(FACTS, url=None),
        )
    assert containing("a.jsonl", "b.jsonl") == refusal(tmp_path / "fleet")
    assert 3 == len(read_segments(tmp_path / "clock")[0].samples)


def test_a_recorders_segments_stay_in_their_order(tmp_path: Path) -> None:
    """No header has a clock set back while no recorder ran: earlier samples are dated earlier, which is reported."""
    times = {"kvdiag-00000009": (2000.0, 2600.0), "kvdiag-00000010": (1000.0, 1300.0), "kvdiag-00000011": (1400.0,)}
    for name, seconds in times.items():
        write(tmp_path / f"{name}.jsonl.gz", *(replace(SAMPLES[0], at_seconds=at) for at in seconds))
    timeline, facts = read_segments(tmp_path)
    assert [400.0, 1000.0, 1000.0, 1300.0, 1400.0] == [sample.at_seconds for sample in timeline.samples]
    assert [containing("kvdiag-00000009", "26 min 40 s")] == [gap.reason for gap in facts.gaps]


def test_too_many_segments_are_refused(tmp_path: Path) -> None:
    """A folder is bounded, as every input."""
    for number in range(MAX_SEGMENTS + 1):
        (tmp_path / f"{number}.jsonl").touch()
    assert "1025 segments, more than 1024" in refusal(tmp_path)


def test_a_folder_is_judged_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`kvdiag diagnose FOLDER` says what `kvdiag diagnose FILE` says of the same samples."""
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "a.jsonl", *SAMPLES[:6])
    write(tmp_path / "folder" / "b.jsonl", *SAMPLES[6:])
    write(tmp_path / "whole.jsonl", *SAMPLES)
    said = []
    for name in ("folder", "whole.jsonl"):
        code = main(["diagnose", str(tmp_path / name), "--output", "json"])
        said.append((code, json.loads(capsys.readouterr().out)))
    assert said[0] == said[1]
    assert (0, "ok") == (said[0][0], said[0][1]["worst"])


def test_a_segment_that_is_removed_meanwhile_is_told(tmp_path: Path) -> None:
    """A recorder that needs room takes its oldest away while the folder is read: the others are judged."""
    # A name in the folder behind which there is nothing any more
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    write(tmp_path / "b.jsonl", *SAMPLES)
    timeline, facts = read_segments(tmp_path)
    assert SAMPLES == timeline.samples
    assert [containing("1 of 2 segments")] == [gap.reason for gap in facts.gaps if "removed" in gap.reason]
