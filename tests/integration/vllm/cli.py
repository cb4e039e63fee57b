"""`kvdiag` as a subprocess, as a user runs it: its exit code, its output, and a process to disturb while it runs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

# A run takes under a minute on idle cores, several where four servers share two of them that lack AVX-512.
RUN_LIMIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one call of the command line left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document of `--output json`."""
        assert self.stdout, f"exit code {self.code}: {self.stderr}"
        decoded: dict[str, Any] = json.loads(self.stdout)
        return decoded

    @property
    def not_ok(self) -> str:
        """The sentence of every step and finding that is not ok, and every gap; stderr where there is no document."""
        if not self.stdout:
            return self.stderr
        judged = (*self.document["steps"], *self.document["findings"])
        sentences = [f"{one['id']} {one['status']}: {one['summary']}" for one in judged if one["status"] != "ok"]
        gaps = [f"{gap['source']} {gap['kind']}: {gap['reason']}" for gap in self.document["gaps"]]
        return "\n".join((*sentences, *gaps))

    def step(self, step_id: str) -> dict[str, Any]:
        """One step of the document."""
        found: dict[str, Any] = next(step for step in self.document["steps"] if step["id"] == step_id)
        return found

    def finding(self, finding_id: str) -> dict[str, Any]:
        """One finding of the document."""
        found: dict[str, Any] = next(one for one in self.document["findings"] if one["id"] == finding_id)
        return found


def kvdiag(*arguments: str, env: Mapping[str, str] | None = None) -> Result:
    """Call the command line and wait for its end."""
    with started(*arguments, env=env) as process:
        return finished(process)


@contextmanager
def started(
    *arguments: str, env: Mapping[str, str] | None = None, sigint: Literal["default", "ignore"] = "default"
) -> Iterator[subprocess.Popen[str]]:
    """The command line, running; killed at the end where it still does."""
    process = subprocess.Popen(
        # A test run started in the background of a shell ignores SIGINT, and its children with it: they shall not.
        ["env", f"--{sigint}-signal=SIGINT", sys.executable, "-m", "kvdiag", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def finished(process: subprocess.Popen[str]) -> Result:
    """Wait for the end of a started command line."""
    stdout, stderr = process.communicate(timeout=RUN_LIMIT_SECONDS)
    return Result(code=process.returncode, stdout=stdout, stderr=stderr)
