"""The options of a fleet's daemon: one daemon watches either a server or a fleet, and imports only what it needs."""

import subprocess
import sys

import pytest

from tests.unit.commands.bad_input.refusals import refusal

IMPORTED = "import sys, kvdiag.commands.serve; print(*sorted(sys.modules))"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(["--prometheus", "http://p", "--url", "http://s"], "either --prometheus", id="a server too"),
        pytest.param(["--prometheus", "http://p", "--agent-dir", "/a"], "or --agent-dir", id="agents too"),
        pytest.param(["--match", '{a="b"}'], "--match needs --prometheus", id="a selector alone"),
        pytest.param(["--url", "http://s", "--every", "5m"], "--every needs --prometheus", id="rounds alone"),
        pytest.param(["--url", "http://s", "--header", "a:b"], "--header needs --prometheus", id="a header alone"),
        pytest.param(["--prometheus", "ftp://p"], "is not a Prometheus address", id="no address"),
        pytest.param(["--prometheus", "http://p", "--match", "up"], "is not a selector", id="no selector"),
        pytest.param(["--prometheus", "http://p", "--window", "soon"], "is not a duration", id="no window"),
        pytest.param(["--prometheus", "http://p", "--every", "1s"], "is outside 30s to 1h", id="too often"),
        pytest.param(
            ["--prometheus", "http://p", "--record-dir", "/dev/null"], "cannot keep the fleet", id="no folder"
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(options: list[str], message: str) -> None:
    """Before the port is opened, and before Prometheus is asked."""
    assert message in refusal("serve", "--listen", "127.0.0.1:0", *options)


def test_a_daemon_next_to_a_server_imports_nothing_of_a_fleet() -> None:
    """Nor of Ray and OpenTelemetry: its memory is limited to 64 MiB."""
    done = subprocess.run([sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True)
    unwanted: tuple[str, ...] = (
        "kvdiag.feeds.fleet",
        "kvdiag.feeds.history",
        "kvdiag.server.fleet",
        "kvdiag.outputs.fleet",
    )
    unwanted += ("kvdiag.server.otlp", "opentelemetry", "google.protobuf", "requests", "ray")
    # Of a server whose model's config is readable, and of a status page that is opened.
    unwanted += ("kvdiag.kv.families.registry", "kvdiag.kv.layout.capacity", "kvdiag.outputs.html")
    assert [] == [one for one in done.stdout.split() if one.startswith(unwanted)]
