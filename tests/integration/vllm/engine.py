"""A real `vllm serve` for the length of a `with` block: on a free loopback port, awaited, killed with its children."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.fixtures.hostile import free_port
from tests.integration.vllm import sessions

# Three processes import vLLM one after the other: 15 to 20 s on two idle cores, minutes where others share them.
START_LIMIT_SECONDS = 300.0
STARTS = 2
"""vLLM picks ports seconds before it binds them: on a busy machine another connection may take one between."""
LOG_LINES_IN_ERRORS = 25
MODEL_NAME = "tiny"
PLUGINS = Path(__file__).with_name("plugins")
"""Python modules that every server can import; `env` names those it is to load, besides `wait_asleep`."""


class EngineError(Exception):
    """The server did not start, or died; the message ends with the last lines of its log."""


class Engine:
    """One vLLM server; `url` answers once the `with` block is entered."""

    def __init__(
        self,
        vllm_env: Path,
        model: Path,
        log: Path,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        max_model_len_tokens: int = 20_000,
        kv_space_gib: int = 1,
        starts: int = STARTS,
    ) -> None:
        """Prepare the command; nothing is started. Entered, the server is started at most `starts` times."""
        self.log = log
        self._starts = starts
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [
            str(vllm_env / "bin" / "python"),
            *("-m", "vllm.entrypoints.cli.main", "serve", str(model)),
            *("--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--enforce-eager", "--max-model-len", str(max_model_len_tokens)),
            *args,
        ]
        told = env or {}
        self._environment = {
            **engine_environment(vllm_env, kv_space_gib=kv_space_gib),
            **told,
            "PYTHONPATH": ":".join(filter(None, (told.get("PYTHONPATH"), str(PLUGINS)))),
            "VLLM_PLUGINS": ",".join(filter(None, (told.get("VLLM_PLUGINS"), "wait_asleep"))),
        }
        self._server: subprocess.Popen[bytes] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for left in reversed(range(self._starts)):
            try:
                self._start()
                break
            except EngineError:
                if not left:
                    raise
        return self

    def _start(self) -> None:
        with self.log.open("wb") as log:
            self._server = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # Ends the server even where this process is killed before it can.
        self._reaper = subprocess.Popen(
            [sys.executable, sessions.__file__, str(self._server.pid)], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._await_health(self._server)
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End the whole tree at once with SIGKILL; a second call does nothing."""
        if self._server is not None:
            sessions.kill_session(self._server.pid)
            self._server.wait()
            self._server = None
        if self._reaper is not None:
            self._reaper.communicate()
            self._reaper = None

    def pids(self, title: str = "") -> list[int]:
        """The living processes of this server whose title holds `title`: `VLLM::EngineCore`, `VLLM::Worker`."""
        if self._server is None:
            return []
        return [pid for pid in sessions.living_in(self._server.pid) if title in _title(pid)]

    def log_tail(self) -> str:
        """What the server's log calls an error, and its last lines; as many of each."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines[:-LOG_LINES_IN_ERRORS] if "ERROR" in line]
        return "\n".join([*errors[:LOG_LINES_IN_ERRORS], *lines[-LOG_LINES_IN_ERRORS:]])

    def _await_health(self, server: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_LIMIT_SECONDS
        while time.monotonic() < deadline:
            if (code := server.poll()) is not None:
                raise EngineError(f"vllm serve ended with code {code} while starting; {self.log}:\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise EngineError(f"vllm serve not healthy after {START_LIMIT_SECONDS:.0f} s; {self.log}:\n{self.log_tail()}")


def engine_environment(vllm_env: Path, *, kv_space_gib: int) -> dict[str, str]:
    """What vLLM needs around it: its own Python's settings, no network, a pool of this size, one thread."""
    # The test run's own Python settings must not reach the engine. PYTHONDONTWRITEBYTECODE alone turns
    # a start of 20 s into one of 70: three processes would each compile 2,600 files again.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {
        **inherited,
        "PATH": f"{vllm_env / 'bin'}:{os.environ.get('PATH', '')}",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_space_gib),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # By itself vLLM binds every server's worker to the same first core, where two starve each other.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
