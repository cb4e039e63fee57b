"""The chart's values: a wrong one is refused by its name, and none that is taken ends the pod or is refused later."""

import json
import re
from collections.abc import Iterator
from typing import Any

import click
import pytest
import yaml
from jsonschema import Draft7Validator

from kvdiag.alert_files import BASE
from kvdiag.commands import serve
from kvdiag.commands.options.prometheus_options import PrometheusOptions
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.segment_store import MAX_BYTES
from tests.integration.deploy.chart import helm
from tests.integration.deploy.manifests import CHART, Manifest
from tests.integration.deploy.test_operators import SCHEMAS, problems
from tests.integration.deploy.test_pods import problem

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
FLEET = "fleet.prometheus=http://prometheus:9090"
POD_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/component")

WRONG: dict[str, list[Any]] = {
    "fullnameOverride": ["KVDIAG-kvdiag", "kvdiag.eu", "1-kvdiag", "kvdiag-", "kvdiag " * 9],
    "image.repository": ["registry.example/kvdiag:1", "Registry/KVDiag", "http://registry/kvdiag", "a b", ""],
    "image.tag": ["latest", ".1", "a" * 129, 0.1],
    "imagePullSecrets": [["registry"], [{"nmae": "registry"}], [{"name": ""}], [{"name": "My_Secret"}]],
    "links.runbookBase": ["https://", "https:///path", "{{ $value }}"],
    "node": [None],
    "node.runtimeClassName": ["Nvidia", "a: b"],
    "node.nodeSelector": [{"a b": "c"}, {"gpu": True}],
    "node.tolerations": [[{"key": "gpu", "operator": "Exist"}], [{"key": "gpu", "value": True}], [{"Key": "gpu"}]],
    "node.affinity": [{"nodeaffinity": {}}],
    "node.priorityClassName": ["High", "a\nb: c"],
    "node.podLabels": [*({name: "x"} for name in POD_LABELS), {"team": "a b"}, {"team": 1}, {"-": "x"}],
    "node.podAnnotations": [{"a b": "c"}, {"a/b/c": "d"}, {"a": 1}],
    "node.resources": [{"limits": {"memory": "128MB"}}, {"limits": {"memory": "128m"}}, {"limit": {}}],
    "node.recordingsSizeLimit": ["0Mi", "256Mi", "1GB", 320],
    "node.extraArgs": [["--listen=:1"], ["--bogus"], ["--workers=2"], ["--url", "http://vllm:8000"], ["-v"]],
    "node.extraEnv": [[{"name": "A", "value": 1}], [{"name": "a b"}], [{"name": "NVIDIA_VISIBLE_DEVICES"}]],
    "node.updateStrategy": [{"rollingUpdate": {"maxUnavailable": "ten"}}, {"type": "Recreate"}],
    "node.networkPolicy.from": [[], None, [{}], [{"namespaceselector": {}}]],
    "fleet.prometheus": [
        "http://",
        "http://:9090",
        "http://a:0",
        "http://a:65536",
        "https://me:secret@a",
        "http://a b",
    ],
    "fleet.match": ["namespace", '{a="b"', '{a="b" c="d"}', "{a='b'}", "up == 0"],
    "fleet.window": ["0h", "59s", "32d", "745h", "5w", "-1h", "1.5h", "24", None],
    "fleet.every": ["1s", "29s", "3601s", "61m", "2h", "0m", "1d", None],
    "fleet.tokenSecret": ["Token", "a/b", "."],
    "fleet.persistence.size": ["0Gi", "10Mi", "1G", None],
    "fleet.persistence.storageClassName": ["-", "Fast"],
    "fleet.extraArgs": [["--record-dir=/tmp"], ["--every=1m"], ["--agent-dir=/x"]],
    "fleet.podLabels": [{name: "x"} for name in POD_LABELS],
    "fleet.networkPolicy.from": [None],
    "monitors.interval": ["76s", "0s", "2m", "1m16s", "500ms", "1h", 15],
    "monitors.labels": [{"app.kubernetes.io/name": "x"}, {"helm.sh/chart": "x"}],
    "alerts.labels": [{"app.kubernetes.io/managed-by": "x"}],
    "dashboards.labels": [{"app.kubernetes.io/version": "x"}, {"grafana_dashboard": 1}],
    "dashboards.annotations": [{"grafana folder": "vLLM"}],
    "dashboards.namespace": ["Grafana", "a.b"],
}

RIGHT: list[dict[str, Any]] = [
    {"fullnameOverride": "kvdiag-eu", "node.runtimeClassName": "123", "node.priorityClassName": "1e3"},
    {"image.repository": "localhost:5000/a/b_c", "dashboards.namespace": "1234"},
    {"fleet.tokenSecret": "123", "fleet.persistence.existingClaim": "007", "fleet.priorityClassName": "true"},
    {"fleet.persistence.storageClassName": "0x1", "fleet.match": '{pod=~"a.*", namespace!="b\\"c"}'},
    {"node.podLabels": {"app.kubernetes.io/version": "1.0", "team": ""}, "node.affinity": {"podAffinity": {}}},
    {"node.tolerations": [{"operator": "Exists"}, {"key": "a/b", "value": "1", "effect": "NoExecute"}]},
    {"node.resources": {"requests": {"cpu": 0.2, "memory": 134217728}}, "imagePullSecrets": [{"name": "1"}]},
    {"fleet.extraEnv": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]},
    {"node.updateStrategy": {"type": "OnDelete"}, "monitors.interval": "75s", "node.recordingsSizeLimit": "300Mi"},
]
EMPTY = ("node.resources", "node.updateStrategy", "node.podLabels", "fleet.podAnnotations", "image.pullPolicy")
"""Values that may be deleted (`null`), as those of an installation that needs none."""


def made(*options: str, release: str = "kvdiag") -> list[Manifest]:
    """The objects, which each Kubernetes and the Prometheus operator take."""
    done = helm("template", release, CHART, f"--set={FLEET}", *options)
    assert 0 == done.returncode, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    for one in found:
        kind = one["kind"].lower()
        assert not (problems(kind, one) if (SCHEMAS / f"{kind}.json").exists() else problem(one, "1.33")), one
    return found


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused(path: str, value: Any) -> None:
    """By the path of the value, before anything is installed."""
    done = helm("template", CHART, f"--set-json={path}={json.dumps(value)}")
    assert 1 == done.returncode
    parent, _, name = path.rpartition(".")
    named = f"{parent}': missing property '{name}'" if value is None else path
    assert named.replace(".", "/") in done.stderr


@pytest.mark.parametrize("values", RIGHT, ids=lambda values: next(iter(values)))
def test_an_odd_value_is_taken(values: dict[str, Any]) -> None:
    """A name may look like a number or a truth value to YAML."""
    made(*(f"--set-json={path}={json.dumps(value)}" for path, value in values.items()))


@pytest.mark.parametrize("path", EMPTY)
def test_a_value_may_be_deleted(path: str) -> None:
    """`null` deletes a default."""
    made(f"--set-json={path}=null")


@pytest.mark.parametrize("release", ["123", "1.kvdiag", "my.llm", "a" * 53, "1" + "2.3" * 17])
def test_any_release_has_valid_names(release: str) -> None:
    """Helm takes releases whose name no Service can have, and names that are numbers to YAML."""
    for one in made("--namespace=123", release=release):
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", one["metadata"]["name"])
        assert one["kind"] != "Service" or len(one["metadata"]["name"]) <= 63
        assert "kvdiag" in one["metadata"]["name"]


def takes(value: Any, *path: str) -> bool:
    """Whether the schema takes a value at this place."""
    found = SCHEMA
    for name in path:
        found = found["properties"][name]
    return Draft7Validator({**found, "definitions": SCHEMA["definitions"]}).is_valid(value)


def durations() -> Iterator[str]:
    """Numbers around each bound, in each unit."""
    for unit in ("ms", "s", "m", "h", "d", "w"):
        yield from (f"{number}{unit}" for number in (*range(100), 599, 743, 744, 745, 3600, 3601, 9999, 2678400))


def cli_takes(name: str, value: str) -> bool:
    """Whether `kvdiag serve` starts with this value of an option."""
    option = next(one for one in serve.command.params if one.name == name)
    try:
        if name == "every":
            option.type.convert(value, option, None)
            return True
        values: dict[str, Any] = {"prometheus": "http://prometheus:9090", name: value}
        given = PrometheusOptions(**values)
        given.access(), given.matchers(), given.span(1.8e9)
    except (KvdiagError, click.UsageError):
        return False
    return True


@pytest.mark.parametrize("name", ["every", "window"])
def test_a_duration_is_taken_as_the_daemon_takes_it(name: str) -> None:
    """Both bounds are the daemon's; the chart has less than all ways to write a time."""
    taken = [one for one in durations() if takes(one, "fleet", name)]
    assert [] == [one for one in taken if not cli_takes(name, one)]
    bounds = {"every": ("30s", "3600s", "60m", "1h"), "window": ("60s", "1m", "1h", "744h", "31d", "4w")}
    assert set(bounds[name]) <= set(taken)
    whole = [one for one in durations() if re.fullmatch(r"[1-9]\d?[mhd]", one)]
    assert [one for one in whole if cli_takes(name, one)] == [one for one in whole if one in taken]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("prometheus", ["http://a", "https://a.b:65535/c?d=e", "http://[::1]:9090", "http://a_b/graph"]),
        ("match", ["", " ", "{}", '{a="b"}', 'a=~"b|c",', '{a="b", c!~"d{2}"}']),
    ],
)
def test_an_address_and_a_selector_are_taken_as_the_daemon_takes_them(name: str, right: list[str]) -> None:
    """The chart takes no password in an address, which everybody who may read the pod would have."""
    assert [] == [one for one in right if not (takes(one, "fleet", name) and cli_takes(name, one))]
    assert [] == [one for one in WRONG[f"fleet.{name}"] if takes(one, "fleet", name)]


def test_a_link_is_taken_as_the_command_takes_it() -> None:
    """`kvdiag alerts --runbook-base` has the same pattern."""
    for part in SCHEMA["properties"]["links"]["properties"].values():
        assert part["pattern"].replace("(\\{", "(?:\\{") == f"^({BASE.pattern})?$"


def test_the_recordings_fit_into_their_volume() -> None:
    """A pod that writes more than its limit is evicted."""
    assert MAX_BYTES < 300 << 20
    assert [takes(f"{size}Mi", "node", "recordingsSizeLimit") for size in (299, 300)] == [False, True]


def test_arguments_are_those_of_the_daemon() -> None:
    """Each option of `kvdiag serve` in the part that can use it, but those that the chart gives itself."""
    known = {one.opts[0].removeprefix("--") for one in serve.command.params if not getattr(one, "hidden", False)}
    chart = {"listen", "record-dir", "prometheus", "match", "window", "every"}
    parts = (SCHEMA["properties"][part]["properties"]["extraArgs"]["items"]["pattern"] for part in ("node", "fleet"))
    assert known - chart == {name for pattern in parts for name in re.findall(r"[a-z][a-z-]+", pattern)}
