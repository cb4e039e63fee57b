"""Every pod that deploy/ makes: valid, hardened, no burden on the server, and its parts meet."""

from typing import Any

import kubernetes_validate
import pytest

import kvdiag
from kvdiag.commands.options.serve_options import LISTEN
from kvdiag.feeds.recording.segment_store import MAX_BYTES
from tests.integration.deploy.manifests import (
    PODS,
    SIDECARS,
    WITH_AGENT,
    Manifest,
    container,
    documents,
    node_view,
    option,
    server,
)

OLDEST, NEWEST = "1.33", "1.37"
"""Native sidecars are stable since the first; the second is the newest that the validator knows."""

CLAIMS_SINCE = "1.34"
"""resource.k8s.io/v1."""

PORT = int(LISTEN.rpartition(":")[2])
BUDGET_MIB = 64
"""Resident memory of `serve` with 8 GPUs and 24 hours of history (design, budgets)."""


def problem(manifest: Manifest, version: str) -> str | None:
    """Why this Kubernetes would refuse it, also for a field that it does not know."""
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", PODS)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_a_pod_is_valid(name: str, version: str) -> None:
    """The API server takes it, from the oldest version that has stable sidecars to the newest."""
    assert problem({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": PODS[name]}, version) is None


@pytest.mark.parametrize(
    ("path", "since"),
    [
        ("kubernetes/networkpolicy.yaml", OLDEST),
        ("kustomize/base/deployment.yaml", OLDEST),
        ("kustomize/base/service.yaml", OLDEST),
        ("kustomize/gpu-dra/claim.yaml", CLAIMS_SINCE),
    ],
)
def test_an_object_is_valid(path: str, since: str) -> None:
    """The pods and their companion objects are valid; operators' objects have schemas of their own."""
    found = [one for one in documents(path) if one["apiVersion"] != "monitoring.coreos.com/v1"]
    assert found
    assert {None} == {problem(manifest, version) for manifest in found for version in (since, NEWEST)}


def test_an_unknown_field_is_found() -> None:
    """The validator finds a field that is misspelt."""
    wrong = {**PODS["daemonset"], "restartPolcy": "Always"}
    told = problem({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": wrong}, NEWEST)
    assert told is not None
    assert "restartPolcy" in told


@pytest.mark.parametrize("name", SIDECARS)
def test_the_sidecar_holds_nothing_up(name: str) -> None:
    """It is a native sidecar whose state is not the pod's: no readiness, no startup probe; it asks for no GPU."""
    sidecar = container(PODS[name], "kvdiag")
    assert sidecar in PODS[name]["initContainers"]
    assert "Always" == sidecar["restartPolicy"]
    assert {"livenessProbe"} == {part for part in sidecar if part.endswith("Probe")}
    assert {"cpu", "memory"} == set(sidecar["resources"]["limits"])


@pytest.mark.parametrize("name", PODS)
def test_kvdiag_keeps_the_class_and_the_budget(name: str) -> None:
    """What it asks for is its limit, so that a Guaranteed pod stays one, and leaves its memory budget room."""
    for one in (one for one in _all(PODS[name]) if one["image"].startswith("kvdiag:")):
        resources = one["resources"]
        assert resources["limits"] == resources["requests"]
        assert BUDGET_MIB * 2 == int(resources["limits"]["memory"].removesuffix("Mi"))


@pytest.mark.parametrize("name", PODS)
def test_kvdiag_may_do_nothing(name: str) -> None:
    """No root, no capability, no writable root, nothing to escalate to; nothing of the host's namespaces."""
    pod = PODS[name]
    for one in (one for one in _all(pod) if one["image"].startswith("kvdiag:")):
        context = {**pod.get("securityContext", {}), **one["securityContext"]}
        assert (True, 65532, 65532) == (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"])
        assert not context["allowPrivilegeEscalation"]
        assert context["readOnlyRootFilesystem"]
        assert {"drop": ["ALL"]} == context["capabilities"]
        assert {"type": "RuntimeDefault"} == context["seccompProfile"]
        assert f"kvdiag:{kvdiag.__version__}" == one["image"]
    assert not {"hostPID", "hostNetwork", "hostIPC", "shareProcessNamespace"} & set(pod)


@pytest.mark.parametrize("name", PODS)
def test_ports_and_probes_meet(name: str) -> None:
    """It listens for others than itself on the port that is named, probed and scraped."""
    sidecar = container(PODS[name], "kvdiag")
    assert f"0.0.0.0:{PORT}" == option(sidecar["args"], "listen")
    assert [{"name": "kvdiag", "containerPort": PORT}] == sidecar["ports"]
    assert {"path": "/-/healthy", "port": "kvdiag"} == sidecar["livenessProbe"]["httpGet"]


@pytest.mark.parametrize("name", WITH_AGENT)
def test_the_agent_is_installed_found_and_read(name: str) -> None:
    """The server runs what the first container installed and cannot change it; kvdiag reads what it publishes."""
    pod = PODS[name]
    install, sidecar, engine = container(pod, "kvdiag-agent"), container(pod, "kvdiag"), server(pod)
    env = {one["name"]: one["value"] for one in engine["env"]}
    where = install["args"][-1]

    # The code is where the server's Python looks, and read-only there.
    assert ["agent", "install", where] == install["args"]
    assert where == env["PYTHONPATH"]
    assert _mount(install, where)["name"] == _mount(engine, where)["name"]
    assert _mount(engine, where)["readOnly"]
    # In any position, an init container that is no sidecar ends before the server starts.
    assert install in pod["initContainers"]
    assert "restartPolicy" not in install

    # What it publishes is on a volume of its own, in memory and bounded, in kvdiag's group.
    published = option(sidecar["args"], "agent-dir")
    assert published == env["KVDIAG_AGENT_DIR"]
    volume = _mount(engine, published)["name"]
    assert (volume, True) == (_mount(sidecar, published)["name"], _mount(sidecar, published)["readOnly"])
    assert volume != _mount(engine, where)["name"]
    assert {"medium": "Memory", "sizeLimit": "16Mi"} == _volumes(pod)[volume]["emptyDir"]
    assert 65532 == pod["securityContext"]["fsGroup"]
    assert "OnRootMismatch" == pod["securityContext"]["fsGroupChangePolicy"]


@pytest.mark.parametrize("name", [*WITH_AGENT, "daemonset"])
def test_what_is_recorded_has_room(name: str) -> None:
    """The recorder's folder is on a volume of kvdiag's own, which is larger than it gets."""
    pod = PODS[name]
    sidecar = container(pod, "kvdiag")
    mount = _mount(sidecar, option(sidecar["args"], "record-dir"))
    assert "readOnly" not in mount
    assert mount["name"] not in {
        other["name"] for other in server(pod).get("volumeMounts", ()) if pod["containers"] != [sidecar]
    }
    assert MAX_BYTES < int(_volumes(pod)[mount["name"]]["emptyDir"]["sizeLimit"].removesuffix("Mi")) * 2**20
    assert 65532 == pod["securityContext"]["fsGroup"]


@pytest.mark.parametrize("name", PODS)
def test_every_mount_has_a_volume(name: str) -> None:
    """No container mounts what the pod does not have (a chart's own volumes are the chart's)."""
    pod = PODS[name]
    assert {mount["name"] for one in _all(pod) for mount in one.get("volumeMounts", ())} <= set(_volumes(pod))


@pytest.mark.parametrize("name", WITH_AGENT)
def test_it_watches_where_the_server_listens(name: str) -> None:
    """The address is on the pod's loopback, and the port one that the server is started on, where the manifest says."""
    watching = container(PODS[name], "kvdiag")
    by_name = {one["name"]: one["value"] for one in watching.get("env", ())}
    url = by_name.get("KVDIAG_SERVE_URL") or option(watching["args"], "url")
    told = {port["containerPort"] for port in server(PODS[name]).get("ports", ())} or {8000}
    assert url in {f"http://127.0.0.1:{port}" for port in told}


def test_both_containers_have_the_claimed_gpu() -> None:
    """With gpu-dra the server and kvdiag share one claim, and the device plugin allocates no GPU in addition."""
    pod = PODS["component with gpu-dra"]
    claims = [one["resources"].get("claims") for one in (server(pod), container(pod, "kvdiag"))]
    assert [[{"name": "gpu"}]] * 2 == claims
    assert ["gpu"] == [claim["name"] for claim in pod["resourceClaims"]]
    assert "nvidia.com/gpu" not in {*server(pod)["resources"]["limits"], *server(pod)["resources"]["requests"]}
    template = documents("kustomize/gpu-dra/claim.yaml")[0]["metadata"]["name"]
    assert template == pod["resourceClaims"][0]["resourceClaimTemplateName"]


@pytest.mark.parametrize("name", ["component with gpu-runtime", "vllm chart", "daemonset"])
def test_the_management_container_asks_for_nvml_alone(name: str) -> None:
    """The third way: the runtime's class, every GPU, and of the driver only what NVML needs."""
    env = {one["name"]: one["value"] for one in container(PODS[name], "kvdiag")["env"]}
    driver = {variable: value for variable, value in env.items() if variable.startswith("NVIDIA_")}
    assert {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "utility"} == driver
    assert "nvidia" == PODS[name]["runtimeClassName"]


def test_the_policy_lets_the_server_be_reached() -> None:
    """A policy closes the pod's other ports, so it opens the server's to all and kvdiag's to the listed peers."""
    ingress = documents("kubernetes/networkpolicy.yaml")[0]["spec"]["ingress"]
    told = {port["port"]: "from" in rule for rule in ingress for port in rule["ports"]}
    assert {8000: False, PORT: True} == told


def test_only_prometheus_reaches_the_daemon_set() -> None:
    """It listens on every address of its pod without a password: a policy that comes with it selects that pod."""
    labels, policy = node_view("DaemonSet")["spec"]["template"]["metadata"]["labels"], node_view("NetworkPolicy")
    [rule] = policy["spec"]["ingress"]

    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    assert ["Ingress"] == policy["spec"]["policyTypes"]
    assert [PORT] == [port["port"] for port in rule["ports"]]
    assert rule["from"]


def _all(pod: Manifest) -> list[Any]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def _mount(one: Manifest, path: str) -> Manifest:
    found: Manifest = next(mount for mount in one["volumeMounts"] if mount["mountPath"] == path)
    return found


def _volumes(pod: Manifest) -> dict[str, Manifest]:
    return {volume["name"]: volume for volume in pod.get("volumes", ())}
