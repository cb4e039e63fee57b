"""The alerting rules and runbooks that kvdiag ships: in the package, or in a checkout next to it."""

import re
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from kvdiag.diagnosis.knowledge import KNOWLEDGE

BASE = re.compile(r"https?://(?:\{\{ \$labels\.instance \}\}|[^\s#{}/])[^\s#{}]*")
"""What a link can begin with in a rule file: an address, or the scraped one with a scheme and path of its own."""


def _folder() -> Traversable:
    packaged = resources.files("kvdiag") / "alerts"
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "alerts"


def runbooks() -> Mapping[str, Traversable]:
    """Every runbook's file by its id: a verdict, or `alert.NAME` for alerts without one; `README` is their index."""
    return {file.name.removesuffix(".md"): file for file in (_folder() / "runbooks").iterdir()}


def runbooks_of(alert: str) -> list[str]:
    """The ids of the runbooks that an alert links to; none where there is no alert of that name."""
    found: set[str] = set()
    for rule in rules(operator=True).split("- alert: ")[1:]:
        name, _, rest = rule.partition("\n")
        linked = re.search(r"/runbooks/(\S+)\.md\n", rest)
        if name.lower() != alert.lower() or (linked is None and "/runbooks/{{ $labels.id }}" not in rest):
            continue
        if linked:
            found.add(linked[1])
        else:
            # An expression without ids is about every verdict.
            chosen = re.search(r'\bid([=!]~?)"([^"]+)"', rest.replace(r"\\", "\\"))
            sign, ids = chosen.groups() if chosen else ("=~", ".*")
            found |= {one for one in KNOWLEDGE if bool(re.fullmatch(ids, one)) == (sign != "!~")}
    return sorted(found)


def rules(*, operator: bool) -> str:
    """All rules as one file for Prometheus, or as the object of its operator."""
    if operator:
        return (_folder() / "prometheusrule.yaml").read_text(encoding="utf-8")
    texts = [(_folder() / f"{name}-rules.yaml").read_text(encoding="utf-8") for name in ("recording", "alerting")]
    comments, _, groups = texts[1].partition("\ngroups:\n")
    return f"{comments}\n{texts[0]}\n{groups}"


def with_links(text: str, runbook_base: str | None, dashboard_base: str | None) -> str:
    """The rules with their links to these addresses; `None` leaves them to kvdiag's own pages."""
    if runbook_base is not None:
        text = re.sub(r"(?m)^( *runbook_url: ).*/runbooks/", lambda link: f"{link[1]}{runbook_base.rstrip('/')}/", text)
    if dashboard_base is not None:
        grafana = f"{dashboard_base.rstrip('/')}/d/kvdiag"
        text = re.sub(r"(?m)^( *dashboard_url: ).*$", lambda link: f"{link[1]}{grafana}", text)
    return text
