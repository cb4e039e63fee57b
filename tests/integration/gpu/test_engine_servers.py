"""The scenarios of other engines' servers, played on what a CPU has of them: llama.cpp's own server."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.integration.gpu.figures import Result
from tests.integration.gpu.scenario import Run, result
from tests.integration.gpu.scenarios.engine_servers import MODEL, SERVERS
from tests.integration.llamacpp.conftest import llama_home as llama_home  # noqa: PLC0414 - a fixture

LLAMA_SERVER = Path(__file__).parents[1] / "llamacpp" / "llama_server.py"


def played(name: str, out: Path) -> Result:
    """The result of a server's scenario."""
    (scenario,) = (each for each in SERVERS if each.name == f"server_{name}")
    work = out / "work"
    work.mkdir()
    return asyncio.run(result(scenario, Run(python=sys.executable, work=work, trace=out / f"{name}.jsonl.gz")))


@pytest.mark.long
def test_a_healthy_server_is_run_against_and_recorded(
    llama_home: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is started by its program's name, no step finds a fault, and the trace of the run is kept.

    On a busy machine a request of a tiny model may be over before it is sampled: its step is unknown then.
    """
    env, models = llama_home
    program = tmp_path / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {env}/bin/python {LLAMA_SERVER} --ctx-size 8192 "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv(MODEL, str(models / "llama.gguf"))

    actual = played("llamacpp", tmp_path)

    assert [] == [one for one in actual.figures if not one.ok and one.value != "unknown"]
    assert (None, 5, True) == (actual.failed, len(actual.figures), any(one.value == "ok" for one in actual.figures))
    assert (tmp_path / "llamacpp.jsonl.gz").stat().st_size > 0


@pytest.mark.parametrize("model", ["", "x"])
def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """A model, or the engine's program: no figure, and no trace."""
    monkeypatch.setenv(MODEL, model)
    actual = played("tgi", tmp_path)
    assert ("text-generation-launcher" if model else MODEL) in (actual.failed or "")
    assert (False, ()) == (actual.ok, actual.figures)
