"""The shipped rules as values, and how they are wrapped for the Prometheus operator.

`python -m tests.integration.alerts.rules` regenerates alerts/prometheusrule.yaml.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[3] / "alerts"
FILES = (FOLDER / "recording-rules.yaml", FOLDER / "alerting-rules.yaml")
WRAPPED = FOLDER / "prometheusrule.yaml"

HEADER = """# recording-rules.yaml and alerting-rules.yaml for the Prometheus operator; made of them, do not edit.
# Set `metadata.labels` to what your Prometheus' `ruleSelector` asks for.
"""


@cache
def groups() -> list[dict[str, Any]]:
    """Every rule group, those that record first."""
    return [group for file in FILES for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]]


def alerts() -> list[dict[str, Any]]:
    """Every alerting rule."""
    return [rule for group in groups() for rule in group["rules"] if "alert" in rule]


def records() -> list[dict[str, Any]]:
    """Every recording rule."""
    return [rule for group in groups() for rule in group["rules"] if "record" in rule]


def prometheus_rule() -> dict[str, Any]:
    """The same rules as an object of the Prometheus operator."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvdiag", "labels": {"app.kubernetes.io/name": "kvdiag"}},
        "spec": {"groups": groups()},
    }


class _Written(yaml.SafeDumper):
    """Nothing by reference: each alert stands whole."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def wrapped_text() -> str:
    """What alerts/prometheusrule.yaml holds."""
    return HEADER + yaml.dump(prometheus_rule(), Dumper=_Written, sort_keys=False, width=4096, allow_unicode=True)


if __name__ == "__main__":
    WRAPPED.write_text(wrapped_text(), encoding="utf-8")
