"""A Python environment with the extra `kvdiag[ray]` as uv.lock has it, made once and kept; kvdiag is this checkout.

By hand: `python -m tests.integration.ray.ray_env` builds it and prints where its Python is.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fixtures.once import cache, made_once

ROOT = Path(__file__).parents[3]
UV = str(Path(sys.executable).with_name("uv"))


class RayEnvError(Exception):
    """Ray cannot be had on this machine; the message is one line that says why."""


def ray_python() -> Path:
    """The environment's Python; some 10 s the first time, nothing after."""
    export = ("export", "--quiet", "--frozen", "--no-dev", "--no-emit-project", "--extra=ray", "--no-header")
    locked = _run(UV, *export)
    interpreter = f"{sys.version}{sysconfig.get_platform()}{sys.base_prefix}"
    digest = hashlib.sha256(f"{locked}{interpreter}".encode()).hexdigest()[:12]
    return made_once(cache() / f"ray-{digest}", lambda folder: _build(folder, locked)) / "bin" / "python"


def ray_environment() -> dict[str, str]:
    """The variables with which a program of this environment finds the checkout, as if kvdiag were installed."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True, slots=True)
class Cluster:
    """The program that keeps two nodes."""

    address: str
    process: subprocess.Popen[str]

    def do(self, command: str) -> None:
        """Ask for something, and wait until it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        assert "done" == self.process.stdout.readline().strip()


@contextmanager
def two_nodes(log: Path, processors: int = 1) -> Iterator[Cluster]:
    """A cluster of two nodes with so many processors each; what it prints is in the log."""
    command = [str(ray_python()), "-m", "tests.integration.ray.two_nodes", str(processors)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with log.open("w") as written, subprocess.Popen(command, env=ray_environment(), stderr=written, **pipes) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, log.read_text()[-2000:]
        yield Cluster(address, process)


def _build(folder: Path, locked: str) -> None:
    _run(UV, "venv", "--quiet", "--python", sys.executable, str(folder))
    python = str(folder / "bin" / "python")
    install = ("pip", "install", "--quiet", "--python", python, "--require-hashes", "--requirements", "-")
    _run(UV, *install, given=locked)


def _run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, cwd=ROOT, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " ".join((done.stderr or done.stdout).split())
        raise RayEnvError(f"{Path(command[0]).name} {command[1]} failed: {reason[-400:]}")
    return done.stdout


if __name__ == "__main__":
    print(ray_python())  # noqa: T201
