"""`kvdiag serve` as a process, with a simulated server that is up, or starts, leaks, exits and restarts."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvdiag.commands.options.serve_options import address
from kvdiag.errors import KvdiagError
from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually, free_port
from tests.fixtures.require import require
from tests.integration.vllm.cli import started
from tests.stand_ins.nvml.stand_in import compiler
from tests.unit.commands.bad_input.refusals import refusal
from tests.unit.sim.client import Client

SLOW_NAMES = Path(__file__).parents[3] / "fixtures" / "slow_names.c"
END_SECONDS = 2.0
"""From SIGTERM to the end."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """A daemon under way."""

    process: subprocess.Popen[str]
    client: Client
    address: str = ""

    def get(self, path: str) -> Any:
        """The document at a path, `None` while there is none."""
        status, text = self.client.get(path)
        return json.loads(text) if status == 200 else None

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """The series of a name, by the values of their labels."""
        found: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(self.client.get(f"/metrics?name[]={name}")[1]):
            for sample in family.samples:
                found[tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
        return found

    def says(self, *worst: str) -> Callable[[], bool]:
        """Whether the newest diagnosis is one of these."""
        return lambda: (self.get("/api/v1/diagnosis") or {"worst": None})["worst"] in worst

    def up(self) -> dict[tuple[str, ...], float]:
        """Which sources are."""
        return self.series("kvdiag_source_up")

    def lives(self) -> list[dict[str, Any]]:
        """Those that it lists."""
        found: list[dict[str, Any]] = (self.get("/api/v1/diagnosis") or {"lives": []})["lives"]
        return found

    def lives_with(self, *verdicts: str) -> list[dict[str, Any]]:
        """Its lives, once they have these verdicts: while a server is identified, there is none for a moment."""
        found: list[dict[str, Any]] = []

        def as_expected() -> bool:
            found[:] = self.lives()
            return [one["worst"] for one in found] == [*verdicts]

        assert eventually(as_expected), found
        return found


@contextmanager
def daemon(url: str, *more: str) -> Iterator[Daemon]:
    """A daemon on a free port, ten times as fast as usual."""
    with started("serve", "--url", url, "--listen", "127.0.0.1:0", "--tick-seconds", "0.1", *more) as process:
        line = json.loads(process.stderr.readline()) if process.stderr is not None else {}
        yield Daemon(process, Client(line["address"]), line["address"])


@pytest.fixture
def serving() -> Iterator[Daemon]:
    """A daemon of a healthy server, once it has reached a verdict."""
    with Drill(SCENARIOS["healthy"]) as drill, daemon(drill.url) as serving:
        assert eventually(serving.says("ok"))
        yield serving


def test_a_healthy_server_is_served_whole(serving: Daemon) -> None:
    """Verdict, ledger, metrics and health of a server in which nothing is wrong; SIGTERM ends it in time, with 0."""
    ledger, faults = serving.get("/api/v1/ledger"), serving.series("kvdiag_finding")
    statuses = {path: serving.client.get(path)[0] for path in ("/", "/metrics", "/-/healthy", "/-/ready")}
    assert {"/": 200, "/metrics": 200, "/-/healthy": 200, "/-/ready": 200} == statuses
    assert ledger["devices"][0]["used_bytes"] == sum(line["bytes"] for line in ledger["ledger"])
    assert set() == {verdict for (verdict, status), value in faults.items() if status == "fault" and value}
    assert {("host",): 1.0, ("nvml",): 1.0, ("engine",): 1.0} == serving.up()
    assert all(0.0 < value < 0.5 for value in serving.series("kvdiag_memory_pressure_ratio").values())
    assert "admit" == serving.get("/api/v1/admission?prompt_tokens=2000&max_tokens=100")["decision"]
    begun = time.monotonic()
    serving.process.send_signal(signal.SIGTERM)
    assert 0 == serving.process.wait(30)
    assert time.monotonic() - begun < END_SECONDS


def test_a_server_that_comes_leaks_goes_and_returns() -> None:
    """`starting` before the server is up; a fault once it leaks; down since its last answer once it exits; and `ok` for
    the next server at that address, with the earlier life's fault listed.
    """
    # an address without a listener yet
    port = free_port()
    with daemon(f"http://127.0.0.1:{port}") as serving:
        # that is no fault, and no error
        assert eventually(serving.says("unknown"))
        gaps = [gap for gap in serving.get("/api/v1/diagnosis")["gaps"] if gap["source"] == "engine"]
        assert ["absent"] == [gap["kind"] for gap in gaps]
        assert gaps[0]["reason"].startswith("no answer yet: ")
        assert 0.0 == serving.up()["engine",]
        assert {0.0} == set(serving.series("kvdiag_source_errors_total").values())
        assert 200 == serving.client.get("/-/ready")[0]

        # a server comes that leaks
        with Drill(SCENARIOS["kv-leak"], port=port) as drill:
            assert eventually(serving.says("ok"))
            Client(drill.url).complete(64, 8)

            # it is found
            assert eventually(serving.says("fault"))
            assert 1.0 == serving.series("kvdiag_finding")["leak.kv_blocks", "fault"]

        # it goes, THEN nothing of it is shown, and it is not healthy
        assert eventually(lambda: serving.up()["engine",] == 0.0)
        assert {} == serving.series("kvdiag_kv_usage_ratio")
        assert not serving.says("ok")()
        assert eventually(lambda: serving.get("/api/v1/diagnosis")["down_since_seconds"] is not None)
        assert [*serving.series("kvdiag_server_down_since_timestamp_seconds")]
        assert "DOWN" in serving.client.get("/")[1]

        # a healthy one takes its place, THEN the leak was the other's
        with Drill(SCENARIOS["healthy"], port=port):
            serving.lives_with("fault", "ok")
            # a verdict from its counters alone is dropped once the new process is identified, and made again
            assert eventually(lambda: serving.series("kvdiag_diagnosis_status").get(("ok",)) == 1.0)
            assert eventually(lambda: serving.series("kvdiag_finding").get(("leak.kv_blocks", "fault")) == 0.0)
            assert 1.0 == serving.up()["engine",]


def test_a_name_server_that_hangs_does_not_keep_it(tmp_path: Path) -> None:
    """A DNS lookup that hangs forever delays neither the daemon's answers nor its exit at SIGTERM."""
    require(compiler() is not None, "a C compiler")
    library = tmp_path / "slow_names.so"
    subprocess.run([compiler() or "cc", "-shared", "-fPIC", "-o", library, SLOW_NAMES, "-ldl"], check=True)
    arguments = ("serve", "--url", "http://slow.example:8000", "--listen", "127.0.0.1:0")
    with started(*arguments, env={"LD_PRELOAD": str(library)}) as process:
        line = json.loads(process.stderr.readline()) if process.stderr is not None else {}
        client = Client(line["address"])
        assert eventually(lambda: "no complete answer" in client.get("/api/v1/ledger")[1])
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert 0 == process.wait(30)
        assert time.monotonic() - begun < END_SECONDS


def test_a_host_that_is_none_is_an_error() -> None:
    """Without the number that the system gives it."""
    assert "no-such-host.invalid:0" in refusal("serve", "--listen", "no-such-host.invalid:0")


@pytest.mark.parametrize(
    ("listen", "expected"),
    [("127.0.0.1:9743", ("127.0.0.1", 9743)), ("[::1]:0", ("::1", 0)), ("localhost:1", ("localhost", 1))],
)
def test_addresses_to_listen_on(listen: str, expected: tuple[str, int]) -> None:
    """HOST:PORT, with brackets around the colons of an IPv6 address."""
    assert expected == address(listen)


@pytest.mark.parametrize(
    "listen", ["", "9743", ":9743", "127.0.0.1", "127.0.0.1:x", "a:70000", "http://a:1", "u@h:1", "[:1"]
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    """Anything else is an error that shows a right one."""
    with pytest.raises(KvdiagError, match="an address to listen on"):
        address(listen)
