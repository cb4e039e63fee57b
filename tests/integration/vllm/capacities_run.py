"""One run of `capacities.py` for all architectures, and what it printed of each."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.vllm.engine import engine_environment

PROGRAM = Path(__file__).with_name("capacities.py")
CONFIGS = tuple(sorted((Path(__file__).parent / "architectures").glob("*.json")))
LIMIT_SECONDS = 600.0

EngineTold = Callable[[Path], dict[str, Any]]
"""What the engine says of a config."""


def capacities(vllm_env: Path) -> dict[str, dict[str, Any]]:
    """By the name of each config; raises with the engine's own last words."""
    environment = engine_environment(vllm_env, kv_space_gib=1)
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [str(vllm_env / "bin" / "python"), str(PROGRAM), *map(str, CONFIGS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(told) != len(CONFIGS):
        raise RuntimeError(f"{CONFIGS[len(told) % len(CONFIGS)].name}: {done.stderr[-2000:]}")
    return {config.name: one for config, one in zip(CONFIGS, told, strict=True)}
