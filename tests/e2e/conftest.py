"""Real vLLM servers for the tests beside this file.

A server takes some 25 s to start and a run of kvdiag half a minute, most of it waiting. So the plain runs, each against
a server of its own, are made one after the other in the background, from the first test of the session on, when the
server with agents has been started; the tests of this folder come last, those of the agents first among them, and those
that await a plain run last of all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import capacities_run, engine_env, gauges
from tests.e2e.capacities_run import EngineTold
from tests.e2e.cli import Result, kvdiag
from tests.e2e.engine import Engine
from tests.e2e.meddling import Meddling
from tests.e2e.meddling import environment as meddling_env
from tests.e2e.side_by_side import completion
from tests.support import require

API_KEY = "the-key-of-the-guarded-server"
PLUGINS = Path(__file__).with_name("plugins")


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
    ) -> Engine:
        """A server, not started; its log is called after `name`."""
        return Engine(
            self.env,
            self.models / model,
            self.logs / f"{name}.log",
            args=args,
            env=env,
            max_model_len_tokens=max_model_len_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A server for one undisturbed run."""

    model: str = "llama"
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectRun:
    """One undisturbed run, and what the server itself said after it."""

    result: Result
    block_tokens: int
    held_blocks_after: int


LEAKED_BLOCKS_PER_REQUEST = 2

SUBJECTS: Mapping[str, Subject] = {
    "leak": Subject(
        args=("--block-size", "32", "--no-enable-prefix-caching"),
        env={
            "PYTHONPATH": str(PLUGINS),
            "VLLM_PLUGINS": "leak_blocks",
            "KVDIAG_TEST_LEAKED_BLOCKS": str(LEAKED_BLOCKS_PER_REQUEST),
        },
    ),
    "sliding_window": Subject(model="mistral-sliding"),
    "hybrid": Subject(model="gemma3", args=("--no-enable-prefix-caching",)),
    "mla": Subject(model="mla"),
    "fp8": Subject(args=("--kv-cache-dtype", "fp8", "--block-size", "64", "--no-enable-prefix-caching")),
    "data_parallel": Subject(args=("--data-parallel-size", "2")),
}

HERE = Path(__file__).parent
RUNS = pytest.StashKey["BackgroundRuns"]()


class BackgroundRuns:
    """The plain runs of a session, one after the other in a thread of their own."""

    def __init__(self, names: Sequence[str], *, capacities: bool, agents: bool) -> None:
        """Begin; `capacities` asks for the run of all architectures as well, `agents` for the server that has them."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvdiag-engines-")
        self._engines = ExitStack()
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._meddling = self._pool.submit(self._start_with_agents) if agents else None
        self._capacities = (
            self._pool.submit(lambda: capacities_run.capacities(engine_env.vllm_env())) if capacities else None
        )
        self._runs = {name: self._pool.submit(self._run, name) for name in names}

    def _home(self) -> VllmHome:
        env = engine_env.vllm_env()
        return VllmHome(env=env, models=engine_env.models(env), logs=Path(self._folder.name))

    def _run(self, name: str) -> SubjectRun:
        return _run_subject(self._home(), name, SUBJECTS[name])

    def _start_with_agents(self) -> Meddling:
        work = Path(self._folder.name) / "agents"
        work.mkdir()
        installed = kvdiag("agent", "install", str(work))
        env = dict(line.split("=", 1) for line in installed.stdout.splitlines())
        engine = self._home().engine("agents", "--tensor-parallel-size", "2", env=meddling_env(env, work / "meddle"))
        meddling = Meddling(self._engines.enter_context(engine), work / "meddle", Path(env["KVDIAG_AGENT_DIR"]))
        meddling.tell("hasten_agent")
        # The first request to a server takes it seconds.
        completion(engine)
        return meddling

    def meddling(self) -> Meddling:
        """The server with agents, awaited; raises what its start raised."""
        assert self._meddling is not None, "no test of this session asks for it"
        return self._meddling.result()

    def result(self, name: str) -> SubjectRun:
        """One run, awaited; raises what it raised."""
        return self._runs[name].result()

    def told(self, config: Path) -> dict[str, Any]:
        """What the engine says of an architecture, awaited; raises what the run raised."""
        assert self._capacities is not None, "no test of this session is marked so"
        return self._capacities.result()[config.name]

    def close(self) -> None:
        """Begin no other."""
        self._pool.shutdown(cancel_futures=True)
        self._engines.close()
        self._folder.cleanup()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put this folder's tests last; all else stays in its random order."""
    ours = [item for item in items if HERE in item.path.parents]
    ours.sort(
        key=lambda item: (
            not _asks_for_agents(item),
            _awaits_a_run(item),
            item.get_closest_marker("kills_the_server") is not None,
        )
    )
    others = [item for item in items if HERE not in item.path.parents]
    items[:] = [*others, *ours]


def _asks_for_agents(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and "meddling" in item.fixturenames


def _awaits_a_run(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("subject", "capacities"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the plain runs that some test of this session awaits, in the order in which they are awaited."""
    wanted = dict.fromkeys(mark.args[0] for item in session.items for mark in item.iter_markers("subject"))
    capacities = any(item.get_closest_marker("capacities") is not None for item in session.items)
    agents = any(_asks_for_agents(item) for item in session.items)
    if (wanted or capacities or agents) and not session.config.option.collectonly:
        session.config.stash[RUNS] = BackgroundRuns(list(wanted), capacities=capacities, agents=agents)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End with the session."""
    if RUNS in config.stash:
        config.stash[RUNS].close()


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


def pytest_configure(config: pytest.Config) -> None:
    """Make this folder's own marker known."""
    config.addinivalue_line("markers", "subject(name): awaits the background run of this subject of conftest.py")
    config.addinivalue_line("markers", "kills_the_server: comes after all others that use `server`")
    config.addinivalue_line("markers", "capacities: awaits the background run of capacities.py")


@pytest.fixture(scope="session")
def server(vllm: VllmHome) -> Iterator[Engine]:
    """As vLLM comes: blocks of 128 tokens, prefix caching on. Left idle by every test that uses it."""
    with vllm.engine("default") as engine:
        yield engine


@pytest.fixture(scope="session")
def guarded_server(vllm: VllmHome) -> Iterator[Engine]:
    """A server that wants a key and admits no more than 2,048 tokens a request."""
    with vllm.engine("guarded", "--api-key", API_KEY, max_model_len_tokens=2048) as engine:
        yield engine


@pytest.fixture(scope="session")
def meddling(request: pytest.FixtureRequest, vllm: VllmHome) -> Meddling:
    """A server of two workers, started in the background, that has the agent on its path, and what meddles with both.

    Its agents publish in haste. Left as it was by every test but that which kills it. `vllm` skips where there can be
    none.
    """
    return request.config.stash[RUNS].meddling()


@pytest.fixture
def subject_run(request: pytest.FixtureRequest, vllm: VllmHome) -> SubjectRun:
    """The background run of the subject that the test's mark names, awaited. `vllm` skips where there can be none."""
    mark = request.node.get_closest_marker("subject")
    return request.config.stash[RUNS].result(mark.args[0])


@pytest.fixture
def engine_told(request: pytest.FixtureRequest, vllm: VllmHome) -> EngineTold:
    """What the engine says of an architecture, awaited. `vllm` skips where there can be none."""
    return request.config.stash[RUNS].told


def _run_subject(vllm: VllmHome, name: str, subject: Subject) -> SubjectRun:
    with vllm.engine(name, *subject.args, model=subject.model, env=subject.env) as server:
        result = kvdiag("run", "--url", server.url, "--output", "json")
        return SubjectRun(
            result=result,
            block_tokens=gauges.block_tokens(server.url),
            held_blocks_after=gauges.held_blocks(server.url),
        )
