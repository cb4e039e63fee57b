"""Real SGLang servers: one process imports SGLang, which takes half a minute, and forks each server in seconds.

Each lives for the length of its `with` block, and sleeps while it is idle: its schedulers would keep a core each busy.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fixtures.hostile import free_port
from tests.integration.vllm import sessions

HERE = Path(__file__).parent
START_LIMIT_SECONDS = 180.0
ANSWER_SECONDS = 300.0
MODEL_NAME = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One running server."""

    url: str
    pid: int
    log: Path

    def get(self, path: str) -> Any:
        """The JSON answer of a GET."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=ANSWER_SECONDS) as answer:
            return json.loads(answer.read())

    def post(self, path: str, **body: Any) -> Any:
        """The JSON answer of a POST; the text of one that is no JSON."""
        request = urllib.request.Request(
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            text = answer.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def complete(self, prompt_tokens: int, max_tokens: int, **more: Any) -> Any:
        """The answer to a prompt of so many ids, all alike from `first` on."""
        first = more.pop("first", 0)
        prompt = [300 + (first + place) % 600 for place in range(prompt_tokens)]
        return self.post(
            "/v1/completions",
            **{"model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "min_tokens": max_tokens, **more},
        )

    def leave(self, prompt_tokens: int, *, after_events: int = 5, first: int = 0) -> None:
        """Stream a long completion, and disconnect after some of its tokens."""
        prompt = [300 + (first + place) % 600 for place in range(prompt_tokens)]
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 1000, "min_tokens": 1000, "stream": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            for _ in range(2 * after_events):  # each event is followed by an empty line
                answer.readline()

    def loads(self) -> list[dict[str, Any]]:
        """What /v1/loads says of each scheduler."""
        found: list[dict[str, Any]] = self.get("/v1/loads")["loads"]
        return found

    def used_tokens(self) -> int:
        """Tokens in use, of all schedulers together."""
        return sum(load["num_used_tokens"] for load in self.loads())

    def pids(self, title: str = "") -> list[int]:
        """The living processes of this server whose title holds `title`."""
        return [pid for pid in sessions.living_in(self.pid) if title in _title(pid)]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class Nursery:
    """Forks servers as they are asked for; what is left of them ends with the `with` block."""

    def __init__(self, env: Path, model: Path, logs: Path, environ: Mapping[str, str]) -> None:
        """Prepare; nothing is started."""
        self._python = env / "bin" / "python"
        self._model = model
        self._logs = logs
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._environ = {
            **inherited,
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # A core for each rank of two; one rank takes the first.
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
            **environ,
            "PYTHONPATH": ":".join(filter(None, (str(HERE / "plugins"), environ.get("PYTHONPATH")))),
        }
        self._process: subprocess.Popen[str] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with (self._logs / "nursery.log").open("wb") as log:
            self._process = subprocess.Popen(
                [self._python, str(HERE / "nursery.py")],
                env=self._environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._reaper = _reaper(self._process.pid)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", (self._logs / "nursery.log").read_text()[-2000:]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The end of its input ends a reaper, which ends what it watches.
        if self._reaper is not None:
            self._reaper.communicate()
        if self._process is not None:
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    @contextmanager
    def start(
        self, name: str, *args: str, metrics: bool = True, env: Mapping[str, str] | None = None
    ) -> Iterator[Server]:
        """A server that answers, with these arguments."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        port, log = free_port(), self._logs / f"{name}.log"
        command = [
            *("--model-path", str(self._model), "--served-model-name", MODEL_NAME, "--device", "cpu"),
            *("--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", str(port)),
            *("--skip-server-warmup", "--sleep-on-idle", *(("--enable-metrics",) if metrics else ()), *args),
        ]
        self._process.stdin.write(json.dumps({"args": command, "log": str(log), "env": dict(env or {})}) + "\n")
        self._process.stdin.flush()
        server = Server(url=f"http://127.0.0.1:{port}", pid=int(self._process.stdout.readline()), log=log)
        reaper = _reaper(server.pid)
        try:
            _await(server)
            yield server
        finally:
            reaper.communicate()


def _reaper(session: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, sessions.__file__, str(session)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _await(server: Server) -> None:
    deadline = time.monotonic() + START_LIMIT_SECONDS
    while time.monotonic() < deadline:
        try:
            server.get("/v1/models")
        except (urllib.error.URLError, OSError):
            assert server.pids(), _tail(server.log)
            time.sleep(0.1)
        else:
            return
    raise AssertionError(_tail(server.log))


def _tail(log: Path, lines: Sequence[str] = ()) -> str:
    return "\n".join((*lines, *log.read_text(errors="replace").splitlines()[-25:]))
