"""Which settings give a pool room for what was asked of it, and what each buys, on servers of known figures."""

from dataclasses import replace

import pytest

from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.diagnosis.prescriptions.measured_scenario import Measured, measured, room_of
from kvdiag.diagnosis.prescriptions.pool_room import for_context, for_requests
from kvdiag.kv.fit.plan import Demand
from kvdiag.kv.fit.scenario import find_levers, scenario_plan
from kvdiag.model import Capabilities, Facts, KvPool, Prescription, Timeline
from tests.builders.values import GIB, MIB, device, engine, holding, pool, seen
from tests.unit.diagnosis.prescriptions.crowded_server import EACH, FREE_BYTES, FULL, SIX, known

TOKENS = EACH * 16


def fixes(found: Prescription | None) -> dict[str, tuple[int | None, bool]]:
    """The changes as they are typed, in their order, with the requests that then fit and whether that is enough."""
    return {} if found is None else {one.change: (one.requests, one.mends) for one in found.changes}


def crowded(of: Facts, timeline: Timeline = FULL) -> Prescription | None:
    """The prescription where six requests fill the pool and four wait."""
    return for_requests(timeline, of, DEFAULT_LIMITS, step="concurrent")


def test_the_least_harmful_change_that_is_enough_comes_first() -> None:
    """Six of ten fit: fewer at once, half the bytes, a share that is not enough, then hardware."""
    assert {
        "--max-num-seqs 6": (6, True),
        "--kv-cache-dtype fp8": (12, True),
        "--gpu-memory-utilization 0.93": (7, False),
        "--tensor-parallel-size 2": (33, True),
        "2 replicas": (12, True),
    } == fixes(crowded(known(SIX)))


def test_a_larger_share_says_what_it_leaves_free() -> None:
    """0.01 of the device's 23.5 GiB is taken from the 0.6 GiB that were free under load."""
    found = crowded(known(SIX))
    (share,) = [one for one in (found or Prescription()).changes if one.free_bytes is not None]
    assert share.free_bytes == pytest.approx(0.6 * GIB - 0.01 * (24 * GIB - 464 * MIB), abs=MIB)


def test_a_share_is_raised_no_further_than_is_needed() -> None:
    """With 6 GiB free the pool grows by the blocks that four more requests need, not by all that is free."""
    roomy = seen(*[holding(6 * EACH, of=SIX, running=6, waiting=4)] * 5, devices=(device(used_bytes=18 * GIB),))
    found = crowded(known(SIX), roomy)
    assert "--gpu-memory-utilization 0.97" in fixes(found)
    assert 10 == fixes(found)["--gpu-memory-utilization 0.97"][0]


def test_a_pool_of_given_bytes_is_given_more_bytes() -> None:
    """--kv-cache-memory-bytes sizes the pool, so that is what grows, to whole blocks."""
    by_hand = replace(SIX, pool_bytes=SIX.total_blocks * 2 * MIB)
    found = fixes(crowded(known(by_hand)))
    (grown,) = [change for change in found if change.startswith("--kv-cache-memory-bytes")]
    assert 0 == int(grown.split()[1]) % (2 * MIB)
    assert not [change for change in found if "utilization" in change]


def test_a_pool_of_given_blocks_is_given_more_blocks() -> None:
    """--num-gpu-blocks-override decides, not the share."""
    found = fixes(crowded(known(replace(SIX, overridden=True))))
    spare_blocks = (FREE_BYTES - DEFAULT_LIMITS.headroom_bytes) // (2 * MIB)
    assert 7 == found[f"--num-gpu-blocks-override {SIX.total_blocks + spare_blocks}"][0]


def test_without_the_models_config_blocks_are_counted_all_the_same() -> None:
    """Requests follow from the blocks that the engine reports; what other formats make of them does not."""
    blocks = replace(SIX, pool_bytes=SIX.total_blocks * 2 * MIB)
    found = crowded(replace(known(blocks), model_config=None))
    assert found is not None
    assert ["--max-num-seqs 6", "2 replicas"] == [one.change for one in found.changes if one.mends]
    assert 1 == len(found.missing)


def test_without_a_device_only_what_needs_no_bytes_is_computed() -> None:
    """No GPU is observed: requests and formats are computed, the reason for the larger pool is listed."""
    unseen = seen(*[holding(6 * EACH, of=SIX, running=6, waiting=4)] * 5)
    found = crowded(known(SIX), unseen)
    assert {"--max-num-seqs 6": (6, True), "--kv-cache-dtype fp8": (12, True), "2 replicas": (12, True)} == fixes(found)
    assert found is not None
    assert 1 == len(found.missing)


def test_nothing_is_prescribed_where_no_request_waited() -> None:
    """Six run, none waits, and no step offered more: there is no demand to compute for."""
    calm = seen(*[holding(6 * EACH, of=SIX, running=6)] * 5)
    assert crowded(known(SIX), calm) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sglang", "--max-running-requests 6"),
        ("trtllm", "--max_batch_size 6"),
        ("tgi", "--max-concurrent-requests 6"),
        ("lmdeploy", "--max-batch-size 6"),
        ("llamacpp", "--parallel 6"),
        ("ollama", "OLLAMA_NUM_PARALLEL=6"),
    ],
)
def test_each_engine_has_its_own_flags(name: str, change: str) -> None:
    """The same figures in the words of every engine; nothing is named that it does not have."""
    found = crowded(replace(known(SIX), engine_name=name))
    assert found is not None
    assert change == found.changes[0].change
    assert not [one for one in found.changes if "--max-num-seqs" in one.change]


def test_an_engine_without_flags_is_prescribed_replicas_alone() -> None:
    """Dynamo's frontend has no setting of its own for it."""
    assert ["2 replicas"] == list(fixes(crowded(replace(known(SIX), engine_name="dynamo"))))


def test_sglangs_share_is_raised_where_the_pool_is_too_small() -> None:
    """Its share is not reported: by how much to raise it follows all the same; more fits, so it is not lowered."""
    sized = replace(SIX, pool_bytes=SIX.total_blocks * 2 * MIB, bytes_computed=True, memory_fraction_ratio=None)
    found = fixes(crowded(replace(known(sized), engine_name="sglang")))
    assert ["raise --mem-fraction-static by 0.02"] == [change for change in found if "fraction" in change]


def test_shares_of_what_the_weights_leave_are_not_guessed() -> None:
    """TensorRT-LLM's is one of what is free then, which nothing reports."""
    sized = replace(SIX, pool_bytes=SIX.total_blocks * 2 * MIB, memory_fraction_ratio=None)
    found = crowded(replace(known(sized), engine_name="trtllm"))
    assert not [change for change in fixes(found) if "fraction" in change]
    assert found is not None
    assert 2 == len(found.missing)


def test_a_pool_that_is_not_reported_is_what_is_missing() -> None:
    """No change is computed, and none is made up."""
    found = crowded(Facts(engine_name="lmdeploy", capabilities=Capabilities(blocks=False)))
    assert found is not None
    assert ((), 1) == (found.changes, len(found.missing))


def test_windows_without_a_config_cost_what_nobody_knows() -> None:
    """A pool of windows or states has no bytes of a request: nothing is computed from its blocks."""
    mixed = replace(known(replace(SIX, mixed=True)), model_config=None)
    found = crowded(mixed)
    assert found is not None
    assert ((), 1) == (found.changes, len(found.missing))


SMALL = pool(usable_blocks=1250, pool_bytes=None, capacity_tokens=20_016, max_concurrency=1251 / 2048)


def test_a_context_that_does_not_fit_is_not_accepted_or_given_room() -> None:
    """The longest request has 32,768 tokens, the pool 20,000: the limit first, then half the bytes, then hardware."""
    found = for_context(FULL, known(SMALL), DEFAULT_LIMITS, pool=SMALL, tokens=32_768)
    longest = {one.change: (one.context_tokens, one.mends) for one in found.changes}
    assert (20_000, True) == longest["--max-model-len 20000"]
    assert (32_768, True) == longest["--kv-cache-dtype fp8"]
    assert ["--max-model-len 20000", "--kv-cache-dtype fp8"] == list(longest)[:2]


def test_llamacpps_context_is_its_pool() -> None:
    """Lowering --ctx-size would shrink the pool as well: it is raised, where bytes are known, or not prescribed."""
    found = for_context(FULL, replace(known(SMALL), engine_name="llamacpp"), DEFAULT_LIMITS, pool=SMALL, tokens=32_768)
    assert [] == [one.change for one in found.changes if one.change == "--ctx-size 20000"]


def test_fit_and_prescription_are_one_arithmetic() -> None:
    """The requests of every change are those of the levers of `fit` on the measured scenario."""
    of = known(SIX)
    server = measured(of, SIX, Demand(context_tokens=TOKENS, requests=10), room_of(FULL, of), DEFAULT_LIMITS)
    assert isinstance(server, Measured)
    plan = scenario_plan(server.scenario)
    levers = {one.plan.max_requests for one in find_levers(server.scenario, plan) if one.supported}
    assert plan.capacity.num_blocks == SIX.total_blocks
    assert {requests for change, (requests, _) in fixes(crowded(of)).items() if "fp8" in change} <= levers


HUGE = KvPool(engine="0", block_tokens=2**31, total_blocks=2**40, usable_blocks=2**40 - 1, usage_blocks=2**40 - 1)


def test_figures_beyond_any_server_raise_nothing() -> None:
    """A pool that no machine has is a missing figure, not an exception."""
    found = crowded(Facts(pools=(HUGE,)), seen(*[engine(usage=1.0, running=1, waiting=9)] * 5))
    assert found is not None
    assert () == found.changes
    assert found.missing
