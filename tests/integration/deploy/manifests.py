"""The manifests of deploy/ as values: every pod that they make, and what they ask of others."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "kvdiag"
BUILT = ROOT / "tests" / "golden" / "deploy"
"""What helm and kubectl make of deploy/: the tests of the chart and of Kustomize compare it."""

NODE_VIEW = BUILT / "node.yaml"
"""The chart by default, without rules and boards."""

COMPONENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "component": ("component",),
        "component with gpu-dra": ("component", "gpu-dra"),
        "component with gpu-runtime": ("component", "gpu-runtime"),
    }
)
"""Kustomize's components that are put on the sample Deployment."""

Manifest = dict[str, Any]


def documents(path: Path | str) -> list[Manifest]:
    """The documents of a YAML file, by its path or its path in deploy/."""
    return [found for found in yaml.safe_load_all((DEPLOY / path).read_text(encoding="utf-8")) if found]


def node_view(kind: str) -> Manifest:
    """An object of the node view by its kind."""
    return next(found for found in documents(NODE_VIEW) if kind == found["kind"])


def manifests() -> Iterator[Path]:
    """Every YAML file of deploy/, of the chart what helm makes of it."""
    yield from (path for path in sorted(DEPLOY.rglob("*.yaml")) if CHART not in path.parents)
    yield NODE_VIEW


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
    template: Manifest = documents("charts/kserve-llminferenceservice.yaml")[0]["spec"]["template"]
    # Merged into KServe's own template, which has the image.
    template["containers"][0]["image"] = "ghcr.io/llm-d/llm-d-cuda:v0.9.0"
    return template


PODS: Mapping[str, Manifest] = MappingProxyType(
    {
        **{name: _template(documents(BUILT / f"{name}.yaml")[0]) for name in COMPONENTS},
        "vllm chart": _of_vllm_chart(),
        "llm-d": _of_llm_d(),
        "kserve": _of_kserve(),
        "kserve llm": _of_kserve_llm(),
        "daemonset": _template(node_view("DaemonSet")),
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
