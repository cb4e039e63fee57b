"""The status page: what it says, that nothing unknown looks healthy, and that nothing from outside is markup."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from kvdiag.feeds.daemon.retention import Retention
from kvdiag.model import Capabilities, Device, Facts, Gap, Memory, PressureThresholds, Sample, Snapshot, Timeline
from kvdiag.outputs.current_verdict import current_verdict
from kvdiag.outputs.html import report_series
from kvdiag.outputs.html.markup import MAX_TEXT_CHARACTERS, Html, element
from kvdiag.outputs.html.report_series import Readings
from kvdiag.outputs.html.status_page import REFRESH_SECONDS, chart, page
from tests.builders import lives
from tests.builders.answers import later
from tests.builders.runs import judged
from tests.builders.values import GIB, device, engine
from tests.builders.worlds import World
from tests.unit.feeds.strategies import FACTS, SAMPLES
from tests.unit.outputs.html_page import Page
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


def read(shown: Snapshot, history: Sequence[Sample] = (), now_seconds: float = NOW) -> Page:
    """The page, which is one whole document."""
    return Page(page(shown, history, now_seconds))


@pytest.mark.parametrize("down", [False, True], ids=["serving", "down"])
def test_lives_on_the_page(golden: Callable[[str, str], None], down: bool) -> None:
    """The worst life leads, the present one follows; a server that is down comes before both."""
    leaking = lives.life(100.0, lives.LEAKED_BLOCKS, tokens=900)
    found = later(lives.judged(leaking, lives.outage(120.0), lives.life(140.0, 0)), NOW - 160.0)
    lost = {"state": "lost", "down_since_seconds": NOW - 2.0} if down else {}
    reader = read(shown(diagnosis=found, **lost))
    lines = [line for text in reader.texts if (line := " ".join(text.split()))]
    golden(f"html/lives{'-down' if down else ''}.txt", "\n".join(lines[: lines.index("Memory ledger") + 1]) + "\n")


def test_the_golden_page(golden: Callable[[str, str], None]) -> None:
    """Verdict, findings with evidence and remedy, the ledger, the last hours, the sources, and links to the rest."""
    reader = read(shown(), minutes(60))
    lines = [line for text in reader.texts if (line := " ".join(text.split()))]
    golden("html/status-page.txt", "\n".join(lines) + "\n")
    links = {str(link["href"]) for link in reader.having("a")}
    assert {link for link in links if not link.startswith("https://github.com/")} == {
        "/metrics", "/api/v1/diagnosis", "/api/v1/ledger", "/api/v1/snapshot", "/api/v1/history",
        "/api/v1/admission", "/runbooks", "/runbooks/leak.host.md", "/runbooks/leak.kv_blocks.md",
        "/-/healthy", "/-/ready",
    }  # fmt: skip


def test_it_needs_neither_script_nor_network() -> None:
    """It refreshes itself, fits a phone, and is light or dark as the reader's system is."""
    reader = read(shown())
    document = page(shown(), (), NOW)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in reader.seen}
    assert not re.search(r"url\((?!#)|@import", document)
    assert {"http-equiv": "refresh", "content": str(REFRESH_SECONDS)} in reader.having("meta")
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in reader.having("meta")
    assert "prefers-color-scheme:dark" in document


def test_the_bar_is_the_ledger_to_scale() -> None:
    """The parts lie next to one another and take as much of the bar as of the device."""
    parts = [one for one in read(shown()).having("rect") if (one.get("class") or "").startswith("part ")]
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
    newest = replace(NEWEST, at_seconds=NOW - 1, devices=devices, engines=(engine(usage=0.5),))
    assert 1 == read(well(newest=newest, pressure_thresholds=thresholds)).text.count("Memory pressure ")
    shown = page(well(newest=newest, pressure_thresholds=thresholds), (), NOW)
    assert colours == [words for words in ("suspect", "fault") if f'Memory pressure <b class="{words}">' in shown]


def test_a_status_that_is_not_current_is_unknown_on_the_page() -> None:
    """The page shows the verdict as of now; see test_current_verdict.py."""
    for known, status in ((well(), "ok"), (well(state="lost"), "unknown"), (STARTING, "unknown"), (shown(), "fault")):
        reader = read(known)
        assert {"class": f"verdict {status}"} in reader.having("section")
        assert current_verdict(known, NOW).sentence in reader.text


def test_an_unknown_verdict_is_not_among_the_healthy_ones() -> None:
    """It is listed under a heading of its own."""
    diagnosis = judged(World())
    blind = replace(diagnosis, findings=tuple(replace(one, status="unknown") for one in diagnosis.findings))
    text = read(well(diagnosis=blind)).text
    assert f"Unknown: {len(blind.findings)}" in text
    assert "Checked, not found" not in text


HOSTILE = "<script>alert(1)</script>\"' onload=x &amp; \u202e\x00\n"


def test_nothing_from_outside_is_markup() -> None:
    """Names, models, addresses, reasons and evidence are escaped as text, with any content."""
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
    reader = read(hostile, [newest])
    assert [] == reader.having("script")
    assert not any(name.startswith("on") for _, attributes in reader.seen for name in attributes)
    assert "<script>alert(1)</script>" in reader.text
    assert not {"\u202e", "\x00"} & set(reader.text)


def test_long_texts_are_cut() -> None:
    """Long texts from outside cannot make the page large."""
    assert f"<p>{'x' * MAX_TEXT_CHARACTERS}…</p>" == element("p", "x" * 1_000_000)


@given(samples=SAMPLES, facts=FACTS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], deadline=None)
def test_whatever_is_seen_the_page_is_whole(samples: Sample, facts: Facts) -> None:
    """Any reading makes a document."""
    newest = replace(samples, at_seconds=NOW - 1)
    known = Snapshot(state="serving", facts=facts, newest=newest, sources=())
    assert {"class": "verdict unknown"} in read(known, [newest]).having("section")


def minutes(count: int, *, without: range = range(0)) -> list[Sample]:
    """A sample a minute, except in the range `without`."""
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
    """KV pool and device memory of six hours, as one line each, with the newest and the highest value in words."""
    reader = read(shown(), minutes(600))
    assert [1, 1] == [path.count("M") for path in reader.lines("s0")]
    assert "engine 0: 50 %, at most 50 %" in reader.text
    assert "GPU 0: 75 %, at most 75 %" in reader.text


def test_missing_samples_break_the_line() -> None:
    """A line is never drawn across time in which nothing was read."""
    reader = read(shown(), minutes(300, without=range(100, 130)))
    assert [2, 2] == [path.count("M") for path in reader.lines("s0")]


def test_minutes_that_were_thinned_do_not_break_the_line() -> None:
    """Twenty minutes at 1 Hz, most of them thinned to a few samples each at uneven times: nothing was missed."""
    retention = Retention()
    for second in range(1200):
        idle = second % 60 < 40
        reading = engine(usage=0.0 if idle else 0.07, running=int(not idle), waiting=0)
        retention.add(Sample(at_seconds=NOW - 1200 + second, engines=(reading,), devices=(device(),)))
    reader = read(shown(), retention.samples())
    assert [1, 1] == [path.count("M") for path in reader.lines("s0")]
    assert "last idle: 0 %, at most 0 %" in reader.text
    assert "6 %" in reader.text


def test_late_gauges_show_no_idle_pool() -> None:
    """Where usage moves only when a request ends, an idle engine's value is that of its last request."""
    idle = [replace(one, engines=(engine(usage=0.07),)) for one in minutes(300)]
    assert "when last idle" in read(shown(), idle).text
    late = replace(shown().facts, capabilities=Capabilities(on_completion=True))
    assert "when last idle" not in read(replace(shown(), facts=late), idle).text


def test_a_failed_reading_ends_the_line() -> None:
    """Also if it failed just once; the newest value is then not shown as of now."""
    gone = Sample(at_seconds=NOW, gaps=(Gap(source="engine", kind="failed", reason="it has gone"),))
    text = read(shown(), [*minutes(5), gone]).text
    assert "engine 0: not observed now" in text
    assert "at most 50 %" in text


def test_a_chart_keeps_the_highest_of_what_it_leaves_out() -> None:
    """A peak of one second is on the line."""
    values = [0.9 if second == 5_000 else 0.1 for second in range(10_000)]
    readings = Readings(times=tuple(map(float, range(10_000))), figures={"figure": values}, breaks=())
    drawn = Page(chart("x", readings, {"figure": "a"}, 0.0, 10_000.0))
    assert "a: 10 %, at most 90 %" in drawn.text
    # From 0.1 of the height up to 0.9, and back again.
    assert re.search(r"(?:l\d+ |v)-1600(?:l\d+ |v)1600", drawn.lines("s0")[0])


def test_engines_that_are_renamed_are_few() -> None:
    """New engines and devices at each read: six minutes of 500 took the daemon a gigabyte and a minute of its loop."""
    samples = [
        Sample(
            at_seconds=NOW - 100 + at,
            engines=tuple(replace(engine(), engine=f"{at}-{number}") for number in range(100)),
            devices=tuple(replace(device(), uuid=f"{at}-{number}", index=number) for number in range(100)),
        )
        for at in range(100)
    ]
    timeline = Timeline(samples=tuple(samples))
    gpus, used = report_series.devices(timeline)
    assert report_series.MAX_FIGURES == len(gpus) == len(used.figures)
    engines = report_series.engines(timeline, Facts())
    assert report_series.MAX_FIGURES == len(engines.figures)
    assert {"usage 99-0", report_series.HELD} <= engines.figures.keys()
    assert "(8 of " in read(shown(), samples).text


def test_an_element_escapes_all_but_elements() -> None:
    """Markup is what was made by it."""
    assert Html('<a href="&quot;x"><b>1</b>&lt;b&gt;</a>') == element("a", element("b", "1"), "<b>", href='"x')
