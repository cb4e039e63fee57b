"""What llama.cpp prints of its memory while it loads a model, 2024 to b11549: text in, values out.

Pure. Only messages are matched, so that the prefix of time and level (since 2026) and the names of functions, which
changed with the versions, do not matter. A start has a context for each model. The served model is loaded first, a
draft model from another file after it; where a log shows no files, the context with the largest KV cache counts. Of a
model with sliding windows two caches are printed, the full one first: its cells are the capacity. Recurrent states
are a cache of their own, with a copy for each token that may be drafted. Of several starts in one file the last that
reports its memory counts.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvdiag.engines.llamacpp.listed_model import ListedModel
from kvdiag.engines.llamacpp.ollama_lines import OllamaLoad
from kvdiag.engines.printed_figures import last_start
from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.formatting import plural
from kvdiag.kv.calibration.engine_report import EngineReport, EngineSettings, PrintedSize, RankReport
from kvdiag.oom.message import ANSI

MAX_LINE_CHARACTERS = 4096
MAX_DEVICES = 256
MAX_CONTEXTS = 64

_MIB = 1 << 20
_SIZE = r"= {1,12}(\d{1,9}\.\d{1,4}) MiB"
_COUNT = r"(\d{1,12})"
# A device of another machine: RPC[192.0.2.1:50052], since 2025 RPC0[…].
_DEVICE = r"(?<![\w.:-])([\w.:-]{1,40}(?:\[[\w.:-]{1,80}\])?)"

_START = re.compile(r"\bbuild(?:_info)?: b?\d|msg=\"starting (?:runner|llama server)")
_NEW_CONTEXT = re.compile(r"llama_context: constructing|n_seq_max {1,40}=")
_NEXT_CONTEXT = re.compile(r"llama_context: (?:n_ctx|flash_attn) {1,40}=")
"""The first line of a context at -lv 4, or in an excerpt."""
_DECIMAL_COMMA = re.compile(r"(\d),(\d{1,4} MiB)")
"""As programs print that set their locale."""
_LOADED = re.compile(r"loaded meta data .{1,80} from (.{1,1024}?) \(version")
_UNIFIED = re.compile(r"llama_context: kv_unified {1,40}= (true|false)")
_BUILD = re.compile(r"\bbuild(?:_info)?: (b?\d[\w.-]{0,40}(?: \([0-9a-f]{5,40}\))?)")
_MODEL = re.compile(r"general\.name {1,40}str {1,20}= (.{1,200})")
_ARCHITECTURE = re.compile(r"general\.architecture {1,40}str {1,20}= ([\w-]{1,60})")
_WEIGHTS = re.compile(rf"load_tensors: {{1,20}}{_DEVICE} (?:model )?buffer size {_SIZE}")
_KV_BUFFER = re.compile(rf"{_DEVICE} (?:KV|RS) buffer size {_SIZE}")
_COMPUTE = re.compile(rf"{_DEVICE} compute buffer size {_SIZE}")
_OLD_KV = re.compile(rf"KV self size  {_SIZE}, K \((\w{{1,12}})\).{{1,40}}V \((\w{{1,12}})\)")
_KV = re.compile(
    rf"size {_SIZE} \( *{_COUNT} cells?, *{_COUNT} layers?(?:, *{_COUNT}(?:/ *{_COUNT})? seqs)?\)"
    r"(?:, {1,4}K \((\w{1,12})\): .{1,24}, {1,4}V \((\w{1,12})\): )?"
)
"""A report may leave the types out, or the requests."""
_STATES = re.compile(
    rf"size {_SIZE} \( *{_COUNT} cells?, *{_COUNT} layers(?:, *{_COUNT} seqs)?(?: {{1,4}}{_COUNT} rs_seq)?\)"
)
_OF_STATES = re.compile(r"recurrent: |, {1,4}R \(")
_OLD_CELLS = re.compile(rf"\bkv_size = {_COUNT}\b(?:.{{1,80}}\bn_layer = {_COUNT})?")
_WINDOW_CELLS = re.compile(rf"creating {{1,8}}SWA KV cache, size = {{1,8}}{_COUNT} cells")
_SETTINGS = tuple(
    (
        name,
        re.compile(
            rf"(?:llama_context\w{{0,8}}|llama_new_context_with_model|llama_init_from_model): {text} {{0,40}}= {_COUNT}"
        ),
    )
    for name, text in (
        *(("n_ctx", "n_ctx"), ("per_seq", "n_ctx_(?:seq|per_seq)"), ("ubatch", "n_ubatch")),
        ("seqs", "n_seq_max"),
    )
)
_SLOTS = re.compile(
    rf"initializing(?: slots)?, n_slots = {_COUNT}(?:, n_ctx_slot = {_COUNT}, kv_unified = '(true|false)')?"
)
_FAILED = re.compile(r"failed to allocate buffer for (?:kv|rs) cache|failed to allocate compute (?:pp |tg )?buffers")
_ASKED = re.compile(
    r"allocating (\d{1,9}\.\d{1,4}) MiB on device|failed to allocate \w{1,20} buffer of size (\d{1,18})"
)


@dataclass(frozen=True, slots=True)
class _Cache:
    """A cache as its summary prints it: cells of all streams, and its type; of states, the copies of each."""

    cells: int
    size: PrintedSize | None
    kind: str = ""
    seqs: int | None = None
    streams: int = 1
    layers: int = 0
    copies: int = 0


@dataclass(slots=True)
class _Context:
    """One context: its caches in the order printed, and the buffers by device."""

    settings: dict[str, int] = field(default_factory=dict)
    caches: list[_Cache] = field(default_factory=list)
    states: _Cache | None = None
    has_states: bool = False
    old_cells: int = 0
    old_layers: int = 0
    has_cells: bool = False
    window_cells: int = 0
    kv_sizes: dict[str, list[str]] = field(default_factory=dict)
    compute_sizes: dict[str, str] = field(default_factory=dict)
    failed: bool = False
    unified: bool | None = None

    @property
    def kv_mib(self) -> float:
        """Its caches on all devices."""
        buffers = sum(float(size) for sizes in self.kv_sizes.values() for size in sizes)
        return buffers or sum(cache.size.nominal_bytes for cache in self.caches if cache.size) / _MIB

    @property
    def seqs(self) -> int | None:
        """How many requests it serves at once."""
        caches = (*self.caches, *((self.states,) if self.states else ()))
        return self.settings.get("seqs") or next((cache.seqs for cache in caches if cache.seqs), None)


@dataclass(slots=True)
class _Start:
    build: str | None = None
    model: str | None = None
    architecture: str | None = None
    weights: dict[str, list[str]] = field(default_factory=dict)
    contexts: list[_Context] = field(default_factory=list)
    slots: tuple[str, str | None, str | None] | None = None
    file: str | None = None
    drafts: bool = False
    listed: ListedModel = field(default_factory=ListedModel)
    ollama: OllamaLoad = field(default_factory=OllamaLoad)

    @property
    def tells_memory(self) -> bool:
        """Whether this start has printed a figure of its memory."""
        return bool(
            self.weights or self.slots or any(one.kv_sizes or one.caches or one.states for one in self.contexts)
        ) or (self.ollama.report() is not None)


def failed_pool_bytes(text: str) -> int | None:
    """The bytes of the buffer that a start could not allocate for its KV cache; `None` without one."""
    failures = list(re.finditer(r"failed to allocate buffer for (?:kv|rs) cache", text))
    asked = list(_ASKED.finditer(text, 0, failures[-1].start())) if failures else []
    if not asked:
        return None
    mib, size = asked[-1].groups()
    return int(size) if mib is None else round(float(mib) * _MIB)


def parse_log(text: str) -> EngineReport:
    """What the last start in `text` says of its memory.

    Raises:
        KvdiagError: none of the lines that report it are there.
    """
    starts = [_Start()]
    for raw in re.split(r"[\r\n]+", text):
        line = raw[:MAX_LINE_CHARACTERS]
        if "\x1b" in line:
            line = ANSI.sub("", line)
        line = _DECIMAL_COMMA.sub(r"\1.\2", line)
        if _START.search(line) and starts[-1].tells_memory:
            starts.append(_Start())
        _take(starts[-1], line)
    start, notes = last_start(
        starts,
        "the log has none of llama.cpp's memory figures (model buffer size, KV buffer size): give the log from the "
        "server's start; builds since 2026 print them with -lv 4",
    )
    report = _report(start)
    return replace(report, notes=(*report.notes, *notes))


def parse_settings(lines: Iterable[str]) -> EngineSettings:
    """The settings that a log's lines show, also of a start that printed no memory; all `None` if not llama.cpp's."""
    try:
        return parse_log("\n".join(lines)).settings
    except KvdiagError:
        return EngineSettings()


def _take(start: _Start, line: str) -> None:
    for pattern, name in ((_BUILD, "build"), (_MODEL, "model"), (_ARCHITECTURE, "architecture")):
        # A drafter is loaded after the model.
        if getattr(start, name) is None and (found := pattern.search(line)) is not None:
            setattr(start, name, found[1].strip())
    if (found := _SLOTS.search(line)) is not None:
        start.slots = (found[1], found[2], found[3])
    if (found := _LOADED.search(line)) is not None:
        start.file = start.file or found[1]
        start.drafts = found[1] != start.file and any(one.kv_mib for one in start.contexts)
    if start.drafts:
        return
    start.listed.take(line)
    start.ollama.take(line)
    if (found := _WEIGHTS.search(line)) is not None:
        _add(start.weights, found[1], found[2])
    if _NEW_CONTEXT.search(line) and len(start.contexts) < MAX_CONTEXTS:
        newest = start.contexts[-1] if start.contexts else None
        if newest is None or newest.settings or newest.kv_sizes:
            start.contexts.append(_Context())
    elif start.contexts and start.contexts[-1].kv_mib and _NEXT_CONTEXT.search(line):
        start.contexts += [_Context()][: MAX_CONTEXTS - len(start.contexts)]
    _take_context(start, line)


def _take_context(start: _Start, line: str) -> None:
    settings = {name: int(found[1]) for name, pattern in _SETTINGS if (found := pattern.search(line)) is not None}
    buffer, compute, cache, old, states, cells, windows = (
        one.search(line) for one in (_KV_BUFFER, _COMPUTE, _KV, _OLD_KV, _STATES, _OLD_CELLS, _WINDOW_CELLS)
    )
    cache, states = (None, states) if _OF_STATES.search(line) else (cache, None)
    if not start.contexts:
        if not (settings or buffer or compute or cache or old or states or cells or windows):
            return
        start.contexts.append(_Context())
    context = start.contexts[-1]
    context.settings |= settings
    if (unified := _UNIFIED.search(line)) is not None:
        context.unified = unified[1] == "true"
    context.failed = context.failed or _FAILED.search(line) is not None
    if buffer is not None:
        _add(context.kv_sizes, buffer[1], buffer[2])
        context.has_states = context.has_states or " RS buffer" in buffer[0]
        context.has_cells = context.has_cells or " KV buffer" in buffer[0]
    if compute is not None and len(context.compute_sizes) < MAX_DEVICES:
        # Printed again where the graph is reserved again, for another batch: the last is what is used.
        context.compute_sizes[compute[1]] = compute[2]
    if cache is not None:
        size, each, layers, seqs, streams, kind_k, kind_v = cache.groups()
        parts = int(streams or 1)
        if int(layers):
            kind = _kind(kind_k, kind_v)
            context.caches.append(
                _Cache(int(each) * parts, _size(size), kind, int(seqs or 0), streams=parts, layers=int(layers))
            )
    elif old is not None:
        context.caches.append(_Cache(0, _size(old[1]), _kind(old[2], old[3])))
    elif states is not None:
        size, each, _, seqs, copies = states.groups()
        context.states = _Cache(int(each), _size(size), seqs=int(seqs or each), copies=int(copies or 0))
        context.has_states = True
    if cells is not None:
        context.old_cells, context.old_layers = int(cells[1]), int(cells[2] or 0)
    if windows is not None:
        context.window_cells = int(windows[1])


def _add(sizes: dict[str, list[str]], device: str, size: str) -> None:
    if device in sizes or len(sizes) < MAX_DEVICES:
        sizes.setdefault(device, []).append(size)


def _kind(kind_k: str | None, kind_v: str | None) -> str:
    """The type of a cache; empty where the log leaves it out."""
    if kind_k is None or kind_v is None:
        return ""
    return kind_k if kind_k == kind_v else f"{kind_k}/{kind_v}"


def _report(start: _Start) -> EngineReport:
    context = max(start.contexts, key=lambda one: one.kv_mib, default=_Context())
    if not context.kv_mib and not start.slots and (own := start.ollama.report()) is not None:
        return replace(own, model_settings=start.listed.settings)
    slots, slot_context, unified = start.slots or (None, None, None)
    longest = int(slot_context) if slot_context else context.settings.get("per_seq") or context.settings.get("n_ctx")
    cells = (context.caches[0].cells if context.caches else 0) or context.old_cells
    longest = longest or (cells // context.caches[0].streams if context.caches else None)
    tokens = cells or context.settings.get("n_ctx")
    if not context.caches and context.kv_sizes == {} and unified == "true":
        tokens = longest
    elif not context.caches and slots and slot_context and unified == "false":
        tokens = int(slots) * int(slot_context)
    notes = []
    if context.failed:
        notes.append("a buffer could not be allocated: this start failed")
    if slots:
        shared = {"true": " that share one pool", "false": " with a pool each"}.get(unified or "", "")
        notes.append(f"{plural(int(slots), 'slot')}{shared}")
    if len(context.caches) > 1:
        notes.append(f"{len(context.caches)} caches: the first one's cells are the capacity")
    return EngineReport(
        settings=EngineSettings(
            version=start.build,
            model=start.model,
            architecture=start.architecture,
            kv_dtype=(context.caches[0].kind or None) if context.caches else None,
            max_model_len_tokens=longest or None,
            max_num_batched_tokens=context.settings.get("ubatch") or None,
            block_size_tokens=1,
            state_dtype="float32" if context.has_states else None,
            slots=context.seqs or (int(slots) if slots else None),
            shares_pool=_shares_cells(context, unified),
            speculative_tokens=(context.states.copies if context.states else 0) or None,
            window_tokens=context.window_cells or None,
        ),
        cache_layers=_cache_layers(context),
        model_settings=start.listed.settings,
        ranks=_ranks(start, context),
        num_blocks=tokens or None,
        tokens=tokens or None,
        concurrency=tokens / longest if tokens and longest else None,
        concurrency_context_tokens=longest or None,
        notes=tuple(notes),
    )


def _shares_cells(context: _Context, unified: str | None) -> bool | None:
    """Whether the slots share one pool: as before July 2025, when a line of a cache had no streams."""
    if context.caches:
        return context.caches[0].streams == 1
    return context.unified if unified is None else unified == "true"


def _cache_layers(context: _Context) -> tuple[int, ...] | None:
    """The layers of each cache of cells, where the log shows them; `()` where it shows states alone."""
    layers = tuple(cache.layers for cache in context.caches if cache.layers)
    if not layers and context.old_layers:
        return (context.old_layers,)
    return layers or (() if context.has_states and not context.has_cells else None)


def _ranks(start: _Start, context: _Context) -> tuple[RankReport, ...]:
    """A report for each device that holds anything; layers' caches lie where the layers are."""
    devices = dict.fromkeys(_device(name) for name in (*start.weights, *context.kv_sizes, *context.compute_sizes))
    whole = _sum(cache.size for cache in (*context.caches, context.states) if cache is not None and cache.size)
    buffers = _size(*(size for sizes in context.kv_sizes.values() for size in sizes))
    # A pass that measures what fits prints the sizes of caches with empty buffers.
    cut = whole is not None and (buffers is None or buffers.high_bytes < whole.low_bytes)
    together = (RankReport(name="all devices", pool=whole),) if cut else ()
    return together + tuple(
        RankReport(
            name=device,
            weights=_size(
                *(size for name, sizes in start.weights.items() if _device(name) == device for size in sizes)
            ),
            pool=None
            if cut
            else _size(
                *(size for name, sizes in context.kv_sizes.items() if _device(name) == device for size in sizes)
            ),
            activation=_size(*(size for name, size in context.compute_sizes.items() if _device(name) == device)),
        )
        for device in devices
    )


def _device(buffer: str) -> str:
    """The device of a buffer's name: CPU_Mapped and CUDA_Host are the host's."""
    return "CPU" if buffer.startswith("CPU") or buffer.endswith("_Host") else buffer.removesuffix("_Split")


def _sum(sizes: Iterable[PrintedSize]) -> PrintedSize | None:
    sizes = list(sizes)
    if not sizes:
        return None
    try:
        return PrintedSize(
            nominal_bytes=sum(size.nominal_bytes for size in sizes), slack_bytes=sum(size.slack_bytes for size in sizes)
        )
    except KvModelError:
        return None


def _size(*printed: str) -> PrintedSize | None:
    if not printed:
        return None
    slack = sum(0.5 * 10 ** -len(size.partition(".")[2]) for size in printed)
    try:
        return PrintedSize(nominal_bytes=round(sum(map(float, printed)) * _MIB), slack_bytes=round(slack * _MIB))
    except KvModelError:
        return None
