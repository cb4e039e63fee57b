"""Every flag of `vllm serve` is an option of `kvdiag fit`, or is known to change nothing, or is refused by its name."""

from pathlib import Path
from typing import Any

import click
import pytest

from kvdiag.commands.fit import command
from kvdiag.commands.fitting.vllm_command import LISTS
from kvdiag.kv.fit.vllm_flags import MODELLED_VARIABLES, PLAIN_VARIABLES, REFUSED_VARIABLES, VLLM_FLAGS
from tests.integration.vllm.conftest import VllmHome

pytestmark = pytest.mark.real_vllm

PROGRAM = Path(__file__).with_name("serve_flags.py")
LIMIT_SECONDS = 300.0
OPTIONS = {
    name: int(not option.is_flag)
    for option in command.params
    if isinstance(option, click.Option)
    for name in (*option.opts, *option.secondary_opts)
}
HELP = {"-h", "--help"}
OWN = {"--api-key"}
"""Options of `fit` that have another meaning in vLLM."""

SHORT = "-O"
"""A short form of --optimization-level that vLLM's parser rewrites before it reads flags."""


@pytest.fixture(scope="module")
def served(vllm: VllmHome) -> dict[str, Any]:
    """The flags of `vllm serve`, each with its number of values, and the variables of its sizing code."""
    (found,) = vllm.answers(PROGRAM, limit_seconds=LIMIT_SECONDS)
    return dict(found)


def test_every_flag_is_known(served: dict[str, Any]) -> None:
    """A flag that a newer vLLM adds has to be modelled, or sorted by what it does."""
    assert [] == sorted(set(served["flags"]) - {*VLLM_FLAGS, *OPTIONS, *HELP})


def test_every_flag_takes_as_many_values_as_in_vllm(served: dict[str, Any]) -> None:
    """Else a value would be taken for the model, or the model for a value."""
    expected = {flag: values for flag, values in served["flags"].items() if flag not in HELP | OWN}
    known = {flag: one.values for flag, one in VLLM_FLAGS.items()} | OPTIONS | dict.fromkeys(LISTS)

    assert expected == {flag: known[flag] for flag in expected}


def test_no_flag_is_listed_that_vllm_does_not_have(served: dict[str, Any]) -> None:
    """A negation is one of vLLM's only where the flag has one."""
    listed = [flag for flag in VLLM_FLAGS if not flag.startswith("--no-") and flag != SHORT]

    assert [] == sorted(set(listed) - set(served["flags"]))


def test_every_variable_is_known(served: dict[str, Any]) -> None:
    """Those that vLLM's own sizing code reads."""
    assert [] == sorted(set(served["variables"]) - {*PLAIN_VARIABLES, *MODELLED_VARIABLES, *REFUSED_VARIABLES})
