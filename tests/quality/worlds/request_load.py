"""Requests over hours and days by the statistics of public traces, and the metrics endpoint that they give.

Lengths are those of Azure's conversation trace (2023). Arrivals have a daily cycle, quiet weekends, and bursts as in
BurstGPT: the rate of a minute is gamma-distributed around a level that itself drifts within minutes.
"""

import csv
import math
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kvdiag.model import Engine, KvPool
from tests.quality.corpus.tape import Tape, Track

TRACE = Path(__file__).parents[1] / "bench" / "data" / "requests_azure_conv_2023.csv"
SECONDS_PER_TOKEN = 0.03
FIRST_TOKEN_SECONDS = 0.5


@cache
def request_lengths() -> tuple[tuple[int, int], ...]:
    """Prompt and output tokens of each request of the trace."""
    with TRACE.open() as lines:
        rows = csv.DictReader(line for line in lines if not line.startswith("#"))
        return tuple((int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows)


@dataclass(kw_only=True)
class Requests:
    """What an engine does at each time of a tape; `ended` and `tokens` count from the beginning."""

    running: list[int]
    held_tokens: Track
    ended: Track
    prompt_tokens: Track
    output_tokens: Track
    waiting: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    media: Track = field(default_factory=list)

    @property
    def load(self) -> Track:
        """Requests that run, as a track."""
        return [float(count) for count in self.running]


def offered(
    tape: Tape, *, peak_per_hour: float, night_ratio: float = 0.15, weekend: bool = False, calm: bool = False
) -> Requests:
    """Requests whose rate peaks in the afternoon; with a low `night_ratio` the engine is idle at night."""
    random, lengths = tape.random, request_lengths()
    begins = random.uniform(0.0, 24.0)
    saturday = random.choice((0, 1, 2, 3, 4)) * 24.0 - begins
    drift = tape.noise(0.15 if calm else 0.4, 9.0)
    found = Requests(running=[], held_tokens=[], ended=[], prompt_tokens=[], output_tokens=[])
    ended = prompts = outputs = 0.0
    for hour, level in zip(tape.hours, drift, strict=True):
        day = 0.5 - 0.5 * math.cos((hour + begins - 3.0) * math.pi / 12.0)
        rate = peak_per_hour * (night_ratio + (1.0 - night_ratio) * day * day) * math.exp(level)
        rate *= 0.45 if weekend and saturday <= hour < saturday + 48.0 else 1.0
        rate *= random.gammavariate(3.0, 1.0 / 3.0)
        arrived = _poisson(tape, rate * tape.tick_seconds / 3600.0)
        some = [random.choice(lengths) for _ in range(min(arrived, 12))]
        mean_prompt = sum(one[0] for one in some) / len(some) if some else 0.0
        mean_output = sum(one[1] for one in some) / len(some) if some else 0.0
        seconds = FIRST_TOKEN_SECONDS + SECONDS_PER_TOKEN * mean_output
        running = _poisson(tape, arrived * seconds / tape.tick_seconds)
        ended += arrived
        prompts += arrived * mean_prompt
        outputs += arrived * mean_output
        found.running.append(running)
        found.held_tokens.append(running * (mean_prompt + random.uniform(0.3, 0.7) * mean_output))
        found.ended.append(ended)
        found.prompt_tokens.append(prompts)
        found.output_tokens.append(outputs)
    return found


def _poisson(tape: Tape, mean: float) -> int:
    if mean > 40.0:
        return max(round(tape.random.gauss(mean, math.sqrt(mean))), 0)
    limit, count, product = math.exp(-mean), 0, tape.random.random()
    while product > limit:
        count += 1
        product *= tape.random.random()
    return count


def pages_of(requests: Requests, pool: KvPool, kept_blocks: Track | None, starts: list[int]) -> list[Engine]:
    """The engine at each time: the pool holds what runs, and `kept_blocks` of no request.

    `starts` has the first place of the life that each place belongs to, where its counters begin at 0.
    """
    made = []
    for place, running in enumerate(requests.running):
        blocks = math.ceil(requests.held_tokens[place] / pool.block_tokens) + running
        blocks += round(kept_blocks[place]) if kept_blocks else 0
        begin = starts[place]
        prompts = round(requests.prompt_tokens[place] - requests.prompt_tokens[begin])
        preempted = requests.preemptions[place] - requests.preemptions[begin] if requests.preemptions else 0
        made.append(
            Engine(
                engine="0",
                kv_usage_ratio=min(blocks / pool.usage_blocks, 1.0),
                requests_running=running,
                requests_waiting=requests.waiting[place] if requests.waiting else 0,
                preemptions_total=preempted,
                prompt_tokens_total=prompts,
                generation_tokens_total=round(requests.output_tokens[place] - requests.output_tokens[begin]),
                requests_finished_total=round(requests.ended[place] - requests.ended[begin]),
                prefix_queries_total=prompts,
                prefix_hits_total=round(0.2 * prompts),
                media_queries_total=round(requests.media[place] - requests.media[begin]) if requests.media else 0,
            )
        )
    return made
