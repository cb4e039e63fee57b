"""The state of llama.cpp's server from /props, /slots and /v1/models, as the series of a page. Pure.

The server has no gauge of its cells in use since 2025-05 (PR 13660). /slots has the tokens of each slot; a slot that
has ended keeps its tokens as its prefix cache and gives them up on demand, so that only the tokens of slots that
process a request are in use. Requests beyond the slots wait (`requests_deferred`); requests beyond the cells do not
wait: all that run fail.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvdiag.engine_memory import host_cache_set_by
from kvdiag.engines.engine import SOURCE, EngineReading
from kvdiag.engines.llamacpp.command_line import Cells, Options, parse_options, pool_cells
from kvdiag.engines.metrics_reader import MAX_SERIES, Figures, crowded
from kvdiag.model import MAX_BYTES, MAX_COUNT, Engine, Gap, HostCache, KvPool
from kvdiag.sources.prometheus_text import Page, Series

if TYPE_CHECKING:
    from kvdiag.kv.pools.cell_model import CellModel

TOKENS, CONTEXT, PROCESSING = "llamacpp:slot_tokens", "llamacpp:slot_context_tokens", "llamacpp:slot_processing"
OUTPUT = "llamacpp:slot_output_tokens"
"""Of each slot, by its id: made from /slots, not by the server."""

SLOTS, TRAINED, SLEEPING = "llamacpp:slots", "llamacpp:trained_context_tokens", "llamacpp:sleeping"
POOL = CELLS, BYTES, MIXED = "llamacpp:cells", "llamacpp:cache_bytes", "llamacpp:caches_mixed"
"""Of the server: made from /props, /v1/models and the command line."""

PROMPT_CACHE, ONE_PROMPT, CHECKPOINTS = (
    "llamacpp:prompt_cache_default_bytes",
    "llamacpp:largest_prompt_bytes",
    "llamacpp:checkpoints_limit_bytes",
)
"""Limits of host memory: the first where --cache-ram is not given, the second where one prompt may exceed it."""

_HAS_PROMPT_CACHE, _STRICT_LIMIT = 6729, 10075
"""Builds from which there is a prompt cache (PR 16391), and from which no prompt exceeds its limit (PR 25070)."""

RUNNING, DEFERRED = "llamacpp:requests_processing", "llamacpp:requests_deferred"
COUNTERS: Mapping[str, Sequence[str]] = {
    "prompt_tokens_total": ("llamacpp:prompt_tokens_total",),
    "generation_tokens_total": ("llamacpp:tokens_predicted_total",),
}
NEEDED_NAMES: Mapping[str, Sequence[str]] = {
    "tokens of each slot": (TOKENS,),
    "running requests": (PROCESSING, RUNNING),
    "waiting requests and token counts": (DEFERRED,),
}
BOTH_OFF = "it reports neither slots nor metrics: start the server with --metrics, and without --no-slots"

NO_BYTES = (
    "the bytes of the KV cache are not reported, and the model's GGUF file and the command line do not give them; run "
    "kvdiag on the server's host, where the file is, or read the KV buffer size in its log (-lv 4)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One slot as /slots has it: its current or last task, and figures that are `None` where they are not reported."""

    number: int
    processing: bool | None
    task: int | None
    tokens: int | None
    output_tokens: int | None
    context_tokens: int | None


def build_number(version: object) -> int | None:
    """The number of a build, such as 11434 of "b11434-0123abc"; a build without one calls itself b0 or b1."""
    found = re.match(r"b?(\d{2,6})\b", version) if isinstance(version, str) else None
    return None if found is None else int(found[1])


def slots_of(answer: object) -> tuple[Slot, ...]:
    """The slots of a decoded answer of /slots; one without a number is left out."""
    listed = answer if isinstance(answer, list) else []
    return tuple(slot for one in listed[: MAX_SERIES + 1] if (slot := _slot(one)) is not None)


def _slot(entry: object) -> Slot | None:
    if not isinstance(entry, dict) or (number := _count(entry.get("id"))) is None:
        return None
    following = entry.get("next_token")
    first = following[0] if isinstance(following, list) and following else following
    output = _count(first.get("n_decoded")) if isinstance(first, dict) else None
    processing = entry.get("is_processing")
    return Slot(
        number=number,
        processing=processing if isinstance(processing, bool) else None,
        task=_count(entry.get("id_task")),
        tokens=_tokens(entry, output),
        output_tokens=output,
        context_tokens=_count(entry.get("n_ctx")),
    )


def _tokens(entry: Mapping[str, Any], output: int | None) -> int | None:
    """Tokens with a cell in a slot; a slot that never had a request has none.

    The newest output token is counted as soon as it is sampled, and gets its cell in the next step. With a draft model
    the tokens drafted for the next step are counted as well (292 = 100 + 189 + 3 of a draft, b11549).
    """
    tokens = _count(entry.get("n_prompt_tokens"))
    if tokens is None:
        return 0 if "id_task" not in entry else None
    processed = (_count(entry.get("n_prompt_tokens_processed")) or 0) + (
        _count(entry.get("n_prompt_tokens_cache")) or 0
    )
    drafted = entry.get("speculative") is True and output and tokens > processed + output
    return processed + output - 1 if output and (drafted or tokens == processed + output) else tokens


def slots_page(slots: Sequence[Slot]) -> Page:
    """The series of the slots."""
    lines: dict[str, list[Series]] = {}
    for slot in slots:
        figures = {
            TOKENS: slot.tokens,
            CONTEXT: slot.context_tokens,
            PROCESSING: slot.processing,
            OUTPUT: slot.output_tokens,
        }
        for name, value in figures.items():
            if value is not None:
                lines.setdefault(name, []).append(Series({"id": str(slot.number)}, float(value)))
    return {name: tuple(found) for name, found in lines.items()}


def server_page(props: object, models: object, options: Options | None, model: "CellModel | None" = None) -> Page:
    """The series of decoded answers of /props and /v1/models, and the cells that the command line shows.

    Their bytes where the `model`'s file has been read.
    """
    props = props if isinstance(props, dict) else {}
    settings = props.get("default_generation_settings")
    figures = {
        SLOTS: _count(props.get("total_slots")),
        CONTEXT: _count(settings.get("n_ctx")) if isinstance(settings, dict) else None,
        TRAINED: _count(model_meta(models).get("n_ctx_train")),
        SLEEPING: props["is_sleeping"] if isinstance(props.get("is_sleeping"), bool) else None,
    }
    page = {name: (Series({}, float(value)),) for name, value in figures.items() if value is not None}
    if isinstance(cells := _cells(page, options), Cells):
        page[CELLS] = (Series({}, float(cells.usable)),)
        slots = figures[SLOTS] or 0
        from kvdiag.engines.llamacpp.cell_bytes import caches, is_mixed  # noqa: PLC0415 - for this engine alone

        cache = caches(model, options, cells, slots=slots) if model and options and slots else None
        if cache is not None:
            page[BYTES] = (Series({}, float(cache.bytes)),)
            page[MIXED] = (Series({}, float(is_mixed(cache))),)
    return {**page, **_host_limits(page, options, model, build_number(props.get("build_info")))}


def _host_limits(page: Page, options: Options | None, model: "CellModel | None", build: int | None) -> Page:
    """What the server's caches may take of the host beyond the limits on its command line, as far as that is known.

    Checkpoints of a model whose file cannot be read may take any size.
    """
    slots, context = (round(lines[0].value) if (lines := page.get(name)) else 0 for name in (SLOTS, CONTEXT))
    if options is None or not options.complete or not slots or not context:
        return {}
    from kvdiag.engines.llamacpp.cell_bytes import slot_state_bytes  # noqa: PLC0415 - for this engine alone

    prompt, checkpoint = (model and slot_state_bytes(model, options, slot_tokens=context)) or (0, MAX_BYTES)
    limits = {CHECKPOINTS: slots * options.checkpoints * checkpoint}
    # A build without a number has /props of 2026.
    if not options.limits_prompt_cache and (SLEEPING in page if build is None else build >= _HAS_PROMPT_CACHE):
        limits[PROMPT_CACHE] = host_cache_set_by("--cache-ram").default_bytes or 0
    if build is None or build < _STRICT_LIMIT:
        limits[ONE_PROMPT] = prompt
    return {name: (Series({}, float(min(size, MAX_BYTES - 1))),) for name, size in limits.items() if size}


def parse_caches(page: Page) -> tuple[HostCache, ...]:
    """The limits of host memory that no option sets; of several servers the largest, since each is of one process."""
    options = {
        PROMPT_CACHE: ("--cache-ram", "--cache-ram, by default"),
        ONE_PROMPT: ("--ctx-size", "--ctx-size"),
        CHECKPOINTS: ("--ctx-checkpoints", "--ctx-checkpoints"),
    }
    known = {name: [line.value for line in page.get(name, ()) if 0 < line.value < MAX_BYTES] for name in options}
    return tuple(
        HostCache(name=host_cache_set_by(option).name, flag=flag, limit_bytes=round(max(known[name])))
        for name, (option, flag) in options.items()
        if known[name]
    )


def model_meta(models: object) -> dict[str, Any]:
    """What /v1/models says of the first model; empty where there is none."""
    entries = models.get("data") if isinstance(models, dict) else None
    first = entries[0] if isinstance(entries, list) and entries else None
    meta = first.get("meta") if isinstance(first, dict) else None
    return meta if isinstance(meta, dict) else {}


def weights_bytes(models: object) -> int | None:
    """The size of the model's weights."""
    size = model_meta(models).get("size")
    return size if type(size) is int and 0 < size < MAX_BYTES else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def parse_engines(page: Page) -> EngineReading:
    """The server as one engine; `None` with a gap if neither its slots nor its metrics are reported."""
    names = (
        TOKENS,
        OUTPUT,
        PROCESSING,
        RUNNING,
        DEFERRED,
        SLEEPING,
        CELLS,
        *(name for all_ in COUNTERS.values() for name in all_),
    )
    if (crowd := crowded(page, names)) is not None:
        return None, (crowd,)
    gaps: list[Gap] = []
    figures = Figures(page, "0", gaps)
    busy = {line.labels.get("id"): line.value > 0 for line in page.get(PROCESSING, ())}
    running = sum(busy.values()) if busy else figures.count((RUNNING,))
    deferred = figures.count((DEFERRED,))
    asleep = figures.value((SLEEPING,))
    if running is None and asleep:
        running = deferred = 0
    if running is None:
        return None, (Gap(SOURCE, "absent", BOTH_OFF),)
    if deferred is None and busy and not all(busy.values()):
        deferred = 0  # a request waits only while every slot is taken
    return (
        Engine(
            engine="0",
            kv_usage_ratio=_usage(page, busy, running, figures),
            requests_running=running,
            requests_waiting=deferred,
            running_output_tokens=_outputs(page, busy),
            asleep=None if asleep is None else asleep > 0,
            **figures.counts(COUNTERS),
        ),
    ), tuple(gaps)


def _outputs(page: Page, busy: Mapping[str | None, bool]) -> int | None:
    """Output tokens of the slots that process a request; `None` where one of them does not report them."""
    outputs = _by_slot(page, OUTPUT)
    wanted = [number for number, processes in busy.items() if processes]
    total = sum(outputs[number] for number in wanted) if outputs.keys() >= {*wanted} and wanted else None
    return total if total is None or total <= MAX_COUNT else None


def _by_slot(page: Page, name: str) -> dict[str | None, int]:
    """A whole number of each slot; a slot whose value is not possible has none."""
    return {line.labels.get("id"): round(line.value) for line in page.get(name, ()) if 0 <= line.value <= MAX_COUNT}


def _usage(page: Page, busy: Mapping[str | None, bool], running: int, figures: Figures) -> float | None:
    """Share of the cells that slots in process hold."""
    cells = figures.count((CELLS,))
    held = _by_slot(page, TOKENS)
    if not cells or any(number not in held for number, processes in busy.items() if processes):
        return None
    if not busy:
        return None if running else 0.0
    used = sum(held[number] for number, processes in busy.items() if processes)
    # A slot counts the tokens of its next batch before cells are found for them: 5,596 in a pool of 4,096 (b11549).
    return min(used / cells, 1.0)


def parse_pools(
    page: Page,
    version: str | None,  # noqa: ARG001 - no version reports it
    commands: Sequence[str] = (),
) -> tuple[tuple[KvPool, ...], tuple[Gap, ...]]:
    """The pool of cells, as far as the command line or a lone slot shows it."""
    options = parse_options(commands)
    cells = _cells(page, options)
    if isinstance(cells, str):
        return (), (Gap(SOURCE, "absent", cells),)
    gaps: list[Gap] = []
    figures = Figures(page, "0", gaps)
    slots, context = figures.count((SLOTS,)), _slot_context(page)
    size = next((line.value for line in page.get(BYTES, ())), 0.0)
    kinds = set() if options is None else {options.type_k, options.type_v}
    try:
        pool = KvPool(
            engine="0",
            block_tokens=1,
            total_blocks=cells.total,
            usable_blocks=cells.usable,
            usage_blocks=cells.usable,
            capacity_tokens=cells.usable,
            max_concurrency=cells.usable / context if context else None,
            max_requests=slots,
            pool_bytes=round(size) if 0 < size < MAX_BYTES else None,
            bytes_computed=bool(size) or None,
            mixed=any(line.value for line in page.get(MIXED, ())) or None,
            cache_dtype="/".join(sorted(kinds)) or None,
            prefix_caching=True,
        )
    except ValueError as error:
        return (), (Gap(SOURCE, "failed", f"the KV pool cannot be used: {error}; check --ctx-size"),)
    if pool.pool_bytes is None:
        gaps.append(Gap(SOURCE, "absent", NO_BYTES))
    return (pool,), tuple(gaps)


def _slot_context(page: Page) -> int | None:
    """The context of one slot, in tokens: /slots has it for each, /props once."""
    sizes = {*_by_slot(page, CONTEXT).values()}
    return sizes.pop() if len(sizes) == 1 else None


def _cells(page: Page, options: Options | None) -> Cells | str:
    figures = Figures(page, "0", [])
    slots, context = figures.count((SLOTS,)), _slot_context(page)
    if not slots and RUNNING in page:
        return "llama.cpp's metrics show neither slots nor cells; run `kvdiag serve` next to the server"
    if not slots or not context or context > MAX_COUNT // slots:
        return "the server does not report its slots; check GET /props of llama.cpp's server"
    return pool_cells(options, slots=slots, slot_tokens=context, trained_tokens=figures.count((TRAINED,)))
