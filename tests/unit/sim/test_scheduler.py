import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.sim.blocks import BlockPool, blocks_for
from kvdiag.sim.scheduler import Admission, PoolFullError, Request, Scheduler, SchedulerLimits

EOS = 2
_IDS = itertools.count()


def scheduler(
    blocks: int,
    *,
    block_tokens: int = 16,
    budget: int = 2048,
    max_running: int = 100,
    admission: Admission = "prompt",
    fails_when_full: bool = False,
    prefix_caching: bool = True,
    kept: int = 0,
) -> Scheduler:
    """A scheduler over a new pool."""
    limits = SchedulerLimits(
        max_batched_tokens=budget,
        max_running=max_running,
        max_model_len_tokens=32768,
        block_tokens=block_tokens,
        admission=admission,
        fails_when_full=fails_when_full,
    )
    return Scheduler(BlockPool(blocks, prefix_caching=prefix_caching), limits, blocks_kept_at_finish=kept)


def request(prompt_tokens: int, max_tokens: int, *, salt: str | None = None) -> Request:
    """A request with a prompt of its own, unless it shares its salt."""
    number = next(_IDS)
    return Request(
        f"r{number}", list(range(prompt_tokens)), max_tokens, ignore_eos=True, cache_salt=salt or f"{number}"
    )


def steps(subject: Scheduler, token: int = 7) -> Iterator[dict[Request, int]]:
    """Step until nothing is left to do; yields each step's tokens while it runs."""
    for number in range(100_000):
        if subject.idle:
            return
        batch = subject.schedule()
        yield batch.tokens
        subject.complete(batch, dict.fromkeys(batch.sampling(), token), eos_token=EOS, now_seconds=float(number))
    raise AssertionError("the scheduler does not come to an end")


def peak_blocks(subject: Scheduler) -> int:
    """The most blocks that were held in any step until the end."""
    return max(subject.pool.held_blocks for _ in steps(subject))


@settings(deadline=None, max_examples=50)
@given(
    prompt=st.integers(1, 300),
    output=st.integers(1, 60),
    block_tokens=st.sampled_from([1, 8, 16, 128]),
    budget=st.sampled_from([1, 7, 64, 2048]),
)
def test_one_request_peaks_at_what_its_tokens_need(prompt: int, output: int, block_tokens: int, budget: int) -> None:
    """A request holds ceil((prompt + output - 1) / block) blocks at its peak, and none when it is over."""
    # A pool with room to spare
    subject = scheduler(1000, block_tokens=block_tokens, budget=budget)
    only = request(prompt, output)
    subject.add(only)
    assert blocks_for(prompt + output - 1, block_tokens) == peak_blocks(subject)
    assert (0, "length", output) == (subject.pool.held_blocks, only.finish_reason, len(only.output))


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """A prompt longer than the token budget takes several steps, and only the last of them samples."""
    subject = scheduler(1000, budget=100)
    only = request(250, 2)
    subject.add(only)
    assert [100, 100, 50, 1] == [tokens[only] for tokens in steps(subject)]


def test_running_requests_go_before_the_queue() -> None:
    """A step gives running requests their tokens first; what is left of the budget starts the next one's prompt."""
    # A request that has begun to generate
    subject = scheduler(1000, budget=100)
    first, second = request(50, 3), request(150, 1)
    subject.add(first)
    batches = steps(subject)
    next(batches)
    subject.add(second)
    assert [{first: 1, second: 99}, {first: 1, second: 51}] == list(batches)


def test_no_more_run_than_allowed() -> None:
    """More requests than max_num_seqs wait, also when blocks are free."""
    subject = scheduler(1000, max_running=2)
    for _ in range(5):
        subject.add(request(20, 4))
    assert 2 == max(len(subject.running) for _ in steps(subject))


def test_a_request_that_does_not_fit_waits() -> None:
    """A prompt that finds too few free blocks waits, without taking any, until another request is over."""
    # Nine usable blocks, of which the first request takes five
    subject = scheduler(10)
    first, second = request(80, 1), request(80, 1)
    subject.add(first)
    subject.add(second)
    seen = [(list(tokens), subject.pool.held_blocks, len(subject.waiting)) for tokens in steps(subject)]
    assert [([first], 5, 1), ([second], 5, 0)] == seen


def test_the_last_one_running_makes_room() -> None:
    """When no block is free, the last running request is preempted, and computed again later without loss."""
    # Two requests that fit as prompts, and not with all their output
    subject = scheduler(12, prefix_caching=False)
    first, second = request(80, 20), request(80, 20)
    subject.add(first)
    subject.add(second)
    assert (10, 1, 0, 1) == (peak_blocks(subject), subject.preemptions_total, first.preemptions, second.preemptions)
    assert (20, 20) == (len(first.output), len(second.output))
    assert 0 == subject.pool.held_blocks


def test_admission_by_first_chunk_thrashes() -> None:
    """Without reserving the whole prompt, a request that cannot finish its prefill is preempted over and over."""
    # A pool that holds one request, and chunks that start another
    gentle, greedy = (
        scheduler(14, budget=32, admission="prompt", prefix_caching=False),
        scheduler(14, budget=32, admission="chunk", prefix_caching=False),
    )
    for subject in (gentle, greedy):
        subject.add(request(120, 60))
        subject.add(request(120, 60))

        peak_blocks(subject)

    assert 0 == gentle.preemptions_total
    assert greedy.preemptions_total > 3


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), min_size=1, max_size=12),
    blocks=st.integers(10, 40),
    aborted=st.sets(st.integers(0, 11)),
)
def test_all_blocks_come_back(sizes: list[tuple[int, int]], blocks: int, aborted: set[int]) -> None:
    """After any mix of completed, preempted and aborted requests no block is held."""
    # Requests each of which fits the pool alone
    subject = scheduler(blocks, budget=50)
    requests = [request(prompt, output) for prompt, output in sizes]
    for one in requests:
        subject.add(one)

    for number, _ in enumerate(steps(subject)):
        if number in aborted and number < len(requests):
            subject.abort(requests[number])

    assert {"length", "abort"} >= {one.finish_reason for one in requests}
    assert 0 == subject.pool.held_blocks


def test_abort_frees_at_once() -> None:
    """A running or a waiting request that is aborted is removed with all its blocks before the next step."""
    subject = scheduler(10)
    running, waiting = request(80, 50), request(80, 50)
    subject.add(running)
    subject.add(waiting)
    batch = subject.schedule()
    assert (5, [waiting]) == (subject.pool.held_blocks, list(subject.waiting))

    subject.abort(waiting)
    subject.abort(running)
    assert (0, True) == (subject.pool.held_blocks, subject.idle)

    # The step under way then has no tokens to return.
    assert [] == subject.complete(batch, {running: 7}, eos_token=EOS, now_seconds=0.0)
    assert [] == running.output


def test_a_failed_step_ends_its_requests() -> None:
    """When the device could not do a step, its requests end in error and their blocks are free."""
    subject = scheduler(100)
    only = request(80, 50)
    subject.add(only)
    assert ([only], "error", 0) == (subject.fail(subject.schedule()), only.finish_reason, subject.pool.held_blocks)


def test_the_same_prompt_hits_the_cache() -> None:
    """A repeated prompt computes only what is not in full cached blocks, and always its last token."""
    # A finished request of exactly five blocks
    subject = scheduler(100)
    subject.add(request(80, 1, salt="same"))
    list(steps(subject))

    subject.add(request(80, 1, salt="same"))
    (again,) = steps(subject)
    subject.add(request(80, 1, salt="other"))
    (salted,) = steps(subject)

    assert ([16], [80]) == (list(again.values()), list(salted.values()))
    assert (240, 64) == (subject.prefix_queries_total, subject.prefix_hits_total)


def test_eos_ends_a_request_unless_it_is_ignored() -> None:
    """The end token ends a request once it has its minimum tokens; one that ignores it continues to its length."""
    subject = scheduler(100)
    obedient = Request("a", [1, 2, 3], 10, min_tokens=4)
    deaf = Request("b", [1, 2, 3], 10, ignore_eos=True)
    subject.add(obedient)
    subject.add(deaf)
    list(steps(subject, token=EOS))
    assert (("stop", 4), ("length", 10)) == tuple((one.finish_reason, len(one.output)) for one in (obedient, deaf))


def test_the_leak_really_keeps_blocks() -> None:
    """A scheduler with the kv-leak fault loses blocks of every finished request forever; the pool itself shows it."""
    subject = scheduler(100, kept=2)
    for _ in range(3):
        subject.add(request(80, 1))
    list(steps(subject))
    assert 6 == subject.pool.held_blocks
    assert 93 == subject.pool.free_blocks


def test_admission_by_output_promises_the_rest() -> None:
    """A request waits until its longest output fits next to the longest outputs of those that run (TensorRT-LLM)."""
    # Two of 60 + 60 tokens need 8 blocks each; 12 blocks hold the prompts of both
    subject = scheduler(13, admission="output", prefix_caching=False)
    first, second = request(60, 61), request(60, 61)
    subject.add(first)
    subject.add(second)
    batch = subject.schedule()
    assert ([first], 4, 1) == (list(batch.tokens), subject.pool.held_blocks, len(subject.waiting))
    assert 8 == peak_blocks(subject)
    assert (61, 61, 0) == (len(first.output), len(second.output), subject.preemptions_total)


def test_admission_with_taking_is_one_step() -> None:
    """All tokens that a request may come to are taken when it is admitted, and do not grow after that (TGI)."""
    subject = scheduler(1001, block_tokens=1, admission="taken", prefix_caching=False)
    subject.add(request(100, 21))
    subject.add(request(50, 11))
    assert {180, 120} == {subject.pool.held_blocks for _ in steps(subject)}
    assert 0 == subject.pool.held_blocks


def test_a_full_pool_fails_all_that_run() -> None:
    """Where nothing is preempted, the request that finds no free cell ends the whole batch (llama.cpp)."""
    subject = scheduler(101, block_tokens=1, max_running=2, fails_when_full=True, prefix_caching=False)
    running = [request(45, 40), request(45, 40)]
    for one in (*running, request(5, 5)):
        subject.add(one)
    with pytest.raises(PoolFullError):
        peak_blocks(subject)
    assert (running, 1, 100) == (subject.running, len(subject.waiting), subject.pool.held_blocks)
