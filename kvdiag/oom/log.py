"""Finds the first out-of-memory failure in an engine's log: the message, its process, and the work in progress.

In this order: the lines are sorted by process, so that ranks that print at once do not mix; every message in them is
found; the first one by line counts, since later ones, in other ranks and in the processes that wait for them, are its
consequences, and an engine's own word for a failure, raised from it, stands above the allocation; a failure from which
the engine recovers is none, and one after which it serves on counts only where nothing else failed. Then the phase and
the scheduled work come from what stands around it, and load and settings from what stands before. Lines that quote
users' requests are no evidence. Pure.
"""

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from kvdiag.engine_data import engine_data
from kvdiag.oom.account import Account, Work
from kvdiag.oom.last_requests import LastRequest, held_requests, last_requests
from kvdiag.oom.message import (
    ANCHORS,
    ANSI,
    CUT,
    MAX_MESSAGE_CHARACTERS,
    WARNINGS,
    Kind,
    Shortage,
    parse_shortage,
    wordings,
)
from kvdiag.oom.phase import NEAR_CHARACTERS, RAISED_FROM, phase_of

MAX_LINE_CHARACTERS = 16 * 2**10
MAX_LINES = 2_000_000
MAX_STREAMS = 4096
"""Processes that are distinguished."""

_REST = "\0"
"""Key of the lines of all further processes, kept apart from the main process's."""

MAX_FAILURES = 1000
MAX_WARNINGS = 16
"""Of each wording: a server under pressure prints thousands, and the first ones are enough."""

_DUMP_LINES = 3000

KILL_CHARACTERS = 2000
"""The kernel's lines about one kill, or what Kubernetes says of one container."""
HOST_CHARACTERS = 20_000
_BEFORE_A_KILL = (
    re.compile(r"memory: usage \d{1,15}kB, limit \d{1,15}kB"),
    re.compile(r"[\w.-]{1,100}:\s{1,20}Container ID:"),
)
"""The cgroup's figures stand before the kernel's list of tasks, a container's name above its state."""

_BEFORE: Mapping[str, tuple[re.Pattern[str], ...]] = {
    kind: (re.compile(pattern),)
    for engine in engine_data("failures.json").values()
    for kind, pattern in engine.get("before", {}).items()
}
"""What an engine prints before a failure of a kind and belongs to it."""

RECOVERY_CHARACTERS = 1000
_RECOVERED = tuple(re.compile(pattern) for pattern in wordings("recovered"))
"""How an engine says that it continues without an allocation that failed."""

HELD_CHARACTERS = 8_000
_HELD = tuple(
    (re.compile(held["capacity"]), re.compile(held["shared"]), re.compile(held["each"]))
    for engine in engine_data("failures.json").values()
    if (held := engine.get("held"))
)
"""The pool's size, whether requests share it, and what each of those that failed had of it."""

CAUSE_CHARACTERS = 20_000
_OWN_WORDS: frozenset[Kind] = frozenset({"prefill", "component", "blocks", "kv_full"})

_PROCESS = re.compile(
    r"\((?P<name>[A-Za-z][\w-]{0,60})(?: rank=(?P<rank>\d{1,5}))? pid=(?P<pid>\d{1,10})(?:, ?ip=[\w.:]{1,60})?\) ?"
    r"|\[rank(?P<only>\d{1,5})\]: ?|\b(?P<short>TP\d{1,4}|DP\d{1,4} TP\d{1,4})\] "
)
_PREFIX = re.compile(
    r"(?:.{0,120}?\b(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[ :]{1,3}"
    r"(?:\d{2,4}-\d{2}(?:-\d{2})? \d{2}:\d{2}:\d{2}(?:[.,]\d{1,6})? )?(?:\[?[\w./-]{1,80}\.py:\d{1,6}\]? ?)?)"
)
_WRAPPER = re.compile(
    r"""(?m)^\d{4}-\d\d-\d\dT[\d:.]{8,18}(?:Z|[+-]\d\d:\d\d) std(?:out|err) [FP] |^\{"log": ?\""""
    r"""|(?:\\r)?(?:\\n)?", ?"stream": ?"std(?:out|err)"[^\n]{0,200}\}\r?$"""
)
"""Around each line: the CRI's time and stream, Docker's json-file."""
REQUEST_LINE = re.compile(r"Received request |prompt: |Generated response |\"(?:prompt|messages)\": ?[\"\[]")
"""Lines that quote what users write, who may write anything."""

_LOAD = re.compile(
    r"Running: (\d{1,9}) reqs?, (?:Swapped: \d{1,9} reqs?, )?(?:Waiting|Pending): (\d{1,9}) reqs?"
    r"(?:[^\n]{0,200}?KV cache usage: (\d{1,3}(?:\.\d{1,4})?)%)?"
)
_LOADS = tuple(
    (name, re.compile(pattern))
    for engine in engine_data("failures.json").values()
    for name, pattern in engine.get("load", {}).items()
)
_GRAPHS = re.compile(r"Capturing (?:CUDA graph|cudagraph)[^\n]{0,160}?\b(\d{1,4})/(\d{1,4}) \[")
"""The progress bar of a capture."""
_MAX_REQUESTS = re.compile(r"(?<!\w)'?max_num_seqs'?(?:=|: )(\d{1,9})")
_DUMP = re.compile(r"Dumping scheduler output for model execution: ")
_TOTAL_SCHEDULED = re.compile(r"total_num_scheduled_tokens=(\d{1,12})")
_SCHEDULED = re.compile(r"num_scheduled_tokens=\{([^{}]{0,200000})\}")
_EACH_SCHEDULED = re.compile(r"['\"]?([\w.:-]{1,120})['\"]?: (\d{1,12})")
_NEW = re.compile(r"NewRequestData\(req_id=([^,()]{1,120}), ?prompt_token_ids_len=(\d{1,12})")
_MAX_DECODE_TOKENS = 16
"""Tokens of one request in one step up to which they are its next ones, drafts of them among it."""


@dataclass(slots=True)
class _Stream:
    """One process's lines as one text, and where in it each line of the log begins."""

    name: str
    rank: int | None
    parts: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    length: int = 0

    def add(self, number: int, text: str) -> None:
        self.starts.append(self.length)
        self.lines.append(number)
        self.parts.append(text)
        self.length += len(text) + 1

    def line_at(self, position: int) -> int:
        return self.lines[bisect_right(self.starts, position) - 1]


def read_failures(text: str, origin: str = "the log") -> Account | None:
    """The first out-of-memory failure in a log, with its line; `None` where there is none."""
    lines = _lines(text)
    streams = _streams(lines)
    wholes = [(stream, "\n".join(stream.parts)) for stream in streams.values()]
    found: list[tuple[int, Kind, int, _Stream, str, int]] = []
    for anchors in (ANCHORS, CUT):
        found = found or [
            (stream.line_at(position), kind, position, stream, whole, end)
            for stream, whole in wholes
            for kind, position, end in _messages(whole, anchors)
        ]
    if not found:
        return None
    found.sort(key=lambda one: (one[1] in WARNINGS, one[0]))
    line, kind, position, stream, whole, end = found[0]
    shortage = parse_shortage(kind, *_message(whole, kind, position, end))
    if own := next((one for one in found[1:] if one[3] is stream and _raised_from(whole, position, *one[1:3])), None):
        line, kind, position, stream, whole, end = own
        shortage = _filled(parse_shortage(kind, *_message(whole, kind, position, end)), shortage)
    if kind == "kv_full":
        shortage = _held(shortage, whole, position)
    connector: str | None = None
    named: tuple[LastRequest, ...] = ()
    if kind == "kv_lost":
        named = last_requests(_unquoted(text, line))
    elif kind == "kv_held":
        connector, named = held_requests(_unquoted(text, len(lines)))
    phase, phase_source = phase_of(whole, kind, position, lines[:line])
    work = _work(lines, line)
    if work is not None and phase == "request" and work.scheduled_tokens is not None:
        most = work.largest_tokens or work.scheduled_tokens
        phase = "prefill" if most > _MAX_DECODE_TOKENS else "decode"
    before = "\n".join(lines[max(0, line - 20_000) : line])
    figures = _load(before)
    graphs = _last(_GRAPHS, before)
    most_requests = _last(_MAX_REQUESTS, "\n".join(lines[:line]))
    return Account(
        origin=f"{origin}, line {line + 1}",
        shortage=shortage,
        line=line + 1,
        process=shortage.killed or stream.name,
        rank=stream.rank,
        phase=phase,
        phase_source=phase_source,
        work=work,
        running=int(figures["running"]) if "running" in figures else None,
        waiting=int(figures["waiting"]) if "waiting" in figures else None,
        kv_usage_ratio=min(figures["usage"], 1.0) if "usage" in figures else None,
        max_num_seqs=int(most_requests[1]) if most_requests else None,
        graphs_captured=(int(graphs[1]), int(graphs[2])) if graphs and phase == "graph_capture" else None,
        last_requests=named,
        connector=connector,
        later=len(found) - 1,
    )


def _held(shortage: Shortage, text: str, position: int) -> Shortage:
    """What the requests that failed together had of the pool, where the engine prints both: their sum where they share
    it, else the largest.
    """
    for capacity, shared, each in _HELD:
        held = [int(one[1]) for one in each.finditer(text, position, position + HELD_CHARACTERS)]
        sizes = _last(capacity, text[:position])
        if held and sizes is not None:
            together = shared.search(text, 0, position) is not None
            return replace(
                shortage,
                requests=len(held),
                held_tokens=sum(held) if together else max(held),
                fitting_tokens=int(sizes[1]),
            )
    return shortage


def _load(text: str) -> dict[str, float]:
    """Running and waiting requests, and the share of the pool in use, as last printed before the failure."""
    if load := _last(_LOAD, text):
        usage = {"usage": float(load[3]) / 100} if load[3] else {}
        return {"running": float(load[1]), "waiting": float(load[2]), **usage}
    return {name: float(last[1]) for name, pattern in _LOADS if (last := _last(pattern, text))}


def _raised_from(text: str, cause: int, kind: Kind, position: int) -> bool:
    """Whether a failure in the engine's own words was raised from the allocation that failed at `cause`."""
    near = kind in _OWN_WORDS and 0 < position - cause < CAUSE_CHARACTERS
    return near and RAISED_FROM.search(text, cause, position) is not None


def _filled(own: Shortage, cause: Shortage) -> Shortage:
    """The engine's own words with the figures of the allocation, where those are missing."""
    figures = ("device", "asked_bytes", "free_bytes", "total_bytes", "allocated_bytes", "unallocated_bytes")
    return replace(own, **{name: getattr(cause, name) for name in figures if getattr(own, name) is None})


def _lines(text: str) -> list[str]:
    """The lines without what a container's runtime puts around them, those that a JSON logger or a repr has put into
    one among them; users' own words left out.
    """
    text = _WRAPPER.sub("", text)
    if "\\n" in text:
        text = text.replace("\\r", "").replace("\\n", "\n")
    lines = []
    for raw in re.split(r"\r\n|\n|\r", text)[:MAX_LINES]:
        line = raw[:MAX_LINE_CHARACTERS]
        if "\x1b" in line:
            line = ANSI.sub("", line)
        lines.append("" if REQUEST_LINE.search(line) else line)
    return lines


def _unquoted(text: str, line: int) -> Iterator[str]:
    """The lines up to that one of `_lines`, without those that stand inside others, which users may have written."""
    number = 0
    for raw in re.split(r"\r\n|\n|\r", _WRAPPER.sub("", text)):
        if number > line:
            return
        yield raw
        number += 1 + raw.count("\\n")


def _streams(lines: list[str]) -> Mapping[str, _Stream]:
    streams: dict[str, _Stream] = {}
    current = ""
    for number, whole in enumerate(lines):
        line = whole
        found = _PROCESS.search(line[:200]) if ("pid=" in line or "[rank" in line or "] " in line) else None
        level = None if not line else _PREFIX.match(line[:300])
        if found is not None:
            name = (found["name"] or found["short"] or f"rank{found['only']}") + (
                f" rank={found['rank']}" if found["rank"] else ""
            )
            current = f"{name} {found['pid'] or ''}"
            line = line[found.end() :]
            level = _PREFIX.match(line[:300])
        elif level is not None:
            # A line with a level and no process is the main process's own; one with neither is a wrapped rest.
            name, current = "", ""
        else:
            name = streams[current].name if current in streams else ""
        if level is not None:
            line = line[level.end() :]
        if current not in streams and len(streams) >= MAX_STREAMS:
            name, current = "", _REST
        stream = streams.setdefault(current, _Stream(name=name, rank=_rank(name)))
        stream.add(number, line.rstrip())
    return streams


def _rank(name: str) -> int | None:
    found = re.search(r"rank=?(\d{1,5})|TP(\d{1,5})", name)
    return int(found[1] or found[2]) if found else None


def _messages(text: str, anchors: Sequence[tuple[Kind, re.Pattern[str]]]) -> Iterator[tuple[Kind, int, int]]:
    """Kind, beginning and end of each message, in order. Where two anchors name one message, the telling one counts."""
    begins = sorted(
        (found.start(), found.end(), kind)
        for kind, pattern in anchors
        for found in islice(pattern.finditer(text), MAX_WARNINGS if kind in WARNINGS else None)
    )[: 4 * MAX_FAILURES]
    kept: list[tuple[int, int, Kind]] = []
    for start, end, kind in begins:
        near = KILL_CHARACTERS if kept and kept[-1][2] == kind == "host" else NEAR_CHARACTERS // 2
        if kept and start - kept[-1][1] < near and _same(text[kept[-1][0] : start], kept[-1][2], kind):
            kept[-1] = (kept[-1][0], end, _more_telling(kept[-1][2], kind))
            continue
        kept.append((start, end, kind))
    for at, (start, stop, kind) in enumerate(kept[:MAX_FAILURES]):
        following = kept[at + 1][0] if at + 1 < len(kept) else len(text)
        if _recovers(text, stop, following):
            continue
        yield kind, start, min(following, start + MAX_MESSAGE_CHARACTERS)


_RANKED: tuple[Kind, ...] = (
    "absurd", "async", "limit", "torch", "masked", "library", "driver", "buffer", "capture", "host"
)  # fmt: skip
"""Kinds whose names may stand together in one message, the most telling one first."""


def _more_telling(first: Kind, second: Kind) -> Kind:
    return first if first == second else min(first, second, key=_RANKED.index)


def _same(between: str, first: Kind, second: Kind) -> bool:
    """Whether two anchors so near each other stand in one message: no figures of the first lie between them."""
    if "Traceback" in between or (first == second == "host"):
        return first == second == "host"
    has_size = "Tried to allocate" in " ".join(between.split())
    if first == second and first not in _RANKED:
        return True
    recovers = any(pattern.search(between) for pattern in _RECOVERED)
    return not has_size and not recovers and first in _RANKED and second in _RANKED


def _recovers(text: str, stop: int, following: int) -> bool:
    return any(one.search(text, stop, min(following, stop + RECOVERY_CHARACTERS)) for one in _RECOVERED)


def _message(text: str, kind: Kind, start: int, end: int) -> tuple[str, str]:
    """A message with what libraries say of the device and the size on its line, and the lines that led up to it."""
    if kind == "host":
        before = text[max(0, start - HOST_CHARACTERS) : start]
        lead = "\n".join(m[0] for p in _BEFORE_A_KILL if (m := _last(p, before)))
        return text[start : min(end, start + KILL_CHARACTERS)], lead
    begin = text.rfind("\n", 0, start) + 1 if kind in {"driver", "library", "buffer", "kv_lost"} else start
    lead = "\n".join(m[0] for pattern in _BEFORE.get(kind, ()) if (m := _last(pattern, text[:start])))
    return text[begin:end], lead


def _work(lines: list[str], line: int) -> Work | None:
    dump = next((text for text in lines[max(0, line - _DUMP_LINES) : line + _DUMP_LINES] if _DUMP.search(text)), None)
    if dump is None:
        return None
    total, each = _TOTAL_SCHEDULED.search(dump), _SCHEDULED.search(dump)
    scheduled = {name: int(tokens) for name, tokens in _EACH_SCHEDULED.findall(each[1])} if each else {}
    prompts = {name.strip("'\" "): int(tokens) for name, tokens in _NEW.findall(dump)}
    named = scheduled or prompts
    largest = max(named, key=named.__getitem__, default=None)
    return Work(
        scheduled_tokens=int(total[1]) if total else sum(scheduled.values()) or None,
        requests=len(scheduled) or None,
        largest_request=largest,
        largest_tokens=scheduled.get(largest or ""),
    )


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None
