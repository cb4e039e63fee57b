"""Other engines' series in a Prometheus: labels that add up, ranks that do not, queues, used tokens as a share."""

from array import array
from dataclasses import replace

from kvdiag.feeds.history.replica_timeline import timeline_of
from kvdiag.feeds.history.series_join import join
from kvdiag.model import Engine, Facts, FailedAllocation, Timeline
from kvdiag.sources.prometheus_answers import History, Points

TIMES = [30.0, 60.0, 90.0]
Line = tuple[str, dict[str, str], list[float]]


def read(*lines: Line) -> tuple[Timeline, Facts]:
    """The timeline of one server's series, SGLang's by default; one with fewer values than times begins later."""
    history = History()
    for name, labels, values in lines:
        key = {"__name__": f"sglang:{name}", "instance": "a:30000", "job": "sglang", "tp_rank": "0", **labels}
        times = array("d", TIMES[-len(values) :])
        history.series[tuple(sorted(key.items()))] = Points(times=times, values=array("d", values))
    (replica,), _ = join([*history.series])
    return timeline_of(replica, history, TIMES[-1])


def engines(*lines: Line) -> list[Engine]:
    """The engine at each time."""
    timeline, facts = read(*lines)
    assert not any(gap.source == "prometheus" for gap in facts.gaps)
    return [one for sample in timeline.samples for one in sample.engines or ()]


def test_streams_add_up_and_ranks_do_not() -> None:
    """Both kinds of requests are one count; each tensor-parallel rank reports the same running requests."""
    found = engines(
        ("prompt_tokens_total", {"is_streaming": "true"}, [10.0, 20.0, 30.0]),
        ("prompt_tokens_total", {"is_streaming": "false"}, [5.0, 6.0]),
        ("num_running_reqs", {}, [2.0, 2.0, 0.0]),
        ("num_running_reqs", {"tp_rank": "1"}, [2.0, 2.0, 0.0]),
    )
    assert [one.prompt_tokens_total for one in found] == [10, 25, 36]
    assert [one.requests_running for one in found] == [2, 2, 0]


def test_requests_that_are_handed_over_wait() -> None:
    """A request between a prefill and a decode server holds tokens, though nothing runs: the pool is not idle."""
    found = engines(
        ("num_running_reqs", {}, [0.0] * 3),
        ("num_queue_reqs", {}, [0.0, 1.0, 0.0]),
        ("num_decode_transfer_queue_reqs", {}, [4.0, 4.0, 0.0]),
    )
    assert [one.requests_waiting for one in found] == [4, 5, 0]


def test_used_tokens_are_a_share_of_the_pool_of_their_time() -> None:
    """The share has two digits, the tokens have all; a pool of another size before counts for its own time."""
    timeline, facts = read(
        ("token_usage", {}, [0.0, 0.01, 0.25]),
        ("num_used_tokens", {}, [7.0, 7.0, 2048.0]),
        ("max_total_num_tokens", {}, [4096.0, 4096.0, 8192.0]),
        ("num_running_reqs", {}, [0.0] * 3),
    )
    found = [one.kv_usage_ratio for sample in timeline.samples for one in sample.engines or ()]
    assert found == [7 / 4096, 7 / 4096, 0.25]
    assert facts.capabilities.blocks


def test_used_tokens_without_a_pool_are_no_usage() -> None:
    """Nothing else is reported: there is no engine to show."""
    timeline, _ = read(("num_used_tokens", {}, [7.0] * 3))
    assert timeline.samples == ()


def test_no_retraction_is_a_count_of_none() -> None:
    """The counter of retractions begins with the first of them; a gauge of the same version stands for 0 before."""
    found = engines(
        ("kv_available_tokens", {}, [8192.0] * 3),
        ("num_retracted_requests_total", {}, [2.0]),
        ("num_running_reqs", {}, [0.0] * 3),
    )
    assert [one.preemptions_total for one in found] == [0, 0, 2]


def test_swap_of_a_container_is_anonymous_memory() -> None:
    """What the kernel has moved to swap adds to what is in memory, and is not resident."""
    pod = {"namespace": "a", "pod": "p", "instance": "10.0.0.1:10250", "job": "kubelet", "container": "c"}
    timeline, _ = read(
        ("num_running_reqs", {"namespace": "a", "pod": "p", "instance": "10.0.0.2:30000"}, [0.0] * 3),
        ("", {"__name__": "container_memory_rss", **pod}, [500.0, 400.0, 300.0]),
        ("", {"__name__": "container_memory_swap", **pod}, [0.0, 200.0, 400.0]),
        ("", {"__name__": "container_memory_working_set_bytes", **pod}, [600.0] * 3),
    )
    found = [(one.anonymous_bytes, one.resident_bytes) for each in timeline.samples for one in each.host or ()]
    assert [(500, 600), (600, 600), (700, 600)] == found


def test_a_front_end_of_dynamo_is_a_server_of_its_own() -> None:
    """It has no pool and no figures of an engine; the requests of its models add up."""
    name = {"__name__": "dynamo_frontend_inflight_requests"}
    found = engines(("", {**name, "model": "a"}, [1.0, 2.0, 0.0]), ("", {**name, "model": "b"}, [0.0, 1.0, 0.0]))
    assert [1, 3, 0] == [one.requests_running for one in found]


def test_the_last_failed_allocation_is_read_back() -> None:
    """Kvdiag's own series say what was asked for, what was free, and when, at the time of each sample."""
    own = {"gpu": "0", "uuid": "GPU-0", "process": "VLLM::EngineCore 7", "job": "sglang"}
    history = History()
    for name, values in (
        ("kvdiag_torch_allocated_bytes", [8e9] * 3),
        ("kvdiag_torch_reserved_bytes", [9e9] * 3),
        ("kvdiag_torch_ooms_total", [0.0, 1.0, 1.0]),
        ("kvdiag_oom_timestamp_seconds", [55.0, 55.0]),
        ("kvdiag_oom_asked_bytes", [2e9, 2e9]),
        ("kvdiag_oom_free_bytes", [1e9, 1e9]),
    ):
        key = {"__name__": name, "instance": "a:9743", **own}
        times = array("d", TIMES[-len(values) :])
        history.series[tuple(sorted(key.items()))] = Points(times=times, values=array("d", values))
    (replica,), _ = join([*history.series])
    timeline, _ = timeline_of(replica, history, TIMES[-1])
    found = [one.failure for sample in timeline.samples for one in sample.allocators or ()]
    failed = FailedAllocation(age_seconds=5.0, asked_bytes=2 * 10**9, free_bytes=10**9)
    assert found == [None, failed, replace(failed, age_seconds=35.0)]


def test_a_pool_that_is_scraped_at_two_addresses_is_one() -> None:
    """A pod that returned with another address, or two jobs: the newest figure counts, and nothing is in doubt."""
    pod = {"namespace": "x", "pod": "sglang-0"}
    moved = {**pod, "instance": "b:30000", "job": "again"}
    _, facts = read(
        ("token_usage", pod, [0.0] * 3),
        ("max_total_num_tokens", pod, [4096.0, 4096.0]),
        ("max_total_num_tokens", moved, [8192.0]),
    )
    assert [8192] == [one.usage_blocks * one.block_tokens for one in facts.pools]
    assert not [gap for gap in facts.gaps if gap.kind == "failed"]
