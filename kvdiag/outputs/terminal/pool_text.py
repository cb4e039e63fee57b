"""The plan for an engine other than vLLM, for a person: answer, capacity, pools, one GPU, what to change.

Figures of the pools come first because they are exact; the partition of a GPU holds estimates, which are marked.
"""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvdiag.formatting import format_bytes, format_count, format_ratio, plural
from kvdiag.kv.pools.engine_plan import POOL_TYPES, TITLES, EnginePlan, EnginePool
from kvdiag.outputs.terminal.cells import columns, grid, heading, indented
from kvdiag.outputs.terminal.fit_text import MARKS, STYLES, WORDS


def render_pools(plan: EnginePlan, *, origin: str, ascii_only: bool) -> RenderableType:  # noqa: ARG001 - as render_fit
    """The whole answer."""
    parts: list[RenderableType] = [_headline(plan), grid(_figures(plan, origin))]
    if plan.pools:
        parts += [heading("Pools of one GPU"), _pools(plan)]
    if plan.parts:
        parts += [heading("One GPU"), _partition(plan)]
    if plan.levers:
        parts += [heading("Possible changes, each alone"), _levers(plan)]
    parts += [Padding(Text(note, style="dim"), (1, 0, 0, 0)) for note in plan.notes]
    return Group(*parts)


def _headline(plan: EnginePlan) -> Text:
    text = Text()
    demand = f"{plural(plan.demand.requests, 'request')} of {plural(plan.demand.context_tokens, 'token')}"
    outcome = plan.outcome
    if outcome is None:
        text.append(TITLES[plan.engine], style="bold")
    else:
        text.append(WORDS[outcome], style=f"bold {STYLES[outcome]}")
    text.append(f"  {demand}")
    if plan.gpu_bytes is not None:
        text.append(f" on {plural(plan.gpus, 'GPU')} of {format_bytes(plan.gpu_bytes)} with {TITLES[plan.engine]}")
    return text


def _figures(plan: EnginePlan, origin: str) -> Iterator[tuple[str, str]]:
    yield "model", origin
    groups = "" if plan.groups == 1 else f" on each of {plan.groups} data-parallel ranks"
    capacity = plural(plan.capacity_tokens // plan.groups, "token")
    if plan.engine in POOL_TYPES["reports_capacity"]:
        yield f"{TITLES[plan.engine]} will report", f"{capacity} of capacity{groups}"
    else:
        yield "capacity", capacity
    yield "longest request", plural(plan.longest_request_tokens, "token")
    running = plan.max_running_requests
    limit = "" if running is None else f", of at most {format_count(running)} that the engine runs"
    yield "max requests", f"{format_count(plan.max_requests)} at once{limit}"
    if plan.kv_bytes_per_token:
        yield "KV per token", f"{format_bytes(plan.kv_bytes_per_token)} on each GPU"
    if plan.gpu_bytes is not None:
        yield "headroom", format_bytes(plan.headroom_bytes)
    if plan.shortfall_bytes:
        yield "cannot start", f"{format_bytes(plan.shortfall_bytes)} missing on each GPU"
    if plan.reserve_shortfall_bytes:
        missing = format_bytes(plan.reserve_shortfall_bytes)
        yield "under load", f"{missing} missing for activations and graphs (estimate): out of memory is likely"
    shown = [f"{name} {value}" for name, value in plan.settings.items() if value is not None]
    if shown:
        yield "settings", ", ".join(shown)


def _pools(plan: EnginePlan) -> RenderableType:
    table = columns("=", ">", ">", "=", header=False)
    for pool in plan.pools:
        table.add_row(pool.name, _units(pool), format_bytes(pool.bytes), plural(pool.layers, "layer"))
    return indented(table)


def _units(pool: EnginePool) -> str:
    each = plural(pool.units, pool.unit)
    streams = "" if pool.streams == 1 else f" for each of {pool.streams} slots"
    size = "" if pool.unit_tokens == 1 else f" of {pool.unit_tokens} tokens"
    return f"{each}{size}{streams}"


def _partition(plan: EnginePlan) -> RenderableType:
    table = columns("=", ">", ">", "=", header=False)
    for part in plan.parts:
        share = format_ratio(part.bytes / (plan.gpu_bytes or 1))
        table.add_row(part.name, format_bytes(part.bytes), share, "estimate" if part.estimated else "")
    return indented(table)


def _levers(plan: EnginePlan) -> RenderableType:
    rows = []
    for lever in plan.levers:
        outcome = lever.outcome
        mark = Text("" if outcome is None else MARKS[outcome], style="" if outcome is None else STYLES[outcome])
        effect = f": headroom {format_bytes(lever.gained_bytes)} more, {plural(lever.max_requests, 'request')} at once"
        if lever.gained_bytes < 0:
            effect = (
                f": headroom {format_bytes(-lever.gained_bytes)} less, {plural(lever.max_requests, 'request')} at once"
            )
        rows.append((mark, Text.assemble((lever.change, "bold"), effect, (f"\n{lever.price}", "dim"))))
    return grid(rows)
