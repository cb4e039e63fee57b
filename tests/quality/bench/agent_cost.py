"""Print what the agent costs: a publication by itself, and the steps of a real vLLM server with it and without.

python -m tests.quality.bench.agent_cost [--windows N]

On the CPU, where a step takes milliseconds and every process wants the same cores: what a GPU's steps lose is
measured by `make gpu-check`.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fixtures.hostile import eventually
from tests.integration.vllm import engine_env
from tests.integration.vllm.engine import MODEL_NAME, Engine
from tests.integration.vllm.meddling import Counted, Meddling, published
from tests.integration.vllm.meddling import environment as meddling_env
from tests.quality.bench.steps import SETTLING, SURE, USUAL_RATIO, Steps, Stretch, compared, touched
from tests.quality.bench.table import note
from tests.unit.agent.subject import environment, installed, run

MEMORY = "/dev/shm"  # noqa: S108 - where a volume in memory is, as the agents' folder should be
ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, os, sys, statistics, time, torch
from torch.world import ACTIVE, FREE, MIB, WORLD
from kvdiag_agent import publication
from kvdiag_agent.thread import Agent
from tests.integration.gpu.serving_process import timed
torch.cuda.init()
for _ in range(300): WORLD.segment((60 * MIB, FREE), (4 * MIB, ACTIVE))
# The stand-in counts its segments anew each time, which torch does not.
counted = WORLD.statistics(0)
torch.cuda.memory_stats_as_nested_dict = lambda device: counted
agent = Agent(os.environ["KVDIAG_AGENT_DIR"])
agent.publish()
(name,) = os.listdir(agent.directory)
told = json.load(open(os.path.join(agent.directory, name)))
whole = told.pop("memory_stats")
size = os.stat(os.path.join(agent.directory, name)).st_size
def median(call): return statistics.median(timed(call, 1000)[0])
folder = publication.Folder(agent.directory)
whole_json = publication.encode(whole)
wall, busy = timed(agent.publish, 1000)
def now_and_then():
    time.sleep(0.2)
    began = time.perf_counter(); agent.publish()
    return time.perf_counter() - began
json_seconds = median(lambda: publication.encode(told))
cold_seconds = statistics.median(now_and_then() for _ in range(25))
let_go, calls = [0.0], [0]
def clocked(function):
    def call(*arguments, **named):
        began = time.perf_counter()
        try: return function(*arguments, **named)
        finally:
            calls[0] += 1
            let_go[0] += time.perf_counter() - began
    return call
# What the clock itself takes is no part of a publication.
def ticking():
    nothing, let_go[0], began = clocked(int), 0.0, time.perf_counter()
    for _ in range(1000): nothing()
    return (time.perf_counter() - began - let_go[0]) / 1000
tick_seconds = statistics.median(ticking() for _ in range(9))
for name in ("open", "read", "write", "close", "stat", "fchmod", "rename"):
    setattr(os, name, clocked(getattr(os, name)))
def held():
    let_go[0], calls[0], began = 0.0, 0, time.perf_counter()
    agent.publish()
    return time.perf_counter() - began - let_go[0] - calls[0] * tick_seconds
print(json.dumps({
    "size_bytes": size,
    "wall_seconds": statistics.median(wall),
    "busy_seconds": busy,
    "json_seconds": json_seconds,
    "file_seconds": median(lambda: folder.put("other.json", told, {"memory_stats": whole_json})) - json_seconds,
    "whole_json_seconds": median(lambda: publication.encode(whole)),
    "gil_seconds": statistics.median(held() for _ in range(1000)),
    "cold_seconds": cold_seconds,
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """Medians but for `busy_seconds`, the mean of the processor's time, slow periods among them.

    `json_seconds` and `file_seconds` are parts of `wall_seconds`; `whole_json_seconds` comes once in a slow period, for
    all that torch counts; `gil_seconds` is what passes outside of the system's calls, which let other threads run.
    """

    size_bytes: int
    wall_seconds: float
    busy_seconds: float
    json_seconds: float
    file_seconds: float
    whole_json_seconds: float
    gil_seconds: float
    cold_seconds: float


def publication_cost() -> Publication:
    """Measure one publication."""
    with tempfile.TemporaryDirectory(
        prefix="kvdiag-publication-", dir=MEMORY if Path(MEMORY).is_dir() else None
    ) as work:
        env = environment(installed(Path(work) / "agent"), Path(work) / "published")
        return Publication(**run(PROGRAM, {**env, "PYTHONPATH": f"{env['PYTHONPATH']}:{ROOT}"}))


WINDOWS = 16
TOKENS = 1500
ANSWER_SECONDS = 300.0
AIM_RATIO = 0.999
PUBLISH_SECONDS = 100e-6
GIL_SECONDS = 50e-6


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; 3 where there is no vLLM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=WINDOWS, help="stretches of steps, half of them with the agent")
    windows = max(parser.parse_args(arguments).windows // 4, 1) * 4
    print_publication(publication_cost())
    try:
        env = engine_env.vllm_env()
        model = engine_env.models(env) / "llama"
    except engine_env.EngineEnvError as error:
        sys.stderr.write(f"agent_cost: not run: no vLLM here ({error})\n")
        return 3
    with tempfile.TemporaryDirectory(
        prefix="kvdiag-agent-cost-", dir=MEMORY if Path(MEMORY).is_dir() else None
    ) as work:
        print_server(measured(env, model, Path(work), windows))
    return 0


def print_publication(told: Publication) -> None:
    """What a publication takes by itself."""
    for what, seconds, most_seconds in (
        ("agent: one publication", told.wall_seconds, PUBLISH_SECONDS),
        ("agent: GIL held per publication", told.gil_seconds, GIL_SECONDS),
    ):
        note(what, seconds * 1e6, most_seconds * 1e6, than="budget", unit="µs")
    print_lines(
        ("publication of one GPU, again and again", f"{verdict(told.wall_seconds, PUBLISH_SECONDS)}"),
        ("  its JSON, its file", f"{told.json_seconds * 1e6:.0f} us, {told.file_seconds * 1e6:.0f} us"),
        ("  the interpreter held", f"{verdict(told.gil_seconds, GIL_SECONDS)}"),
        ("  processor time, slow periods among them", f"{told.busy_seconds * 1e6:.0f} us"),
        ("  more in a slow period, for all torch counts", f"{told.whole_json_seconds * 1e6:.0f} us"),
        ("  once in a while, caches cold", f"{told.cold_seconds * 1e6:.0f} us"),
        ("  size", f"{told.size_bytes} bytes"),
    )


def verdict(seconds: float, limit_seconds: float) -> str:
    """A time against its budget."""
    word = "met" if seconds <= limit_seconds else "NOT MET"
    return f"{seconds * 1e6:.0f} us (at most {limit_seconds * 1e6:.0f} us: {word})"


@dataclass(frozen=True, slots=True)
class Window:
    """One generation, with the agents or without."""

    beside: bool
    stretch: Stretch
    busy_seconds: tuple[float, ...]


def print_server(windows: Sequence[Window]) -> None:
    """What the agents cost a server that generates."""
    found = touched([window.stretch for window in windows])
    sides = compared(*(Steps(durations(windows, beside=beside)) for beside in (True, False)))
    busy_seconds = [seconds for window in windows for seconds in window.busy_seconds]
    wall_seconds = [(ended - began) / 1e9 for window in windows for began, ended in window.stretch.publications]
    stretched_seconds = sum(window.stretch.begun[-1] - window.stretch.begun[0] for window in windows if window.beside)
    if found.least_unaffected_ratio >= AIM_RATIO:
        word = "met"
    else:
        word = "NOT MET" if found.unaffected_ratio < AIM_RATIO else "undecided, take more --windows"
    print_lines(
        ("in a vLLM server on the CPU, all its processes", f"{len(wall_seconds)} publications"),
        ("  one from begin to end, median", f"{statistics.median(wall_seconds) * 1e6:.0f} us"),
        ("  one's processor time, median", f"{statistics.median(busy_seconds) * 1e6:.0f} us"),
        ("  all of them, of one processor's time", f"{sum(busy_seconds) * 1e9 / stretched_seconds:.3%}"),
        ("steps of the engine, median without the agents", f"{found.steps}, {sides.usual_seconds * 1e6:.0f} us"),
        ("  that a publication fell into", f"{found.touched}, {found.touched / found.steps:.2%}"),
        (
            "  these are longer than those around, beyond chance",
            f"{found.longer_seconds * 1e6:.0f} +- {SURE * found.longer_error_seconds * 1e6:.0f} us",
        ),
        (f"  and longer than {USUAL_RATIO:.1%} of all others", f"{found.affected}, by chance {found.by_chance:.1f}"),
        (
            "  steps not affected",
            f"{found.unaffected_ratio:.3%}, surely {found.least_unaffected_ratio:.3%} (aim {AIM_RATIO:.1%}: {word})",
        ),
        ("stretches with the agents against those without", f"{sides.slower_ratio:+.2%} by the median"),
        ("  one half of those without against the other", f"{noise(windows):.2%}"),
    )


def durations(windows: Sequence[Window], *, beside: bool) -> tuple[int, ...]:
    """Durations of all steps in the intervals with the agents, or without."""
    return tuple(
        after - before
        for window in windows
        if window.beside == beside
        for before, after in itertools.pairwise(window.stretch.begun[SETTLING:])
    )


def noise(windows: Sequence[Window]) -> float:
    """How far apart two halves are that nothing is between."""
    alone = [window for window in windows if not window.beside]
    halves = [
        statistics.median(durations(half, beside=False))
        for half in (alone[: len(alone) // 2], alone[len(alone) // 2 :])
    ]
    return max(halves) / min(halves) - 1


def measured(env: Path, model: Path, work: Path, windows: int) -> list[Window]:
    """Generations with the agents and without, alternating."""
    installed(work / "agent")
    folder = work / "published"
    agent = {"KVDIAG_AGENT_DIR": str(folder), "PYTHONPATH": str(work / "agent")}
    found = []
    with Engine(env, model, work / "vllm.log", env=meddling_env(agent, work / "meddle")) as engine:
        meddling = Meddling(engine, work / "meddle", folder)
        complete(engine)
        meddling.tell("count_steps")
        for number in range(windows):
            # In the order with, without, without, with: what drifts counts for both.
            beside = number % 4 in (0, 3)
            if beside:
                meddling.tell("agent_on")
                # Its first publication finds out what later ones know.
                assert eventually(
                    lambda: sum(one["sequence"] > 1 for one in published(folder).values()) >= len(meddling.answers())
                )
            else:
                meddling.tell("agent_off")
            meddling.tell("count_steps")
            complete(engine)
            found.append(window(meddling.counted(), beside=beside))
    return found


def window(counted: Sequence[Counted], *, beside: bool) -> Window:
    """One generation as all processes of the server have noted it."""
    begun = next(one.begun for one in counted if one.begun)
    made = [
        each for one in counted for each in one.publications if begun[SETTLING] < each.began_nanoseconds < begun[-1]
    ]
    return Window(
        beside=beside,
        stretch=Stretch(begun=begun, publications=[(each.began_nanoseconds, each.ended_nanoseconds) for each in made]),
        busy_seconds=tuple(each.busy_nanoseconds / 1e9 for each in made),
    )


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
    sys.stdout.write("".join(f"{name:56}{figure}\n" for name, figure in lines))


if __name__ == "__main__":
    sys.exit(main())
