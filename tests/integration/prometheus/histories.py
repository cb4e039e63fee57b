"""Histories of servers as a Prometheus holds them: a namespace each, all of them ending at one moment."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from kvdiag.model import Device, Engine, Facts, HostProcess, Sample, Timeline
from tests.builders import series
from tests.builders.series import Part
from tests.builders.values import GIB, allocator, device, engine, pool, process, split
from tests.integration.prometheus import openmetrics
from tests.integration.prometheus.openmetrics import Labels, line

END_SECONDS = 1_795_132_800.0
"""2026-11-20 00:00 UTC."""

HOURS = 2.5
PID = 100

FACTS = Facts(url="http://server", engine_name="vllm", model="tiny", pools=(pool(),))


def ending(timeline: Timeline, end_seconds: float = END_SECONDS) -> Timeline:
    """The same timeline, shifted to end at a moment."""
    by = end_seconds - timeline.samples[-1].at_seconds
    return Timeline(samples=tuple(replace(one, at_seconds=one.at_seconds + by) for one in timeline.samples))


def card(size: int) -> Sample:
    """GPU 0 of a server, with the driver's reservation reported."""
    return Sample(at_seconds=0.0, devices=(device(used_bytes=size + 2 * GIB, total_bytes=80 * GIB),))


def watched(
    part: Part = card,
    *,
    name: str = "pool",
    hours: float = HOURS,
    leak_mb_per_hour: float = 0.0,
    busy: bool = False,
    tick_seconds: float = 60.0,
) -> Timeline:
    """A server's history; idle by default."""
    made = series.timeline(
        name, 1, hours=hours, leak_mb_per_hour=leak_mb_per_hour, part=part, busy=busy, tick_seconds=tick_seconds
    )
    return ending(made)


def on(timeline: Timeline, uuid: str) -> Timeline:
    """The same with its devices under another UUID."""

    def moved(devices: tuple[Device, ...] | None) -> tuple[Device, ...] | None:
        return None if devices is None else tuple(replace(one, uuid=uuid) for one in devices)

    return Timeline(samples=tuple(replace(one, devices=moved(one.devices)) for one in timeline.samples))


def engines(timeline: Timeline, change: Callable[[int, Engine], Engine]) -> Timeline:
    """The same with every engine changed, by the number of its sample."""
    return Timeline(
        samples=tuple(
            replace(one, engines=tuple(change(number, each) for each in one.engines or ()))
            for number, one in enumerate(timeline.samples)
        )
    )


def server(namespace: str, pod: str = "vllm-0", *, port: int = 8000, **labels: str) -> Labels:
    """The labels with which a pod's own page is scraped."""
    return {"namespace": namespace, "pod": pod, "instance": f"{namespace}.{pod}:{port}", "job": "vllm", **labels}


def exporter(namespace: str, pod: str = "vllm-0", *, node: str = "node-1") -> Labels:
    """The labels of DCGM's exporter for a GPU that it gives to a pod."""
    return {**_dcgm(node), "exported_namespace": namespace, "exported_pod": pod, "exported_container": "vllm"}


def _dcgm(node: str) -> dict[str, str]:
    return {
        "namespace": "gpu-operator",
        "pod": f"dcgm-{node}",
        "instance": f"{node}:9400",
        "job": "dcgm",
        "Hostname": node,
    }


def healthy() -> Iterator[str]:
    """An idle server on a pool that never moves."""
    timeline = on(watched(), "GPU-healthy")
    yield from openmetrics.vllm(timeline, FACTS, server("healthy"))
    yield from openmetrics.dcgm(timeline, exporter("healthy"))


def leak() -> Iterator[str]:
    """Two servers on one node, of which the second one's device grows."""
    for pod, rate in (("vllm-0", 0.0), ("vllm-1", 2000.0)):
        timeline = on(watched(leak_mb_per_hour=rate), f"GPU-leak-{pod}")
        yield from openmetrics.vllm(timeline, FACTS, server("leak", pod))
        yield from openmetrics.dcgm(timeline, exporter("leak", pod))


def kv_leak() -> Iterator[str]:
    """A server that leaks one KV block."""
    held = engines(watched(), lambda number, one: replace(one, kv_usage_ratio=1 / 6144 if number > 60 else 0.0))
    yield from openmetrics.vllm(held, FACTS, server("kv-leak"))


def kvdiag_part(size: int) -> Sample:
    """The figures of kvdiag and its agent: torch's allocated bytes grow, and so does host memory."""
    held = size + GIB
    worker = process(PID, held + GIB, name="VLLM::Worker")
    whole = device(used_bytes=held + 2 * GIB, total_bytes=80 * GIB, processes=(worker,), uuid="GPU-own")
    seen = allocator(
        device_uuid="own",
        pid=PID,
        allocated_bytes=size,
        reserved_bytes=held,
        process_bytes=held + GIB,
        title="VLLM::Worker",
    )
    host = HostProcess(pid=PID + 1, name="VLLM::EngineCore", resident_bytes=size + GIB, anonymous_bytes=size)
    return Sample(at_seconds=0.0, devices=(whole,), allocators=(seen,), host=(host,))


def own() -> Iterator[str]:
    """A server with kvdiag running next to it, scraped on a port of its own."""
    timeline = watched(kvdiag_part, leak_mb_per_hour=2000.0)
    yield from openmetrics.vllm(timeline, FACTS, server("own"))
    yield from openmetrics.kvdiag(timeline, {**server("own", port=9450), "job": "kvdiag"})


def fragmented_timeline() -> Timeline:
    """Fragmentation for which torch flushes its cache, under load, and failed allocations in the last minutes."""
    made = []
    seen = watched(kvdiag_part).samples
    for number, sample in enumerate(seen):
        late = max(number - len(seen) + 4, 0)
        (one,) = sample.allocators or ()
        live = one.reserved_bytes - 8 * GIB
        holes = split(reserved_bytes=one.reserved_bytes, live_bytes=live, releasable_bytes=0, stranded_bytes=8 * GIB)
        counts = {"alloc_retries_total": 7 + late, "ooms_total": 1 + late // 2}
        told = replace(one, allocated_bytes=live, split=holes, **counts)  # type: ignore[arg-type]
        work = replace(engine(usage=0.2, running=3), generation_tokens_total=1000 * number)
        made.append(replace(sample, allocators=(told,), engines=(work,)))
    return Timeline(samples=tuple(made))


def fragmented() -> Iterator[str]:
    """The same timeline as kvdiag's own metrics report it."""
    timeline = fragmented_timeline()
    yield from openmetrics.vllm(timeline, FACTS, server("fragmented"))
    yield from openmetrics.kvdiag(timeline, {**server("fragmented", port=9450), "job": "kvdiag"})


def mixed() -> Iterator[str]:
    """Engines every 15 seconds, the device every 60, and 7 seconds after them."""
    yield from openmetrics.vllm(watched(tick_seconds=15.0), FACTS, server("mixed"))
    late = ending(on(watched(leak_mb_per_hour=2000.0), "GPU-mixed"), END_SECONDS - 8.0)
    yield from openmetrics.dcgm(late, exporter("mixed"))


def restart() -> Iterator[str]:
    """A server that restarted at another address, its counters at 0 and 10 GiB less in use."""
    before = ending(on(watched(name="filled cache"), "GPU-restart"), END_SECONDS - HOURS * 3600.0 - 60.0)
    after = on(watched(), "GPU-restart")
    for timeline, address in ((before, "10.1.0.1:8000"), (after, "10.1.0.2:8000")):
        counted = engines(timeline, lambda number, one: replace(one, prompt_tokens_total=1000 * number))
        yield from openmetrics.vllm(counted, FACTS, {**server("restart"), "instance": address})
        yield from openmetrics.dcgm(timeline, exporter("restart"))


def twice() -> Iterator[str]:
    """A server that two jobs scrape, the second one a second later and only for the last hour."""
    timeline = watched()
    yield from openmetrics.vllm(timeline, FACTS, server("twice"))
    again = ending(watched(hours=1.0), END_SECONDS - 1.0)
    yield from openmetrics.vllm(again, FACTS, {**server("twice"), "job": "pods"})


def renamed() -> Iterator[str]:
    """A server that was upgraded: the first half of its history has the names of 0.9."""
    timeline = watched()
    middle = len(timeline.samples) // 2
    old, new = Timeline(samples=timeline.samples[:middle]), Timeline(samples=timeline.samples[middle:])
    yield from openmetrics.vllm(old, FACTS, server("renamed"), openmetrics.OLD_NAMES)
    yield from openmetrics.vllm(new, FACTS, server("renamed"))


def old() -> Iterator[str]:
    """A server of vLLM 0.9: an idle one shows its null block as used."""
    held = engines(watched(), lambda number, one: replace(one, kv_usage_ratio=1 / 6145, prefix_queries_total=number))
    yield from openmetrics.vllm(held, FACTS, server("old"), openmetrics.OLD_NAMES)


def resized() -> Iterator[str]:
    """A server that was restarted with a pool of another size and then leaks KV blocks."""
    small = replace(FACTS, pools=(pool(usable_blocks=1024),))
    before = ending(watched(hours=1.0), END_SECONDS - HOURS * 3600.0 - 60.0)
    yield from openmetrics.vllm(before, small, server("resized"))
    yield from openmetrics.vllm(watched(), FACTS, server("resized"))


def impossible() -> Iterator[str]:
    """A server whose figures are no numbers, or cannot be, now and then."""
    for number, sample in enumerate(watched().samples):
        wrong = {5: "NaN", 7: "+Inf", 9: "3.5", 11: "-1"}.get(number, "0")
        for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"):
            yield line(f"vllm:{name}", server("impossible"), wrong, sample.at_seconds)


def shared() -> Iterator[str]:
    """Two servers on one host whose exporter names no pods."""
    for port in (8000, 8001):
        labels = {"job": "vllm", "instance": f"host-2:{port}", "rack": "shared"}
        yield from openmetrics.vllm(watched(), FACTS, labels)
    yield from openmetrics.dcgm(
        on(watched(), "GPU-shared"), {"job": "dcgm", "instance": "host-2:9400", "Hostname": "host-2", "rack": "shared"}
    )


def time_sliced() -> Iterator[str]:
    """A GPU that its exporter gives to two servers at once, and grows; and one that went from one pod to the next."""
    slices = on(watched(leak_mb_per_hour=2000.0), "GPU-sliced")
    handed = on(watched(leak_mb_per_hour=2000.0), "GPU-handed")
    middle = END_SECONDS - 1800.0
    for pod in ("vllm-0", "vllm-1"):
        yield from openmetrics.vllm(watched(), FACTS, server("sliced", pod))
        yield from openmetrics.dcgm(slices, exporter("sliced", pod, node="node-sliced"))
        mine = Timeline(samples=tuple(one for one in handed.samples if (one.at_seconds < middle) == (pod == "vllm-0")))
        yield from openmetrics.vllm(mine, FACTS, server("handed", pod))
        yield from openmetrics.dcgm(mine, exporter("handed", pod, node="node-handed"))


def one_host() -> Iterator[str]:
    """One server on a host of its own, with nvidia_gpu_exporter on that host."""
    yield from openmetrics.vllm(watched(), FACTS, {"job": "vllm", "instance": "host-3:8000", "rack": "one"})
    for sample in watched(leak_mb_per_hour=2000.0).samples:
        for each in sample.devices or ():
            assert each.memory is not None
            for name, size in (("total", each.memory.total_bytes), ("free", each.memory.free_bytes)):
                labels = {"job": "gpu", "instance": "host-3:9835", "uuid": "aaaa-host-3"}
                yield line(f"nvidia_smi_memory_{name}_bytes", labels, size, sample.at_seconds)


def gpus() -> Iterator[str]:
    """GPUs that no server is known of."""
    for index, rate in ((0, 0.0), (1, 2000.0)):
        timeline = on(watched(leak_mb_per_hour=rate), f"GPU-alone-{index}")
        numbered = Timeline(
            samples=tuple(
                replace(one, devices=tuple(replace(each, index=index) for each in one.devices or ()))
                for one in timeline.samples
            )
        )
        yield from openmetrics.dcgm(numbered, _dcgm("node-9") | {"namespace": "gpus"})


def cluster() -> Iterator[str]:
    """A server whose memory, limit, image and node come from cAdvisor and kube-state-metrics."""
    for sample in watched(leak_mb_per_hour=2000.0).samples:
        used = sample.devices[0].memory.used_bytes if sample.devices and sample.devices[0].memory else 0
        at_seconds = sample.at_seconds
        pod = {"namespace": "cluster", "pod": "vllm-0"}
        node = {"job": "kubelet", "instance": "node-4:10250", **pod}
        state = {"job": "kube-state-metrics", "instance": "10.9.9.9:8080", **pod}
        yield line("container_memory_rss", {**node, "container": "vllm"}, used, at_seconds)
        yield line("container_memory_rss", {**node, "container": ""}, used + GIB, at_seconds)
        yield line("container_memory_working_set_bytes", {**node, "container": "vllm"}, used + GIB, at_seconds)
        yield line("kube_pod_info", {**state, "node": "node-4"}, 1, at_seconds)
        yield line(
            "kube_pod_container_info",
            {**state, "container": "vllm", "image": "vllm/vllm-openai:v0.11.0"},
            1,
            at_seconds,
        )
        limit = {**state, "container": "vllm", "resource": "memory", "unit": "byte"}
        yield line("kube_pod_container_resource_limits", limit, 100 * GIB, at_seconds)
        yield line("kube_pod_container_resource_limits", {**limit, "resource": "cpu", "unit": "core"}, 8, at_seconds)
    yield from openmetrics.vllm(watched(), FACTS, server("cluster", container="vllm"))
    # A GPU of its node that the exporter, which names pods, gives to none.
    yield from openmetrics.dcgm(on(watched(), "GPU-cluster"), exporter("cluster", node="node-4"))
    yield from openmetrics.dcgm(on(watched(), "GPU-free"), _dcgm("node-4"))


def pageless() -> Iterator[str]:
    """Two pods on GPUs of their own, whose engines have no page; the exporter's labels are honoured for one."""
    for pod, rate in (("server-0", 2000.0), ("server-1", 0.0)):
        timeline = on(watched(leak_mb_per_hour=rate), f"GPU-{pod}")
        named = {"namespace": "pageless", "pod": pod, "container": "serve"}
        honoured = {**_dcgm("node-5"), **named}
        apart = {**exporter("pageless", pod, node="node-6"), "exported_container": "serve"}
        yield from openmetrics.dcgm(timeline, honoured if pod == "server-0" else apart)
        for sample in timeline.samples:
            node = {"job": "kubelet", "instance": "node-5:10250", **named}
            state = {"job": "kube-state-metrics", "instance": "10.9.9.9:8080", **named, "image": "lmsysorg/sglang:v0.5"}
            yield line("container_memory_rss", node, 8 * GIB, sample.at_seconds)
            yield line("container_memory_rss", {**node, "container": "sidecar"}, GIB, sample.at_seconds)
            yield line("kube_pod_container_info", state, 1, sample.at_seconds)


def down() -> Iterator[str]:
    """A server that stopped answering half an hour before the end, while its GPU's exporter continued."""
    timeline = watched()
    answered = Timeline(samples=timeline.samples[:-30])
    yield from openmetrics.vllm(answered, FACTS, server("down"))
    yield from openmetrics.dcgm(on(timeline, "GPU-down"), exporter("down"))
    for number, sample in enumerate(timeline.samples):
        yield line("up", server("down"), int(number < len(answered.samples)), sample.at_seconds)


def engines_of_two() -> Iterator[str]:
    """A server of two data-parallel engines, of which the second one keeps a block."""
    two = replace(FACTS, pools=(pool("0"), pool("1")))
    timeline = Timeline(
        samples=tuple(
            replace(one, engines=(engine(label="0"), engine(label="1", usage=1 / 6144))) for one in watched().samples
        )
    )
    yield from openmetrics.vllm(timeline, two, server("two-engines"))


def llamacpp() -> Iterator[str]:
    """llama.cpp's servers under load, which report no pool: healthy, a growing host, a growing device."""
    for pod, host, card_rate in (("llama-0", 0.0, 0.0), ("llama-1", 2000.0, 0.0), ("llama-2", 0.0, 2000.0)):
        own = server("llamacpp", pod, port=8080, container="llama-server")
        node = {"job": "kubelet", "instance": "node-7:10250", "namespace": "llamacpp", "pod": pod}
        yield from openmetrics.dcgm(
            on(watched(leak_mb_per_hour=card_rate), f"GPU-{pod}"), exporter("llamacpp", pod, node=f"node-{pod}")
        )
        for number, sample in enumerate(watched(leak_mb_per_hour=host).samples):
            used = sample.devices[0].memory.used_bytes if sample.devices and sample.devices[0].memory else 0
            figures = {
                "prompt_tokens_total": 2048 * number,
                "tokens_predicted_total": 100 * number,
                "requests_processing": number % 3,
                "requests_deferred": 0,
            }
            for name, value in figures.items():
                yield line(f"llamacpp:{name}", own, value, sample.at_seconds)
            yield line("container_memory_rss", {**node, "container": "llama-server"}, used, sample.at_seconds)


def trtllm() -> Iterator[str]:
    """TensorRT-LLM's servers over 12 hours, whose gauges show the last step before a request ended: one keeps a block
    of every other request.
    """
    for pod, kept in (("trt-healthy", 0.0), ("trt-leak", 0.5)):
        own = server("trtllm", pod, container="trtllm")
        for number in range(12 * 60):
            running, ended = 1 + number % 3, 2 * number
            blocks = min(running * (10 + number % 7) + round(kept * ended), 4_000)
            figures = {
                "kv_cache_max_blocks": 4_000,
                "kv_cache_tokens_per_block": 32,
                "kv_cache_used_blocks": blocks,
                "kv_cache_utilization": blocks / 4_000,
                "num_requests_running": running,
                "num_requests_waiting": 0,
                "prompt_tokens_total": 300 * ended,
                "generation_tokens_total": 60 * ended,
                "e2e_request_latency_seconds_count": ended,
            }
            for name, value in figures.items():
                yield line(f"trtllm_{name}", own, value, END_SECONDS - 60.0 * (12 * 60 - number))


WORLDS: Mapping[str, Callable[[], Iterable[str]]] = MappingProxyType(
    {
        one.__name__: one
        for one in (
            healthy,
            leak,
            kv_leak,
            own,
            fragmented,
            mixed,
            restart,
            twice,
            renamed,
            old,
            resized,
            impossible,
            shared,
            time_sliced,
            one_host,
            gpus,
            cluster,
            pageless,
            down,
            engines_of_two,
            llamacpp,
            trtllm,
        )
    }
)
