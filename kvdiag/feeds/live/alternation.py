"""Notices that several servers answer at one address in turn, so that their figures are not taken for one server's.

A load balancer in front of two servers shows each of them at random. A counter of tokens then falls, and with a later
sample it is back at once, above its earlier value; or samples without this engine's metrics stand between samples with
them. A server that restarts begins at 0 and takes its time to get there: where it does not, as with one long prompt,
that counts as a change, too, and `MAX_CHANGES` of them are allowed in `WINDOW_SECONDS`. Beyond that every sample is
refused, until nothing has changed for that long. A single look is too short for this: `answer_in_turn` reads at once.

Equal servers show nothing of this, nor does one that is read over a connection that stays with it. A run has requests
of its own under way: while they generate tokens, a server that runs fewer is not the one that they were sent to
(`UncountedLoads`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from kvdiag.engines.engine import SOURCE, EngineAdapter, EngineClient, EngineReading
from kvdiag.formatting import format_duration
from kvdiag.model import Capabilities, Engine, Gap, Load, Sample
from kvdiag.sources.http import Unreadable
from kvdiag.sources.prometheus_text import Page

WINDOW_SECONDS = 60.0
"""An engine loads its model for seconds to minutes; a small model of llama.cpp's is served again within a second."""

MAX_CHANGES = 2
"""In `WINDOW_SECONDS`: a server that restarts twice at once is one server."""

MAX_ENGINES = 1024

REASON = (
    f"several servers answer at this address in turn: their metrics changed more than {MAX_CHANGES} times within "
    f"{format_duration(WINDOW_SECONDS)}; give the address of one of them"
)

IN_TURN = "several servers answer at this address in turn, or the server restarted; give the address of one of them"

UNCOUNTED = (
    "requests to this address do not show in the metrics that are read: several servers answer in turn, or "
    "--metrics-url is another server's; give the address of one server"
)

SEVERAL_SERVERS = (REASON, UNCOUNTED)
"""Reasons for which no sample at an address can be taken for one server's."""

MAX_UNCOUNTED = 1
"""Loads of a run that its server may not count: on a busy machine the end of a stream is read late."""

MIN_MISSING = 5
"""Samples of a load whose requests a server does not run, of which tokens arrive all the same. A fast server has ended
a request while its tokens are still read here, which takes a busy machine some tenths of a second."""

MIN_RETURNS, RETURNED_SHARE = 3, 0.1
"""How often loads are not counted and then counted, also as a ratio to their samples: where streams end late on a busy
machine it is once in many samples, and with two servers at random once in four."""

DELAY_SECONDS = 1.0
"""Beyond what an engine's gauges lag behind."""

READS = 4
"""One after another: of two servers at random, seven times in eight not all are of the same one."""


async def answer_in_turn(engine: EngineClient) -> bool:
    """Whether a counter fell, or the pool changed, from one read of the server to the next."""
    try:
        pages = [await engine.page() for _ in range(READS)]
    except Unreadable:
        return False  # the sampler reports why
    return contradict(engine.engine, pages)


def contradict(adapter: EngineAdapter, pages: Sequence[Page]) -> bool:
    """Whether these pages of one address, oldest first, are of several servers, or of one before and after a restart.

    A pool that is reported later, as with the first request, contradicts nothing.
    """
    pools = [adapter.parse_pools(page, None, ())[0] for page in pages]
    engines = [adapter.parse_engines(page)[0] or () for page in pages]
    counts = [
        {one.engine: one.prompt_tokens_total or 0 for one in each if one.prompt_tokens_total is not None}
        for each in engines
    ]
    fell = any(after.get(name, count) < count for before, after in pairwise(counts) for name, count in before.items())
    return fell or len({tuple((pool.engine, pool.total_blocks) for pool in each) for each in pools if each}) > 1


class Alternation:
    """The changes of server that were observed at one address."""

    def __init__(self) -> None:
        """Nothing is known of the server yet."""
        self._highest: dict[str, int] = {}
        self._fallen: dict[str, tuple[int, int]] = {}
        self._interrupted = False
        self._known = False
        self._changes: deque[float] = deque(maxlen=MAX_CHANGES + 1)

    def check(self, reading: EngineReading, now_seconds: float) -> EngineReading:
        """The same as read, or a gap in its place while several servers answer."""
        engines, gaps = reading
        if engines is not None:
            if self._returned(engines):
                self._changes.append(now_seconds)
            self._known = True
        elif self._known and any(gap.kind == "absent" for gap in gaps):
            # It answers, with the metrics of something else.
            self._interrupted = True
        while self._changes and now_seconds - self._changes[0] > WINDOW_SECONDS:
            self._changes.popleft()
        if len(self._changes) <= MAX_CHANGES:
            return reading
        return None, (Gap(SOURCE, "refused", REASON),)

    def _returned(self, engines: tuple[Engine, ...]) -> bool:
        """Whether the server of an earlier sample answers again, after another one did."""
        interrupted, self._interrupted = self._interrupted, False
        if len(self._highest) > MAX_ENGINES:
            self._highest.clear()
            self._fallen.clear()
        returned = False
        for engine in engines:
            count = engine.prompt_tokens_total
            if count is None:
                continue
            highest = self._highest.setdefault(engine.engine, count)
            lowest, last = self._fallen.get(engine.engine, (count, count))
            if count < highest:
                self._fallen[engine.engine] = (min(lowest, count), count)
            else:
                # At once, not as a restarted server gets there.
                returned = returned or (count - last) * 2 > highest - lowest > 0
                self._fallen.pop(engine.engine, None)
                self._highest[engine.engine] = count
        return returned or interrupted


class UncountedLoads:
    """Loads of our own that the server does not count while they generate tokens, or counts only now and then."""

    def __init__(self) -> None:
        """No load has been offered yet."""
        self._uncounted = self._returns = self._samples = 0
        self._begin()

    def _begin(self) -> None:
        self._counted = self._lost = False
        self._missing = 0
        self._first: tuple[float, int] | None = None

    def check(self, sample: Sample, capabilities: Capabilities) -> Sample:
        """The same sample, or one with a gap for its engines while more were uncounted than may be.

        Gauges that move when a request ends show none of it; those that lag count only after their delay.
        """
        before, after = sample.load_before, sample.load
        if after is not None and not after.requests:
            self._uncounted += self._missing >= MIN_MISSING and not self._counted
            self._begin()
        elif after is not None and after.resident_tokens and before is not None and before.resident_tokens:
            self._add(sample, before, after, capabilities)
        elif after is not None and sample.engines:
            # All of them, before the first token was read here.
            self._counted = self._counted or sample.open_requests >= after.requests
        returned = self._returns >= max(MIN_RETURNS, RETURNED_SHARE * self._samples)
        if self._uncounted <= MAX_UNCOUNTED and not returned:
            return sample
        return replace(sample, engines=None, gaps=(Gap(SOURCE, "refused", UNCOUNTED),))

    def _add(self, sample: Sample, before: Load, after: Load, capabilities: Capabilities) -> None:
        tokens = sum(after.resident_tokens)
        late_seconds = max(capabilities.late_seconds, capabilities.renewed_seconds)
        running = [engine.requests_running for engine in sample.engines or ()]
        if not running or None in running or capabilities.on_completion:
            return
        self._samples += 1
        if sample.open_requests >= min(len(before.resident_tokens), len(after.resident_tokens)):
            # A delay at the end of a load is not followed by this, nor is one at its beginning as long.
            self._returns += self._lost and not late_seconds
            self._counted, self._lost = True, False
            return
        if not sample.open_requests:
            # Fewer are running where the ends of some are read late, one after another.
            self._lost = self._counted
        if self._first is None:
            self._first = sample.at_seconds, tokens
            return
        first_seconds, first_tokens = self._first
        is_late = late_seconds and sample.at_seconds - first_seconds < late_seconds + DELAY_SECONDS
        is_missing = not (is_late or tokens - first_tokens < max(1, capabilities.late_tokens))
        self._missing += is_missing
        self._lost = self._lost or (is_missing and not sample.open_requests)
