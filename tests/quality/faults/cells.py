"""What may happen to each source of the daemon, and what it promises then: the fault matrix.

A source that is lost is named as a gap, counts as down, shows nothing as if it were there, holds up no other, and is
there again by itself when it is mended. A Prometheus is no source of the daemon:
tests/integration/prometheus/test_bad_server.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdiag.outputs.current_verdict import REFUSED
from kvdiag.outputs.presentation import DOWN
from tests.fixtures.hostile import eventually
from tests.quality.faults.daemon_stage import Stage

SHOWN: Mapping[str, str | None] = {
    "engine": "kvdiag_kv_usage_ratio",
    "nvml": "kvdiag_gpu_memory_used_bytes",
    "torch_allocator": "kvdiag_torch_allocated_bytes",
    "host": "kvdiag_host_resident_bytes",
    "recorder": None,
}
"""A figure of each source: the recorder writes alone."""

COLUMNS = (("nvml",), ("engine", "host"), ("torch_allocator",), ("recorder",))
"""Sources whose faults are played in parallel; the server's metrics and its processes fail and recover together."""

NO_SUCH_THING: Mapping[tuple[str, str], str] = {
    ("torch_allocator", "slow"): "a file is there or not; a late folder: tests/unit/sources/test_worker_thread.py",
    ("host", "slow"): "/proc is the kernel's own memory",
    ("host", "hanging"): "no process can be made to hang in a driver; tests/unit/feeds/live/test_live.py",
    ("host", "garbage"): "as slow; names of processes are any bytes in tests/unit/sources/test_host.py",
    ("recorder", "slow"): "a thread of its own writes; tests/unit/feeds/recording/test_recorder.py",
    ("recorder", "hanging"): "a disk cannot be made to hang without root; tests/unit/feeds/recording/test_recorder.py",
    ("recorder", "garbage"): "it is not read while it runs; torn folders: tests/unit/feeds/recording/test_recorder.py",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A source in a condition. `up` is its `kvdiag_source_up` then, `None` where it has none or either by turns.

    `named` is in the reason of its gap.
    """

    source: str
    condition: str
    up: float | None
    named: str = ""


CELLS: tuple[Cell, ...] = (
    Cell(source="nvml", condition="hanging", up=0.0, named="driver has not answered"),
    Cell(source="nvml", condition="slow", up=1.0),
    Cell(source="nvml", condition="garbage", up=1.0, named="its memory is unknown"),
    Cell(source="nvml", condition="flapping", up=None),
    Cell(source="nvml", condition="absent", up=0.0, named="kernel module is not loaded"),
    Cell(source="engine", condition="slow", up=1.0),
    Cell(source="engine", condition="garbage", up=0.0, named="malformed"),
    Cell(source="engine", condition="flapping", up=None),
    Cell(source="engine", condition="hanging", up=0.0, named="5 s"),
    Cell(source="engine", condition="absent", up=0.0, named="connect"),
    Cell(source="engine", condition="hostile", up=0.0, named="more than"),
    Cell(source="engine", condition="restarted", up=1.0),
    Cell(source="engine", condition="leaking", up=1.0),
    Cell(source="host", condition="absent", up=0.0, named="processes have exited"),
    Cell(source="host", condition="flapping", up=None),
    Cell(source="torch_allocator", condition="garbage", up=0.0, named="agent-"),
    Cell(source="torch_allocator", condition="flapping", up=None),
    Cell(source="torch_allocator", condition="absent", up=None, named="no folder of agents"),
    Cell(source="torch_allocator", condition="hanging", up=0.0, named="its agent is stuck"),
    Cell(source="recorder", condition="full", up=0.0, named=""),
    Cell(source="recorder", condition="flapping", up=None),
    Cell(source="recorder", condition="absent", up=0.0, named=""),
)


LEAK = "leak.kv_blocks"

ACTING = ("<script", "\x1b", "\x07", "\u202e")
"""Of what the server calls itself. In the text format of metrics `<` is a character as any other."""

comes = partial(eventually, every_seconds=0.15)
"""Each look asks the daemon."""


def play(stage: Stage, cell: Cell) -> str:
    """Break one source, watch what the daemon makes of it, mend it, and watch again; what was not as promised."""
    if cell.condition in ("restarted", "leaking"):
        return _play_life(stage, leaks=cell.condition == "leaking")
    before = ticks(stage)
    errors_before = errors(stage, cell.source)
    stage.set(cell.source, cell.condition)
    try:
        if not comes(lambda: _is_as_told(stage, cell, errors_before)):
            return f"is not as promised: {_seen(stage, cell.source)}"
        if not comes(lambda: _all_go_on(stage, before, cell)):
            return f"holds up others: {before} then {ticks(stage)}"
        if stage.serving.client.get("/-/healthy")[0] != 200 or stage.serving.process.poll() is not None:
            return "ends the daemon"
        # A server that answers is not down, even with an invalid answer.
        word = REFUSED if cell.condition in ("garbage", "hostile") else DOWN
        if cell.source == "engine" and cell.up == 0.0 and not comes(lambda: word in stage.serving.client.get("/")[1]):
            return f"is not called {word}"
        if acts := _acts(stage):
            return f"reaches a reader as it came: {acts}"
    finally:
        stage.set(cell.source, "well")
    if not comes(lambda: is_well(stage, cell.source)):
        return f"does not heal: {_seen(stage, cell.source)}"
    return ""


def _play_life(stage: Stage, *, leaks: bool) -> str:
    """Have the server restart, after a leak or none; each of its lives is judged by itself, and none is forgotten."""
    begun_seconds = stage.clock.now_seconds()
    try:
        if leaks:
            stage.set("engine", "leaking")
            if not comes(lambda: _leaks(stage.serving.get("/api/v1/diagnosis"))):
                return "its leak is not found"
            stage.set("engine", "absent")
            if not comes(lambda: "down_since_seconds" in stage.serving.get("/api/v1/snapshot")["snapshot"]):
                return "is not down"
        else:
            stage.set("engine", "restarted")
    finally:
        stage.set("engine", "well")
    if not comes(lambda: _is_another_life(stage, begun_seconds, leaked=leaks)):
        return f"is not another life: {(stage.serving.get('/api/v1/diagnosis') or {}).get('lives')}"
    return "" if comes(lambda: is_well(stage, "engine")) else f"does not heal: {_seen(stage, 'engine')}"


def _is_another_life(stage: Stage, begun_seconds: float, *, leaked: bool) -> bool:
    """Whether a life began since then, the one before has its end, and a leak is that one's alone."""
    found = stage.serving.get("/api/v1/diagnosis")
    *_, before, present = [{}, *found["lives"]] if found else [{}, {}]
    if before.get("end_seconds") is None or present["start_seconds"] < begun_seconds:
        return False
    if present["end_seconds"] is not None or not leaked:
        return present["end_seconds"] is None
    page = stage.serving.client.get("/")[1]
    return _leaks(before) and not _leaks(present) and not _leaks(found) and found["worst"] == "fault" and LEAK in page


def _leaks(judged: Mapping[str, Any] | None) -> bool:
    """Whether a diagnosis, or one life of it, has the leak among its faults."""
    return judged is not None and (LEAK, "fault") in [(one["id"], one["status"]) for one in judged["findings"]]


def _acts(stage: Stage) -> list[str]:
    """What of a server's own words would act where a page is shown."""
    page, metrics = (stage.serving.client.get(path)[1] for path in ("/", "/metrics"))
    return [part for part in ACTING if part in page or (part in metrics and not part.isprintable())]


def is_well(stage: Stage, source: str) -> bool:
    """Whether a source is up, shown and without a gap."""
    return stage.serving.up().get((source,)) == 1.0 and _shown(stage, source) is not False and not _gaps(stage, source)


def _is_as_told(stage: Stage, cell: Cell, errors_before: float) -> bool:
    up = stage.serving.up().get((cell.source,))
    if cell.condition == "flapping":
        return errors(stage, cell.source) > errors_before + 1
    gone = cell.up != 1.0 or bool(cell.named)
    return (
        up == cell.up
        and (_shown(stage, cell.source) is not gone or SHOWN[cell.source] is None)
        and (cell.source == "recorder" or any(cell.named in reason for reason in _gaps(stage, cell.source)) is gone)
    )


def _all_go_on(stage: Stage, before: Mapping[str, float], cell: Cell) -> bool:
    return all(count > before.get(source, 0.0) + 2 for source, count in ticks(stage).items() if source != cell.source)


def ticks(stage: Stage) -> dict[str, float]:
    """Of each source, the ticks that were not missed."""
    due, missed = (stage.serving.series(f"kvdiag_ticks{name}_total") for name in ("", "_missed"))
    return {source: count - missed.get((source,), 0.0) for (source,), count in due.items()}


def errors(stage: Stage, source: str) -> float:
    """How often a source failed."""
    return stage.serving.series("kvdiag_source_errors_total").get((source,), 0.0)


def _shown(stage: Stage, source: str) -> bool | None:
    name = SHOWN[source]
    return None if name is None else bool(stage.serving.series(name))


def _gaps(stage: Stage, source: str) -> list[str]:
    gaps = stage.serving.get("/api/v1/ledger")["gaps"]
    known = ("files are not visible here",)
    return [gap["reason"] for gap in gaps if gap["source"] == source and not any(k in gap["reason"] for k in known)]


def _seen(stage: Stage, source: str) -> str:
    return f"up {stage.serving.up().get((source,))}, shown {_shown(stage, source)}, gaps {_gaps(stage, source)}"
