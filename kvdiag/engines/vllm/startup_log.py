"""What vLLM prints of its memory while it starts, 0.6 to 0.32: text in, values out. Nothing is ever evaluated.

Pure. The wordings are those of vllm/worker/worker.py (V0), v1/worker/gpu_worker.py, gpu_model_runner.py, cpu_worker.py,
v1/core/kv_cache_utils.py and the engines' first lines; only messages are matched, so that prefixes, colours and what a
container runtime puts in front do not matter. Of several starts in one file the last that reports its memory counts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kvdiag.engines.printed_figures import last_start
from kvdiag.engines.vllm.settings import WORDINGS, parse_settings
from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.engine_report import GIB, EngineReport, PrintedSize, RankReport
from kvdiag.oom.message import ANSI

MAX_LINE_CHARACTERS = 64 * 2**10
"""The longest line, the engine's config, has 3,400 in 0.32; the rest of a line is ignored."""

MAX_CONTINUATIONS = 6
"""Lines without a prefix of their own that are read together with the one they may be the wrapped rest of."""

MAX_RANKS = 4096
_PREFIX_CHARACTERS = 256

_PROCESS = re.compile(r"\((?P<name>[A-Za-z][\w-]{0,60})(?: rank=(?P<rank>\d{1,5}))? pid=(?P<pid>\d{1,10})[),]")
_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
_COUNT = r"(\d{1,3}(?:,\d{3}){1,5}|\d{1,15})"
_INTERESTING = re.compile(
    r"Gi?B|KV cache size|block|oncurrency|LLM engine|API server version|args|model len|max_num_|cheduling|rchit"
    r"|graph memory"
)
"""Found in every message that is matched below; most lines of a long log have none of it."""

_STARTS = re.compile(r"vLLM API server version|non-default args: |Initializing an? (?:V[01] )?LLM engine \(v")

# "GB" up to 0.8.3 is GiB as well: both divide by 2**30.
_RANK_SIZES = tuple((name, re.compile(wording.replace("{number}", _NUMBER))) for name, wording in WORDINGS["sizes"])
"""Field of `RankReport` to the wordings of it. Of one rank the last line counts, except for weights: the largest."""

_TOKENS = re.compile(rf"\b\w{{1,64}}(?: \+ host)? KV cache size: {_COUNT} tokens")
_CONCURRENCY = re.compile(rf"Maximum concurrency for {_COUNT} tokens per request: (\d{{1,12}}\.\d{{1,4}})x")
_BLOCKS = re.compile(rf"# \w{{1,12}} blocks: {_COUNT}(?:, # CPU blocks: \d{{1,15}})?")
_OVERRIDE = re.compile(rf"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override={_COUNT}")
_BELOW_ZERO = re.compile(r"KV [Cc]ache(?: memory)?(?: is|:) ?-(\d{1,7}(?:\.\d{1,6})?) ?GiB")
_V0 = re.compile(r"# \w{1,12} blocks: \d{1,15}, # CPU blocks: ")
_DATA_RANK = re.compile(r"(?:^|_)DP(\d{1,5})(?:_|$)")
_STAGE = re.compile(r"(?:^|_)PP(\d{1,5})(?:_|$)")


@dataclass(slots=True)
class _Process:
    name: str
    sizes: dict[str, PrintedSize] = field(default_factory=dict)
    failed_pool: str | None = None


@dataclass(slots=True)
class _Start:
    lines: list[str] = field(default_factory=list)
    processes: dict[str, _Process] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    concurrencies: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    """By engine: tokens of a request, how many fit, and half a unit of the last printed digit."""
    blocks: dict[int, int] = field(default_factory=dict)
    override: int | None = None
    is_v0: bool = False

    @property
    def tells_memory(self) -> bool:
        """Whether this start has printed any figure."""
        sized = any(process.sizes or process.failed_pool for process in self.processes.values())
        return bool(sized or self.tokens or self.concurrencies or self.blocks)


def failed_pool_bytes(text: str) -> int | None:
    """The size below zero of a KV pool for which a start had no memory, as a positive number; `None` without one."""
    found = _BELOW_ZERO.findall(text)
    return round(float(found[-1]) * GIB) if found else None


def parse_log(text: str) -> EngineReport:
    """What the last start in `text` says of its memory.

    Raises:
        KvdiagError: none of the lines that report it are there.
    """
    starts = [_Start()]
    for process, name, record in _records(text):
        current = starts[-1]
        if _STARTS.search(record) and current.tells_memory:
            current = _Start()
            starts.append(current)
        current.lines.append(record)
        _take(current, process, name, record)
    start, notes = last_start(
        starts,
        "the log has none of vLLM's memory figures (model weights, available KV cache, "
        "KV cache size): give the log from the server's start, at level INFO",
    )
    report = _report(start)
    return replace(report, notes=(*report.notes, *notes))


def _records(text: str) -> Iterator[tuple[str, str, str]]:
    """Process key, process name and message, one for each line that may matter, wrapped rest included."""
    key, name, joined = "", "", 0
    held: list[str] = []
    for raw in re.split(r"[\r\n]+", text):
        line = raw[:MAX_LINE_CHARACTERS]
        if "\x1b" in line:
            line = ANSI.sub("", line)
        front = line[:_PREFIX_CHARACTERS]
        found = _PROCESS.search(front) if " pid=" in front else None
        own = found is not None or _LEVEL.search(front) is not None
        if own or joined >= MAX_CONTINUATIONS:
            yield from _reported(key, name, held)
            held, joined = [], 0
        if own:
            # With a rank or a process id the same name is another process; without either it is the main one.
            key, name = (found["pid"], found["name"]) if found else ("", "")
            name += f" rank {found['rank']}" if found and found["rank"] else ""
        held.append(line)
        joined += 1
    yield from _reported(key, name, held)


def _reported(key: str, name: str, held: list[str]) -> Iterator[tuple[str, str, str]]:
    if held and any(_INTERESTING.search(line) for line in held):
        yield key, name, " ".join(line.strip() for line in held)


def _take(start: _Start, key: str, name: str, record: str) -> None:
    """Add to a start what a record prints: the last figure counts, of weights the largest (`_take_size`)."""
    data_rank = _data_rank(name)
    for figure, pattern in _RANK_SIZES:
        for found in pattern.finditer(record):
            _take_size(start, key, name, figure, found[1])
    for found in _TOKENS.finditer(record):
        start.tokens[data_rank] = _count(found[1])
    for found in _CONCURRENCY.finditer(record):
        digits = len(found[2].partition(".")[2])
        start.concurrencies[data_rank] = (_count(found[1]), float(found[2]), 0.5 * 10**-digits)
    for found in _BLOCKS.finditer(record):
        start.blocks[data_rank] = _count(found[1])
    start.is_v0 = start.is_v0 or _V0.search(record) is not None
    for found in _OVERRIDE.finditer(record):
        # Workers print the same with a handful of blocks while they estimate their graphs, before any pool size.
        if any("pool" in process.sizes for process in start.processes.values()):
            start.override = _count(found[1])


def _take_size(start: _Start, key: str, name: str, figure: str, printed: str) -> None:
    if key not in start.processes and len(start.processes) >= MAX_RANKS:
        return
    process = start.processes.setdefault(key, _Process(name))
    process.name = name or process.name
    if printed.startswith("-"):
        # A pool below zero is a start that failed; graphs below zero are a measurement that other processes disturbed.
        process.failed_pool = printed if figure == "pool" else process.failed_pool
        return
    size = _size(printed)
    known = process.sizes.get(figure)
    if size is None or (figure == "weights" and known is not None and known.nominal_bytes >= size.nominal_bytes):
        return
    process.sizes[figure] = size
    if figure == "pool":
        process.failed_pool = None


def _size(printed: str) -> PrintedSize | None:
    """A printed GiB figure; newer versions drop trailing zeros of two decimals (utils/mem_utils.py::format_gib)."""
    decimals = max(2, len(printed.partition(".")[2]))
    try:
        return PrintedSize(nominal_bytes=round(float(printed) * GIB), slack_bytes=round(0.5 * 10**-decimals * GIB))
    except KvModelError:
        return None


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _data_rank(name: str) -> int:
    found = _DATA_RANK.search(name)
    return int(found[1]) if found else 0


def _report(start: _Start) -> EngineReport:
    settings = parse_settings(start.lines)
    if start.override is not None:
        settings = replace(settings, blocks_override=start.override)
    notes: list[str] = []
    named = {_data_rank(process.name) for process in start.processes.values()}
    pools = start.tokens or start.blocks
    engine = min(pools, key=pools.__getitem__) if pools else min(named, default=0)
    engines = named | set(start.tokens)
    if len(engines) > 1:
        notes.append(f"{len(engines)} data-parallel engines; DP{engine}, which has the smallest pool, is compared")
    processes = [process for process in start.processes.values() if _data_rank(process.name) == engine]
    notes += [
        f"{process.name or 'the engine'} reports a KV pool of {process.failed_pool} GiB: this start failed"
        for process in processes
        if process.failed_pool
    ]
    context_tokens, concurrency, slack = start.concurrencies.get(engine, (None, None, 0.0))
    return EngineReport(
        settings=settings,
        ranks=_ranks(processes),
        num_blocks=start.blocks.get(engine),
        tokens=start.tokens.get(engine),
        concurrency=concurrency,
        concurrency_slack=slack,
        concurrency_context_tokens=context_tokens or None,
        is_v0=start.is_v0,
        notes=tuple(notes),
    )


def _ranks(processes: Iterable[_Process]) -> tuple[RankReport, ...]:
    """The processes that printed a size; those of the same name are numbered."""
    telling = [process for process in processes if process.sizes]
    names = Counter(process.name for process in telling)
    seen: Counter[str] = Counter()
    ranks = []
    for process in telling:
        label = process.name or "main process"
        seen[process.name] += 1
        if names[process.name] > 1:
            label += f" {seen[process.name]} of {names[process.name]}"
        found = _STAGE.search(process.name)
        ranks.append(RankReport(name=label, stage=int(found[1]) if found else None, **process.sizes))
    return tuple(ranks)
