"""A server's process with the stand-in torch and the installed agent, which runs a test's program."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdiag.commands.agent import files

TORCH = Path(__file__).parents[2] / "stand_ins" / "torch"
LIMIT_SECONDS = 60.0

BUSY = """
import json, os, sys, time, torch
from torch.world import ACTIVE, FREE, MIB, WORLD
torch.cuda.init()
WORLD.segment((512 * MIB, ACTIVE), stream=7)
WORLD.segment((60 * MIB, FREE), (4 * MIB, ACTIVE), stream=7)
WORLD.segment((20 * MIB, FREE), stream=7)
WORLD.segment((30 * MIB, FREE), stream=7, pool=(0, 1))
"""
"""A server that holds 626 MiB of its GPU."""

ONCE = """
from kvdiag_agent.thread import Agent
agent = Agent(os.environ["KVDIAG_AGENT_DIR"])
"""


def installed(folder: Path) -> Path:
    """The agent's folder as `kvdiag agent install` writes it."""
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
    """The JSON in the last line of a program's output; any output on stderr fails the test."""
    out, said = outcome(program, environment)
    assert "" == said, said
    return json.loads(out.splitlines()[-1]) if out else None


def outcome(program: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """What a program leaves on stdout and stderr; it has to end well."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout, done.stderr


def published(folder: Path) -> list[dict[str, Any]]:
    """Every publication in a folder, in order of name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("agent-*.json"))]


def names_in(folder: Path) -> list[str]:
    """The names of what is in a folder."""
    return sorted(path.name for path in folder.iterdir())
