"""The data of known reports: every entry is whole, in order and safe to show and to search with."""

import re
from time import process_time

import pytest

from kvdiag.diagnosis.knowledge import KNOWLEDGE, known_engines
from kvdiag.diagnosis.prescriptions.known_reports import Report, every_report, signs_in, vocabulary
from kvdiag.diagnosis.prescriptions.version_order import order
from tests.unit.diagnosis.prescriptions.reported import rows

REPORTS = every_report()
LINK = re.compile(
    r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/\d+|https://github\.com/[\w.-]+/[\w.-]+/security/\S+"
)


def test_there_are_many_and_each_has_its_own_id() -> None:
    """There are many and each has its own id."""
    assert len({one.id for one in REPORTS}) == len(REPORTS) >= 40


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.id)
def test_an_entry_is_whole(report: Report) -> None:
    """An entry is whole."""
    assert set(report.verdicts) <= set(KNOWLEDGE)
    assert set(report.engines) <= set(known_engines())
    assert {*report.conditions, *report.without} <= set(vocabulary()["conditions"])
    assert set(report.processes) <= set(vocabulary()["processes"])
    assert all(text.endswith(".") and text.isascii() and text.isprintable() for text in (report.summary, report.remedy))
    assert report.links
    assert all(LINK.fullmatch(link) for link in report.links)
    assert len(report.bytes_per_request) in (0, 2)
    assert list(report.bytes_per_request) == sorted(report.bytes_per_request)


@pytest.mark.parametrize("report", REPORTS, ids=lambda one: one.id)
def test_the_versions_of_an_entry_ascend(report: Report) -> None:
    """The versions of an entry ascend."""
    versions = [one for one in (report.first, report.last, report.fixed_in) if one is not None]
    placed = [order(one) for one in versions]
    assert None not in placed
    assert placed == sorted(placed, key=lambda one: one or ((), 0, 0, 0, 0))
    assert report.last is None or report.fixed_in is None or order(report.last) != order(report.fixed_in)


@pytest.mark.parametrize("report", [one for one in REPORTS if one.log is not None], ids=lambda one: one.id)
def test_a_log_line_is_searched_in_linear_time(report: Report) -> None:
    """A log line is searched in linear time."""
    began = process_time()
    signs_in("token_to_kv_pool_allocator memory leak " * 20_000, report.engines[0])
    assert process_time() - began < 30.0


def test_every_word_of_the_vocabulary_is_used() -> None:
    """Every word of the vocabulary is used."""
    used = {name for one in REPORTS for name in (*one.conditions, *one.without)}
    assert used == set(vocabulary()["conditions"])


def test_every_incident_has_an_entry_or_a_reason() -> None:
    """Every incident has an entry or a reason."""
    assert {row["incident"] for row in rows() if not row.get("left_out") and not row.get("engine")} == set()
