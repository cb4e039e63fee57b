"""The example for Alertmanager: valid, and every alert reaches whom it should."""

import re
from typing import Any

import pytest
import yaml

from tests.integration.alerts.rules import FOLDER, alerts
from tests.integration.alerts.tools import amtool

ALERTS = [pytest.param(rule, id=f"{rule['alert']}-{rule['labels']['severity']}") for rule in alerts()]


def test_amtool_takes_the_example() -> None:
    """The example for Alertmanager is valid."""
    done = amtool("check-config", FOLDER / "alertmanager.example.yaml")
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALERTS)
def test_the_example_sends_each_severity_to_its_own(rule: dict[str, Any]) -> None:
    """A critical alert reaches the pager, a warning the tickets, and an info is dropped."""
    receiver = {"critical": "pager", "warning": "tickets", "info": "null"}[rule["labels"]["severity"]]
    labels = [f"alertname={rule['alert']}", f"severity={rule['labels']['severity']}", "pod=vllm-0"]
    config = f"--config.file={FOLDER / 'alertmanager.example.yaml'}"
    done = amtool("config", "routes", "test", config, f"--verify.receivers={receiver}", *labels)
    assert 0 == done.returncode, done.stdout + done.stderr


def test_the_example_inhibits_alerts_that_there_are() -> None:
    """Each pattern of an inhibition matches an alert, and a warning is inhibited by its own critical one."""
    config = yaml.safe_load((FOLDER / "alertmanager.example.yaml").read_text())
    names = {rule["alert"] for rule in alerts()}
    patterns = [
        matcher.partition("alertname")[2].strip(' =~"')
        for rule in config["inhibit_rules"]
        for matcher in (*rule["source_matchers"], *rule["target_matchers"])
        if matcher.startswith("alertname")
    ]
    assert all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)
    assert {"alertname", "instance", "gpu", "engine", "id"} <= set(config["inhibit_rules"][0]["equal"])


@pytest.mark.parametrize("alert", ["KvdiagFleetReplica", "KvdiagFleetVersion"])
@pytest.mark.parametrize(("severity", "receiver"), [("critical", "pager"), ("warning", "tickets")])
def test_a_version_and_its_replicas_are_a_notification_each(alert: str, severity: str, receiver: str) -> None:
    """Grouped by version and verdict; other alerts by their pods."""
    config = FOLDER / "alertmanager.example.yaml"
    routes = [
        one
        for one in yaml.safe_load(config.read_text())["route"]["routes"]
        if {f'severity = "{severity}"', 'alertname =~ "KvdiagFleet(Replica|Version)"'} == set(one["matchers"])
    ]
    assert [["alertname", "engine", "model_name", "version", "id"]] == [one["group_by"] for one in routes]
    labels = [f"alertname={alert}", f"severity={severity}", "pod=vllm-0"]
    done = amtool("config", "routes", "test", f"--config.file={config}", f"--verify.receivers={receiver}", *labels)
    assert 0 == done.returncode, done.stdout + done.stderr
