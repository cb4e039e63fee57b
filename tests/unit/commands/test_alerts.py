"""`kvdiag alerts`: the shipped rules, and where their links lead."""

import pytest
import yaml

from tests.integration.alerts.rules import alerts, groups, prometheus_rule
from tests.unit.commands.bad_input.refusals import call as kvdiag


def links(text: str, name: str) -> list[str]:
    """The links of a name in printed rules, in their order."""
    printed = yaml.safe_load(text)
    rules = [rule for group in printed.get("spec", printed)["groups"] for rule in group["rules"] if "alert" in rule]
    return [rule["annotations"][name] for rule in rules]


def test_rules_are_the_shipped_ones() -> None:
    """One file holds what the two files hold, and the operator's object is the shipped one."""
    assert groups() == yaml.safe_load(kvdiag("alerts").stdout)["groups"]
    assert prometheus_rule() == yaml.safe_load(kvdiag("alerts", "--operator").stdout)


@pytest.mark.parametrize("form", [(), ("--operator",)], ids=["file", "operator"])
def test_links_are_set_in_one_place(form: tuple[str, ...]) -> None:
    """Every runbook and every dashboard is at the given addresses, and nothing else is changed."""
    arguments = ("--runbook-base", "https://wiki.example/kv/", "--dashboard-base", "https://grafana.example")
    printed = kvdiag("alerts", *form, *arguments).stdout
    ids = [rule["annotations"]["runbook_url"].rpartition("/runbooks/")[2] for rule in alerts()]
    assert [f"https://wiki.example/kv/{name}" for name in ids] == links(printed, "runbook_url")
    assert {"https://grafana.example/d/kvdiag"} == set(links(printed, "dashboard_url"))
    assert links(kvdiag("alerts").stdout, "summary") == links(printed, "summary")


def test_a_daemon_behind_tls_is_linked_by_https() -> None:
    """The scraped address may stand in the base."""
    printed = kvdiag("alerts", "--runbook-base", "https://{{ $labels.instance }}/runbooks").stdout
    folders = {url.rpartition("/")[0] for url in links(printed, "runbook_url")}
    assert {"https://{{ $labels.instance }}/runbooks"} == folders


@pytest.mark.parametrize("base", ["wiki.example", "https://a b", "https://x/\n- evil", "https://x#y", ""])
def test_a_base_that_is_no_address_is_refused(base: str) -> None:
    """What would break the rule file is not written into it."""
    assert 3 == kvdiag("alerts", "--runbook-base", base).code
