"""The answer of `kvdiag fit` for a person: fits or not first, then the figures, the partition, and what to change.

The partition is that of the pipeline stage with the least headroom, because a plan is as good as its worst stage.
Single changes come next, then combinations, each with the plan that it leads to and its price; where none of them
fits, a line reports it. Notes at the end name what was estimated. Nothing is calculated here but shares.
"""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvdiag.formatting import format_bytes, format_count, format_number, format_ratio, plural
from kvdiag.kv.fit.overheads import RULE_OF_THUMB
from kvdiag.kv.fit.plan import Budget, Outcome, Plan
from kvdiag.kv.fit.scenario import BLOCKS_OPTION, Lever, Scenario
from kvdiag.kv.pools.engine_plan import EnginePlan
from kvdiag.outputs.terminal.cells import MEMORY, Kind, columns, grid, heading, indented, marked

WORDS = {Outcome.FITS: "FITS", Outcome.TIGHT: "FITS, TIGHTLY", Outcome.DOES_NOT_FIT: "DOES NOT FIT"}
STYLES = {Outcome.FITS: "green", Outcome.TIGHT: "yellow", Outcome.DOES_NOT_FIT: "red"}
MARKS = {Outcome.FITS: "yes", Outcome.TIGHT: "tight", Outcome.DOES_NOT_FIT: "no"}
_LAYERS: Mapping[str, str] = MEMORY["layers"]
"""Kinds of layer whose identifier is not the word for them."""
_LEGEND = "yes: fits; tight: fits, with less than 10 % of the pool free; no: does not fit; n/a: not supported"
_BAR_WIDTH = 60
_PARTS = {field: Kind(*parts) for field, parts in MEMORY["budget"].items()}


def render_fit(
    scenario: Scenario,
    plan: Plan,
    levers: Sequence[Lever],
    combinations: Sequence[Lever],
    *,
    origin: str,
    notes: Sequence[str],
    block_waste_ratio: float | None,
    ascii_only: bool,
) -> RenderableType:
    """The whole answer. `block_waste_ratio` is None for a model that keeps no KV cache."""
    headline = Text()
    headline.append(WORDS[plan.outcome], style=f"bold {STYLES[plan.outcome]}")
    budget = plan.budgets[plan.limiting_stage]
    if budget.shortfall_bytes:
        headline.append(f"  {_too_large(budget)}")
    elif plan.keeps_cache:
        headline.append(f"  {_demand(plan)}")
    else:
        headline.append("  a model without a KV cache")
    headline.append(f" on {plural(scenario.gpus, 'GPU')} of {format_bytes(scenario.gpu_bytes)}")
    parts: list[RenderableType] = [headline, _figures(scenario, plan, origin, block_waste_ratio)]
    title = "One GPU" if len(plan.budgets) == 1 else f"One GPU of pipeline stage {plan.limiting_stage} (least headroom)"
    pool_name = "KV pool" if plan.keeps_cache else "free"
    parts += [
        heading(title),
        _bar(budget, ascii_only=ascii_only),
        _partition(budget, pool_name=pool_name, ascii_only=ascii_only),
    ]
    if levers:
        parts += [heading("Possible changes, each alone"), _levers(levers)]
    if combinations:
        parts += [heading("More GPUs or combinations that fit, fewest GPUs first"), _levers(combinations)]
    helps = any(one.supported and one.plan.outcome is not Outcome.DOES_NOT_FIT for one in (*levers, *combinations))
    if plan.outcome is Outcome.DOES_NOT_FIT and not helps and not scenario.exceeds_limit:
        gpus = plural(scenario.widest_gpus, "GPU")
        subject = f"{_demand(plan)} do not fit" if plan.keeps_cache else "The model does not fit"
        why = f"{subject} on up to {gpus} in any weight or KV-cache format; lower --concurrency or --context."
        parts.append(Padding(Text(why), (1, 0, 0, 0)))
    if levers or combinations:
        parts.append(Padding(Text(_LEGEND, style="dim"), (1, 0, 0, 0)))
    for note in notes:
        parts.append(Padding(Text(note, style="dim"), (1, 0, 0, 0)))
    return Group(*parts)


def _too_large(budget: Budget) -> str:
    sizes = f"{format_bytes(budget.weights_bytes)} of weights per GPU, {format_bytes(budget.usable_bytes)} usable"
    if budget.weights_bytes > budget.usable_bytes:
        return sizes
    return f"the weights fit, but not the engine's overheads: {sizes}"


def _demand(plan: Plan) -> str:
    return f"{plural(plan.demand.requests, 'request')} of {plural(plan.demand.context_tokens, 'token')}"


def render_grid(rows: Sequence[Sequence[Plan | EnginePlan]]) -> RenderableType:
    """Context down, concurrency across."""
    table = columns(">context", *(f">{format_count(plan.demand.requests)}" for plan in rows[0]))
    for row in rows:
        outcomes = [plan.outcome for plan in row if plan.outcome is not None]
        cells = [Text(MARKS[one], style=STYLES[one]) for one in outcomes]
        table.add_row(f"{format_count(row[0].demand.context_tokens)}", *cells)
    return Group(heading("Context (rows) by requests at once (columns)"), table)


def _figures(scenario: Scenario, plan: Plan, origin: str, block_waste_ratio: float | None) -> RenderableType:
    kinds = ", ".join(f"{count} {_LAYERS.get(kind, kind)}" for kind, count in scenario.architecture.kinds.items())
    per_gpu = "" if scenario.gpus == 1 else " per GPU"
    headroom, budget = f"{format_bytes(plan.headroom_bytes)}{per_gpu}", plan.budgets[plan.limiting_stage]
    if budget.overrun_bytes:
        left = "no memory is" if budget.shortfall_bytes else f"{format_bytes(budget.available_bytes)} are"
        headroom = (
            f"none: {BLOCKS_OPTION} needs {format_bytes(budget.override_bytes or 0)}{per_gpu}, and {left} available"
        )
    elif plan.keeps_cache:
        need = "needs" if plan.demand.requests == 1 else "need"
        headroom += f"; {_demand(plan)} {need} {format_bytes(plan.needed_bytes)} of KV pool{per_gpu}"
    rows = [("model", f"{origin}: {kinds} layers"), ("KV headroom" if plan.keeps_cache else "headroom", headroom)]
    rows += _cache_figures(scenario, plan) if plan.keeps_cache else [("KV cache", "none: only weights and overhead")]
    if block_waste_ratio is not None and plan.capacity.num_blocks:
        rows.append(("block waste", f"{format_ratio(block_waste_ratio)} of the space in a request's blocks is unused"))
    return grid(rows)


def _cache_figures(scenario: Scenario, plan: Plan) -> list[tuple[str, str]]:
    pool, requests = plan.capacity, plural(plan.demand.requests, "request")
    budget = plan.budgets[plan.limiting_stage]
    if budget.shortfall_bytes or not pool.num_blocks:
        return [("KV pool", "none: weights and overheads leave no memory for it, so the engine does not start")]
    if budget.overrun_bytes:
        asked = plural(pool.num_blocks, "block")
        return [("KV pool", f"none: {asked} do not fit into the memory available, so the engine does not start")]
    concurrency = format_number(pool.max_concurrency)
    blocks = f"{plural(pool.num_blocks, 'block')}, one of them the null block"
    starts = pool.admits_one and scenario.overheads.source != RULE_OF_THUMB
    limit = " (the model's limit)" if plan.max_context_tokens == scenario.most_context_tokens else ""
    return [
        ("max requests", f"{plan.max_requests:,} at once, of {plural(plan.demand.context_tokens, 'token')} each"),
        ("max context", f"{plural(plan.max_context_tokens, 'token')}{limit}, with {requests} at once"),
        ("KV pool", f"{blocks}; {format_count(pool.blocks_per_request)} per request"),
        (
            "vLLM will report" if starts else "capacity",
            f"{plural(pool.capacity_tokens, 'token')}, concurrency {concurrency}x",
        ),
    ]


def _bar(budget: Budget, *, ascii_only: bool) -> RenderableType:
    """The partition as a bar; parts that do not fit run over its end."""
    cells = {field: round(getattr(budget, field) / budget.total_bytes * _BAR_WIDTH) for field in _PARTS}
    bar = "".join(marked(_PARTS[name], ascii_only=ascii_only) * min(_BAR_WIDTH + 1, cells[name]) for name in _PARTS)
    return indented(Text(bar[: _BAR_WIDTH + 1]))


def _partition(budget: Budget, *, pool_name: str, ascii_only: bool) -> RenderableType:
    table = columns("=", "=", ">", ">", header=False)
    # One figure for all three where they were measured together, else one for each.
    omitted = ["activation_bytes", "context_bytes", "graph_bytes"] if budget.overhead_bytes else ["overhead_bytes"]
    omitted.append("unused_bytes")
    for field, part in _PARTS.items():
        share = getattr(budget, field)
        if not share and field in omitted:
            continue
        shown = pool_name if part.title == "KV pool" else part.title
        if field == "reserve_bytes":
            shown = f"{shown} (memory fraction {format_number(budget.memory_fraction_ratio)})"
        table.add_row(
            marked(part, ascii_only=ascii_only), shown, format_bytes(share), format_ratio(share / budget.total_bytes)
        )
    if budget.shortfall_bytes:
        table.add_row("!", "missing for weights and overheads", format_bytes(budget.shortfall_bytes), "")
    return indented(table)


def _levers(levers: Sequence[Lever]) -> RenderableType:
    rows = []
    for lever in levers:
        plan = lever.plan
        effect = f"KV headroom {format_bytes(plan.headroom_bytes)} per GPU"
        if plan.keeps_cache:
            effect += f", {plural(plan.max_requests, 'request')} at once"
        change = Text.assemble((lever.change, "bold"), f": {effect}", (f"\n{lever.price}", "dim"))
        mark = Text(MARKS[plan.outcome], style=STYLES[plan.outcome]) if lever.supported else Text("n/a", style="dim")
        rows.append((mark, change))
    return grid(rows)
