"""Real SGLang servers for the tests in this folder: one worker takes all of them, for one process imports SGLang."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.require import require
from tests.integration.sglang.servers import Nursery, Server
from tests.integration.sglang.sglang_env import sglang_env
from tests.integration.vllm.cli import kvdiag
from tests.integration.vllm.engine_env import EngineEnvError, models

HERE = Path(__file__).parent
POOL_TOKENS = 32_768


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of this folder on one worker."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("sglang"))


@pytest.fixture(scope="session")
def agent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of servers with the agent in each process."""
    folder = tmp_path_factory.mktemp("agent")
    installed = kvdiag("agent", "install", str(folder))
    variables = dict(line.split("=", 1) for line in installed.stdout.splitlines())
    return {**variables, "PYTHONPATH": f"{folder / 'sitecustomize'}:{folder}"}


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory, agent: dict[str, str]) -> Iterator[Nursery]:
    """Where servers come from; skipped with the reason where SGLang cannot be had."""
    try:
        env = sglang_env()
        folder = models(env)
    except EngineEnvError as error:
        require(False, f"SGLang's CPU environment ({error})")
        raise
    with Nursery(env, folder / "llama", tmp_path_factory.mktemp("sglang"), agent) as one:
        yield one


@pytest.fixture(scope="session")
def server(nursery: Nursery) -> Iterator[Server]:
    """As SGLang comes, in pages of one token; every test leaves it idle, its radix cache as it may be."""
    with nursery.start("page1", "--max-total-tokens", str(POOL_TOKENS), "--enable-streaming-session") as one:
        yield one
