"""Real vLLM servers for the tests in this folder.

A server takes some 25 s to start and a run of kvdiag half a minute, most of it waiting: tests that share one are a
group, which one worker takes. `make test` starts one server alone, `meddling`: healthy, with the agent, and leaking for
the length of a test. Tests that want another server, such as `workers`, or take long on this one are `long`.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.require import require
from tests.integration.vllm import engine_env, gauges
from tests.integration.vllm.cli import Result, kvdiag
from tests.integration.vllm.engine import PLUGINS, STARTS, Engine, engine_environment
from tests.integration.vllm.meddling import Meddling
from tests.integration.vllm.meddling import environment as meddling_env
from tests.integration.vllm.side_by_side import completion

FIGURES_SECONDS = 300.0
API_KEY = "the-key-of-the-guarded-server"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmHome:
    """Where the engine's environment, the models and the logs of this session are."""

    env: Path
    models: Path
    logs: Path

    def engine(
        self,
        name: str,
        *args: str,
        model: str = "llama",
        env: Mapping[str, str] | None = None,
        max_model_len_tokens: int = 20_000,
        starts: int = STARTS,
    ) -> Engine:
        """A server, not started; its log is called after `name`."""
        return Engine(
            self.env,
            self.models / model,
            self.logs / f"{name}.log",
            args=args,
            env=env,
            max_model_len_tokens=max_model_len_tokens,
            starts=starts,
        )

    def answers(self, program: Path, *arguments: Path | str, limit_seconds: float) -> list[Any]:
        """What a program in vLLM's Python prints as lines of JSON, between the lines that vLLM prints."""
        quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(
            [str(self.env / "bin" / "python"), str(program), *map(str, arguments)],
            env=engine_environment(self.env, kv_space_gib=1) | quiet,
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "[{", '["'))]
        if done.returncode:
            raise RuntimeError(f"{program.name}, after {len(found)} answers: {done.stderr[-2000:]}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A server for one undisturbed run."""

    model: str = "llama"
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRun:
    """One undisturbed run, and the server's own figures after it."""

    result: Result
    block_tokens: int
    held_blocks_after: int


LEAKED_BLOCKS_PER_REQUEST = 2

AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
FP8_CACHE = ("--kv-cache-dtype", "fp8") if AVX512 else ()
"""A CPU without AVX-512 has no kernels for it (vllm/v1/attention/backends/cpu_attn.py::_get_attn_isa)."""

SUBJECTS: Mapping[str, Subject] = {
    "leak": Subject(
        args=("--block-size", "32", "--no-enable-prefix-caching"),
        env={
            "VLLM_PLUGINS": "leak_blocks",
            "KVDIAG_TEST_LEAKED_BLOCKS": str(PLUGINS / "leaked-blocks"),
        },
    ),
    "sliding_window": Subject(model="mistral-sliding"),
    "hybrid": Subject(model="gemma3", args=("--no-enable-prefix-caching",)),
    # Without AMX, vLLM's latent attention on a CPU is a reference of quadratic cost: 16K tokens take over a minute.
    "mla": Subject(model="mla", args=("--max-model-len", "4096")),
    "fp8": Subject(args=(*FP8_CACHE, "--block-size", "64", "--no-enable-prefix-caching")),
    "data_parallel": Subject(args=("--data-parallel-size", "2")),
}

HERE = Path(__file__).parent
SHARED = ("meddling", "workers", "guarded_server", "engine_reports")
"""What tests share, the everyday server first."""

ANSWERS = ("engine_figures", "registered", "reported", "served")
"""What the tests of one file share: what one program in vLLM's Python answers, after some minutes."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests by the server, or the run, that they share."""
    for item in items:
        if HERE in item.path.parents and isinstance(item, pytest.Function):
            item.add_marker(pytest.mark.xdist_group(_shared(item)))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests that need a server of their own are marked `long`."""
    fixtures = {*getattr(item, "fixturenames", ())}
    if HERE in item.path.parents and fixtures & {"subject_run", *SHARED[1:]}:
        item.add_marker("long")


def _shared(item: pytest.Function) -> str:
    if "subject_run" in item.fixturenames:
        return f"vllm-{item.callspec.params['subject_run']}"
    if any(name in item.fixturenames for name in ANSWERS):
        return f"vllm-{item.path.stem}"
    shared = [name for name in SHARED if name in item.fixturenames]
    return f"vllm-{shared[0] if shared else item.name}"


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> VllmHome:
    """What a server needs, built once; where it cannot be had, the tests are skipped with the reason."""
    try:
        env = engine_env.vllm_env()
        models = engine_env.models(env)
    except engine_env.EngineEnvError as error:
        require(False, f"vLLM's CPU build ({error})")
        raise
    return VllmHome(env=env, models=models, logs=tmp_path_factory.mktemp("engines"))


@pytest.fixture(scope="module")
def engine_figures(
    request: pytest.FixtureRequest, vllm: VllmHome, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The engine's figures for every one of a module's `CASES`, by its `PROGRAM`, which imports `bare_layers`."""
    given = tmp_path_factory.mktemp("cases") / "cases.json"
    given.write_text(json.dumps([*request.module.CASES.values()]), encoding="utf-8")
    answers = vllm.answers(request.module.PROGRAM, given, limit_seconds=FIGURES_SECONDS)
    return dict(zip(request.module.CASES, answers, strict=True))


@pytest.fixture(scope="session")
def server(meddling: Meddling) -> Engine:
    """As vLLM comes: blocks of 128 tokens, prefix caching on. Left idle by every test that uses it."""
    return meddling.server


@pytest.fixture(scope="session")
def guarded_server(vllm: VllmHome) -> Iterator[Engine]:
    """A server that wants a key and admits no more than 2,048 tokens a request."""
    with vllm.engine("guarded", "--api-key", API_KEY, max_model_len_tokens=2048) as engine:
        yield engine


@pytest.fixture(scope="session")
def meddling(vllm: VllmHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meddling]:
    """A server of one worker with the agent on its path, and what meddles with both; every test leaves it as it was."""
    with _meddling(vllm, tmp_path_factory.mktemp("agents"), ["VLLM::EngineCore", "VLLM::Worker", "python"]) as one:
        yield one


@pytest.fixture(scope="session")
def workers(vllm: VllmHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meddling]:
    """The same with two workers; every test leaves it as it was but that which kills it."""
    processes = ["VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1", "python"]
    with _meddling(vllm, tmp_path_factory.mktemp("agents"), processes, "--tensor-parallel-size", "2") as two:
        yield two


@contextmanager
def _meddling(vllm: VllmHome, work: Path, processes: list[str], *args: str) -> Iterator[Meddling]:
    installed = kvdiag("agent", "install", str(work))
    env = dict(line.split("=", 1) for line in installed.stdout.splitlines())
    with vllm.engine(work.name, *args, env=meddling_env(env, work / "meddle")) as engine:
        meddling = Meddling(engine, work / "meddle", Path(env["KVDIAG_AGENT_DIR"]), processes)
        # Agents publish in haste: a test would wait most of its time for one publication a second.
        meddling.tell("hasten_agent")
        # The first request to a server takes it seconds.
        completion(engine)
        yield meddling


@pytest.fixture(scope="session")
def subject_run(request: pytest.FixtureRequest, vllm: VllmHome) -> SubjectRun:
    """One undisturbed run against the subject of that name."""
    subject = SUBJECTS[request.param]
    with vllm.engine(request.param, *subject.args, model=subject.model, env=subject.env) as server:
        result = kvdiag("run", "--url", server.url, "--output", "json")
        return SubjectRun(
            result=result,
            block_tokens=gauges.block_tokens(server.url),
            held_blocks_after=gauges.held_blocks(server.url),
        )
