"""The scenarios' plays: half a minute each, mostly of waiting for the agent: the tests of one share its play."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.require import require
from tests.integration.gpu.stand_in_machine import begin, library
from tests.stand_ins.nvml.stand_in import compiler

HERE = Path(__file__).parent
LIMIT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What one program left."""

    code: int
    table: str
    figures: Mapping[str, Any]
    out: Path


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests of one scenario, which share its play."""
    for item in items:
        if HERE in item.path.parents and isinstance(item, pytest.Function) and "played" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group(f"scenario-{item.callspec.params['name']}"))


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in driver, compiled once."""
    require(compiler() is not None, "a C compiler (cc)")
    return library(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="session")
def plays() -> dict[str, Played]:
    """The plays that were made so far, by their scenario's name."""
    return {}


@pytest.fixture
def played(name: str, plays: dict[str, Played], libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The play of the test's scenario, by a program of its own on a stand-in GPU of its own, made once."""
    if name not in plays:
        out = tmp_path_factory.mktemp("scenarios") / name
        with begin(libraries, out, "--brief", name) as process:
            try:
                table, said = process.communicate(timeout=LIMIT_SECONDS)
            finally:
                process.kill()
        figures = out / "figures.json"
        assert figures.exists(), f"exit code {process.returncode}: {said}"
        plays[name] = Played(code=process.returncode, table=table, figures=json.loads(figures.read_text()), out=out)
    return plays[name]
