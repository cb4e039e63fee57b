"""The plots of a report: device memory, torch, the pool, requests and host memory over time, with the steps. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from kvdiag.kv.served import block_bytes
from kvdiag.model import Diagnosis, Facts, Span, StepResult, Timeline, cuda_uuid
from kvdiag.outputs import plots, report_series, scales
from kvdiag.outputs.markup import Html, element
from kvdiag.outputs.plots import Band, Event, Level, Line, Marker, Plot
from kvdiag.outputs.report_series import HELD, Gpu, Readings
from kvdiag.outputs.text import readable

MAX_GPUS = 16
"""Drawn; the others are counted, and stand in the ledger."""

MAX_LINES = 8
MAX_BANDS = 400
"""A day of soak cycles; beyond that each step is one band."""

MAX_EVENTS = 100
"""What fails all the time is told by its first times."""

MAX_READINGS = 12_000
"""Columns of all lines together, so that a page of many GPUs stays as large as one of few."""

FLAT_RATIO = 0.1
"""What moves by less of the device than this is drawn once more as a change, or a leak would be a straight line."""

LEAST_CHANGE_BYTES = 16 * 2**20
"""Of the change's axis, so that a page of noise does not look like a mountain."""

HEADROOM = 1.12
"""Of a scale above what is highest, for the label of a bound."""

NEAR_RATIO = 0.5
"""A bound further above the readings than this would press them to the floor: it is only named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What all plots of a report share."""

    timeline: Timeline
    diagnosis: Diagnosis
    bands: tuple[Band, ...]
    events: tuple[Event, ...]
    columns: int

    def plot(self, **what: object) -> Plot:
        return Plot(
            start_seconds=self.diagnosis.start_seconds,
            end_seconds=self.diagnosis.end_seconds,
            bands=self.bands,
            events=self.events,
            columns=self.columns,
            **what,  # type: ignore[arg-type]
        )


def draw(diagnosis: Diagnosis, timeline: Timeline) -> list[Html]:
    """Every plot that there is something to draw for, in groups."""
    if diagnosis.end_seconds <= diagnosis.start_seconds:
        return [element("p", "There are not enough readings over time to draw.", class_="unseen")]
    facts = diagnosis.facts
    gpus, used = report_series.devices(timeline)
    reserved, allocated = report_series.allocators(timeline, facts)
    page, memory = report_series.engines(timeline, facts), report_series.host(timeline)
    lines = 2 * len(gpus[:MAX_GPUS]) * (3 if allocated.figures else 1) + len(page.figures) + len(memory.figures)
    frame = _Frame(
        timeline=timeline,
        diagnosis=diagnosis,
        bands=_bands(timeline, diagnosis),
        events=_events(timeline, diagnosis),
        columns=max(min(plots.COLUMNS, MAX_READINGS // max(lines, 1)), 100),
    )
    shown = [
        figure
        for gpu in gpus[:MAX_GPUS]
        for figure in _gpu(frame, gpu, used, reserved, allocated, alone=len(gpus) == 1)
    ]
    parts: list[Html] = []
    if not gpus:
        parts.append(element("p", "Device memory was not seen: there is nothing to draw of it.", class_="unseen"))
    if shown:
        parts.append(element("div", *shown, class_="charts"))
    if len(gpus) > MAX_GPUS:
        parts.append(element("p", f"{len(gpus) - MAX_GPUS} more GPUs are not drawn; the ledger has them."))
    rest = [*_pool(frame, page, facts), *_requests(frame, page), *_host(frame, memory)]
    if not page.figures:
        parts.append(element("p", "The engine's page was not seen: neither pool nor requests.", class_="unseen"))
    if rest:
        parts.append(element("div", *rest, class_="charts"))
    return parts


def _bands(timeline: Timeline, diagnosis: Diagnosis) -> tuple[Band, ...]:
    """Each step's cycles, named once."""
    numbers = {step.id: number for number, step in enumerate(diagnosis.steps, start=1)}
    spans = timeline.spans()
    end_seconds = diagnosis.end_seconds
    if len(spans) > MAX_BANDS:
        whole: dict[str, Span] = {}
        for span in spans:
            first = whole.setdefault(span.step, span)
            whole[span.step] = replace(first, end_seconds=span.end_seconds, offer_seconds=None)
        spans = tuple(whole.values())
    found: list[Band] = []
    named: set[str] = set()
    for span in spans:
        if span.step not in numbers:
            continue
        label = "" if span.step in named else str(numbers[span.step])
        named.add(span.step)
        last = end_seconds if span.end_seconds is None else span.end_seconds
        name = span.step.replace("_", " ")
        found.append(Band(start_seconds=span.begin_seconds, end_seconds=last, label=label, name=name))
        if span.offer_seconds is not None and span.workload is not None and span.workload.requests:
            released = last if span.release_seconds is None else span.release_seconds
            found.append(Band(start_seconds=span.offer_seconds, end_seconds=released, strong=True))
    return tuple(found)


def _events(timeline: Timeline, diagnosis: Diagnosis) -> tuple[Event, ...]:
    """Allocations that failed, as the agents tell, and loads of which requests failed."""
    found = [
        Event(at_seconds=at_seconds, told="an allocation failed") for at_seconds in report_series.failures(timeline)
    ]
    for span in timeline.spans():
        outcome = span.outcome
        if outcome is not None and outcome.failed and span.release_seconds is not None:
            told = f"{span.step}: {outcome.failed} of {outcome.completed + outcome.failed} requests failed"
            found.append(Event(at_seconds=span.release_seconds, told=told))
    within = [one for one in found if diagnosis.start_seconds <= one.at_seconds <= diagnosis.end_seconds]
    return tuple(sorted(within, key=lambda one: one.at_seconds)[:MAX_EVENTS])


def _gpu(
    frame: _Frame, gpu: Gpu, used: Readings, reserved: Readings, allocated: Readings, *, alone: bool
) -> Iterator[Html]:
    uuid = cuda_uuid(gpu.uuid)
    lines = [Line(name="used", runs=used.runs(gpu.uuid), style="s0")]
    if uuid in reserved.figures:
        lines.append(Line(name="torch reserved", runs=reserved.runs(uuid), style="s1"))
        lines.append(Line(name="torch allocated", runs=allocated.runs(uuid), style="s2 dashed"))
    lines = [line for line in lines if line.runs]
    title = f"GPU {gpu.index} memory"
    if not lines:
        yield element("p", f"{title}: could not be read.", class_="unseen")
        return
    top = gpu.total_bytes or max(_extremes(lines)[1], 1.0)
    levels = () if gpu.total_bytes is None else (Level(value=top, label=f"{readable(top)}, all there is"),)
    markers = _device_markers(frame) if alone else ()
    yield _figure(
        frame.plot(
            key=f"gpu-{gpu.index}-{_slug(gpu.uuid)}",
            title=title,
            description=f"Bytes of {gpu.name} over time, from none to all of its memory.",
            scale=scales.sizes(0.0, HEADROOM * max([top, *_values(markers)])),
            lines=tuple(lines),
            levels=levels,
            markers=markers,
        ),
        readable,
    )
    if all(high - low < FLAT_RATIO * top for low, high in (_extremes([line]) for line in lines)):
        yield _change(frame, f"gpu-{gpu.index}-{_slug(gpu.uuid)}-change", title, lines)


def _change(frame: _Frame, key: str, title: str, lines: Sequence[Line]) -> Html:
    """The same lines against their first readings."""
    changes = []
    for line in lines:
        first = line.runs[0][1][0]
        moved = tuple((times, [value - first for value in values]) for times, values in line.runs)
        changes.append(replace(line, runs=moved))
    low, high = _extremes(changes)
    room = max(LEAST_CHANGE_BYTES - (high - low), 0.0)
    spare = 0.08 * max(high - low, LEAST_CHANGE_BYTES)
    return _figure(
        frame.plot(
            key=key,
            title=f"{title}: change since the first reading",
            description="The same figures, each less its own first reading, so that small growth can be seen.",
            scale=scales.sizes(low - (spare if low < 0 else 0.0), high + spare + room, signed=True),
            lines=tuple(changes),
        ),
        _signed,
    )


def _signed(value: float) -> str:
    return f"+{readable(value)}" if value > 0 else readable(value)


def _device_markers(frame: _Frame) -> tuple[Marker, ...]:
    """The steps' figures of the server's device, which are those of the only one there is."""
    found = []
    for step in frame.diagnosis.steps:
        expected, measured = _both(step, "device_used_bytes")
        spans = frame.timeline.spans(step.id)
        if not spans or (expected is None and measured is None):
            continue
        end = spans[-1].end_seconds
        found.append(
            Marker(
                at_seconds=frame.diagnosis.end_seconds if end is None else end,
                expected=expected,
                measured=measured,
                told=_told(step, expected, measured, readable),
            )
        )
    return tuple(found)


def _pool(frame: _Frame, page: Readings, facts: Facts) -> Iterator[Html]:
    held = page.runs(HELD) if HELD in page.figures else ()
    if not held:
        if page.figures:
            yield from _usage(frame, page)
        return
    lines = [Line(name="blocks held by requests", runs=held, style="s0 stepped")]
    usable = sum(pool.usable_blocks for pool in facts.pools)
    markers = _block_markers(frame, page)
    top = HEADROOM * max([_extremes(lines)[1], *_values(markers), 1.0])
    near = top > NEAR_RATIO * usable
    size = block_bytes(facts, facts.pools[0]) if facts.pools else None
    capacity = f"{usable:,} blocks" + ("" if size is None else f", {readable(usable * size[0])} a rank")
    yield _figure(
        frame.plot(
            key="pool",
            title=f"KV pool in use, of {capacity}",
            description="Blocks of the KV pool that requests hold, over time, in all engines together.",
            scale=scales.counts(0.0, HEADROOM * usable if near else top),
            lines=tuple(lines),
            levels=(Level(value=usable, label=f"{usable:,} blocks, the whole pool"),) if near else (),
            markers=markers,
        ),
        _count,
    )
    engines = [name for name in page.figures if name.startswith(f"{HELD} ")]
    if len(engines) > 1:
        several = [
            Line(name=f"engine {name.removeprefix(HELD).strip()}", runs=page.runs(name), style=f"s{place} stepped")
            for place, name in enumerate(islice(engines, MAX_LINES))
        ]
        yield _figure(
            frame.plot(
                key="pools",
                title="KV pool in use, by engine" + _left_out(len(engines)),
                description="Blocks that requests hold, engine by engine.",
                scale=scales.counts(0.0, max(_extremes(several)[1], 1.0) * HEADROOM),
                lines=tuple(several),
            ),
            _count,
        )


def _usage(frame: _Frame, page: Readings) -> Iterator[Html]:
    """The pool's used share, where its size is not told."""
    names = [name for name in page.figures if name.startswith("usage ") and page.runs(name)]
    lines = [
        Line(name=f"engine {name.removeprefix('usage ')}", runs=page.runs(name), style=f"s{place} stepped")
        for place, name in enumerate(islice(names, MAX_LINES))
    ]
    if lines:
        yield _figure(
            frame.plot(
                key="usage",
                title="KV pool in use, share" + _left_out(len(names)),
                description="Share of the KV pool that requests hold, engine by engine; its size is not told.",
                scale=scales.shares(),
                lines=tuple(lines),
            ),
            lambda value: f"{value:.1%}",
        )


def _block_markers(frame: _Frame, page: Readings) -> tuple[Marker, ...]:
    """Each step's blocks above what was held before it, at the reading that was judged."""
    found = []
    for step in frame.diagnosis.steps:
        expected, measured = _both(step, "blocks")
        spans = frame.timeline.spans(step.id)
        if not spans or measured is None:
            continue
        at_seconds, floor = _where(spans, page, measured, frame.diagnosis.end_seconds)
        found.append(
            Marker(
                at_seconds=at_seconds,
                expected=None if expected is None else floor + expected,
                measured=floor + measured,
                told=_told(step, expected, measured, lambda value: f"{value:,.0f} blocks"),
            )
        )
    return tuple(found)


def _where(spans: Sequence[Span], page: Readings, measured: float, end_seconds: float) -> tuple[float, float]:
    """The first reading of a step that shows what it measured, and what was held before that cycle."""
    readings = [
        (time, value)
        for time, value in zip(page.times, page.figures[HELD], strict=True)
        if value is not None and spans[0].begin_seconds <= time <= (spans[-1].end_seconds or end_seconds)
    ]
    for span in reversed(spans):
        offered = span.begin_seconds if span.offer_seconds is None else span.offer_seconds
        before = [value for time, value in readings if span.begin_seconds <= time <= offered]
        floor = before[-1] if before else 0.0
        last = end_seconds if span.end_seconds is None else span.end_seconds
        shown = [time for time, value in readings if offered <= time <= last and value - floor == measured]
        if shown:
            return shown[len(shown) // 2], floor
    last = end_seconds if spans[-1].end_seconds is None else spans[-1].end_seconds
    return (spans[-1].begin_seconds + last) / 2, 0.0


def _values(markers: Sequence[Marker]) -> list[float]:
    return [value for marker in markers for value in (marker.expected, marker.measured) if value is not None]


def _both(step: StepResult, name: str) -> tuple[float | None, float | None]:
    expected, measured = (
        next((one.value for one in told if one.name == name), None) for told in (step.expected, step.measured)
    )
    return (
        expected if isinstance(expected, int | float) else None,
        measured if isinstance(measured, int | float) else None,
    )


def _told(step: StepResult, expected: float | None, measured: float | None, unit: Callable[[float], str]) -> str:
    parts = [
        f"{name} {unit(value)}" for name, value in (("expected", expected), ("measured", measured)) if value is not None
    ]
    return f"{step.id}: {', '.join(parts)}"


def _requests(frame: _Frame, page: Readings) -> Iterator[Html]:
    lines = [
        Line(name=name, runs=page.runs(name), style=style)
        for name, style in (("running", "s0 stepped"), ("waiting", "s1 stepped dashed"))
        if name in page.figures
    ]
    lines = [line for line in lines if line.runs]
    if lines:
        yield _figure(
            frame.plot(
                key="requests",
                title="Requests",
                description="Requests that run and that wait, over time, in all engines together.",
                scale=scales.counts(0.0, max(_extremes(lines)[1] * HEADROOM, 4.0)),
                lines=tuple(lines),
            ),
            _count,
        )
    preempted = (
        [Line(name="preempted since its start", runs=page.runs("preempted"), style="s6")]
        if "preempted" in page.figures
        else []
    )
    preempted = [line for line in preempted if line.runs and _extremes([line])[1] > _extremes([line])[0]]
    if preempted:
        yield _figure(
            frame.plot(
                key="preempted",
                title="Preempted requests",
                description="Requests that lost their blocks and were computed again, since the server's start.",
                scale=scales.counts(0.0, _extremes(preempted)[1] * HEADROOM),
                lines=tuple(preempted),
            ),
            _count,
        )


def _host(frame: _Frame, memory: Readings) -> Iterator[Html]:
    lines = [Line(name=name, runs=memory.runs(name)) for name in memory.figures]
    lines = sorted((line for line in lines if line.runs), key=lambda line: -_extremes([line])[1])
    styled = tuple(replace(line, style=f"s{place}") for place, line in enumerate(lines[:MAX_LINES]))
    if styled:
        title = "Host memory of the server's processes" + _left_out(len(lines))
        yield _change(frame, "host", title, styled)


def _figure(plot: Plot, unit: Callable[[float], str]) -> Html:
    """A plot with the same in figures, for those who do not see it."""
    head = element("tr", *(element("th", name, scope="col") for name in ("", "first", "lowest", "highest", "last")))
    rows = []
    for line in plot.lines:
        low, high = _extremes([line])
        first, last = line.runs[0][1][0], line.runs[-1][1][-1]
        told = [element("td", unit(value)) for value in (first, low, high, last)]
        rows.append(element("tr", element("th", line.name, scope="row"), *told))
    marked = [element("li", one.told) for one in plot.markers]
    marked += [element("li", one.told) for one in plot.events]
    table = element("div", element("table", head, *rows), class_="scroll")
    more = [element("ul", *marked)] if marked else []
    return plots.page_part(plot, element("details", element("summary", "In figures"), table, *more))


def _extremes(lines: Sequence[Line]) -> tuple[float, float]:
    values = [values for line in lines for _, values in line.runs]
    return min(map(min, values), default=0.0), max(map(max, values), default=0.0)


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _left_out(lines: int) -> str:
    return f" ({MAX_LINES} of {lines})" if lines > MAX_LINES else ""


def _slug(text: str) -> str:
    """What may stand in an id, of a name from outside."""
    return "".join(one for one in text if one.isascii() and (one.isalnum() or one == "-"))[:64]
