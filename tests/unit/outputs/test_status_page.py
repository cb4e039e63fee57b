"""The status page: what it says, that nothing unknown looks healthy, and that nothing from outside is markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import HealthCheck, given, settings

from kvdiag.model import Device, Diagnosis, Facts, Gap, Memory, PressureThresholds, Sample, Snapshot
from kvdiag.outputs.html.markup import MAX_TEXT_CHARACTERS, VOID, Html, element
from kvdiag.outputs.html.status_chart import Window, chart
from kvdiag.outputs.html.status_page import REFRESH_SECONDS, SILENT_SECONDS, STALE_SECONDS, headline, page
from tests.builders.runs import judged
from tests.builders.values import GIB, device, engine
from tests.builders.worlds import World
from tests.unit.feeds.strategies import FACTS, SAMPLES
from tests.unit.outputs.test_metrics import NEWEST, snapshot
from tests.unit.server.shell import STARTING

NOW = 1_770_000_000.0


def shown(**changed: object) -> Snapshot:
    """The leaking server of the exporter's golden page, as of now."""
    known = snapshot(newest=replace(NEWEST, at_seconds=NOW - 1))
    return replace(known, **{"diagnosed_seconds": NOW - 4, **changed})  # type: ignore[arg-type]


def well(**changed: object) -> Snapshot:
    """A server in which nothing was found."""
    diagnosis = judged(World())
    assert diagnosis.worst == "ok"
    return shown(**{"diagnosis": diagnosis, **changed})


class Reader(HTMLParser):
    """A browser's view: elements that are closed in order, and the text between them."""

    def __init__(self, document: str) -> None:
        """Read it."""
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(document)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element without content."""
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """It must be the innermost."""
        assert tag == self.open.pop()

    def handle_data(self, data: str) -> None:
        """Note what is read."""
        self.words.append(data)

    @property
    def text(self) -> str:
        """All that a person reads."""
        return "".join(self.words)

    def having(self, name: str) -> list[dict[str, str | None]]:
        """The elements of one kind."""
        return [attributes for tag, attributes in self.elements if tag == name]


def read(shown: Snapshot, history: Sequence[Sample] = (), now_seconds: float = NOW) -> Reader:
    """The page, which is one whole document."""
    reader = Reader(page(shown, history, now_seconds))
    assert [] == reader.open
    return reader


def test_a_person_reads_what_is_wrong_and_what_to_do() -> None:
    """Verdict, findings with evidence and remedy, the ledger, the sources, and where the rest is."""
    # WHEN
    reader = read(shown())

    # THEN
    assert "FAULT - kvdiag" in reader.text
    for words in (
        "leak.kv_blocks", "Remedy", "alerts/runbooks/leak.kv_blocks.md", "test/model, vllm 0.32.0",
        "23.00 GiB of 24.00 GiB taken (96%)", "kv held 3.00 GiB", "unaccounted 560.00 MiB",
        "The server answers.", "Last read 1 s ago.", "Last diagnosed 4 s ago.", "3 errors",
    ):  # fmt: skip
        assert words in reader.text
    assert {link["href"] for link in reader.having("a")} == {
        "/metrics", "/api/v1/diagnosis", "/api/v1/ledger", "/api/v1/admission", "/-/healthy", "/-/ready",
    }  # fmt: skip


def test_it_needs_neither_script_nor_network() -> None:
    """It renews itself, fits a phone, and is light or dark as the reader's system is."""
    # WHEN
    reader = read(shown())
    document = page(shown(), (), NOW)

    # THEN
    assert [] == [tag for tag, _ in reader.elements if tag in ("script", "link", "img", "iframe", "object")]
    assert "url(" not in document
    assert {"http-equiv": "refresh", "content": str(REFRESH_SECONDS)} in reader.having("meta")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in reader.having("meta")
    assert "prefers-color-scheme:dark" in document


def test_the_bar_is_the_ledger_to_scale() -> None:
    """The parts lie beside one another and take as much of the bar as of the device."""
    # WHEN
    parts = [one for one in read(shown()).having("rect") if (one["class"] or "").startswith("part ")]

    # THEN
    places = [(float((one["x"] or "").rstrip("%")), float((one["width"] or "").rstrip("%"))) for one in parts]
    assert 23 / 24 * 100 == pytest.approx(sum(width for _, width in places), abs=0.01)
    edges = [left + width for left, width in places]
    assert [left for left, _ in places[1:]] == pytest.approx(edges[:-1], abs=0.01)


@pytest.mark.parametrize(
    ("thresholds", "colours"),
    [
        pytest.param(PressureThresholds(warning_ratio=0.8, critical_ratio=0.9), [], id="below both"),
        pytest.param(PressureThresholds(warning_ratio=0.2, critical_ratio=0.9), ["suspect"], id="between"),
        pytest.param(PressureThresholds(warning_ratio=0.2, critical_ratio=0.3), ["fault"], id="above both"),
        pytest.param(None, [], id="nobody said"),
    ],
)
@pytest.mark.parametrize("devices", [NEWEST.devices, None], ids=["a GPU", "the pool alone"])
def test_pressure_has_the_colour_of_what_it_asks_for(
    thresholds: PressureThresholds | None, colours: list[str], devices: tuple[Device, ...] | None
) -> None:
    """By the thresholds that the daemon was given; below them, and where there are none, in no colour."""
    # GIVEN
    newest = replace(NEWEST, at_seconds=NOW - 1, devices=devices, engines=(engine(usage=0.5),))

    # WHEN
    reader = read(well(newest=newest, pressure_thresholds=thresholds))

    # THEN
    assert 1 == reader.text.count("Memory pressure ")
    shown = page(well(newest=newest, pressure_thresholds=thresholds), (), NOW)
    assert colours == [words for words in ("suspect", "fault") if f'Memory pressure <b class="{words}">' in shown]


@pytest.mark.parametrize(
    ("known", "status", "words"),
    [
        pytest.param(STARTING, "unknown", "Nothing has been read yet.", id="nothing read"),
        pytest.param(well(), "ok", "No fault found in what could be seen.", id="well"),
        pytest.param(well(diagnosis=None), "unknown", "There is no diagnosis yet.", id="not judged yet"),
        pytest.param(well(state="lost"), "unknown", "The server does not answer.", id="lost"),
        pytest.param(well(state="starting"), "unknown", "The server has not answered yet.", id="starting"),
        pytest.param(
            well(diagnosed_seconds=NOW - STALE_SECONDS - 1),
            "unknown",
            "The newest diagnosis was made 5 min ago.",
            id="an old diagnosis",
        ),
        pytest.param(
            well(newest=replace(NEWEST, at_seconds=NOW - SILENT_SECONDS - 1)),
            "unknown",
            "Nothing has been read since 61 s ago.",
            id="nothing read any more",
        ),
        pytest.param(
            well(newest=replace(NEWEST, at_seconds=NOW - 1, devices=None)),
            "ok",
            "No fault found in what could be seen; device memory was not seen.",
            id="no device",
        ),
    ],
)
def test_nothing_unknown_looks_healthy(known: Snapshot, status: str, words: str) -> None:
    """Only a server that answers and was judged a moment ago is ok, and what was not seen is said."""
    # WHEN
    said = headline(known, NOW)
    reader = read(known)

    # THEN
    assert (status, words) == (said.status, said.sentence)
    assert {"class": f"verdict {status}"} in reader.having("section")
    assert words in reader.text


def test_a_fault_is_still_told_when_the_diagnosis_is_old() -> None:
    """It is unknown whether it lasts, not what it was."""
    # WHEN
    said = headline(replace(shown(), diagnosed_seconds=NOW - 3600), NOW)

    # THEN
    assert "unknown" == said.status
    assert "It found leak.kv_blocks: " in said.sentence


def test_a_verdict_that_could_not_be_told_is_no_healthy_one() -> None:
    """It stands under a heading of its own, in its own colour."""
    # GIVEN
    diagnosis = judged(World())
    blind = replace(diagnosis, findings=tuple(replace(one, status="unknown") for one in diagnosis.findings))

    # WHEN
    reader = read(well(diagnosis=blind))

    # THEN
    assert f"Could not tell: {len(blind.findings)}" in reader.text
    assert "Looked at and not found" not in reader.text
    assert {"unknown"} == {one.get("class") for one in reader.having("b") if one.get("class")}


HOSTILE = "<script>alert(1)</script>\"' onload=x &amp; \u202e\x00\n"


def test_nothing_from_outside_is_markup() -> None:
    """Names, models, addresses, reasons and evidence are text, whatever they hold."""
    # GIVEN
    known = shown()
    assert known.diagnosis is not None
    devices = tuple(replace(one, name=HOSTILE, uuid=HOSTILE, mig_parent_uuid="GPU-1") for one in NEWEST.devices or ())
    findings = tuple(
        replace(
            one, summary=HOSTILE, likely_cause=HOSTILE, evidence=tuple(replace(e, value=HOSTILE) for e in one.evidence)
        )
        for one in known.diagnosis.findings
    )
    newest = replace(
        NEWEST,
        at_seconds=NOW - 1,
        devices=devices,
        engines=(engine(usage=0.5, running=1, waiting=0, label=HOSTILE),),
        gaps=(Gap(source=HOSTILE, kind="failed", reason=HOSTILE),),
    )
    hostile = replace(
        known,
        newest=newest,
        facts=replace(known.facts, model=HOSTILE, url=HOSTILE, engine_version=HOSTILE),
        diagnosis=replace(known.diagnosis, findings=findings),
    )

    # WHEN
    reader = read(hostile, [newest])

    # THEN
    assert [] == reader.having("script")
    assert not any(name.startswith("on") for _, attributes in reader.elements for name in attributes)
    assert "<script>alert(1)</script>" in reader.text
    assert not {"\u202e", "\x00"} & set(reader.text)


def test_long_texts_are_cut() -> None:
    """Nobody makes the page as large as they like."""
    # THEN
    assert f"<p>{'x' * MAX_TEXT_CHARACTERS}…</p>" == element("p", "x" * 1_000_000)


@given(samples=SAMPLES, facts=FACTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None)
def test_whatever_is_seen_the_page_is_whole(samples: Sample, facts: Facts) -> None:
    """Any reading makes a document."""
    # GIVEN
    newest = replace(samples, at_seconds=NOW - 1)
    known = Snapshot(state="serving", facts=facts, newest=newest, sources=())

    # THEN
    assert "unknown" == headline(known, NOW).status
    read(known, [newest])


def minutes(count: int, *, without: range = range(0)) -> list[Sample]:
    """A reading a minute, but for some."""
    held = Memory(total_bytes=24 * GIB, free_bytes=6 * GIB)
    gpu: Device = replace(device(used_bytes=0), memory=held)
    return [
        Sample(
            at_seconds=NOW - 60 * (count - number),
            engines=(engine(usage=0.5, running=1, waiting=0),),
            devices=(gpu,),
        )
        for number in range(count)
        if number not in without
    ]


def test_the_last_hours_are_drawn() -> None:
    """Occupancy and device memory of six hours, as one line each, with the newest and the highest value in words."""
    # WHEN
    reader = read(shown(), minutes(600))

    # THEN
    lines = [one["d"] or "" for one in reader.having("path")]
    assert [1, 1] == [path.count("M") for path in lines]
    assert "engine 0: 50.0%, at most 50.0%" in reader.text
    assert "GPU 0: 75.0%, at most 75.0%" in reader.text
    assert "last 6.0 h, UTC" in reader.text


def test_what_was_not_seen_is_a_hole() -> None:
    """A line is never drawn across time in which nothing was read."""
    # WHEN
    reader = read(shown(), minutes(300, without=range(100, 130)))

    # THEN
    assert [2, 2] == [(one["d"] or "").count("M") for one in reader.having("path")]


def test_a_failed_reading_ends_the_line() -> None:
    """Also where it lasted a moment alone, and what is not seen now is not told as of now."""
    # GIVEN
    gone = Sample(at_seconds=NOW, gaps=(Gap(source="engine", kind="failed", reason="it has gone"),))

    # WHEN
    reader = read(shown(), [*minutes(5), gone])

    # THEN
    assert "engine 0: not seen now, at most 50.0%" in reader.text


def test_a_chart_keeps_the_highest_of_what_it_leaves_out() -> None:
    """A peak of one second is on the line."""
    # GIVEN
    points = [(float(second), 0.9 if second == 5_000 else 0.1) for second in range(10_000)]

    # WHEN
    drawn = chart("x", {"a": points}, Window(start_seconds=0.0, end_seconds=10_000.0))

    # THEN
    assert "a: 10.0%, at most 90.0%" in drawn
    path = drawn.partition(' d="')[2].partition('"')[0]
    # From 0.1 of the height up to 0.9, and back again.
    assert re.search(r"(?:l\d+ |v)-1600(?:l\d+ |v)1600", path)


def test_an_element_escapes_all_but_elements() -> None:
    """Markup is what was made by it."""
    # THEN
    assert Html('<a href="&quot;x"><b>1</b>&lt;b&gt;</a>') == element("a", element("b", "1"), "<b>", href='"x')


def test_a_diagnosis_of_another_status_keeps_it() -> None:
    """What the diagnosis calls unknown is unknown."""
    # GIVEN
    diagnosis: Diagnosis = replace(judged(World()), worst="unknown")

    # THEN
    assert ("unknown", "Not enough was seen to judge.") == (
        headline(well(diagnosis=diagnosis), NOW).status,
        headline(well(diagnosis=diagnosis), NOW).sentence,
    )
