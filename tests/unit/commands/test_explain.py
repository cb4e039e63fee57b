"""`kvdiag explain`: what is known of a verdict, and one line where there is none of that name."""

from dataclasses import asdict

import pytest

from kvdiag.alert_files import runbooks
from kvdiag.commands import main
from kvdiag.diagnosis.knowledge import KNOWLEDGE, entry_of
from kvdiag.outputs.terminal import explanation
from tests.integration.alerts.rules import alerts
from tests.unit.commands.bad_input.refusals import call as kvdiag


def unwrapped(text: str) -> str:
    """The text without any white space, since it is wrapped."""
    return "".join(text.split())


@pytest.mark.parametrize("verdict", KNOWLEDGE)
def test_every_part_of_a_verdict_is_printed(verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each part stands under its heading, in the order in which it is needed; the runbook is its command."""
    code = main(["explain", verdict])

    entry = {**asdict(KNOWLEDGE[verdict]), "runbook": f"`kvdiag explain --runbook {verdict}`"}
    expected = verdict + "".join(title + entry[field] for title, field in explanation.PARTS)
    assert (0, unwrapped(expected)) == (code, unwrapped(capsys.readouterr().out))


def test_without_an_id_all_are_listed() -> None:
    """The list has one line or more for each verdict, with its symptom."""
    actual = kvdiag("explain")

    assert (0, "") == (actual.code, actual.stderr)
    assert list(KNOWLEDGE) == [word for word in actual.stdout.split() if word in KNOWLEDGE]


def test_document_of_one_and_of_all() -> None:
    """As JSON one verdict is its entry with its id, and the list is all of them."""
    one = kvdiag("explain", "leak.kv_blocks", "--output", "json").document
    every = kvdiag("explain", "--output", "json").document

    assert {"schema_version": 1, "id": "leak.kv_blocks", **asdict(KNOWLEDGE["leak.kv_blocks"])} == one
    assert [{"id": verdict, **asdict(entry)} for verdict, entry in KNOWLEDGE.items()] == every["verdicts"]


def test_a_verdict_is_explained_in_the_words_of_an_engine() -> None:
    """The entry of that engine, alone and in the list; an engine that is not known is a usage error."""
    one = kvdiag("explain", "capacity.concurrency", "--engine", "llamacpp", "--output", "json").document
    every = kvdiag("explain", "--engine", "sglang", "--output", "json").document
    assert {
        "schema_version": 1,
        "id": "capacity.concurrency",
        **asdict(entry_of("capacity.concurrency", "llamacpp")),
    } == one
    assert [{"id": verdict, **asdict(entry_of(verdict, "sglang"))} for verdict in KNOWLEDGE] == every["verdicts"]
    assert KNOWLEDGE["capacity.concurrency"] != entry_of("capacity.concurrency", "llamacpp")
    assert 3 == kvdiag("explain", "leak.host", "--engine", "nobody").code


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("KvdiagLeakKvBlocks", "leak.kv_blocks"),
        ("kvdiagoomseen", "alert.oom"),
        ("KvdiagPreemptionThrash", "capacity.concurrency"),
        ("oom", "alert.oom"),
        ("kv_blocks", "leak.kv_blocks"),
    ],
)
def test_an_alert_or_a_word_finds_its_runbook(name: str, expected: str) -> None:
    """The name of an alert and a part of an id mean the runbook that the alert links to, or that has it in its id."""
    assert expected == kvdiag("explain", name, "--output", "json").document["id"]


def test_the_alert_of_all_other_verdicts_means_none_with_an_alert_of_its_own() -> None:
    """KvdiagVerdict lists the verdicts that its expression does not exclude."""
    actual = kvdiag("explain", "KvdiagVerdict").stderr
    assert [True, True, False, False] == [
        verdict in actual for verdict in ("spike.activation", "isolation.prefix_cache", "leak.host", "benign.warmup")
    ]


@pytest.mark.parametrize("name", sorted({rule["alert"] for rule in alerts()}))
def test_no_alert_is_unknown(name: str) -> None:
    """Every alert has a runbook, or says between which it is."""
    actual = kvdiag("explain", "--runbook", name)
    assert 0 == actual.code or any(verdict in actual.stderr for verdict in KNOWLEDGE)


@pytest.mark.parametrize("name", sorted(runbooks()))
def test_a_runbook_is_printed_as_it_is(name: str) -> None:
    """No line of it is wrapped: commands in it can be copied."""
    assert runbooks()[name].read_text(encoding="utf-8") == kvdiag("explain", "--runbook", name).stdout
