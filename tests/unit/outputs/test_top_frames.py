"""Frames of the live view: that they fit, that they say what matters first, and that unknown is never healthy."""

import io
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from kvdiag.ledger import ledger
from kvdiag.model import (
    Facts,
    Finding,
    Gap,
    GrowthFigures,
    LedgerLine,
    Sample,
    ServerState,
    Snapshot,
    SourceHealth,
    Status,
)
from kvdiag.outputs.current_verdict import STALE_SECONDS
from kvdiag.outputs.terminal.sparkline_history import Trend
from kvdiag.outputs.terminal.top_frame import View, frame, verdict
from kvdiag.outputs.terminal.top_memory import Room, bar, parts
from tests.builders.runs import judged, run
from tests.builders.values import GIB, NO_ANSWER, NO_NVML, device, engine, process
from tests.builders.worlds import WORLDS, World, facts
from tests.unit.feeds.strategies import FACTS, SAMPLES, TEXTS

SIZES = [(80, 24), (40, 12), (200, 60), (20, 4), (100, 30), (1, 1)]
HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J[bold red]loud[/]\r\bOK\u202etxt\u2028\ud800 :smile: 显存" * 20

UP = (
    SourceHealth(source="engine", up=True, errors_total=3, duration_seconds=0.004),
    SourceHealth(source="host", up=True, errors_total=0),
    SourceHealth(source="nvml", up=True, errors_total=0, duration_seconds=0.002),
)

DOWN = (replace(UP[0], up=False), *UP[1:])


def view(world: World | None = None, **changes: object) -> View:
    """What a daemon in a world shows at the end of a run there."""
    world = world or World()
    timeline, diagnosis = run(world), judged(world)
    devices = [sample.devices for sample in timeline.samples if sample.devices]
    engines = [sample.engines for sample in timeline.samples if sample.engines]
    newest = Sample(
        at_seconds=timeline.samples[-1].at_seconds,
        engines=engines[-1] if engines else None,
        devices=devices[-1] if devices else None,
        gaps=diagnosis.gaps,
    )
    return of(
        Snapshot(
            state="serving",
            facts=facts(world),
            newest=newest,
            sources=UP,
            diagnosis=diagnosis,
            diagnosed_seconds=newest.at_seconds,
        ),
        **changes,
    )


def of(snapshot: Snapshot, **changes: object) -> View:
    """The view of a snapshot."""
    usual = View(snapshot=snapshot, lines=ledger(snapshot.newest, snapshot.facts), origin="sampled by this command")
    return replace(usual, **changes)  # type: ignore[arg-type]


def with_snapshot(shown: View, **changes: object) -> View:
    """The same view of a snapshot that differs."""
    return of(replace(shown.snapshot, **changes))  # type: ignore[arg-type]


def screen(shown: View, columns: int = 80, rows: int | None = 24, *, ascii_only: bool = False) -> list[str]:
    """The lines that a terminal of this size gets."""
    file = io.StringIO()
    console = Console(file=file, width=columns, height=rows or 1000, highlight=False, color_system=None)
    console.print(frame(shown, Room(columns=columns, rows=rows, ascii_only=ascii_only)))
    return file.getvalue().removesuffix("\n").split("\n")


def test_a_model_that_is_a_path_is_named_by_its_file() -> None:
    """llama.cpp names a model by its path, whose beginning is that of every model."""
    shown = view()
    path = replace(shown.snapshot.facts, model="/srv/models/very/deep/folder/tiny.gguf")
    title = screen(with_snapshot(shown, facts=path))[0]
    assert "tiny.gguf" in title
    assert "/srv" not in title


def eight_gpus(*, used_bytes: int = 70 * GIB) -> View:
    """Eight GPUs, the first of them cut into three slices, the last one out of reach."""
    cut = [
        device(0, uuid=f"MIG-{number}", mig_parent_uuid="GPU-0", total_bytes=20 * GIB, used_bytes=number * 5 * GIB)
        for number in (1, 2, 3)
    ]
    whole = [device(number, total_bytes=80 * GIB, used_bytes=used_bytes) for number in range(7)]
    devices = (whole[0], *cut, *whole[1:], device(7, used_bytes=None))
    usual = view().snapshot
    return of(replace(usual, newest=replace(usual.newest, devices=devices)))


def unread() -> View:
    """Nothing has been read."""
    return of(Snapshot(state="starting", facts=Facts(), newest=Sample(at_seconds=0.0), sources=()))


def lost() -> View:
    """The server stopped answering: its devices are still read, and nothing is known of its pool and requests."""
    newest = replace(view().snapshot.newest, engines=None, gaps=(NO_ANSWER,))
    return with_snapshot(view(), state="lost", sources=DOWN, newest=newest)


def many_findings() -> View:
    """Everything that can be wrong is, in long sentences."""
    usual = view(World(leaked_blocks_per_request=4)).snapshot
    assert usual.diagnosis is not None
    (leak,) = [one for one in usual.diagnosis.findings if one.id == "leak.kv_blocks"]
    wrong = tuple(replace(leak, id=f"leak.number_{number}", summary="word " * 60) for number in range(40))
    return of(replace(usual, diagnosis=replace(usual.diagnosis, findings=wrong)))


def hostile() -> View:
    """Every text that comes from outside does its worst."""
    usual = view().snapshot
    bad = Finding(id=HOSTILE, status="fault", summary=HOSTILE, remedy=HOSTILE)
    newest = replace(
        usual.newest,
        engines=(engine(label=HOSTILE, usage=0.5, running=3), engine(label="b")),
        devices=(replace(device(processes=(process(7, GIB, HOSTILE),)), name=HOSTILE, uuid=HOSTILE),),
        gaps=(Gap(source=HOSTILE, kind="failed", reason=HOSTILE),),
    )
    assert usual.diagnosis is not None
    made = replace(usual.diagnosis, worst="fault", findings=(bad, replace(bad, status="unknown")))
    known = replace(usual.facts, url=HOSTILE, model=HOSTILE, engine_version=HOSTILE)
    sources = (SourceHealth(source=HOSTILE, up=False, errors_total=9),)
    told = of(replace(usual, newest=newest, diagnosis=made, facts=known, sources=sources))
    return replace(
        told,
        note=HOSTILE,
        origin=HOSTILE,
        trends=(Trend(of=HOSTILE, is_pool=True, recent=(0.1,) * 9, watched_seconds=9.0),),
    )


STATES: Mapping[str, Callable[[], View]] = {
    "healthy": view,
    "fault": lambda: view(World(leaked_blocks_per_request=4)),
    "no GPU": lambda: view(World(nvml=NO_NVML)),
    "eight GPUs": eight_gpus,
    "many findings": many_findings,
    "hostile names": hostile,
    "not read yet": unread,
    "lost": lost,
    "a daemon that is gone": lambda: view(problem="the daemon at http://127.0.0.1:9743: " + "cannot connect " * 20),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_a_frame_never_overflows(state: str, columns: int, rows: int) -> None:
    """No line is wider, and no frame longer, than the terminal; what is drawn is plain text."""
    lines = screen(STATES[state](), columns, rows)
    assert len(lines) <= rows
    assert [line for line in lines if cell_len(line) > columns] == []
    bad = {unicodedata.category(character) for line in lines for character in line} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert set() == bad


@pytest.mark.parametrize("world", WORLDS)
def test_every_world_fits_and_shows_its_verdict(world: str) -> None:
    """For any server, the verdict is the second line, and the sources are the last."""
    shown = view(WORLDS[world])
    status = verdict(shown).status
    lines = screen(shown)
    assert len(lines) <= 24
    assert lines[1].startswith(status.upper())
    assert lines[-1].startswith("sources  engine up (3 failed reads)")
    assert lines[-1].endswith("q quits")


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 40), (40, 12)])
@pytest.mark.parametrize("name", ["healthy", "leaking", "eight GPUs", "lost"])
def test_the_whole_frame(golden: Callable[[str, str], None], name: str, columns: int, rows: int) -> None:
    """Verdict first, then the memory, then problems and what to do about them."""
    views = {"leaking": lambda: view(World(leaked_blocks_per_request=4)), **STATES}
    lines = [line.rstrip() for line in screen(views[name](), columns, rows)]
    golden(f"top/{name.replace(' ', '-').lower()}-{columns}x{rows}.txt", "\n".join(lines) + "\n")


def test_in_little_room_the_verdict_and_its_finding_stay() -> None:
    """At 40x12 the legend goes, at 20x4 all but the verdict and the finding."""
    shown = view(World(leaked_blocks_per_request=4))
    small, least = "\n".join(screen(shown, 40, 12)), screen(shown, 20, 4)
    assert "FAULT  16 checks: 1 fault" in small
    assert "GPU 0 ███" in small
    assert "FAULT leak.kv_blocks: " in small
    assert least[1].startswith("FAULT")
    assert any("leak.kv_block" in line for line in least)
    assert ["FAULT"] == [line.strip() for line in screen(shown, 10, 3)]


def test_what_is_left_out_is_counted() -> None:
    """Findings that do not fit are counted, and so are the lesser GPUs in a small terminal."""
    assert "+30 more: enlarge" in "\n".join(screen(many_findings()))
    assert "and 8 more GPUs" in "\n".join(screen(eight_gpus(), 40, 12))


def test_slices_and_unreadable_gpus_are_told_apart() -> None:
    """A GPU that is cut is shown by its slices; one that cannot be read says so."""
    rows = [line for line in screen(eight_gpus(), 80, 30) if line.startswith("GPU")]
    assert ["0.1", "0.2", "0.3", "1", "2", "3", "4", "5", "6", "7"] == [row.split()[1] for row in rows]
    assert rows[0].endswith("5.00 GiB of 20.0 GiB  25 %")
    assert rows[-1].endswith("memory cannot be read")


UNKNOWN: Mapping[str, Callable[[], View]] = {
    "starting": lambda: with_snapshot(view(), state="starting"),
    "lost": lost,
    "no diagnosis": lambda: with_snapshot(view(), diagnosis=None, diagnosed_seconds=None),
    "an old diagnosis": lambda: with_snapshot(view(), diagnosed_seconds=1_026.0 - STALE_SECONDS - 1.0),
    "no daemon": lambda: view(problem="the daemon does not answer"),
    "nothing": unread,
}


@pytest.mark.parametrize("why", UNKNOWN)
@pytest.mark.parametrize("rows", [1, 12, 24, None])
def test_what_is_not_known_is_not_healthy(why: str, rows: int | None) -> None:
    """A healthy diagnosis that does not hold now is shown as unknown, with the reason."""
    assert ("ok", "") == (verdict(view()).status, verdict(view()).reason)
    shown = UNKNOWN[why]()
    lines = screen(shown, 80, rows)
    now = verdict(shown)
    assert "unknown" == now.status
    assert now.reason
    assert lines[min(1, len(lines) - 1)].startswith("DOWN" if why == "lost" else "UNKNOWN")
    assert not any(line.startswith("checked, not found") for line in lines)
    assert not any(line.startswith("OK") for line in lines)


def test_a_fault_stays_one_when_the_server_is_lost() -> None:
    """A fault that was found is still a fault, and the lost server is reported with it."""
    leaking = view(World(leaked_blocks_per_request=4)).snapshot
    now = verdict(of(replace(leaking, state="lost", newest=replace(leaking.newest, gaps=(NO_ANSWER,)))))
    assert ("DOWN", "fault") == (now.word, now.status)
    assert NO_ANSWER.reason in now.reason


def test_the_age_of_a_diagnosis_is_shown() -> None:
    """One that is not of now says so, long before it is too old to hold."""
    healthy = view().snapshot
    lines = screen(of(replace(healthy, diagnosed_seconds=healthy.newest.at_seconds - 120.0)))
    assert lines[1].rstrip().endswith("diagnosed 2 min ago")


@pytest.mark.parametrize(
    ("trend", "figures"),
    [
        (Trend(of="0", is_pool=True, recent=(0.25, 0.5), watched_seconds=10.0), ["+25 points in 10 s"]),
        (Trend(of="GPU-0", is_pool=False, recent=(0.5, 0.5), watched_seconds=120.0), ["unchanged in 2 min"]),
        (Trend(of="0", is_pool=True, recent=(0.0, 0.9, 0.0), watched_seconds=47.0), ["no net change in 47 s"]),
        (
            Trend(of="GPU-0", is_pool=False, recent=(0.5, 0.75), watched_seconds=120.0),
            ["+6.00 GiB in 2 min", "not steadily"],
        ),
        (
            Trend(
                of="GPU-0",
                is_pool=False,
                recent=(0.5, 0.75),
                watched_seconds=120.0,
                per_minute_ratio=0.125,
                full_in_seconds=120.0,
            ),
            ["+6.00 GiB in 2 min", "+3.00 GiB/min", "full in 2 min"],
        ),
    ],
)
def test_where_it_is_going(trend: Trend, figures: list[str]) -> None:
    """What was gained, at which rate, and how long the room lasts where it rises steadily."""
    lines = screen(view(trends=(trend,)))
    assert [line for line in lines if line.rstrip().endswith(f" {', '.join(figures)}")] != []


@pytest.mark.parametrize(("latest_seconds", "latest"), [(14_400.0, "4 h"), (None, "never")], ids=["bounded", "no end"])
def test_how_long_the_room_lasts_by_a_finding(latest_seconds: float | None, latest: str) -> None:
    """With its bounds, of which the later one may be that it never runs out; of what is wrong alone."""
    usual = view().snapshot
    assert usual.diagnosis is not None
    growth = GrowthFigures(
        bytes_per_second=1.0,
        exhaustion_seconds=7200.0,
        exhaustion_low_seconds=3600.0,
        exhaustion_high_seconds=latest_seconds,
    )
    leak = Finding(id="leak.host", status="fault", summary="grows", growth=growth)
    healthy = replace(leak, id="leak.kv_blocks", status="ok")
    found = replace(usual.diagnosis, worst="fault", findings=(leak, healthy))
    lines = screen(of(replace(usual, diagnosis=found)))
    (shown,) = [line.split() for line in lines if "full in 2 h" in line]
    assert ["leak.host", *["full", "in", "2", "h"], "(1", "h", "to", *f"{latest})".split()] == shown


def test_a_terminal_of_ascii_gets_ascii() -> None:
    """Where the encoding has no block characters the bars are of letters, with the same content."""
    lines = screen(view(World(leaked_blocks_per_request=4)), ascii_only=True)
    assert all(line.isascii() for line in lines)
    assert lines[4].startswith("WWWW")


@given(sizes=st.lists(st.integers(1, 2**44), min_size=1, max_size=8), width=st.integers(0, 200))
def test_a_bar_fills_its_width_and_hides_nothing(sizes: list[int], width: int) -> None:
    """Its cells add up to the width, and what is there has one where there is room."""
    names = ("driver_reserved", "weights", "kv_held", "kv_free", "outside_torch", "other_process", "unaccounted", "new")
    lines = [
        LedgerLine(gpu=0, component=name, bytes=size, provenance="measured")
        for name, size in zip(names, sizes, strict=False)
    ]
    found = bar(parts(lines, None), width, ascii_only=False)
    assert width == found.cell_len
    if width >= 3 * len(sizes):
        assert len(sizes) == len(set(found.plain))


def test_a_negative_residual_is_told() -> None:
    """Parts that claim more than was measured cannot be drawn, but are in the legend."""
    shown = view()
    lines = (
        *shown.lines,
        LedgerLine(gpu=0, uuid="GPU-0", component="unaccounted", bytes=-3 * GIB, provenance="computed"),
    )
    assert "? unaccounted -3.00 GiB" in "\n".join(screen(replace(shown, lines=lines)))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), known=FACTS, newest=SAMPLES, columns=st.integers(1, 220), rows=st.integers(1, 70), text=TEXTS)
def test_any_snapshot_can_be_shown(
    data: st.DataObject, known: Facts, newest: Sample, columns: int, rows: int, text: str
) -> None:
    """For any samples and any window size, the frame fits."""
    states: tuple[ServerState, ...] = ("starting", "serving", "lost")
    state = data.draw(st.sampled_from(states))
    sources = (SourceHealth(source=text, up=data.draw(st.booleans()), errors_total=1),)
    worsts: tuple[Status, ...] = ("ok", "unknown", "fault")
    made = replace(judged(), worst=data.draw(st.sampled_from(worsts)))
    shown = of(
        Snapshot(state=state, facts=known, newest=newest, sources=sources, diagnosis=made, diagnosed_seconds=0.0)
    )
    lines = screen(shown, columns, rows)
    assert len(lines) <= rows
    assert all(cell_len(line) <= columns for line in lines)
