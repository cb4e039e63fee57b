"""A server's process with the stand-in torch and the agent as it is installed, which runs what a test tells it to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdiag.commands.agent import files

TORCH = Path(__file__).parents[1] / "torch_stand_in"
LIMIT_SECONDS = 60.0


def installed(folder: Path) -> Path:
    """The agent's folder as `kvdiag agent install` fills it."""
    for name, content in files().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def environment(
    agent: Path, published: Path | None, *, torch: Path | None = TORCH, env: Mapping[str, str] | None = None
) -> dict[str, str]:
    """What a server gets that is to publish into `published`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join(str(part) for part in (agent, torch) if part is not None)
    told = {} if published is None else {"KVDIAG_AGENT_DIR": str(published)}
    return {**inherited, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **told, **(env or {})}


def run(program: str, environment: Mapping[str, str]) -> Any:
    """What a program leaves on its last line as JSON; whatever it says on stderr fails the test."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr), done.stderr
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def published(folder: Path) -> list[dict[str, Any]]:
    """Every publication in a folder, in order of name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("agent-*.json"))]
