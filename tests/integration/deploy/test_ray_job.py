"""The RayJob: its pods are valid, its command exists, and its image has the Ray that is locked."""

import re
import shlex
import tomllib

import pytest

from tests.integration.deploy.manifests import DEPLOY, ROOT, Manifest, documents, option
from tests.integration.deploy.test_pods import NEWEST, OLDEST, problem
from tests.integration.docs.test_runbooks import parse

JOB: Manifest = documents("ray/rayjob.yaml")[0]["spec"]
CLUSTER: Manifest = JOB["rayClusterSpec"]
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_its_pods_are_valid_and_may_do_nothing(version: str) -> None:
    """Head and workers: no root, no capability, no token."""
    for group in GROUPS:
        spec = group["template"]["spec"]
        assert problem({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, version) is None
        assert (True, False) == (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"])
        assert {"drop": ["ALL"]} == spec["containers"][0]["securityContext"]["capabilities"]


def test_its_command_is_understood_and_a_verdict_is_no_failure() -> None:
    """Without the part that turns exit codes 1 and 2 into success."""
    words = shlex.split(JOB["entrypoint"])
    end = words.index("||")
    parse(words[1:end])
    assert "auto" == option(words, "ray")
    assert ["[", "$?", "-lt", "3", "]"] == words[end + 1 :]


def test_ray_is_the_locked_one() -> None:
    """In the lock, the manifest and the image: a driver needs the Ray of its cluster."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    (locked,) = (one["version"] for one in packages if one["name"] == "ray")
    image = re.findall(r"RAY_IMAGE=rayproject/ray:([0-9.]+)-", (DEPLOY / "ray" / "Dockerfile").read_text("utf-8"))
    assert [locked] * 2 == [CLUSTER["rayVersion"], *image]
