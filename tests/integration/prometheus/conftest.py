"""One real Prometheus for the session, which holds the history of every world; started by the first test that asks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvdiag.commands import main
from tests.fixtures.require import require
from tests.integration.prometheus.histories import END_SECONDS, WORLDS
from tests.integration.prometheus.server import PrometheusEnvError, programs, serving, write_history


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Exit code and output of one call of the command line."""

    code: int
    stdout: str
    stderr: str


def require_prometheus() -> None:
    """Skip the test with one line where there is no Prometheus; fail under CI=true."""
    try:
        programs()
    except PrometheusEnvError as error:
        require(ok=False, what=f"Prometheus ({error})")


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus with every world's history."""
    require_prometheus()
    storage = tmp_path_factory.mktemp("prometheus") / "data"
    write_history((line for world in WORLDS.values() for line in world()), storage)
    with serving(storage) as url:
        yield url


@pytest.fixture
def diagnose(capsys: pytest.CaptureFixture[str]) -> Any:
    """`kvdiag diagnose`, up to the histories' end unless the arguments say otherwise."""

    def call(*arguments: str) -> Judged:
        code = main(["diagnose", "--end", str(END_SECONDS), *arguments])
        out, err = capsys.readouterr()
        return Judged(code=code, stdout=out, stderr=err)

    return call
