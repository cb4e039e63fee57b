"""`kvdiag diagnose --prometheus` on a real Prometheus: histories of servers, and the verdict on each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.outputs import documents
from tests.builders.answers import containing
from tests.integration.prometheus.conftest import Judged
from tests.integration.prometheus.histories import END_SECONDS, FACTS, WORLDS, fragmented_timeline, kvdiag_part, watched
from tests.integration.vllm.cli import kvdiag

Diagnose = Callable[..., Judged]

OUTPUTS = Path(documents.__path__[0])
SCHEMAS = {name: json.loads((OUTPUTS / name).read_text()) for name in ("diagnosis.schema.json", "fleet.schema.json")}
VALIDATOR = Draft202012Validator(
    SCHEMAS["fleet.schema.json"],
    registry=Registry().with_resources((name, Resource.from_contents(one)) for name, one in SCHEMAS.items()),
)


def whole(diagnose: Diagnose, history: str, match: str) -> dict[str, Any]:
    """The JSON document of the replicas that a selector matches."""
    said = diagnose("--prometheus", history, "--match", match, "--output", "json")
    assert not said.stderr
    decoded: dict[str, Any] = json.loads(said.stdout)
    return decoded


def only(diagnose: Diagnose, history: str, namespace: str) -> dict[str, Any]:
    """The one replica of a world."""
    replicas = whole(diagnose, history, f'{{namespace="{namespace}"}}')["replicas"]
    assert 1 == len(replicas)
    found: dict[str, Any] = replicas[0]
    return found


def statuses(replica: dict[str, Any], *ids: str) -> list[str]:
    """The statuses of some findings."""
    told = {one["id"]: one["status"] for one in replica["findings"]}
    return [told[each] for each in ids]


def reasons(replica: dict[str, Any]) -> str:
    """The reasons of all gaps, in one text."""
    return "\n".join(gap["reason"] for gap in replica["gaps"])


LEAKS = ("leak.kv_blocks", "leak.device_torch", "leak.device_non_torch", "leak.host")


def test_an_idle_healthy_server_is_ok(history: str, diagnose: Diagnose) -> None:
    """Its own page and its pod's GPU are joined, and nothing is found."""
    replica = only(diagnose, history, "healthy")
    assert {"namespace": "healthy", "pod": "vllm-0", "instance": "healthy.vllm-0:8000", "job": "vllm"} == replica[
        "subject"
    ]
    assert ["ok", "ok", "ok", "unknown"] == statuses(replica, *LEAKS)
    assert ("ok", 151, 32768) == (
        replica["worst"],
        replica["window"]["samples"],
        replica["server"]["max_model_len_tokens"],
    )
    assert {"GPU-healthy"} == {line["uuid"] for line in replica["ledger"]}


def test_the_worst_replica_comes_first(history: str, diagnose: Diagnose) -> None:
    """Of two servers on one node each has the GPU that its exporter says its pod has."""
    document = whole(diagnose, history, '{namespace="leak"}')
    assert ["vllm-1", "vllm-0"] == [one["subject"]["pod"] for one in document["replicas"]]
    assert ["fault", "ok"] == [one["worst"] for one in document["replicas"]]
    assert {"fault": 1, "suspect": 0, "unknown": 0, "ok": 1} == document["fleet"]["by_worst"]


@pytest.mark.parametrize(
    ("namespace", "expected"),
    [
        pytest.param("kv-leak", ["fault", "unknown", "unknown", "unknown"], id="a block stays held"),
        # No request asked the cache of media, which the engine counts: nothing else of the host may grow.
        pytest.param("own", ["ok", "fault", "ok", "fault"], id="kvdiag's own names, torch and host grow"),
        pytest.param("mixed", ["ok", "fault", "unknown", "unknown"], id="intervals of 15 and 60 seconds"),
        pytest.param("restart", ["ok", "ok", "ok", "unknown"], id="a restart under another address"),
        pytest.param("twice", ["ok", "unknown", "unknown", "unknown"], id="two jobs scrape it"),
        pytest.param("renamed", ["ok", "unknown", "unknown", "unknown"], id="upgraded from 0.9"),
        pytest.param("old", ["ok", "unknown", "unknown", "unknown"], id="0.9 counts its null block"),
        pytest.param("resized", ["ok", "unknown", "unknown", "unknown"], id="a pool of another size before"),
        # vLLM's processor caches may take 8 GiB of a container.
        pytest.param("cluster", ["ok", "ok", "ok", "suspect"], id="cAdvisor and kube-state-metrics"),
        pytest.param("two-engines", ["fault", "unknown", "unknown", "unknown"], id="two engines"),
    ],
)
def test_every_history_is_read(history: str, diagnose: Diagnose, namespace: str, expected: list[str]) -> None:
    """What stands in it is found, and what does not is not."""
    assert expected == statuses(only(diagnose, history, namespace), *LEAKS)


@pytest.mark.parametrize("namespace", ["restart", "resized"])
def test_each_life_has_a_verdict(history: str, diagnose: Diagnose, namespace: str) -> None:
    """Before a restart and after it, also where the pool had another size before."""
    lives = only(diagnose, history, namespace)["lives"]
    assert [False, True] == [one["end_seconds"] is None for one in lives]
    assert lives[0]["end_seconds"] < lives[1]["start_seconds"]


def test_a_trace_of_the_same_readings_is_judged_alike(history: str, diagnose: Diagnose, tmp_path: Path) -> None:
    """One Timeline, one Diagnosis: the feed that made it does not matter."""
    # kvdiag's own metrics of a server, as a trace.
    timeline = watched(kvdiag_part, leak_mb_per_hour=2000.0)
    with TraceWriter(tmp_path / "trace.jsonl", FACTS) as trace:
        for sample in timeline.samples:
            trace.add(sample)

    recorded = json.loads(diagnose(str(tmp_path / "trace.jsonl"), "--output", "json").stdout)
    replica = only(diagnose, history, "own")

    def told(findings: list[dict[str, Any]]) -> list[tuple[str, str, Any]]:
        figures = ("growth_per_hour", "p_drift", "growth_of_the_floor", "blocks_at_last_idle")
        return [
            (one["id"], one["status"], [each["value"] for each in one["evidence"] if each["name"] in figures])
            for one in findings
            if one["id"].startswith("leak.")
        ]

    assert told(recorded["findings"]) == told(replica["findings"])
    assert recorded["window"] == replica["window"]


def test_what_torch_gave_up_on_is_seen_in_any_feed(history: str, diagnose: Diagnose, tmp_path: Path) -> None:
    """Cache flushes and out-of-memory counts give the same verdict from a trace as from kvdiag's metrics."""
    with TraceWriter(tmp_path / "trace.jsonl", FACTS) as trace:
        for sample in fragmented_timeline().samples:
            trace.add(sample)
    recorded = json.loads(diagnose(str(tmp_path / "trace.jsonl"), "--output", "json").stdout)
    replica = only(diagnose, history, "fragmented")

    def told(findings: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
        asked = ("fragmentation.allocator", "spike.activation")
        return [(one["id"], one["status"], one["summary"]) for one in findings if one["id"] in asked]

    assert ["suspect", "suspect"] == [status for _, status, _ in told(replica["findings"])]
    assert told(recorded["findings"]) == told(replica["findings"])


def test_what_may_be_of_two_servers_is_of_neither(history: str, diagnose: Diagnose) -> None:
    """A GPU without a pod label on a host of two servers is a subject of its own, and a gap names both servers."""
    document = whole(diagnose, history, '{rack="shared"}')
    assert 3 == len(document["replicas"])
    assert [containing("GPU shared", "host-2:8000, host-2:8001")] == [gap["reason"] for gap in document["gaps"]]
    alone = next(one for one in document["replicas"] if "UUID" in one["subject"])
    assert ["unknown", "ok"] == statuses(alone, "leak.kv_blocks", "leak.device_non_torch")
    for server in (one for one in document["replicas"] if one is not alone):
        assert ["ok", "unknown"] == statuses(server, "leak.kv_blocks", "leak.device_non_torch")
        assert "assigned to none" in reasons(server)


def test_a_gpu_that_two_pods_have_at_once_accuses_neither(history: str, diagnose: Diagnose) -> None:
    """For a time-sliced GPU the exporter names every pod without a split of its bytes, so leaks are unknown."""
    document = whole(diagnose, history, '{namespace="sliced"}')
    servers = [one for one in document["replicas"] if "UUID" not in one["subject"]]
    assert 2 == len(servers)
    for one in servers:
        assert ["unknown", "unknown"] == statuses(one, "leak.device_torch", "leak.device_non_torch")
        assert "sliced/vllm-0, sliced/vllm-1" in reasons(one)
    assert ["suspect"] == [one["worst"] for one in document["replicas"] if one not in servers]


def test_a_gpu_that_changed_hands_stays_with_each_pod(history: str, diagnose: Diagnose) -> None:
    """A GPU on which one pod replaced another is not shared: each pod keeps its own interval."""
    document = whole(diagnose, history, '{namespace="handed"}')
    found = {one["subject"]["pod"]: statuses(one, "leak.device_torch") for one in document["replicas"]}
    assert {"vllm-0": ["fault"], "vllm-1": ["unknown"]} == found
    assert "is shared by" not in str(document)


def test_one_server_on_a_host_has_its_gpu(history: str, diagnose: Diagnose) -> None:
    """nvidia_gpu_exporter names no pod; the host is enough where one server is there."""
    document = whole(diagnose, history, '{rack="one"}')
    assert [["ok", "fault"]] == [statuses(one, "leak.kv_blocks", "leak.device_torch") for one in document["replicas"]]


def test_gpus_without_a_server_are_judged(history: str, diagnose: Diagnose) -> None:
    """With DCGM alone each GPU is a subject, and no server is reported as healthy."""
    replicas = whole(diagnose, history, '{namespace="gpus"}')["replicas"]
    assert ["GPU-alone-1", "GPU-alone-0"] == [one["subject"]["UUID"] for one in replicas]
    assert ["suspect", "unknown"] == [one["worst"] for one in replicas]


def test_a_pod_without_a_page_is_judged_by_what_is_there(history: str, diagnose: Diagnose) -> None:
    """DCGM and cAdvisor: a subject by its pod's labels, its GPU and host judged, and its pool unknown."""
    replicas = whole(diagnose, history, '{namespace="pageless"}')["replicas"]
    found = {one["subject"]["pod"]: one for one in replicas}
    assert {"server-0": {"namespace": "pageless", "pod": "server-0"}} == {"server-0": found["server-0"]["subject"]}
    assert ["unknown", "fault", "unknown", "ok"] == statuses(found["server-0"], *LEAKS)
    assert ["unknown", "ok", "ok", "ok"] == statuses(found["server-1"], *LEAKS)
    assert ["sglang", "sglang"] == [one["server"]["engine"] for one in replicas]
    assert "metrics are not scraped" in reasons(replicas[0])
    assert 2 == len(replicas)


def test_a_node_tells_version_limit_and_container(history: str, diagnose: Diagnose) -> None:
    """The image's tag is the version, and a GPU that the exporter gives to no pod is not the server's."""
    replica = only(diagnose, history, "cluster")
    assert "0.11.0" == replica["server"]["engine_version"]
    host = next(one for one in replica["findings"] if one["id"] == "leak.host")
    assert 0 < next(one["value"] for one in host["evidence"] if one["name"] == "room") < 100 * 2**30
    assert {"GPU-cluster"} == {line["uuid"] for line in replica["ledger"]}


def test_a_server_that_stopped_answering_is_unknown(history: str, diagnose: Diagnose) -> None:
    """`up` says that its scrape fails: what was ok before is not called well."""
    replica = only(diagnose, history, "down")
    assert "unknown" == replica["worst"]
    assert "up is 0" in reasons(replica)


def test_what_cannot_be_is_left_out_and_said(history: str, diagnose: Diagnose) -> None:
    """NaN, infinite, negative and impossibly large values are dropped, and gaps name them."""
    replica = only(diagnose, history, "impossible")
    assert ("unknown", 148) == (replica["worst"], replica["window"]["samples"])
    for samples in ("infinite", "impossible"):
        assert f"{samples} samples of vllm:kv_cache_usage_perc" in reasons(replica)


@pytest.mark.parametrize(
    ("namespace", "reason"),
    [
        pytest.param("twice", "two jobs", id="duplicates"),
    ],
)
def test_what_was_left_out_is_said(history: str, diagnose: Diagnose, namespace: str, reason: str) -> None:
    """Each choice between duplicate series is a gap of its replica."""
    assert reason in reasons(only(diagnose, history, namespace))


def test_the_whole_fleet_meets_the_schema(history: str) -> None:
    """Every world at once, read by several processes, comes out as the committed schema says."""
    said = kvdiag("diagnose", "--prometheus", history, "--end", str(END_SECONDS), "--output", "json")
    document = said.document
    assert [] == [error.message for error in VALIDATOR.iter_errors(document)]
    assert len(document["replicas"]) > len(WORLDS)
    assert (2, "fault") == (said.code, document["worst"])
    order = ["fault", "suspect", "unknown", "ok"]
    ranks = [order.index(one["worst"]) for one in document["replicas"]]
    assert sorted(ranks) == ranks


def test_the_text_fits_a_terminal(history: str, diagnose: Diagnose) -> None:
    """A table of the replicas and the worst one in full, 80 columns wide."""
    said = diagnose("--prometheus", history, "--match", '{namespace="leak"}')
    lines = said.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "FAULT  2 replicas: 1 fault, 1 ok" == lines[0]
    assert any(line.split()[:2] == ["FAULT", "leak/vllm-1"] for line in lines)
    assert "In full: leak/vllm-1" in lines


def test_nobody_there_is_one_clear_line(history: str, diagnose: Diagnose) -> None:
    """A selector that matches nothing says so, and exits with 3."""
    said = diagnose("--prometheus", history, "--match", '{namespace="nobody"}')
    assert (3, "", 1) == (said.code, said.stdout, said.stderr.count("\n"))
    assert '{namespace="nobody"}' in said.stderr


def test_a_refused_selector_is_one_clear_line(history: str, diagnose: Diagnose) -> None:
    """A selector that only Prometheus can reject is one line on stderr with the server's error."""
    said = diagnose("--prometheus", history, "--match", '{namespace=~"("}')
    assert (3, "", 1) == (said.code, said.stdout, said.stderr.count("\n"))
    assert "query rejected" in said.stderr
    assert "missing closing )" in said.stderr


def test_llamacpp_shows_growth_of_memory(history: str, diagnose: Diagnose) -> None:
    """Its metrics have no pool: a growing device is the server's, without torch; a growing host may be its cache."""
    found = {one["subject"]["pod"]: one for one in whole(diagnose, history, '{namespace="llamacpp"}')["replicas"]}
    assert [["unknown", "ok", "ok", "ok"]] == [statuses(found["llama-0"], *LEAKS)]
    assert ["unknown", "ok", "ok", "suspect"] == statuses(found["llama-1"], *LEAKS)
    assert ["unknown", "ok", "fault", "ok"] == statuses(found["llama-2"], *LEAKS)
    assert "kvdiag serve" in reasons(found["llama-0"])


def test_trtllm_s_late_gauges_bound_a_leak(history: str, diagnose: Diagnose) -> None:
    """The lowest blocks of its requests' ends are low on the healthy server, and rise on the other at equal load."""
    found = {one["subject"]["pod"]: one for one in whole(diagnose, history, '{namespace="trtllm"}')["replicas"]}
    assert ["ok"] == statuses(found["trt-healthy"], LEAKS[0])
    assert ["suspect"] == statuses(found["trt-leak"], LEAKS[0])
