"""`kvdiag explain`: what is known of a verdict, and one line where there is none of that name."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from kvdiag.commands import main
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.outputs.terminal import explanation
from tests.integration.vllm.cli import kvdiag


def unwrapped(text: str) -> str:
    """The text without any white space, since it is wrapped."""
    return "".join(text.split())


@pytest.mark.parametrize("verdict", KNOWLEDGE)
def test_every_part_of_a_verdict_is_printed(verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part of an entry stands under its heading, in the order in which it is needed."""
    # WHEN
    code = main(["explain", verdict])

    # THEN
    entry = asdict(KNOWLEDGE[verdict])
    expected = verdict + "".join(title + entry[field] for field, title in explanation.PARTS.items())
    assert (0, unwrapped(expected)) == (code, unwrapped(capsys.readouterr().out))


def test_without_an_id_all_are_listed() -> None:
    """The list has one line or more for each verdict, with its symptom."""
    # WHEN
    actual = kvdiag("explain")

    # THEN
    assert (0, "") == (actual.code, actual.stderr)
    words = actual.stdout.split()
    assert list(KNOWLEDGE) == [word for word in words if word in KNOWLEDGE]


def test_document_of_one_and_of_all() -> None:
    """As JSON one verdict is its entry with its id, and the list is all of them."""
    # WHEN
    one = kvdiag("explain", "leak.kv_blocks", "--output", "json").document
    every = kvdiag("explain", "--output", "json").document

    # THEN
    assert {"schema_version": 1, "id": "leak.kv_blocks", **asdict(KNOWLEDGE["leak.kv_blocks"])} == one
    assert [{"id": verdict, **asdict(entry)} for verdict, entry in KNOWLEDGE.items()] == every["verdicts"]


@pytest.mark.parametrize(
    ("asked", "hint"),
    [("leak.kv_block", "; did you mean leak.kv_blocks?"), ("nothing\nlike it", ""), ("", "")],
)
def test_unknown_verdict_is_one_line(asked: str, hint: str) -> None:
    """An id that does not exist is wrong usage, said in one line with the nearest that does."""
    # WHEN
    actual = kvdiag("explain", asked)

    # THEN
    expected = f"kvdiag: there is no verdict {asked!r}{hint} (kvdiag explain lists them)\n"
    assert (3, "", expected) == (actual.code, actual.stdout, actual.stderr)
