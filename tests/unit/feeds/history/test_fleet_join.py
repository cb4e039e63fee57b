"""Which series are of one server: by pod, by instance, by UUID, by host; and by none where it could be two."""

import random
from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.feeds.history.replica_timeline import timeline_of
from kvdiag.feeds.history.series_join import Replica, gpus_assigned, join, pods_of_gpus
from kvdiag.feeds.history.series_labels import METRICS, uuid_of
from kvdiag.model import Gap
from kvdiag.sources.prometheus_answers import History, Labels, Points
from tests.builders.answers import containing


def labels(name: str, **more: str) -> Labels:
    """One series."""
    return tuple(sorted({"__name__": name, **more}.items()))


def vllm(**more: str) -> Labels:
    """A server's own series."""
    return labels("vllm:num_requests_running", **{"job": "engine", **more})


def dcgm(uuid: str = "GPU-1", **more: str) -> Labels:
    """A GPU's."""
    return labels("DCGM_FI_DEV_FB_USED", UUID=uuid, **{"job": "dcgm", "instance": "10.9.9.9:9400", **more})


def joined(*series: Labels, gpus: tuple[Labels, ...] = ()) -> dict[str, set[str]]:
    """The UUIDs of each replica's GPUs, by its key."""
    replicas, _ = join(series, gpus)
    return {one.key: {dict(each).get("UUID", "") for each in one.series} - {""} for one in replicas}


POD = vllm(namespace="a", pod="p", instance="10.0.0.1:8000")
TWIN = vllm(namespace="a", pod="q", instance="10.0.0.2:8000")
HOST = vllm(instance="gpu-1:8000")


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        pytest.param(
            (POD, TWIN, dcgm(exported_namespace="a", exported_pod="p", namespace="gpu", pod="dcgm-x")),
            {"pod /a/p": {"GPU-1"}, "pod /a/q": set()},
            id="the exporter names the pod",
        ),
        pytest.param(
            (POD, TWIN, dcgm(namespace="a", pod="q")),
            {"pod /a/p": set(), "pod /a/q": {"GPU-1"}},
            id="under the target's own label",
        ),
        pytest.param(
            (POD, dcgm(exported_namespace="b", exported_pod="p")),
            {"gpu 1": {"GPU-1"}, "pod /a/p": set()},
            id="same name, another namespace",
        ),
        pytest.param((HOST, dcgm(Hostname="gpu-1")), {"instance /gpu-1:8000": {"GPU-1"}}, id="the host"),
        pytest.param(
            (HOST, dcgm(instance="gpu-1:9400")), {"instance /gpu-1:8000": {"GPU-1"}}, id="the exporter's instance"
        ),
        pytest.param((HOST, dcgm()), {"instance /gpu-1:8000": {"GPU-1"}}, id="one server and one host"),
        pytest.param(
            (HOST, dcgm(), dcgm("GPU-2", instance="10.9.9.8:9400")),
            {"gpu 1": {"GPU-1"}, "gpu 2": {"GPU-2"}, "instance /gpu-1:8000": set()},
            id="one server and two hosts",
        ),
        pytest.param(
            (vllm(instance="gpu-1:8000"), vllm(instance="gpu-1:8001"), dcgm(Hostname="gpu-1")),
            {"gpu 1": {"GPU-1"}, "instance /gpu-1:8000": set(), "instance /gpu-1:8001": set()},
            id="two servers on the host",
        ),
        pytest.param(
            (POD, labels("kube_pod_info", namespace="a", pod="p", node="n1"), dcgm(Hostname="n1")),
            {"pod /a/p": {"GPU-1"}},
            id="the pod's node",
        ),
        pytest.param(
            (
                POD,
                labels("kube_pod_info", namespace="a", pod="p", node="n1"),
                dcgm(Hostname="n1"),
                dcgm("GPU-2", Hostname="n1", exported_namespace="a", exported_pod="p"),
            ),
            {"gpu 1": {"GPU-1"}, "pod /a/p": {"GPU-2"}},
            id="the exporter names other pods",
        ),
        pytest.param(
            (POD, TWIN, labels("kvdiag_gpu_memory_free_bytes", namespace="a", pod="q", uuid="GPU-1"), dcgm()),
            {"pod /a/p": set(), "pod /a/q": {"GPU-1"}},
            id="the UUID that kvdiag tells",
        ),
        pytest.param(
            (
                POD,
                labels("kube_pod_info", namespace="a", pod="p", node="n1"),
                dcgm(Hostname="n1", namespace="a", pod="p"),
                dcgm("GPU-2", Hostname="n1", namespace="b", pod="notebook"),
                dcgm("GPU-3", Hostname="n1"),
            ),
            {"gpu 2": {"GPU-2"}, "gpu 3": {"GPU-3"}, "pod /a/p": {"GPU-1"}},
            id="honoured labels name pods",
        ),
        pytest.param(
            (
                POD,
                TWIN,
                labels("nvidia_smi_memory_used_bytes", uuid="GPU-1", instance="n1:9835", pod="q", namespace="a"),
            ),
            {"pod /a/p": set(), "pod /a/q": set()},
            id="nvidia_gpu_exporter with a pod's labels",
        ),
        pytest.param(
            (HOST, dcgm("GPU-1", Hostname="gpu-1", GPU_I_ID="3"), dcgm("GPU-1", Hostname="gpu-1", GPU_I_ID="4")),
            {"instance /gpu-1:8000": {"GPU-1"}},
            id="slices of one GPU",
        ),
    ],
)
def test_a_gpu_is_given_to_the_one_server_it_can_be_of(
    series: tuple[Labels, ...], expected: dict[str, set[str]]
) -> None:
    """A GPU that could belong to two pods, or to a foreign one, is assigned to none."""
    chosen = tuple(one for one in series if dict(one)["__name__"].startswith("DCGM"))
    assert expected == joined(*series, gpus=chosen)


def test_a_gpu_of_several_pods_is_of_none() -> None:
    """A GPU that an exporter assigns to two pods at once is reported as missing at the server in one of them."""
    both = tuple(dcgm(exported_namespace="a", exported_pod=pod, Hostname="n1") for pod in ("p", "notebook"))
    replicas, gaps = join((POD, *both), both, pods_of_gpus(both))
    reason = containing("GPU 1 of n1", "a/notebook, a/p")
    assert ["gpu 1", "pod /a/p"] == [one.key for one in replicas]
    assert (Gap("nvml", "absent", reason),) == gaps
    assert gaps[0] in replicas[1].gaps


def memory_of(pod: str, **more: str) -> Labels:
    """The labels of a node's memory metric for a pod's container."""
    return labels("container_memory_rss", **{"namespace": "a", "pod": pod, "instance": "n1:10250", **more})


@pytest.mark.parametrize("named", [("namespace", "pod"), ("exported_namespace", "exported_pod")])
def test_shared_gpus_are_known_by_either_label(named: tuple[str, str]) -> None:
    """Whether a Prometheus honours the exporter's labels or renames them: two pods at once have a GPU together."""
    space, pod = named
    both = tuple(dcgm(**{space: "a", pod: one, "Hostname": "n1"}) for one in ("p", "q"))
    replicas, gaps = join((POD, TWIN, *both), both, pods_of_gpus(both))
    assert {"1": {"a/p", "a/q"}} == pods_of_gpus(both)
    assert ["gpu 1", "pod /a/p", "pod /a/q"] == [one.key for one in replicas]
    assert (Gap("nvml", "absent", containing("a/p, a/q")),) == gaps


@pytest.mark.parametrize(
    "own",
    [{"pod": "nvidia-dcgm-exporter-x7"}, {"pod": "gpu-y", "container": "exporter"}, {"pod": "z", "namespace": "otel"}],
)
def test_an_exporters_own_pod_has_no_gpu(own: dict[str, str]) -> None:
    """What a target is called itself is no workload, whether or not the exporter was replaced meanwhile."""
    gpus = (dcgm(**own), dcgm(**{**own, "pod": f"{own['pod']}-2"}))
    assert {} == pods_of_gpus(gpus)
    assert ["gpu 1"] == [one.key for one in join((memory_of(**own), *gpus), gpus)[0]]


@pytest.mark.parametrize("named", [("namespace", "pod"), ("exported_namespace", "exported_pod")])
def test_a_pod_without_a_page_is_a_server(named: tuple[str, str]) -> None:
    """Two GPUs from its exporter and its memory from the node: one subject, named by the pod, without an engine."""
    space, pod = named
    given = {space: "a", pod: "trtllm-0"}
    gpus = (dcgm(**given), dcgm("GPU-2", **given), dcgm("GPU-3", **{space: "a", pod: "unseen"}))
    replicas, _ = join((memory_of("trtllm-0"), memory_of("web-0"), *gpus), gpus)
    assert ["gpu 3", "pod /a/trtllm-0"] == [one.key for one in replicas]
    server = replicas[1]
    assert (("namespace", "a"), ("pod", "trtllm-0")) == server.subject
    assert {"GPU-1", "GPU-2", ""} == {dict(one).get("UUID", "") for one in server.series}
    assert [containing("metrics are not scraped")] == [gap.reason for gap in server.gaps]


def test_a_uuid_under_another_label_is_one() -> None:
    """Some exporters report a GPU's UUID in the label where others report its index."""
    assert ["1f", "1f", "1f", None, None] == [
        uuid_of(one)
        for one in (
            {"UUID": "GPU-1F"}, {"uuid": "1f"}, {"gpu": "GPU-1f"}, {"gpu": "0"}, {"Hostname": "n1"},
        )
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["region", "case"])
def test_what_every_series_tells_apart_is_apart(name: str) -> None:
    """Labels that a Prometheus puts on all it sends: the same pod, host and UUID in two regions are two."""
    series = tuple(
        one for where in ("a", "b") for one in (vllm(instance="gpu-1:8000", **{name: where}), dcgm(**{name: where}))
    )
    assert {f"instance /gpu-1:8000 [{name}=a]": {"GPU-1"}, f"instance /gpu-1:8000 [{name}=b]": {"GPU-1"}} == joined(
        *series, gpus=series[1::2]
    )


def test_gpus_that_were_not_asked_for_are_no_subjects() -> None:
    """Looked at for servers alone, a stranger's GPU is left out."""
    assert {"pod /a/p": set()} == joined(POD, dcgm(exported_namespace="b", exported_pod="x"))


@pytest.mark.parametrize(
    ("series", "keys"),
    [
        pytest.param((POD, vllm(namespace="a", pod="p", job="again")), ["pod /a/p"], id="two jobs, one pod"),
        pytest.param((POD, vllm(namespace="a", pod="p", instance="10.0.0.9:8000")), ["pod /a/p"], id="another address"),
        pytest.param((POD, vllm(namespace="a", pod="p", cluster="x")), ["pod /a/p", "pod x/a/p"], id="two clusters"),
        pytest.param(
            (HOST, labels("kvdiag_requests_running", instance="gpu-1:9450")), ["instance /gpu-1:8000"], id="beside"
        ),
        pytest.param(
            (HOST, labels("kvdiag_requests_running", instance="gpu-2:9450"), vllm(instance="gpu-3:8000")),
            ["instance /gpu-1:8000", "instance /gpu-2:9450", "instance /gpu-3:8000"],
            id="on a host of its own",
        ),
        pytest.param((vllm(),), ["instance /"], id="no label at all"),
    ],
)
def test_servers_are_told_apart(series: tuple[Labels, ...], keys: list[str]) -> None:
    """By their pod, else by their instance."""
    assert keys == [one.key for one in join(series)[0]]


def test_what_is_not_told_is_a_gap_of_its_replica() -> None:
    """Missing GPUs and host memory are gaps of the replica: the rules report why their verdict is unknown."""
    (replica,), gaps = join([POD])
    assert [("nvml", "absent"), ("host", "absent")] == [(gap.source, gap.kind) for gap in replica.gaps]
    assert () == gaps


@pytest.mark.parametrize(("size", "expected"), [("16", (16 * 2**30,)), ("None", None)])
def test_the_bound_of_an_offloading_buffer_is_kept(size: str, expected: tuple[int, ...] | None) -> None:
    """The metrics' configuration reports the limit, in Prometheus as on the server's own endpoint."""
    config = labels("vllm:cache_config_info", kv_offloading_size=size, namespace="a", pod="p")
    history = History()
    for one in (POD, config):
        history.series[one] = Points(times=array("d", [30.0, 60.0]), values=array("d", [1.0, 1.0]))
    (replica,), _ = join([POD, config])
    _, facts = timeline_of(replica, history, 90.0)
    assert expected == (None if facts.host_caches is None else tuple(one.limit_bytes for one in facts.host_caches))


def test_a_leak_before_a_restart_is_read_by_the_pool_of_then() -> None:
    """Half of 1,024 blocks stay in use, then the server restarts clean with 2,048: the leak is the first life's."""
    own = {"namespace": "a", "pod": "p", "engine": "0"}
    times = [30.0 * place for place in range(1, 21)]
    lives = (times[:10], times[10:])
    history = History()
    for name, values in (
        ("kv_cache_usage_perc", [0.5] * 10 + [0.0] * 10),
        ("num_requests_running", [0.0] * 20),
        ("num_requests_waiting", [0.0] * 20),
        ("prompt_tokens_total", [float(place) for place in (*range(100, 110), *range(10))]),
    ):
        history.series[labels(f"vllm:{name}", **own)] = Points(times=array("d", times), values=array("d", values))
    for blocks, life in zip(("1025", "2049"), lives, strict=True):
        config = labels("vllm:cache_config_info", **own, num_gpu_blocks=blocks, block_size="16")
        history.series[config] = Points(times=array("d", life), values=array("d", [1.0] * 10))
    (replica,), _ = join([*history.series])
    timeline, facts = timeline_of(replica, history, times[-1])
    found = diagnose(timeline, facts)
    assert ("fault", ["fault", "ok"]) == (found.worst, [one.worst for one in found.lives])
    (leak,) = found.lives[0].findings
    assert 512 == next(one.value for one in leak.evidence if one.name == "blocks_at_last_idle")
    assert [2048] == [one.usable_blocks for one in facts.pools]


VALUES = st.sampled_from(["", "a", "b", "p", "node:1", "GPU-1", "0", "memory", "capacity", "awake", "vllm 7", "é\n"])
NAMES = st.sampled_from(sorted(METRICS))
LABEL_NAMES = st.sampled_from(
    [
        *("namespace", "pod", "exported_namespace", "exported_pod", "instance", "job", "cluster", "node", "Hostname"),
        *("UUID", "uuid", "gpu", "GPU_I_ID", "engine", "process", "container", "reason", "sleep_state", "resource"),
        *("num_gpu_blocks", "block_size", "image", "component", "rank", "model_name", "modelName"),
    ]
)
SERIES = st.lists(
    st.builds(lambda name, more: labels(name, **more), NAMES, st.dictionaries(LABEL_NAMES, VALUES, max_size=6)),
    max_size=25,
    unique=True,
)


@given(SERIES, st.randoms(use_true_random=False))
def test_the_order_of_series_changes_nothing(series: list[Labels], chance: random.Random) -> None:
    """A Prometheus lists them in any order."""
    shuffled = list(series)
    chance.shuffle(shuffled)
    assert join(series, series) == join(shuffled, shuffled)


@given(SERIES)
def test_no_series_is_of_two(series: list[Labels]) -> None:
    """Each is of one replica or of none."""
    replicas, _ = join(series, series)
    given_out = [one for replica in replicas for one in replica.series]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(series)


NUMBERS = st.sampled_from([0.0, 1.0, 0.5, 3.5, -1.0, 7.0, 81559.0, 1e9, 8.5e10, 1e18, 1e300])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SERIES, st.data())
def test_no_history_does_harm(series: list[Labels], data: st.DataObject) -> None:
    """Any series under these names in Prometheus give a timeline that can be diagnosed."""
    history = History()
    for one in series:
        times = sorted(data.draw(st.sets(st.integers(1, 40), max_size=6)))
        values = [data.draw(NUMBERS) for _ in times]
        history.series[one] = Points(times=array("d", [30.0 * moment for moment in times]), values=array("d", values))
    replicas: tuple[Replica, ...] = join(series, series)[0]
    for replica in replicas:
        timeline, facts = timeline_of(replica, history, 1500.0)
        found = diagnose(timeline, facts)
        assert len(timeline.samples) == found.samples


@pytest.mark.parametrize(
    ("gpus", "certain"),
    [
        ((dcgm("GPU-a", exported_namespace="ml", exported_pod="llm-0"),), True),
        ((dcgm("GPU-b", instance="10.0.0.5:9400"),), False),
        ((), False),
    ],
    ids=["named by its exporter", "on the same host", "none"],
)
def test_gpus_are_the_servers_own_where_its_pod_is_named(gpus: tuple[Labels, ...], certain: bool) -> None:
    """An exporter that names the pod assigns the GPU to it; the same host may have other, idle GPUs."""
    own = vllm(instance="10.0.0.5:8000", node="n1", namespace="ml", pod="llm-0")
    (server,) = [one for one in join([own, *gpus], gpus)[0] if one.key.startswith("pod ")]
    assert certain is gpus_assigned(server)
