"""Finds what a server was doing when it ran out of memory: from the functions in the traceback, the text around the
message, and the progress of the log. Pure.
"""

import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import get_args

from kvdiag.engine_data import engine_data
from kvdiag.oom.account import Phase, ServingPhase
from kvdiag.oom.message import MAX_MESSAGE_CHARACTERS, WORDINGS, Kind, wordings

SERVING: frozenset[Phase] = frozenset(get_args(ServingPhase))
IN_WORDS: dict[Phase, str] = WORDINGS["phases"]

TRACEBACK_CHARACTERS = 40_000
NEAR_CHARACTERS = 400
_TRACEBACK = "Traceback (most recent call last)"
RAISED_FROM = re.compile(r"direct cause of the following exception|During handling of the above exception")
_NATIVE_FRAME = re.compile(r"\n\d{1,3} {1,8}0x[0-9a-f]{6,16} ")
"""A frame of a C++ program's stack, printed after its message."""

_FUNCTIONS: dict[Phase, list[str]] = json.loads(resources.files("kvdiag.oom").joinpath("functions.json").read_bytes())
"""Functions of the engines by what they do. Outer frames stand before inner ones: a capture and a profile run go
through the same model code as a request.
"""

for _engine in engine_data("failures.json").values():
    for _phase, _names in _engine.get("functions", {}).items():
        _FUNCTIONS[_phase] += _names
_FRAMES = tuple((phase, re.compile(rf"\b(?:{'|'.join(names)})\b")) for phase, names in _FUNCTIONS.items())

_NEARBY, _PROGRESS = (
    tuple((phase, re.compile(pattern)) for phase, pattern in wordings(name)) for name in ("nearby", "progress")
)
"""Wordings next to the message itself, and what engines print while they start: the last one before the message gives
the progress.
"""

_OF_REFUSALS: dict[Kind, Phase] = WORDINGS["refusals"]


def phase_of(text: str, kind: Kind, position: int, lines_before: Sequence[str]) -> tuple[Phase | None, str | None]:
    """The phase of a message that begins at `position` of its process's `text`, and the source of that."""
    if kind in _OF_REFUSALS:
        return _OF_REFUSALS[kind], "message"
    near = text[max(0, position - NEAR_CHARACTERS) : position + NEAR_CHARACTERS]
    nearby = next((phase for phase, pattern in _NEARBY if pattern.search(near)), None)
    if kind == "capture" or nearby == "graph_capture":
        return "graph_capture", "message"
    framed = _framed(text, position)
    if framed not in {None, "request", "startup"}:
        return framed, "traceback"
    if nearby is not None:
        return nearby, "message"
    lines = reversed(lines_before)
    progress = next((phase for text in lines for phase, pattern in _PROGRESS if pattern.search(text)), None)
    if framed == "startup" and progress not in {None, "request"}:
        return progress, "progress"
    if framed is not None:
        return framed, "traceback"
    return progress, None if progress is None else "progress"


def _framed(text: str, position: int) -> Phase | None:
    """By the functions of the traceback that ends in the message, or that is printed after it; without a phase,
    by those of the exception that was raised from it.
    """
    before = text[max(0, position - TRACEBACK_CHARACTERS) : position]
    after = text[position : position + TRACEBACK_CHARACTERS]
    tail = before[-TRACEBACK_CHARACTERS // 4 :]
    if (begin := before.rfind(_TRACEBACK)) >= 0:
        stack = before[begin:]
    elif (begin := after.find(_TRACEBACK, 0, MAX_MESSAGE_CHARACTERS)) >= 0:
        stack = after[begin:]
    elif _NATIVE_FRAME.search(after, 0, MAX_MESSAGE_CHARACTERS):
        stack = after[:MAX_MESSAGE_CHARACTERS]
    else:
        stack = tail if 'File "' in tail else ""
    outer = after[chained.end() :] if (chained := RAISED_FROM.search(after, 0, MAX_MESSAGE_CHARACTERS)) else ""
    return next((phase for text in (stack, outer) for phase, pattern in _FRAMES if text and pattern.search(text)), None)
