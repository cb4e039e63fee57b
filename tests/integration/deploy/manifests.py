"""The manifests of deploy/ as values: every pod that they make, and what they ask of others."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"

Manifest = dict[str, Any]

LISTS_BY: Mapping[str, str] = MappingProxyType(
    {
        "containers": "name",
        "initContainers": "name",
        "volumes": "name",
        "env": "name",
        "volumeMounts": "mountPath",
        "ports": "containerPort",
        "resourceClaims": "name",
    }
)
"""The lists of a pod that a strategic merge patch joins, by which key (x-kubernetes-patch-merge-key of its API)."""


def documents(path: Path | str) -> list[Manifest]:
    """The documents of a YAML file, by its path or its path in deploy/."""
    return [found for found in yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8")) if found]


def manifests() -> Iterator[Path]:
    """Every YAML file of deploy/."""
    yield from sorted(DEPLOY.rglob("*.yaml"))


def merged(value: Any, patch: Any, key: str = "") -> Any:
    """A value under a strategic merge patch, as far as pods need it: kustomize puts first what a patch names."""
    if isinstance(patch, dict):
        result = dict(value) if isinstance(value, dict) else {}
        for name, part in patch.items():
            if part is None:
                result.pop(name, None)
            else:
                result[name] = merged(result.get(name), part, name)
        return result
    if isinstance(patch, list) and isinstance(value, list) and key in LISTS_BY:
        by = LISTS_BY[key]
        known = {item[by]: item for item in value}
        brought = [merged(known.get(item[by]), item) for item in patch]
        return [*brought, *(item for item in value if item[by] not in {one[by] for one in patch})]
    return copy.deepcopy(patch)


def patched(manifest: Manifest, component: str) -> Manifest:
    """A workload as a component of deploy/kustomize, and those that it is made of, make it."""
    settings = documents(f"kustomize/{component}/kustomization.yaml")[0]
    for other in settings.get("components", ()):
        manifest = patched(manifest, str(other).removeprefix("../"))
    for patch in settings["patches"]:
        name, _, value = patch["target"]["labelSelector"].partition("=")
        kind = patch["target"]["kind"]
        if manifest["kind"] == kind and manifest["metadata"].get("labels", {}).get(name) == value:
            brought = documents(f"kustomize/{component}/{patch['path']}")[0]
            manifest = merged(manifest, {**brought, "metadata": {}})
    return manifest


def built(*components: str) -> Manifest:
    """The sample Deployment with components on it."""
    manifest = documents("kustomize/base/deployment.yaml")[0]
    for component in components:
        manifest = patched(manifest, component)
    return manifest


def _template(manifest: Manifest) -> Manifest:
    found: Manifest = manifest["spec"]["template"]["spec"]
    return found


def _of_vllm_chart() -> Manifest:
    values = documents("charts/vllm-values.yaml")[0]
    # templates/deployment.yaml of the chart: the server's container, and the class where a GPU is asked for.
    server = {"name": "vllm", "image": "vllm/vllm-openai:v0.32.0"}
    return {
        "runtimeClassName": "nvidia",
        "initContainers": values["extraInit"]["initContainers"],
        "containers": [server],
    }


def _of_llm_d() -> Manifest:
    decode = documents("charts/llm-d-values.yaml")[0]["decode"]
    own = {"modelCommand", "mountModelVolume"}
    containers = [
        {name: part for name, part in container.items() if name not in own} for container in decode["containers"]
    ]
    return {
        **decode["extraConfig"],
        "initContainers": decode["initContainers"],
        "containers": containers,
        "volumes": decode["volumes"],
    }


def _of_kserve() -> Manifest:
    predictor: Manifest = dict(documents("charts/kserve-inferenceservice.yaml")[0]["spec"]["predictor"])
    return {name: part for name, part in predictor.items() if name not in {"labels", "minReplicas"}}


def _of_kserve_llm() -> Manifest:
    template: Manifest = copy.deepcopy(documents("charts/kserve-llminferenceservice.yaml")[0]["spec"]["template"])
    # Merged into KServe's own template, which has the image.
    template["containers"][0]["image"] = "ghcr.io/llm-d/llm-d-cuda:v0.9.0"
    return template


PODS: Mapping[str, Manifest] = MappingProxyType(
    {
        "component": _template(built("component")),
        "component with gpu-dra": _template(built("component", "gpu-dra")),
        "component with gpu-runtime": _template(built("component", "gpu-runtime")),
        "vllm chart": _of_vllm_chart(),
        "llm-d": _of_llm_d(),
        "kserve": _of_kserve(),
        "kserve llm": _of_kserve_llm(),
        "daemonset": _template(documents("kubernetes/daemonset.yaml")[1]),
    }
)
"""The specification of every pod, by what makes it."""

SIDECARS = tuple(name for name in PODS if name != "daemonset")
WITH_AGENT = tuple(name for name in SIDECARS if name != "vllm chart")


def container(pod: Manifest, name: str) -> Manifest:
    """A container of a pod, of whichever kind."""
    return next(one for one in (*pod.get("initContainers", ()), *pod["containers"]) if one["name"] == name)


def server(pod: Manifest) -> Manifest:
    """The server's container, which is the first."""
    found: Manifest = pod["containers"][0]
    return found


def option(arguments: list[str], name: str) -> str:
    """The value of `--name=value` or `--name value` on a command line."""
    for at, argument in enumerate(arguments):
        if argument.startswith(f"--{name}="):
            return argument.partition("=")[2]
        if argument == f"--{name}":
            return arguments[at + 1]
    raise LookupError(f"--{name} is not among {arguments}")
