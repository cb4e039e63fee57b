"""Finds what a server was doing when it ran out of memory: from the functions in the traceback, the text around the
message, and the progress of the log. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Literal, get_args

from kvdiag.oom.message import MAX_MESSAGE_CHARACTERS, Kind

ServingPhase = Literal["prefill", "decode", "request", "sampler", "logprobs", "encoder", "kv_growth"]
"""`request`: serving, prefill or decode unknown. `kv_growth`: a cache that grows in torch."""

StartPhase = Literal["load", "profile", "kv_pool", "graph_capture", "warmup", "startup", "wake"]
Phase = Literal[StartPhase, ServingPhase]
SERVING: frozenset[Phase] = frozenset(get_args(ServingPhase))
IN_WORDS: dict[Phase, str] = {
    "load": "while loading the weights",
    "profile": "during the profile run, before the KV pool exists",
    "kv_pool": "while allocating the KV pool",
    "graph_capture": "while capturing CUDA graphs",
    "warmup": "during the warm-up at start",
    "startup": "at start",
    "wake": "while waking from sleep",
    "prefill": "during a prefill",
    "decode": "during a decode step",
    "request": "while serving requests",
    "sampler": "in the sampler",
    "logprobs": "while computing log-probabilities",
    "encoder": "in the image or audio encoder",
    "kv_growth": "while the KV cache grew",
}

TRACEBACK_CHARACTERS = 40_000
NEAR_CHARACTERS = 400
_TRACEBACK = "Traceback (most recent call last)"

_FUNCTIONS: dict[Phase, list[str]] = json.loads(resources.files("kvdiag.oom").joinpath("functions.json").read_bytes())
"""Functions of the engines by what they do. Outer frames stand before inner ones: a capture and a profile run go
through the same model code as a request.
"""

_FRAMES = tuple((phase, re.compile(rf"\b(?:{'|'.join(names)})\b")) for phase, names in _FUNCTIONS.items())

_NEARBY: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ("load", re.compile(r"Failed to load model")),
    ("graph_capture", re.compile(r"Capture cuda graph failed|Capturing CUDA graphs?|while capturing")),
    ("warmup", re.compile(r"warming up (?:sampler|pooler)")),
    ("profile", re.compile(r"during (?:the )?(?:profile run|memory profiling)")),
)
"""Wordings next to the message itself."""

_PROGRESS: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ("startup", re.compile(r"vLLM API server version|non-default args: |Initializing an? (?:V[01] )?LLM engine")),
    ("load", re.compile(r"Starting to load model|Loading (?:safetensors|pt) checkpoint|Load weight begin")),
    ("profile", re.compile(r"(?:Loading model weights|Model loading) took|Load weight end")),
    ("kv_pool", re.compile(r"Available KV cache memory|Memory profiling (?:takes|results)|KV Cache is allocated")),
    ("warmup", re.compile(r"KV cache size: |# \w{1,12} blocks: |Graph capturing finished|Capture cuda graph end")),
    ("graph_capture", re.compile(r"Capturing (?:CUDA graph|cudagraphs|the model for CUDA)|Capture cuda graph begin")),
    (
        "request",
        re.compile(
            r"Application startup complete|Uvicorn running|Started server process|throughput: \d|\"POST /"
            r"|The server is fired up|init engine \(profile"
        ),
    ),
)
"""Printed by engines while they start; the last one before the message gives the progress."""

_OF_REFUSALS: dict[Kind, Phase] = {
    "warmup": "warmup",
    "profiling": "profile",
    "blocks": "kv_pool",
    "context": "kv_pool",
    "budget": "startup",
}


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
    progress = _progress(lines_before)
    if framed == "startup" and progress not in {None, "request"}:
        return progress, "progress"
    if framed is not None:
        return framed, "traceback"
    return progress, None if progress is None else "progress"


def _framed(text: str, position: int) -> Phase | None:
    """By the functions of the traceback that ends in the message, or that is printed after it."""
    before = text[max(0, position - TRACEBACK_CHARACTERS) : position]
    after = text[position : position + TRACEBACK_CHARACTERS]
    tail = before[-TRACEBACK_CHARACTERS // 4 :]
    if (begin := before.rfind(_TRACEBACK)) >= 0:
        stack = before[begin:]
    elif (begin := after.find(_TRACEBACK, 0, MAX_MESSAGE_CHARACTERS)) >= 0:
        stack = after[begin:]
    else:
        stack = tail if 'File "' in tail else ""
    return next((phase for phase, pattern in _FRAMES if stack and pattern.search(stack)), None)


def _progress(lines: Sequence[str]) -> Phase | None:
    return next((phase for text in reversed(lines) for phase, pattern in _PROGRESS if pattern.search(text)), None)
