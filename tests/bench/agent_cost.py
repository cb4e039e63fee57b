"""Print what the agent costs a real vLLM server: steps of the model with it and without, in turns in one run.

python -m tests.bench.agent_cost [--windows N]

On the CPU, where a step takes milliseconds and every process wants the same cores: what a GPU's steps lose is
measured by `make gpu-check`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdiag.commands.agent import files
from tests.bench.steps import Steps, compared
from tests.e2e import engine_env
from tests.e2e.engine import MODEL_NAME, Engine
from tests.e2e.meddling import Meddling, environment, wait_for

WINDOWS = 16
TOKENS = 1500
ANSWER_SECONDS = 300.0
AIM_RATIO = 0.999
MEMORY = "/dev/shm"  # noqa: S108 - where a volume in memory is, as the agents' folder should be


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 3 where there is no vLLM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=WINDOWS, help="stretches of steps, half of them with the agent")
    windows = max(parser.parse_args(arguments).windows // 4, 1) * 4
    try:
        env = engine_env.vllm_env()
        model = engine_env.models(env) / "llama"
    except engine_env.EngineEnvError as error:
        sys.stderr.write(f"agent_cost: not run: no vLLM here ({error})\n")
        return 3
    with tempfile.TemporaryDirectory(
        prefix="kvdiag-agent-cost-", dir=MEMORY if Path(MEMORY).is_dir() else None
    ) as work:
        steps, publish_seconds = measured(env, model, Path(work), windows)
    found = compared(Steps(tuple(steps["with"])), Steps(tuple(steps["without"])))
    alone = steps["without"]
    noise = compared(Steps(tuple(alone[: len(alone) // 2])), Steps(tuple(alone[len(alone) // 2 :])))
    noise_back = compared(Steps(tuple(alone[len(alone) // 2 :])), Steps(tuple(alone[: len(alone) // 2])))
    unaffected = 1 - found.held_up_ratio
    print_lines(
        ("publication, median of its own figures", f"{publish_seconds * 1e6:.0f} us"),
        ("step of the model without the agent, median", f"{found.usual_seconds * 1e6:.0f} us"),
        ("the same with the agent, beyond that", f"{found.slower_ratio:.3%}"),
        ("one half of the steps without beyond the other", f"{noise.slower_ratio + noise_back.slower_ratio:.3%}"),
        ("steps in all", f"{found.count}"),
        ("steps not held up by the agent", f"{unaffected:.3%} (aim: {AIM_RATIO:.1%})"),
        ("steps held up with nothing beside them", f"{found.held_up_anyway_ratio:.3%}"),
    )
    return 0


def measured(env: Path, model: Path, work: Path, windows: int) -> tuple[Mapping[str, list[int]], float]:
    """Steps with and without, and what a publication took."""
    for name, content in files().items():
        (work / "agent" / name).parent.mkdir(parents=True, exist_ok=True)
        (work / "agent" / name).write_bytes(content)
    published = work / "published"
    agent = {"KVDIAG_AGENT_DIR": str(published), "PYTHONPATH": str(work / "agent")}
    steps: dict[str, list[int]] = {"with": [], "without": []}
    publish_seconds: list[float] = []
    with Engine(env, model, work / "vllm.log", env=environment(agent, work / "meddle")) as engine:
        meddling = Meddling(engine, work / "meddle", published)
        complete(engine)
        meddling.tell("count_steps")
        for number in range(windows):
            # In the order with, without, without, with: what drifts counts for both.
            name = "with" if number % 4 in (0, 3) else "without"
            if name == "with":
                meddling.tell("agent_on")
                # Its first publication finds out what later ones know.
                wait_for(
                    lambda: sum(told["sequence"] > 1 for told in publications(published)) >= len(meddling.answers())
                )
            else:
                meddling.tell("agent_off")
            meddling.tell("count_steps")
            complete(engine)
            steps[name] += [each for found in meddling.steps().values() for each in found]
            publish_seconds += [told["publish_seconds"] for told in publications(published)]
    return steps, statistics.median(publish_seconds) if publish_seconds else 0.0


def publications(folder: Path) -> list[dict[str, Any]]:
    """What every agent has published last."""
    return [json.loads(path.read_text()) for path in folder.glob("agent-*.json")]


def complete(engine: Engine) -> None:
    """Have the server generate."""
    body = {"model": MODEL_NAME, "prompt": [7] * 64, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{engine.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
        answer.read()


def print_lines(*lines: tuple[str, str]) -> None:
    """The figures in columns."""
    sys.stdout.write("".join(f"{name:48}{figure}\n" for name, figure in lines))


if __name__ == "__main__":
    sys.exit(main())
