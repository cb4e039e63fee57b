"""`kvdiag serve` by file: what comes first, what is refused at the start, and what SIGHUP changes."""

import json
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

from kvdiag.sim import SCENARIOS, Drill
from tests.fixtures.hostile import eventually
from tests.integration.vllm.cli import started
from tests.unit.commands.bad_input.refusals import listed, refusal
from tests.unit.commands.serve.test_serve import Daemon
from tests.unit.sim.client import Client

LONG_SECONDS = 60.0
THRESHOLDS = "kvdiag_memory_pressure_threshold_ratio"


class Told:
    """What a daemon logs, line by line."""

    def __init__(self, daemon: Daemon, lines: Queue[dict[str, Any]]) -> None:
        """Read from the queue to which the log-reading thread adds lines."""
        self.daemon = daemon
        self._lines = lines

    def next(self, event: str) -> dict[str, Any]:
        """The next line of a kind."""
        while (line := self._lines.get(timeout=LONG_SECONDS))["event"] != event:
            pass
        return line

    def changed(self) -> dict[str, Any]:
        """What it says to a SIGHUP."""
        self.daemon.process.send_signal(signal.SIGHUP)
        return self.next("configuration")


@contextmanager
def configured(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Told]:
    """A daemon with these arguments, and its log."""
    with started("serve", *arguments, env=env) as process:
        lines: Queue[dict[str, Any]] = Queue()
        stream = process.stderr
        assert stream is not None

        def read() -> None:
            for line in stream:
                lines.put(json.loads(line))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            told = Told(Daemon(process, Client("http://127.0.0.1:1")), lines)
            address = told.next("listening")["address"]
            yield Told(Daemon(process, Client(address), address), lines)
        finally:
            process.kill()
            thread.join(LONG_SECONDS)


BAD_FILES = (
    'lisen = "127.0.0.1:0"',
    "listen = true",
    "listen = []",
    "insecure = 1",
    "reserved-gap-bytes = true",
    "reserved-gap-bytes = 1.5",
    "reserved-gap-bytes = -1",
    "pressure-warning = 0.9",
    "pressure-warning = 0.7\npressure-critical = 0.6",
    "pressure-warning = 0",
    "pressure-critical = 80",
    "pressure-critical = nan",
    'config = "other.toml"',
    'record-max-size = "much"',
    "record-max-size = 1000",
    'listen = "nowhere"',
    'url = "ftp://x"',
    "listen = ",
)


def test_bad_files_are_refused(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    """At the start, in one line that says what is wrong."""
    config = tmp_path / "kvdiag.toml"
    told = {}
    for text in BAD_FILES:
        config.write_text(f"[serve]\n{text}\n", encoding="utf-8")
        told[text.replace("\n", "; ")] = refusal("serve", "--config", str(config)).replace(str(config), "CONFIG")
    golden("errors/serve.txt", listed(told))


def test_flags_before_environment_before_file_before_defaults(tmp_path: Path) -> None:
    """Of an option that is given in several ways the nearest counts."""
    (tmp_path / "file").mkdir()
    config = tmp_path / "kvdiag.toml"
    config.write_text(
        f'[serve]\nlisten = "nowhere"\nrecord-dir = "{tmp_path}/file/record"\nurl = "http://127.0.0.1:1"\n'
    )
    env = {"KVDIAG_SERVE_CONFIG": str(config), "KVDIAG_SERVE_RECORD_DIR": str(tmp_path / "environment")}
    with configured("--listen", "127.0.0.1:0", env=env) as told:
        assert eventually(lambda: told.daemon.up() != {})
    assert (True, False) == ((tmp_path / "environment").is_dir(), (tmp_path / "file/record").exists())


def test_hangup_reads_the_file_again(tmp_path: Path) -> None:
    """SIGHUP applies a new URL and thresholds at once; a bad file changes nothing; what needs a restart is logged."""
    # a daemon that watches by a file
    config = tmp_path / "kvdiag.toml"
    with Drill(SCENARIOS["healthy"]) as one, Drill(SCENARIOS["healthy"]) as other:
        config.write_text(f'[serve]\nurl = "{one.url}"\n')
        pace = ("--listen", "127.0.0.1:0", "--tick-seconds", "0.1")
        with configured(*pace, "--config", str(config)) as told:
            assert one.url == told.next("watches")["url"]

            # the file is wrong, THEN it stays with the server
            config.write_text("[serve]\nurll = 1\n")
            refused = told.changed()
            assert "error" == refused["level"]
            assert "'urll'" in refused["reason"]
            assert eventually(told.daemon.says("ok"))

            # thresholds are the wrong way round, THEN those from before hold; WHEN they are right, THEN they do
            config.write_text(f'[serve]\nurl = "{one.url}"\npressure-warning = 0.95\n')
            assert "error" == told.changed()["level"]
            assert {("warning",): 0.8, ("critical",): 0.9} == told.daemon.series(THRESHOLDS)
            config.write_text(f'[serve]\nurl = "{one.url}"\npressure-warning = 0.5\n')
            assert "reloaded" == told.changed()["state"]
            assert eventually(lambda: {("warning",): 0.5, ("critical",): 0.9} == told.daemon.series(THRESHOLDS))

            # it names another server, and what takes a restart
            config.write_text(
                f'[serve]\nurl = "{other.url}"\nagent-dir = "{tmp_path}"\nrecord-dir = "{tmp_path}/record"\n'
            )
            assert told.changed()["reason"].startswith("--record-dir ")

            # that one is watched, and the agents are looked for
            assert other.url == told.next("watches")["url"]
            assert eventually(told.daemon.says("ok"))
            assert eventually(
                lambda: "torch_allocator" in {gap["source"] for gap in told.daemon.get("/api/v1/ledger")["gaps"]}
            )
            assert other.url == told.daemon.get("/api/v1/diagnosis")["subject"]["url"]


def framed(told: Told) -> str | None:
    """A header that the web configuration asks for."""
    with urllib.request.urlopen(f"{told.daemon.address}/-/healthy", timeout=LONG_SECONDS) as answer:
        found: str | None = answer.headers["X-Frame-Options"]
        return found


def test_hangup_renews_what_the_web_configuration_says(tmp_path: Path) -> None:
    """With a --config or without one; where that is wrong, the web configuration stays as it was, too."""
    web, config = tmp_path / "web.yml", tmp_path / "kvdiag.toml"

    def ask_for(headers: str) -> None:
        web.write_text(f"http_server_config: {{headers: {{X-Content-Type-Options: nosniff{headers}}}}}\n")

    config.write_text('[serve]\nurl = "http://127.0.0.1:1"\n')
    ask_for("")
    options = ("--listen", "127.0.0.1:0", "--web-config", str(web))
    with configured(*options) as told:
        # there is no --config
        assert framed(told) is None
        ask_for(", X-Frame-Options: deny")
        assert "reloaded" == told.changed()["state"]
        assert "deny" == framed(told)

    ask_for("")
    with configured(*options, "--config", str(config)) as told:
        # the configuration names no server
        ask_for(", X-Frame-Options: deny")
        config.write_text('[serve]\nurl = "ftp://x"\n')
        assert "'ftp://x'" in told.changed()["reason"]
        assert framed(told) is None
