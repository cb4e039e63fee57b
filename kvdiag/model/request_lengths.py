"""The lengths of finished requests, from which those of the next ones are estimated."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

GRID = 64
"""Moments at which growth is evaluated, denser in the near future."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A histogram of finished requests' output tokens, and the mean of their prompts.

    `upper_tokens` ascend and may end with infinity; `counts` are per bucket, not cumulated.
    """

    upper_tokens: tuple[float, ...]
    counts: tuple[int, ...]
    mean_prompt_tokens: float | None = None

    def __post_init__(self) -> None:
        """Refuse invalid buckets."""
        if len(self.upper_tokens) != len(self.counts) or any(a >= b for a, b in pairwise(self.upper_tokens)):
            raise ValueError("buckets must ascend, with one count each")
        if any(count < 0 for count in self.counts) or any(not upper > 0 for upper in self.upper_tokens):
            raise ValueError("counts must be 0 or more, upper bounds above 0")

    @property
    def finished(self) -> int:
        """The number of finished requests."""
        return sum(self.counts)

    def quantile_tokens(self, ratio: float, most_tokens: int) -> int:
        """The quantile of the lengths, at most `most_tokens`; lengths are taken as uniform within a bucket."""
        wanted = ratio * self.finished
        lower, before = 0.0, 0
        for upper, count in zip(self.upper_tokens, self.counts, strict=True):
            end = min(upper, float(most_tokens))
            if count and before + count >= wanted:
                return max(math.ceil(lower + (end - lower) * (wanted - before) / count), 1)
            lower, before = end, before + count
        return most_tokens

    def mean_tokens(self, most_tokens: int) -> float:
        """The mean length."""
        return self.beyond_tokens(0.0, most_tokens)

    @lru_cache(maxsize=16)  # noqa: B019 - the same for all calls between two samples
    def peak_growth_tokens(self, held_tokens: float, most_tokens: int) -> float:
        """How much more a running request will hold than now, at the worst moment, on average over many of them.

        Each continues to write, and finished ones release all of their tokens. A request at a random moment still
        writes t tokens or more with probability R(t), the mean length beyond t over the mean length (the residual life
        of renewal theory; Feller, vol. 2, XI.4): together they hold (held + t) R(t) each after t steps.
        """
        mean_tokens = self.mean_tokens(most_tokens)
        if mean_tokens <= 0.0:
            return 0.0
        moments = (most_tokens * (number / GRID) ** 2 for number in range(1, GRID))
        held = ((held_tokens + t) * self.beyond_tokens(t, most_tokens) / mean_tokens for t in moments)
        return max(max(held) - held_tokens, 0.0)

    def beyond_tokens(self, tokens: float, most_tokens: int) -> float:
        """The mean tokens that a request writes after its first `tokens`: the integral of the share that is longer."""
        total, lower, longer = 0.0, 0.0, self.finished
        for upper, count in zip(self.upper_tokens, self.counts, strict=True):
            end, begin = min(upper, float(most_tokens)), max(lower, tokens)
            if end > begin:
                # The share falls in a straight line within a bucket.
                first = longer - count * (begin - lower) / (end - lower)
                total += (first + longer - count) / 2.0 * (end - begin)
            lower, longer = max(lower, end), longer - count
        return total / self.finished if self.finished else max(most_tokens - tokens, 0.0)
