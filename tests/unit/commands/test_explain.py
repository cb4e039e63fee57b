"""`kvdiag explain`: what is known of a verdict, and one line where there is none of that name."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kvdiag.commands import main
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.outputs.terminal import explanation
from tests.unit.commands.bad_input.refusals import call as kvdiag


def unwrapped(text: str) -> str:
    """The text without any white space, since it is wrapped."""
    return "".join(text.split())


@pytest.mark.parametrize("verdict", KNOWLEDGE)
def test_every_part_of_a_verdict_is_printed(verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part of an entry stands under its heading, in the order in which it is needed."""
    code = main(["explain", verdict])

    entry = asdict(KNOWLEDGE[verdict])
    expected = verdict + "".join(title + entry[field] for field, title in explanation.PARTS.items())
    assert (0, unwrapped(expected)) == (code, unwrapped(capsys.readouterr().out))


def test_without_an_id_all_are_listed() -> None:
    """The list has one line or more for each verdict, with its symptom."""
    actual = kvdiag("explain")

    assert (0, "") == (actual.code, actual.stderr)
    words = actual.stdout.split()
    assert list(KNOWLEDGE) == [word for word in words if word in KNOWLEDGE]


def test_document_of_one_and_of_all() -> None:
    """As JSON one verdict is its entry with its id, and the list is all of them."""
    one = kvdiag("explain", "leak.kv_blocks", "--output", "json").document
    every = kvdiag("explain", "--output", "json").document

    assert {"schema_version": 1, "id": "leak.kv_blocks", **asdict(KNOWLEDGE["leak.kv_blocks"])} == one
    assert [{"id": verdict, **asdict(entry)} for verdict, entry in KNOWLEDGE.items()] == every["verdicts"]
