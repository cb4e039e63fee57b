"""The real path from a server to the on-call pager: Prometheus with the shipped rules, Alertmanager with the shipped
example, and a webhook that keeps each message. Only durations are shorter.
"""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml

from tests.integration.alerts.rules import FILES, FOLDER
from tests.integration.prometheus.alertmanager import alerting
from tests.integration.prometheus.server import serving

ANSWER_SECONDS = 120.0

FASTER = 600.0
"""Ten minutes are one second; ranges within an expression stay as they are."""

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

PROMETHEUS = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 200ms}}
rule_files: [{rules}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["{alertmanager}"]}}]}}]}}
scrape_configs: {jobs}
"""

Job = dict[str, Any]
"""What Prometheus scrapes under one name."""


@dataclass(slots=True)
class Pager:
    """The messages that a webhook received, by path: `page` or `ticket`."""

    told: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"page": [], "ticket": []})

    def messages(self, path: str, status: str = "firing") -> list[list[dict[str, str]]]:
        """The labels of the alerts of each message there."""
        return [[alert["labels"] for alert in one["alerts"]] for one in self.told[path] if one["status"] == status]

    def alerts(self, path: str, status: str, name: str) -> list[dict[str, Any]]:
        """The alerts of a name in every message there, that were `firing` or `resolved`.

        Other alerts may fire and resolve meanwhile on a slow machine, for example when a scrape times out.
        """
        found = [alert for message in self.told[path] for alert in message["alerts"] if alert["status"] == status]
        return [alert for alert in found if alert["labels"]["alertname"] == name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The servers under way."""

    prometheus: str
    alertmanager: str
    pager: Pager

    def value(self, query: str) -> float | None:
        """What Prometheus says now; `None` where there is no series."""
        result = _json(f"{self.prometheus}/api/v1/query?{urlencode({'query': query})}")["data"]["result"]
        return float(result[0]["value"][1]) if result else None

    def label(self, query: str, label: str) -> str:
        """A label of the first series that there is now."""
        result = _json(f"{self.prometheus}/api/v1/query?{urlencode({'query': query})}")["data"]["result"]
        return str(result[0]["metric"][label])

    def inhibited(self, name: str, severity: str) -> bool:
        """Whether Alertmanager has this alert, and keeps it back because of another."""
        return any(
            alert["labels"]["alertname"] == name
            and alert["labels"]["severity"] == severity
            and alert["status"]["state"] == "suppressed"
            and alert["status"]["inhibitedBy"]
            for alert in _json(f"{self.alertmanager}/api/v2/alerts")
        )


def _json(url: str) -> Any:
    with urlopen(url, timeout=ANSWER_SECONDS) as answer:
        return json.load(answer)


def shorter(duration: str) -> str:
    """A duration of the shipped files, so much shorter."""
    number, unit = float(duration[:-1]), duration[-1]
    return f"{max(round(number * UNITS[unit] * 1000.0 / FASTER), 1)}ms"


def shorter_rules(text: str) -> str:
    """Rules whose alerts wait for less, and are otherwise what is shipped."""
    return re.sub(r"(?m)^(\s+(?:for|keep_firing_for): )(\w+)$", lambda found: found[1] + shorter(found[2]), text)


def shorter_routes(text: str, webhook: str) -> str:
    """The shipped example, with a webhook that there is, and a tenth of the time in which alerts are gathered."""
    config = yaml.safe_load(text)
    for route in (config["route"], *config["route"]["routes"]):
        route["group_wait"] = {"30s": "3s", "10s": "1s"}[route.get("group_wait", "30s")]
        route["group_interval"] = "1s"
    for receiver in config["receivers"]:
        for hook in receiver.get("webhook_configs", ()):
            hook["url"] = hook["url"].replace("http://127.0.0.1:9099", webhook)
    return yaml.safe_dump(config)


def job(name: str, url: str, *, pod: str, **more: object) -> Job:
    """One target with a pod's labels."""
    labels = {"namespace": "llm", "pod": pod}
    return {
        "job_name": name,
        "static_configs": [{"targets": [url.removeprefix("http://")], "labels": labels}],
        **more,
    }


@contextmanager
def chain(folder: Path, *jobs: Job) -> Iterator[Chain]:
    """Prometheus that scrapes these, and all behind it."""
    pager = Pager()

    class Hook(BaseHTTPRequestHandler):
        """Keeps every message."""

        def do_POST(self) -> None:
            """Take one."""
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            pager.told[self.path.strip("/")].append(message)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    for file in FILES:
        (folder / file.name).write_text(shorter_rules(file.read_text(encoding="utf-8")))
    with ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        routes = shorter_routes(
            (FOLDER / "alertmanager.example.yaml").read_text(encoding="utf-8"), f"http://127.0.0.1:{server.server_port}"
        )
        with alerting(folder, routes) as alertmanager:
            config = PROMETHEUS.format(
                rules=", ".join(str(folder / file.name) for file in FILES),
                alertmanager=alertmanager.removeprefix("http://"),
                jobs=json.dumps(jobs),
            )
            with serving(folder / "data", config=config) as prometheus:
                yield Chain(prometheus=prometheus, alertmanager=alertmanager, pager=pager)
        server.shutdown()
