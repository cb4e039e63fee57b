"""Who has the blocks of a KV pool, as every output shows it."""

from dataclasses import replace

from kvdiag.diagnosis import diagnose
from kvdiag.model import RequestBlocks
from kvdiag.outputs.documents.diagnosis_document import audit_document, document
from kvdiag.outputs.html.report_page import render as report
from kvdiag.outputs.html.status_page import page as status_page
from kvdiag.outputs.pool_owners import owner_rows, request_notes
from kvdiag.outputs.terminal.text import render as text
from kvdiag.outputs.terminal.text import render_audit
from kvdiag.outputs.terminal.top_frame import View, frame
from kvdiag.outputs.terminal.top_memory import Room
from tests.builders.runs import run
from tests.builders.values import owners
from tests.builders.worlds import World, facts
from tests.unit.outputs.html_page import Page
from tests.unit.outputs.report_pages import MAKING
from tests.unit.outputs.test_status_page import NOW, shown
from tests.unit.outputs.texts import piped

HELD = RequestBlocks(
    age_seconds=1.0,
    requests=40,
    tail_tokens=300,
    tail_largest_tokens=15,
    longest_requests=10,
    longest_blocks=90,
    stalled_requests=2,
    stalled_blocks=7,
    stalled_oldest_seconds=90.0,
)
COUNTED = replace(owners(running_blocks=120, cached_free_blocks=300, orphaned_blocks=14), held=HELD)
KNOWN = facts(World())


def test_owners_with_blocks_are_shown_with_their_share() -> None:
    """120 running, 300 cached, 14 orphaned and the rest of 1,000 free; an owner without blocks is left out."""
    rows = {one.owner: (one.blocks, one.share) for one in owner_rows((COUNTED,), KNOWN)}
    expected = {
        "running": ("120", "12 %"),
        "cached_free": ("300", "30 %"),
        "free": ("566", "57 %"),
        "orphaned": ("14", "1.4 %"),
    }
    assert expected == rows


def test_several_engines_are_told_apart() -> None:
    """The rows of each engine's pool name it."""
    names = [one.name for one in owner_rows((owners(), owners(engine="1")), KNOWN)]
    assert 4 == len(set(names))


def test_requests_without_blocks_have_no_note() -> None:
    """An idle engine, and one whose requests nothing looks at."""
    idle = replace(HELD, requests=0, longest_requests=0, stalled_requests=0)
    assert [] == list(request_notes((replace(COUNTED, held=idle), replace(COUNTED, held=None)), KNOWN))


def test_every_output_shows_them() -> None:
    """The diagnosis in text, JSON and the report, the audit, the status page and the live view."""
    timeline = run(World())
    newest = replace(timeline.samples[-1], block_owners=(COUNTED,))
    timeline = replace(timeline, samples=(*timeline.samples[:-1], newest))
    diagnosis = diagnose(timeline, KNOWN)
    snapshot = shown(newest=replace(shown().newest, block_owners=(COUNTED,)))
    audited = audit_document(KNOWN, newest, diagnosis.ledger, ())

    for entry in (document(diagnosis)["block_owners"], audited["block_owners"]):
        assert [(COUNTED.by_owner, 300)] == [(one["blocks"], one["requests"]["tail_tokens"]) for one in entry]
    outputs = (
        piped(text(diagnosis)),
        piped(render_audit(KNOWN, (), diagnosis.ledger, (), newest.block_owners or ())),
        Page(report(diagnosis, timeline, MAKING)).text,
        Page(status_page(snapshot, (), NOW)).text,
    )
    for row in owner_rows((COUNTED,), KNOWN):
        assert [] == [one for one in outputs if row.name not in one]
    for note in request_notes((COUNTED,), KNOWN):
        assert [] == [one for one in outputs if note not in " ".join(one.split())]
    live = frame(View(snapshot=snapshot, lines=diagnosis.ledger, origin=""), Room(columns=100)).plain
    assert "14 orphaned" in live
