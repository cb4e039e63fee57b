"""The isolation probe: two tenants ask the same, one request at a time, with salts and without. It judges nothing.

Each request has a span of its own, with a sample of the engines right before it and samples after it until they have
counted it, so that every prefix hit is known to be its own.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvdiag.diagnosis.rules.isolation_prefix_cache import ISOLATION
from kvdiag.feeds.active.load_generator import Prompt, Speed, within
from kvdiag.feeds.active.run_timeline import MarkedRun, engine_samples
from kvdiag.feeds.active.step_plan import shortened
from kvdiag.model import Facts, Outcome, Probe, ProbeKind, Sample, Workload

ROUNDS = 6
"""The least with which a rank-sum test of hits against misses can come to 1 in 900."""

SALTED_ROUNDS: tuple[tuple[ProbeKind, ...], ...] = (
    ("first", "same_salt", "other_salt"),
    ("first", "other_salt", "same_salt"),
)
"""By turns: what comes second may be faster or slower for that alone."""

UNSALTED: tuple[ProbeKind, ...] = ("first_unsalted", "other_unsalted")

PROMPT_TOKENS = 2048

MIN_BLOCKS = 4
"""Whole blocks that a prompt takes at least: prefix caches know whole blocks alone, hybrid models have large ones."""

POOL_SHARE = 4
"""A prompt takes one part of so many of the pool: three of one round are cached at once, and none is pushed out."""

NEW_PROMPTS_SECONDS = 60.0
"""Time for all prompts that have to be computed, by the measured speed: slower servers get shorter ones."""

REQUEST_SECONDS = 60.0

COUNTED_SECONDS = 2.0
"""Longest wait until the metrics count a request: they do so with its first token, some milliseconds late."""

UNCOUNTED_SECONDS = 0.1
"""The same once a request was not counted by then: the metrics are another server's, and waiting is futile."""

READING_PAUSE_SECONDS = 0.02

RECENT_SAMPLES = 8

FAILURES = 2
"""Failed requests in a row after which no more are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationPlan:
    """The requests in their order, and notes on what differs from their definition."""

    requests: tuple[Workload, ...]
    notes: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of everything, prompts and outputs."""
        return sum(one.prompt_tokens + one.max_tokens for one in self.requests)


def plan_isolation(facts: Facts, speed: Speed | None = None, *, other_key: bool = False) -> IsolationPlan:
    """The probe fitted to the server."""
    block = max((pool.block_tokens for pool in facts.pools), default=1)
    # The last token of a prompt is always computed, so that its block is never a hit.
    whole = Workload(requests=1, prompt_tokens=max(PROMPT_TOKENS, MIN_BLOCKS * block + 1), max_tokens=1)
    rooms = [
        (pool.usable_blocks // POOL_SHARE * pool.block_tokens, "the prompts of both tenants have to fit in the pool")
        for pool in facts.pools
    ]
    if speed is not None:
        new = ROUNDS * (len(SALTED_ROUNDS[0]) + len(UNSALTED))
        most = int(NEW_PROMPTS_SECONDS * speed.prompt_tokens_per_second / new)
        rooms.append((most, "the server cannot process more in a minute"))
    fitting, notes = shortened(whole, facts, rooms, least_tokens=1)
    kinds = [kind for number in range(ROUNDS) for kind in (*SALTED_ROUNDS[number % len(SALTED_ROUNDS)], *UNSALTED)]
    return IsolationPlan(
        requests=tuple(
            replace(fitting, probe=Probe(kind=kind, other_key=other_key and kind.startswith("other"))) for kind in kinds
        ),
        notes=notes,
    )


@dataclass(kw_only=True)
class IsolationFeed(MarkedRun):
    """Sends the probe's requests to one server while a sampler reads it.

    `other_headers` hold the other tenant's key; without them both tenants have one key.
    """

    other_headers: Mapping[str, str] | None = None
    _counted_seconds: float = field(default=COUNTED_SECONDS, init=False)

    async def run(self, speed: Speed | None, tell: Callable[[str], None]) -> None:
        """All requests, one after the other; fewer where they fail."""
        plan = plan_isolation(self.sampler.facts, speed, other_key=self.other_headers is not None)
        prompt, failed = self.requests.new_prompt(1), 0
        for cycle, workload in enumerate(plan.requests):
            tell(f"request {cycle + 1} of {len(plan.requests)}")
            probe = workload.probe or Probe(kind="first")
            if probe.kind.startswith("first"):
                prompt = self.requests.new_prompt(workload.prompt_tokens)
            self._mark(ISOLATION, cycle, "begin", workload=workload, notes=() if cycle else plan.notes)
            await self.sampler.read_engine()
            before = _prompts_counted(self._readings(0))
            self._mark(ISOLATION, cycle, "offer")
            asked = self.requests.ask(self._as_asked(prompt, probe), workload.max_tokens)
            outcome = await within(REQUEST_SECONDS, asked, 1)
            self._mark(ISOLATION, cycle, "release", outcome=outcome)
            await self._await_counted(before, outcome)
            self._mark(ISOLATION, cycle, "end")
            failed = failed + 1 if outcome.failed else 0
            if failed >= FAILURES:
                return

    def _as_asked(self, prompt: Prompt, probe: Probe) -> Prompt:
        other = probe.kind.startswith("other")
        salt = {"other_salt": secrets.token_hex(16)}.get(probe.kind, prompt.cache_salt)
        headers = dict(self.other_headers or {}) if probe.other_key else {}
        if len(self.sampler.facts.pools) > 1:
            # Each engine of a data-parallel server has a prefix cache of its own.
            headers |= self.requests.engine.first_engine_headers
        return replace(
            prompt,
            cache_salt=None if probe.kind.endswith("unsalted") else salt,
            user="kvdiag-b" if other else "kvdiag-a",
            headers=headers,
        )

    async def _await_counted(self, before: int | None, outcome: Outcome) -> None:
        """Read until the engines have counted the request and are idle; where they never do, that is to be judged."""
        first, until_seconds = self.recorder.count, self.sampler.clock.now_seconds() + self._counted_seconds
        while True:
            await self.sampler.read_engine()
            readings = self._readings(first)
            counted = _prompts_counted(readings)
            if before is None or counted is None or not outcome.completed:
                return
            if counted >= before + outcome.prompt_tokens and readings[-1].engines_idle is not False:
                return
            if self.sampler.clock.now_seconds() > until_seconds:
                self._counted_seconds = UNCOUNTED_SECONDS
                return
            await asyncio.sleep(READING_PAUSE_SECONDS)

    def _readings(self, first: int) -> list[Sample]:
        return engine_samples(self.recorder.since(first)[-RECENT_SAMPLES:])


def _prompts_counted(samples: list[Sample]) -> int | None:
    """Prompt tokens that the engines have counted; an earlier sample may arrive later."""
    counts = (sample.total("prompt_tokens_total") for sample in samples)
    return max((count for count in counts if count is not None), default=None)
