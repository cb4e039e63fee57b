"""llama.cpp's own server for the tests in this folder; it starts in less than a second."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.fixtures.require import require
from tests.integration.llamacpp import llama_env
from tests.integration.llamacpp.served_gguf import LlamaServer

Start = Callable[..., LlamaServer]


@pytest.fixture(scope="session")
def llama_home() -> tuple[Path, Path]:
    """The environment with the server, and the folder of models; skipped with the reason where they cannot be had."""
    try:
        env = llama_env.llama_env()
        return env, llama_env.models(env)
    except llama_env.LlamaEnvError as error:
        require(False, f"llama.cpp's server ({error})")
        raise


@pytest.fixture
def llama(llama_home: tuple[Path, Path], tmp_path: Path) -> Iterator[Start]:
    """Starts a server with these arguments, which ends with the test."""
    env, models = llama_home
    with ExitStack() as stack:

        def start(*args: str, model: str = "llama", **environ: str) -> LlamaServer:
            server = LlamaServer(env, models / f"{model}.gguf", tmp_path / "server.log", *args, environ=environ)
            return stack.enter_context(server)

        yield start
