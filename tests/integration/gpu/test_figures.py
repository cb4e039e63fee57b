"""Figures against their limits, and the table that shows them."""

import json
from pathlib import Path

import pytest

from tests.integration.gpu.figures import Figure, Machine, Result, at_least, at_most, exactly, keep, one_of, table

MIB = 2**20
MACHINE = Machine(gpu="NVIDIA X", driver="580.1", torch="2.11.0", cuda="13.0", python="3.12.3", kvdiag="0.1.0")


@pytest.mark.parametrize(
    ("figure", "expected"),
    [
        (at_most("a", 3 * MIB, 3 * MIB, "bytes"), (True, "<= 3.0 MiB")),
        (at_most("a", 3 * MIB + 1, 3 * MIB, "bytes"), (False, "<= 3.0 MiB")),
        (at_least("a", 5, 5, "files"), (True, ">= 5 files")),
        (at_least("a", 4, 5, "files"), (False, ">= 5 files")),
        (exactly("a", 0, 0, "bytes"), (True, "0 bytes")),
        (exactly("a", None, 0), (False, "0")),
        (one_of("a", "fault", ("fault", "suspect")), (True, "fault or suspect")),
        (one_of("a", "ok", ("fault",)), (False, "fault")),
    ],
)
def test_figure_is_within_its_limit_or_not(figure: Figure, expected: tuple[bool, str]) -> None:
    """At the limit is within."""
    assert expected == (figure.ok, figure.limit)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Result(scenario="a", about="", figures=(exactly("b", 1, 1), Figure(name="c", value=2))), True),
        (Result(scenario="a", about="", figures=(exactly("b", 1, 1), exactly("c", 1, 2))), False),
        (Result(scenario="a", about="", figures=(Figure(name="c", value=2),)), False),
        (Result(scenario="a", about=""), False),
        (Result(scenario="a", about="", figures=(exactly("b", 1, 1),), failed="no GPU memory"), False),
    ],
    ids=["all within", "one beyond", "nothing judged", "nothing found", "not played to its end"],
)
def test_scenario_passes_only_by_what_it_found(result: Result, expected: bool) -> None:
    """A scenario that judged nothing has not passed."""
    assert expected == result.ok


def test_table_shows_every_figure_with_its_limit() -> None:
    """The machine first, then each scenario with its verdict and its figures."""
    results = (
        Result(scenario="comb", about="3 GiB in holes", figures=(at_least("stranded", 4 * MIB, 3 * MIB, "bytes"),)),
        Result(scenario="cost", about="a publication", figures=(at_most("publication", 123.4567, 100, "us"),)),
        Result(scenario="graph_pool", about="a pool", failed="graph: RuntimeError: no"),
    )
    assert [
        "NVIDIA X, driver 580.1, torch 2.11.0, CUDA 13.0",
        "        scenario    figure       value       limit",
        "ok      comb        3 GiB in holes",
        "ok                  stranded     4.0 MiB     >= 3.0 MiB",
        "FAILED  cost        a publication",
        "FAILED              publication  123.457 us  <= 100 us",
        "FAILED  graph_pool  graph: RuntimeError: no",
    ] == table(MACHINE, results).splitlines()


def test_document_names_the_machine_and_keeps_every_figure(tmp_path: Path) -> None:
    """The document that is committed with the traces names its GPU, driver and torch, and holds every figure."""
    result = Result(scenario="comb", about="holes", figures=(exactly("failed", 1, 1, "requests"),))
    keep(tmp_path / "figures.json", MACHINE, [result])
    told = json.loads((tmp_path / "figures.json").read_text())
    assert ("NVIDIA X", "580.1", "2.11.0") == tuple(told["machine"][name] for name in ("gpu", "driver", "torch"))
    figure = {"name": "failed", "value": 1, "unit": "requests", "limit": "1 requests", "ok": True}
    assert [{"scenario": "comb", "about": "holes", "figures": [figure], "failed": None, "ok": True}] == told[
        "scenarios"
    ]
