"""Decides which requests run, with how many tokens and blocks, as vLLM 0.32 does (vllm/v1/core/sched/scheduler.py).

A step gives running requests their tokens first; one without a free block preempts the last of them. Only if none was
preempted, the queue is admitted in order, as long as the next request's whole prompt fits. A prefix-cache hit takes
existing blocks, and the last token is always computed. Pure: the caller owns the clock and the device. A step is
`schedule()`, the model's work, then `complete()` or `fail()`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvdiag.sim.blocks import BlockPool, block_hash, blocks_for

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]

Admission = Literal["chunk", "prompt", "output", "taken"]
"""When a request is admitted: once its first chunk fits; all its known tokens (vLLM's scheduler_reserve_full_isl); all
tokens that it may come to, next to all that the running ones may come to (TensorRT-LLM's GUARANTEED_NO_EVICT); or the
same, and their blocks are taken at once (TGI).
"""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. The keys and values of `computed_tokens` tokens are in `blocks`."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    cache_salt: str | None = None
    arrived_seconds: float = 0.0
    scheduled_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: float | None = None
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None

    @property
    def tokens(self) -> int:
        """Prompt and output so far; the newest output token has no keys and values yet."""
        return len(self.prompt) + len(self.output)

    @property
    def most_tokens(self) -> int:
        """Tokens that it may have keys and values of at most; the last output token never has."""
        return len(self.prompt) + self.max_tokens - 1

    def slice(self, start: int, end: int) -> list[int]:
        """The tokens from `start` to before `end` of prompt and output concatenated."""
        split = len(self.prompt)
        return [*self.prompt[start:end], *self.output[max(start - split, 0) : max(end - split, 0)]]


@dataclass(frozen=True, slots=True)
class Batch:
    """One engine step's work: how many new tokens of each request the model computes."""

    tokens: dict[Request, int]

    @property
    def total_tokens(self) -> int:
        """Tokens that the model processes in this step."""
        return sum(self.tokens.values())

    @property
    def longest_prefill_tokens(self) -> int:
        """Length of the longest sequence of which this step computes a prefill chunk; 0 in a pure decode step."""
        return max((request.tokens for request, new in self.tokens.items() if new > 1), default=0)

    def sampling(self) -> Iterator[Request]:
        """The requests whose known tokens are all computed by this step, so that each samples a new one."""
        return (request for request, new in self.tokens.items() if request.computed_tokens + new == request.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What `vllm serve` sets by --max-num-batched-tokens, --max-num-seqs, --max-model-len and --block-size."""

    max_batched_tokens: int = 2048
    """vLLM's default for a server on a GPU of less than 70 GiB (arg_utils.py: get_batch_defaults)."""
    max_running: int = 256
    max_model_len_tokens: int = 32768
    block_tokens: int = 16
    admission: Admission = "prompt"
    fails_when_full: bool = False
    """Admit a request to any free slot, preempt nothing, and fail all that run when no cell is free (llama.cpp)."""


class PoolFullError(Exception):
    """No block is free for a request that runs, and none may be preempted."""


class Scheduler:
    """First come, first served; a running request without a free block preempts the last one."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits, *, blocks_kept_at_finish: int = 0) -> None:
        """Schedule over `pool`; a finished request leaks `blocks_kept_at_finish` blocks."""
        self.pool = pool
        self.limits = limits
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.preemptions_total = 0
        self.prefix_queries_total = 0
        self.prefix_hits_total = 0
        self._blocks_kept_at_finish = blocks_kept_at_finish

    @property
    def idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self.running and not self.waiting

    def add(self, request: Request) -> None:
        """Queue a request, whose prompt fits `max_model_len_tokens` and the pool (the front end checks that)."""
        self._extend_hashes(request, len(request.prompt))
        self.waiting.append(request)

    def schedule(self) -> Batch:
        """Choose this step's work and take the blocks for it: running requests first, then the queue in order.

        Raises:
            PoolFullError: with `fails_when_full`; the caller fails all that run.
        """
        batch: dict[Request, int] = {}
        budget = self.limits.max_batched_tokens
        preempted_before = self.preemptions_total
        position = 0
        while position < len(self.running) and budget > 0:
            request = self.running[position]
            new = min(request.tokens - request.computed_tokens, budget)
            if not self._allocate_or_preempt(request, new):
                break  # it was itself the last one, and is back in the queue
            batch[request] = new
            budget -= new
            position += 1
        if self.preemptions_total == preempted_before:
            self._admit(batch, budget)
        return Batch(batch)

    def complete(
        self, batch: Batch, sampled: dict[Request, int], *, eos_token: int, now_seconds: float
    ) -> list[Request]:
        """Apply the step's computed and sampled tokens; returns the requests that finished."""
        finished: list[Request] = []
        for request, new in batch.tokens.items():
            if request.finish_reason is not None:
                continue  # aborted while the step ran
            request.computed_tokens += new
            if request not in sampled:
                continue
            token = sampled[request]
            request.output.append(token)
            self._extend_hashes(request, request.tokens)
            if request.first_token_seconds is None:
                request.first_token_seconds = now_seconds
            request.last_token_seconds = now_seconds
            if (reason := self._stop_reason(request, token, eos_token)) is not None:
                self._finish(request, reason)
                finished.append(request)
        return finished

    def fail(self, batch: Batch) -> list[Request]:
        """End every request of a failed step with an error; returns them."""
        failed = [request for request in batch.tokens if request.finish_reason is None]
        for request in failed:
            self._finish(request, "error")
        return failed

    def abort(self, request: Request) -> None:
        """Drop a waiting or running request; a finished one stays unchanged."""
        if request.finish_reason is None:
            self._finish(request, "abort")

    def _allocate_or_preempt(self, request: Request, new: int) -> bool:
        while not self._allocate(request, new):
            if self.limits.fails_when_full:
                raise PoolFullError
            victim = self.running.pop()
            self._give_back(victim)
            victim.computed_tokens = 0
            victim.preemptions += 1
            self.preemptions_total += 1
            self.waiting.appendleft(victim)
            if victim is request:
                return False
        return True

    def _admit(self, batch: dict[Request, int], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_running:
            request = self.waiting[0]
            # The last token is always computed: its logits are needed (kv_cache_manager.py: max_cache_hit_length).
            hit = self.pool.find(request.hashes[: (request.tokens - 1) // self.limits.block_tokens])
            cached = len(hit) * self.limits.block_tokens
            new = min(request.tokens - cached, budget)
            must_fit = {"chunk": cached + new, "prompt": request.tokens}.get(self.limits.admission, request.most_tokens)
            needed = blocks_for(must_fit, self.limits.block_tokens) - len(hit)
            room = self.pool.free_blocks - self._promised()
            if needed + self.pool.free_among(hit) > room and not self.limits.fails_when_full:
                return
            self.waiting.popleft()
            self.running.append(request)
            self.pool.hold(hit)
            request.blocks = list(hit)
            request.computed_tokens = cached
            if request.preemptions == 0:
                request.cached_tokens = cached
                self.prefix_queries_total += request.tokens if self.pool.prefix_caching else 0
                self.prefix_hits_total += cached
            if not self._allocate(request, request.most_tokens - cached if self.limits.admission == "taken" else new):
                raise PoolFullError
            batch[request] = new
            budget -= new

    def _promised(self) -> int:
        """Blocks that running requests may still take, where they are promised to them."""
        if self.limits.admission != "output":
            return 0
        return sum(blocks_for(one.most_tokens, self.limits.block_tokens) - len(one.blocks) for one in self.running)

    def _allocate(self, request: Request, new: int) -> bool:
        end = request.computed_tokens + new
        needed = blocks_for(end, self.limits.block_tokens) - len(request.blocks)
        if needed > self.pool.free_blocks:
            return False
        if needed > 0:
            request.blocks += self.pool.take(needed)
        if self.pool.prefix_caching:
            for index in range(request.computed_tokens // self.limits.block_tokens, end // self.limits.block_tokens):
                self.pool.publish(request.blocks[index], request.hashes[index])
        return True

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        if self._blocks_kept_at_finish:
            # The fault of the kv-leak scenario: the table forgets its first blocks without releasing them.
            del request.blocks[: self._blocks_kept_at_finish]
        self._give_back(request)

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []

    def _stop_reason(self, request: Request, token: int, eos_token: int) -> FinishReason | None:
        if token == eos_token and not request.ignore_eos and len(request.output) >= request.min_tokens:
            return "stop"
        if len(request.output) >= request.max_tokens or request.tokens >= self.limits.max_model_len_tokens:
            return "length"
        return None

    def _extend_hashes(self, request: Request, tokens: int) -> None:
        size = self.limits.block_tokens
        while self.pool.prefix_caching and (len(request.hashes) + 1) * size <= tokens:
            start = len(request.hashes) * size
            content = request.slice(start, start + size)
            parent = request.hashes[-1] if request.hashes else b""
            salt = request.cache_salt if start == 0 else None
            request.hashes.append(block_hash(parent, content, salt))
