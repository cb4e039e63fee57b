"""What SGLang prints of its memory while it starts, 0.4 to 0.5.23: text in, values out. Nothing is ever evaluated.

Pure. Only messages are matched; the rank stands in front of them (`[2026-11-22 21:14:12 TP0] …`). "GB" is always 2**30.
Of several starts in one file the last that reports its memory counts. A rank prints a pool for each kind of layer: its
pool is their sum. Then come a drafter's weights and pool, which are not the model's: the pool has as many tokens as one
of the model's. The device's memory that `--mem-fraction-static` is a share of is what was free before the weights.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvdiag.engines.printed_figures import last_start
from kvdiag.engines.sglang.settings import ARGUMENT_LINE, WORDINGS, parse_settings
from kvdiag.errors import KvModelError
from kvdiag.kv.calibration.engine_report import GIB, EngineReport, PrintedSize, RankReport
from kvdiag.oom.message import ANSI

MAX_LINE_CHARACTERS = 64 * 2**10
"""The line of the arguments has 18,000 in 0.5.23; the rest of a line is ignored."""

MAX_RANKS = 4096
MAX_SETTING_LINES = 10_000
MAX_POOLS = 64

_PREFIX_CHARACTERS = 120
_NUMBER = r"(-?\d{1,9}(?:\.\d{1,9})?)"
# In reports, commas may divide the digits.
_WHOLE = r"(\d{1,3}(?:,\d{3}){1,4}(?!\d)|\d{1,15})"
_RANK = re.compile(
    r"\[(?:(?:\d{4}-\d{2}-\d{2} )?[\d:.,]{5,20} )?([A-Z_]{2,8}\d{1,4}(?: [A-Z_]{2,8}\d{1,4}){0,5})\]"
    r"|\[(gpu(?:_id)?=\d{1,4})\]"
)
# A line that was wrapped after a comma, as in a report.
_WRAPPED = re.compile(r",[ \t]{0,8}\r?\n[ \t]{0,80}(?=[A-Za-z])")
_INTERESTING = re.compile(r"GB|mem|tokens|server_args|sglang|dtype|--[a-z]")
# Weights are printed by how much free memory fell: libraries that load meanwhile are in it, 0.05 to 0.2 GiB in public
# logs.
_LIBRARIES_BYTES = GIB // 4
# models/llama_eagle3.py, deepseek_nextn.py, qwen3_next_mtp.py …: a drafter's weights are printed as the model's are.
_DRAFTER = re.compile(r"\btype=\w{0,60}?(?:Eagle|NextN|MTP)")
_DATA_RANK, _STAGE, _TENSOR_RANK = (re.compile(rf"\b{name}(\d{{1,4}})\b") for name in ("DP", "PP", "TP"))


def _pattern(wording: str) -> re.Pattern[str]:
    return re.compile(wording.replace("{number}", _NUMBER).replace("{whole}", _WHOLE))


_WEIGHTS, _TOTAL, _GRAPHS = (_pattern(WORDINGS[name]) for name in ("weights", "total", "graphs"))
_POOLS = tuple(map(_pattern, WORDINGS["pools"]))
_BACKED_POOL, _NO_POOL, _TOKENS = (_pattern(WORDINGS[name]) for name in ("backed_pool", "no_pool", "tokens"))
_POOL_TOKENS = tuple(map(_pattern, WORDINGS["pool_tokens"]))
_STATES = _pattern(WORDINGS["states"])
_WINDOWS, _BOTH_POOLS = _pattern(WORDINGS["windows"]), _pattern(WORDINGS["both_pools"])


@dataclass(slots=True)
class _Rank:
    """One scheduler's figures, in the order printed."""

    weights: list[PrintedSize] = field(default_factory=list)
    has_drafter: bool = False
    pools: list[tuple[int | None, PrintedSize]] = field(default_factory=list)
    """Tokens of each, where its line has them."""
    window_tokens: int | None = None
    states: PrintedSize | None = None
    state_slots: int | None = None
    graphs: list[PrintedSize] = field(default_factory=list)
    total: PrintedSize | None = None
    tokens: int | None = None
    pool_tokens: int | None = None


@dataclass(slots=True)
class _Start:
    lines: list[str] = field(default_factory=list)
    ranks: dict[str, _Rank] = field(default_factory=lambda: defaultdict(_Rank))

    @property
    def tells_memory(self) -> bool:
        """Whether this start has printed any figure."""
        return any(rank.weights or rank.pools or rank.tokens for rank in self.ranks.values())


def failed_pool_bytes(text: str) -> int | None:
    """The memory missing for a pool of no tokens, as the refusal of a start gives it; `None` without one."""
    refusal, before = _last(_NO_POOL, text), _last(_TOTAL, text)
    if refusal is None or before is None:
        return None
    missing = (float(refusal[2]) - float(refusal[1])) * float(before[1])
    return round(missing * GIB) if missing > 0 else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def parse_log(text: str) -> EngineReport:
    """What the last start in `text` says of its memory.

    Raises:
        KvdiagError: none of the lines that report it are there.
    """
    starts = [_Start()]
    for raw in re.split(r"[\r\n]+", _WRAPPED.sub(", ", text)):
        line = raw[:MAX_LINE_CHARACTERS]
        if _INTERESTING.search(line) is None:
            continue
        line = ANSI.sub("", line) if "\x1b" in line else line
        if ARGUMENT_LINE.search(line) and starts[-1].tells_memory:
            starts.append(_Start())
        _take(starts[-1], line)
    start, notes = last_start(
        starts,
        "the log has none of SGLang's memory figures (Load weight end, KV Cache is allocated, "
        "max_total_num_tokens): give the log from the server's start, at level INFO",
    )
    report = _report(start)
    return replace(report, notes=(*report.notes, *notes))


def _take(start: _Start, line: str) -> None:
    """Add to a start what a line prints."""
    if len(start.lines) < MAX_SETTING_LINES:
        start.lines.append(line)
    prefix = _RANK.search(line[:_PREFIX_CHARACTERS])
    name = (prefix[1] or prefix[2]).strip() if prefix else ""
    if name not in start.ranks and len(start.ranks) >= MAX_RANKS:
        return
    rank = start.ranks[name]
    if found := _TOTAL.search(line):
        rank.total = rank.total or _size(found[1])
    if _DRAFTER.search(line):
        rank.has_drafter = True
    elif found := _WEIGHTS.search(line):
        rank.weights += [replace(size, excess_bytes=_LIBRARIES_BYTES) for size in _sizes(*found.groups())]
    if found := _GRAPHS.search(line):
        rank.graphs += _sizes(*found.groups())
    if found := _STATES.search(line):
        rank.state_slots = _count(found[1]) if found[1] else None
        rank.states = _sum(_sizes(found[2], found[3]))
    if found := _WINDOWS.search(line):
        rank.window_tokens = _count(found[1])
    held = next(filter(None, (pattern.search(line) for pattern in _POOL_TOKENS)), None)
    if (found := _BACKED_POOL.search(line)) and (size := _sum(_sizes(*found.groups()))) is not None:
        # What was allocated before is a virtual range of which this is backed by memory.
        rank.pools = [(None, size)]
    elif (
        (found := next(filter(None, (pattern.search(line) for pattern in _POOLS)), None))
        and (size := _sum(_sizes(*found.groups()))) is not None
        and len(rank.pools) < MAX_POOLS
    ):
        rank.pools.append((None if held is None else _count(held[1]), size))
    if (found := _BOTH_POOLS.search(line)) and not rank.pools and (size := _size(found[1])) is not None:
        # The lines of each are not in this log.
        rank.pools.append((_count(found[2]), size))
        rank.pool_tokens = max(rank.pool_tokens or 0, _count(found[2]))
    if found := _TOKENS.search(line):
        rank.tokens = _count(found[1])
    elif held is not None:
        rank.pool_tokens = max(rank.pool_tokens or 0, _count(held[1]))


def _count(printed: str) -> int:
    return int(printed.replace(",", ""))


def _sizes(*printed: str) -> list[PrintedSize]:
    return [size for one in printed if (size := _size(one)) is not None]


def _size(printed: str) -> PrintedSize | None:
    """A printed GiB figure. A negative one, of weights of a few MiB, is as good as 0."""
    decimals = len(printed.partition(".")[2])
    try:
        return PrintedSize(
            nominal_bytes=max(round(float(printed) * GIB), 0), slack_bytes=round(0.5 * 10**-decimals * GIB)
        )
    except KvModelError:
        return None


def _sum(sizes: Iterable[PrintedSize]) -> PrintedSize | None:
    """Several sizes together, each as exact as it was printed; `None` without any."""
    sizes = list(sizes)
    try:
        return (
            PrintedSize(
                nominal_bytes=sum(size.nominal_bytes for size in sizes),
                slack_bytes=sum(size.slack_bytes for size in sizes),
                excess_bytes=sum(size.excess_bytes for size in sizes),
            )
            if sizes
            else None
        )
    except KvModelError:
        return None


def _report(start: _Start) -> EngineReport:
    settings = parse_settings(start.lines)
    named = {name: rank for name, rank in start.ranks.items() if rank.weights or rank.pools or rank.tokens}
    engines: dict[str, list[str]] = defaultdict(list)
    for name in named:
        found = _DATA_RANK.search(name)
        engines[found[1] if found else "0"].append(name)
    tokens = {engine: _tokens([named[name] for name in names]) for engine, names in engines.items()}
    engine = min(engines, key=lambda one: (tokens[one] is None, tokens[one] or 0, one))
    notes = []
    if len(engines) > 1:
        notes.append(f"{len(engines)} data-parallel engines; DP{engine}, which has the smallest pool, is compared")
    compared = [named[name] for name in engines[engine]]
    if any(rank.has_drafter or len(rank.weights) > 1 or _drafters(rank) for rank in compared):
        notes.append("the log has a drafter's weights and pool, too: they are not compared")
    if settings.tensor_parallel is None and (parts := _tensor_parallel(named)) > 1:
        settings = replace(settings, tensor_parallel=parts)
        notes.append(f"{parts} tensor-parallel ranks by the prefixes of the log's lines; pass --tp if there are more")
    page, held = settings.block_size_tokens, tokens[engine]
    return EngineReport(
        settings=replace(
            settings, window_tokens=next(filter(None, (_window(named[name]) for name in engines[engine])), None)
        ),
        ranks=tuple(_rank(name, named[name]) for name in engines[engine]),
        num_blocks=None if held is None or page is None else held // page,
        tokens=held,
        state_slots=min((named[name].state_slots or 0 for name in engines[engine]), default=0) or None,
        notes=tuple(notes),
    )


def _tensor_parallel(names: Iterable[str]) -> int:
    """Ranks that share the model, by their names; 1 where data-parallel groups, which share it otherwise, have some."""
    names = list(names)
    if any(_DATA_RANK.search(name) for name in names):
        return 1
    return max((int(found[1]) + 1 for name in names if (found := _TENSOR_RANK.search(name))), default=1)


def _tokens(ranks: Iterable[_Rank]) -> int | None:
    """The pool of the rank that has the fewest; the tokens of a pool's line where the start ended before its last."""
    counts = [count for rank in ranks if (count := rank.tokens or rank.pool_tokens) is not None]
    return min(counts, default=None)


def _window(rank: _Rank) -> int | None:
    """Tokens of its pool for layers with sliding windows, where its log shows them: the smaller of two pools."""
    counts = {tokens for tokens, _ in rank.pools if tokens is not None}
    return rank.window_tokens or (min(counts) if len(counts) > 1 else None)


def _drafters(rank: _Rank) -> list[PrintedSize]:
    """Its pools for a drafter's layers. A model with sliding windows has two of its own, which may have as many
    tokens; before lines had tokens no model had two.
    """
    kinds = 1 if rank.window_tokens is None else 2
    own = {tokens for tokens, _ in rank.pools[:kinds]}
    return [size for tokens, size in rank.pools[kinds:] if tokens is None or tokens in own]


def _rank(name: str, rank: _Rank) -> RankReport:
    stage = _STAGE.search(name)
    drafters = _drafters(rank)
    return RankReport(
        name=name.replace(" ", "_") or "main process",
        stage=int(stage[1]) if stage else None,
        weights=_sum(rank.weights[:1]),
        states=rank.states,
        pool=_sum(size for _, size in rank.pools if not any(size is one for one in drafters)),
        graphs_actual=_sum(rank.graphs),
        total=rank.total,
    )
