"""Preemptions that admission advice would prevent: ten recorded minutes of a public service, with it and without.

The requests (time, prompt, output) are Microsoft's; the server is the simulated scheduler, which behaves as vLLM 0.32
in virtual time. With advice a client asks before it sends, asks again a second later on the answer "wait", and drops
its request on "shed" or after a minute of waiting. The advice rests on figures up to a second old, as the daemon's
does. The second server cannot preempt: when its pool is full, the running requests are lost.
"""

import heapq
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvdiag.admission import Advice, Wish, advise
from kvdiag.model import Engine, Facts, KvPool, Lengths
from kvdiag.sim.blocks import BlockPool
from kvdiag.sim.scheduler import Request, Scheduler, SchedulerLimits
from tests.quality.bench.table import note

TRACE = Path(__file__).parent / "data" / "requests_azure_conv_2023.csv"

BLOCK_TOKENS = 16
MAX_MODEL_LEN_TOKENS = 8192
MAX_TOKENS = 1024
"""What clients ask for at most: they do not know how long an answer becomes."""

STEP_SECONDS, TOKEN_SECONDS = 0.02, 0.00005
"""A decode step, and each token of it: some 1,500 tokens a second at forty requests, an 8B model on one large GPU."""

POOLS_BLOCKS = (2000, 3000, 4000)

SAMPLE_SECONDS = RETRY_SECONDS = 1.0
PATIENCE_SECONDS = 60.0

BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, float("inf"))
"""Buckets of vllm:request_generation_tokens."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request."""

    at_seconds: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Outcome:
    """What came of all of them."""

    sent: int = 0
    finished: int = 0
    turned_away: int = 0
    lost: int = 0
    collapses: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    whole_seconds: list[float] = field(default_factory=list)


def arrivals(path: Path = TRACE) -> list[Arrival]:
    """The recorded requests in order."""
    lines = path.read_text().splitlines()[3:]
    rows = (line.split(",") for line in lines)
    return [Arrival(float(seconds), int(prompt), max(int(output), 1)) for seconds, prompt, output in rows]


class _Server:
    """The scheduler in virtual time, and what its page would say."""

    def __init__(self, blocks: int, *, preempts: bool) -> None:
        self.pool = BlockPool(blocks + 1, prefix_caching=False)
        limits = SchedulerLimits(max_model_len_tokens=MAX_MODEL_LEN_TOKENS, block_tokens=BLOCK_TOKENS)
        self.scheduler = Scheduler(self.pool, limits)
        self.preempts = preempts
        self.counts = [0] * len(BOUNDS)
        self.prompts = 0

    def engine(self) -> Engine:
        return Engine(
            engine="0",
            kv_usage_ratio=self.pool.held_blocks / (self.pool.total_blocks - 1),
            requests_running=len(self.scheduler.running),
            requests_waiting=len(self.scheduler.waiting),
        )

    def lengths(self) -> Lengths:
        finished = sum(self.counts)
        mean = self.prompts / finished if finished else None
        return Lengths(upper_tokens=BOUNDS, counts=tuple(self.counts), mean_prompt_tokens=mean)

    def step(self, now_seconds: float, outcome: Outcome) -> tuple[float, list[Request]]:
        """One step: how long it takes, and who is finished by it."""
        before = {request: request.computed_tokens for request in self.scheduler.running}
        batch = self.scheduler.schedule()
        fallen = [request for request in before if request not in batch.tokens and request.computed_tokens == 0]
        outcome.recomputed_tokens += sum(before[request] for request in fallen)
        took_seconds = STEP_SECONDS + TOKEN_SECONDS * batch.total_tokens
        if fallen and not self.preempts:
            gone = [*self.scheduler.running, *fallen]
            for request in gone:
                self.scheduler.abort(request)
            outcome.collapses += 1
            outcome.lost += len(gone)
            return took_seconds, []
        sampled = dict.fromkeys(batch.sampling(), 1)
        finished = self.scheduler.complete(batch, sampled, eos_token=0, now_seconds=now_seconds + took_seconds)
        for request in finished:
            self.counts[bisect_left(BOUNDS, len(request.output))] += 1
            self.prompts += len(request.prompt)
        return took_seconds, finished


def replay(requests: Sequence[Arrival], blocks: int, *, advised: bool, preempts: bool) -> Outcome:
    """Send the recorded requests to a server of so many blocks, each asking first where `advised`."""
    server, outcome = _Server(blocks, preempts=preempts), Outcome()
    pool = KvPool(
        engine="0",
        block_tokens=BLOCK_TOKENS,
        total_blocks=blocks + 1,
        usable_blocks=blocks,
        usage_blocks=blocks,
    )
    facts = Facts(max_model_len_tokens=MAX_MODEL_LEN_TOKENS, pools=(pool,))
    due = [(one.at_seconds, number) for number, one in enumerate(requests)]
    heapq.heapify(due)
    arrived: dict[str, float] = {}
    now_seconds, seen_seconds, seen, promised = 0.0, 0.0, server.engine(), list[int]()
    lengths = server.lengths()
    while due or not server.scheduler.idle:
        if server.scheduler.idle and due:
            now_seconds = max(now_seconds, due[0][0])
        while due and due[0][0] <= now_seconds:
            at_seconds, number = heapq.heappop(due)
            one = requests[number]
            if advised:
                if at_seconds - seen_seconds >= SAMPLE_SECONDS:
                    seen, seen_seconds, promised = server.engine(), at_seconds, []
                    lengths = server.lengths()
                told = _ask(one, seen, at_seconds - seen_seconds, facts, lengths, promised)
                if told.decision == "wait" and at_seconds + RETRY_SECONDS - one.at_seconds <= PATIENCE_SECONDS:
                    heapq.heappush(due, (at_seconds + RETRY_SECONDS, number))
                    continue
                if told.decision != "admit":
                    outcome.turned_away += 1
                    continue
                promised.append(told.request_blocks or 0)
            outcome.sent += 1
            arrived[str(number)] = one.at_seconds
            server.scheduler.add(Request(str(number), range(one.prompt_tokens), one.output_tokens, ignore_eos=True))
        took_seconds, finished = server.step(now_seconds, outcome)
        now_seconds += took_seconds
        for request in finished:
            outcome.finished += 1
            outcome.first_token_seconds.append((request.first_token_seconds or 0.0) - arrived[request.id])
            outcome.whole_seconds.append(now_seconds - arrived[request.id])
    outcome.preemptions = server.scheduler.preemptions_total
    return outcome


def _ask(
    one: Arrival, seen: Engine, age_seconds: float, facts: Facts, lengths: Lengths, promised: Sequence[int]
) -> Advice:
    wish = Wish(prompt_tokens=one.prompt_tokens, max_tokens=MAX_TOKENS)
    return advise(wish, engines=[seen], age_seconds=age_seconds, facts=facts, lengths=lengths, promised=promised)


def _quantile(values: Sequence[float], ratio: float) -> float:
    return sorted(values)[min(int(ratio * len(values)), len(values) - 1)] if values else float("nan")


def main() -> None:
    """Print what became of the requests."""
    requests = arrivals()
    _say(f"{len(requests):,} requests of ten recorded minutes (Azure, conversations, 2023)")
    _say("away: told to shed, or waited for a minute; again: tokens computed again after a preemption;")
    _say("collapses: a pool that is full where nobody can be preempted, lost: requests that ran there")
    for preempts in (True, False):
        _say("")
        _say("a server that preempts" if preempts else "a server that cannot")
        columns = "preempted      again" if preempts else "collapses       lost"
        _say(f"   blocks  advice    done   away  {columns}  first token p50     p95  whole p95")
        for blocks in POOLS_BLOCKS:
            harms: list[int] = []
            for advised in (False, True):
                out = replay(requests, blocks, advised=advised, preempts=preempts)
                first = [_quantile(out.first_token_seconds, ratio) for ratio in (0.5, 0.95)]
                harm = (out.preemptions, out.recomputed_tokens) if preempts else (out.collapses, out.lost)
                harms.append(harm[0] if preempts else harm[1])
                _say(
                    f"{blocks:>9,}  {'yes' if advised else 'no':<6}  {out.finished:>6,}  {out.turned_away:>5,}  "
                    f"{harm[0]:>9,}  {harm[1]:>9,}  {first[0]:>13.1f} s  {first[1]:>4.1f} s  "
                    f"{_quantile(out.whole_seconds, 0.95):>7.1f} s"
                )
            what = "preemptions" if preempts else "requests lost, no preemption"
            note(f"admission, pool of {blocks:,} blocks: {what}", harms[1], harms[0], than="without advice", unit="")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
