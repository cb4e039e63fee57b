"""Latency of one repeated request, alternating between a disturbed and an undisturbed server.

Both kinds alternate in one run, so that other load on the machine affects both.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.fixtures.hostile import LONG_SECONDS
from tests.integration.vllm.engine import MODEL_NAME, Engine

REQUESTS = 6
TURNS = (False, True, True, False)
"""With and without: what drifts counts for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The answers' texts, and how long each took."""

    texts: frozenset[str] = frozenset()
    seconds: tuple[float, ...] = ()

    def __add__(self, others: Answers) -> Answers:
        """These and others of the same kind."""
        return Answers(texts=self.texts | others.texts, seconds=self.seconds + others.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The same request with something done to the server and without."""

    undisturbed: Answers
    disturbed: Answers

    @property
    def ratio(self) -> float:
        """The median with it over that without."""
        return statistics.median(self.disturbed.seconds) / statistics.median(self.undisturbed.seconds)

    @property
    def noise_ratio(self) -> float:
        """The longest of those without over their median: what the machine does to a request by itself."""
        return max(self.undisturbed.seconds) / statistics.median(self.undisturbed.seconds)

    @property
    def slower(self) -> bool:
        """Whether half of the requests took longer with it than the longest one without.

        Of 24 and 24 that do not differ this happens by chance once in 25,000 times.
        """
        return self.ratio > self.noise_ratio


def completion(server: Engine) -> str:
    """What the server answers, greedily, to one prompt."""
    body = {"model": MODEL_NAME, "prompt": [500] * 100, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=LONG_SECONDS) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def asked(server: Engine, requests: int = REQUESTS) -> Answers:
    """So many answers, one after the other."""
    texts, seconds = [], []
    for _ in range(requests):
        began = time.perf_counter()
        texts.append(completion(server))
        seconds.append(time.perf_counter() - began)
    return Answers(texts=frozenset(texts), seconds=tuple(seconds))


def side_by_side(
    server: Engine,
    disturb: Callable[[], AbstractContextManager[None]],
    in_effect: Callable[[], None] = lambda: None,
    *,
    rounds: int = 2,
) -> SideBySide:
    """Alternate undisturbed and disturbed requests; `in_effect` is called at the end of each disturbance."""
    undisturbed = disturbed = Answers()
    for turn in TURNS * rounds:
        if turn:
            with disturb():
                disturbed += asked(server)
                in_effect()
        else:
            undisturbed += asked(server)
    return SideBySide(undisturbed=undisturbed, disturbed=disturbed)
