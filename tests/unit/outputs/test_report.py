import re
from dataclasses import replace
from html import unescape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis import diagnose
from kvdiag.formatting import format_bytes
from kvdiag.model import Diagnosis, Facts, FailedAllocation, Gap, Sample, Timeline
from kvdiag.outputs.html.kit import prose
from kvdiag.outputs.html.report_page import render
from kvdiag.outputs.html.report_series import failures
from kvdiag.outputs.presentation import evidence_value, spaced
from tests.builders.runs import judged, run
from tests.builders.values import GIB, allocator, device, engine
from tests.builders.worlds import WORLDS, World, facts
from tests.unit.outputs.html_page import Page
from tests.unit.outputs.report_pages import MAKING, PAGES, holes, page

MAX_BYTES = 2 * 10**6


def reported(diagnosis: Diagnosis, timeline: Timeline) -> Page:
    """The report of a diagnosis, read."""
    return Page(render(diagnosis, timeline, MAKING))


@pytest.mark.parametrize("name", WORLDS)
def test_a_report_has_all_that_was_judged(name: str) -> None:
    """The verdict, every finding with its evidence and advice, every step, ledger line and gap."""
    world = WORLDS[name]
    timeline = run(world)
    diagnosis = diagnose(timeline, facts(world))
    text = reported(diagnosis, timeline).text
    assert diagnosis.worst.upper() in text
    for one in diagnosis.findings:
        assert one.id in text
        assert one.summary in text
        if one.status in ("fault", "suspect"):
            assert all(evidence_value(part) in text for part in one.evidence if part.value is not None)
            assert all(told in text for told in (one.likely_cause, one.confirm, one.remedy) if told)
    for number, step in enumerate(diagnosis.steps, start=1):
        assert f"{number} {step.id.replace('_', ' ')}" in text
        assert step.summary in text
    assert all(spaced(line.component) in text for line in diagnosis.ledger)
    assert all(gap.reason in text for gap in diagnosis.gaps)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_small_and_needs_nothing_else(name: str) -> None:
    """Every element is closed, nothing is fetched or run, links are those of known reports, and ids are unique."""
    content = PAGES[name]()
    page = Page(content)
    assert len(content.encode()) < MAX_BYTES
    assert not {tag for tag, _ in page.seen} & {"script", "link", "img", "iframe", "form", "object", "base"}
    links = [attrs for tag, attrs in page.seen if tag == "a"]
    assert all(
        (one["href"] or "").startswith("https://github.com/") and "noopener" in (one["rel"] or "") for one in links
    )
    rest = [attrs for tag, attrs in page.seen if tag != "a"]
    assert not {key for attrs in rest for key in attrs if key in ("src", "href")}
    assert not {key for _, attrs in page.seen for key in attrs if key.startswith("on")}
    assert "default-src 'none'" in unescape(content)
    assert not re.search(r"url\((?!#)|@import", content)
    ids = [attrs["id"] for _, attrs in page.seen if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = {name for _, attrs in page.seen for name in (attrs.get("aria-labelledby") or "").split()}
    assert named <= set(ids)


def test_every_picture_has_a_title_and_the_same_in_figures() -> None:
    """Who does not see a plot reads its title and its description, and has its figures as a table."""
    page = Page(PAGES["agents"]())
    pictures = [attrs for tag, attrs in page.seen if tag == "svg" and attrs.get("role") == "img"]
    assert 5 == len(pictures)
    assert all(attrs["aria-labelledby"] for attrs in pictures)
    assert 4 == page.text.count("As a table")


def test_every_part_of_the_memory_says_what_it_is_under_the_mouse() -> None:
    """A piece of the bar has its component and its size as its title."""
    diagnosis = judged(World())
    content = render(diagnosis, run(World()), MAKING)
    titles = re.findall(r'<rect [^>]*class="part [^>]*><title>([^<]*)</title></rect>', content)
    expected = [f"{spaced(line.component)}: {format_bytes(line.bytes)}" for line in diagnosis.ledger if line.bytes]
    assert expected == titles


def test_the_same_run_gives_the_same_page() -> None:
    """The page does not depend on random numbers or the clock."""
    assert PAGES["leak"]() == PAGES["leak"]()


def test_a_hole_is_a_break_in_the_line() -> None:
    """What failed to be read, and time in which nothing was, are drawn as breaks, not as lines or zeros."""
    timeline = holes()
    page = reported(diagnose(timeline, facts(World())), timeline)
    used, _, held, *_ = page.lines("s0")
    assert (3, 2) == (used.count("M"), held.count("M"))
    assert not re.search(r"M\d+ 2000", used + held)


def test_a_lone_reading_is_drawn() -> None:
    """A sample between two holes is a dot."""
    lost = Gap(source="nvml", kind="failed", reason="GPU is lost")
    samples = [
        Sample(at_seconds=float(second), devices=(device(),))
        if second == 50
        else Sample(at_seconds=float(second), gaps=(lost,))
        for second in range(100)
    ]
    timeline = Timeline(samples=tuple(samples))
    page = reported(diagnose(timeline, facts(World())), timeline)
    assert re.fullmatch(r"M\d+ \d+h0", page.lines("s0")[0])


def test_what_was_never_seen_is_said() -> None:
    """Without a device there is no plot of one, and the page says why."""
    blind, nothing = Page(PAGES["blind"]()), Page(PAGES["nothing"]())
    assert "Device memory not observed." in blind.text
    assert "GPU 0 memory" not in blind.text
    assert "Not enough samples" in nothing.text
    assert "UNKNOWN" in nothing.text


def test_a_device_without_a_name_is_told_by_its_size() -> None:
    """As from a history that does not report the name."""
    nameless = replace(device(used_bytes=4 * GIB, total_bytes=24 * GIB), name="")
    timeline = Timeline(samples=(Sample(at_seconds=0.0, devices=(nameless,)),))
    actual = reported(diagnose(timeline, Facts()), timeline)
    assert "24.0 GiB" == actual.texts[actual.texts.index("GPUs") + 1]


def test_expected_and_measured_are_marked_where_they_were_judged() -> None:
    """Each step's blocks stand on the line at the height that the pool had then."""
    page = Page(PAGES["healthy"]())
    assert "concurrent: expected 1,430 blocks, measured 1,430 blocks" in page.text
    assert 2 * 4 + 1 * 2 <= sum(attrs.get("class") in ("expected", "measured") for _, attrs in page.seen)


def test_what_failed_is_marked() -> None:
    """Requests that failed are a line at their time."""
    page = Page(PAGES["failing"]())
    assert "long_context: 1 of 1 requests failed" in page.text
    assert [] != [attrs for tag, attrs in page.seen if tag == "line" and attrs.get("class") == "event"]


def test_an_allocation_that_failed_is_marked_once() -> None:
    """A failure that an agent reports repeatedly is one event."""
    samples = [
        Sample(
            at_seconds=1000.0 + second,
            allocators=(
                allocator(failure=FailedAllocation(age_seconds=float(second + 3), asked_bytes=GIB, free_bytes=GIB)),
            ),
        )
        for second in range(60)
    ]
    assert (997.0,) == failures(Timeline(samples=tuple(samples)))


def test_nothing_from_outside_is_markup() -> None:
    """Hostile names are shown, and are no elements, controls or overrides."""
    content = PAGES["hostile"]()
    assert "<script>window.hurt=1</script>" in Page(content).text
    assert not set(content) & {"\x00", "\x1b", "\u202e", "\u2028"}
    assert content.encode("utf-8")


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=60))
def test_any_text_from_outside_is_shown_and_does_nothing(text: str) -> None:
    """With any model name the page stays well-formed."""
    known = Facts(model=text, url=text, gaps=(Gap(source="nvml", kind="absent", reason=text),))
    empty = Timeline(samples=())
    seen = [tag for tag, _ in reported(diagnose(empty, known), empty).seen]
    assert [tag for tag, _ in reported(diagnose(empty, replace(known, model="x")), empty).seen] == seen


def test_a_long_restless_history_stays_small() -> None:
    """Sixteen and more GPUs with agents, with samples that come, jump and stop at random, still give a small page."""
    # twenty minutes at 1 Hz
    lost = Gap(source="nvml", kind="failed", reason="GPU is lost")
    samples = []
    for second in range(1200):
        jump = second * 7919 % 1000 * 2**20
        samples.append(
            Sample(
                at_seconds=1000.0 + second,
                devices=tuple(device(gpu, used_bytes=10 * GIB + jump) for gpu in range(20)) if second % 5 else None,
                allocators=tuple(
                    allocator(device_uuid=str(gpu), pid=gpu + 1, allocated_bytes=5 * GIB + jump) for gpu in range(20)
                ),
                engines=(engine(usage=second % 100 / 100, running=second % 7, waiting=second % 3),),
                gaps=() if second % 5 else (lost,),
            )
        )
    timeline = Timeline(samples=tuple(samples))
    diagnosis = replace(judged(), start_seconds=1000.0, end_seconds=2200.0)
    content = render(diagnosis, timeline, MAKING)
    assert len(content.encode()) < MAX_BYTES
    assert "4 more GPUs" in content


def test_a_part_that_claims_more_than_there_is_stays_within_its_bar() -> None:
    """A negative rest is shown as it is, and its bar stays within its limits."""
    world = World(weights_bytes=22 * GIB)
    timeline = run(replace(world, weights_bytes=6 * GIB))
    diagnosis = diagnose(timeline, facts(world))
    assert any(line.bytes < 0 for line in diagnosis.ledger)
    parts = [attrs for tag, attrs in reported(diagnosis, timeline).seen if "part " in (attrs.get("class") or "")]
    assert sum(float((attrs["width"] or "").rstrip("%")) for attrs in parts) <= 100.01


def test_the_message_of_a_failure_is_whole() -> None:
    """A long error of the server stands in the page, to its end."""
    error = f"Internal Server Error: {'x' * 600} end"
    assert error in Page(page(World(failing={"long_context": error}))).text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lower --max-num-seqs: 4", 'lower <span class="flag">--max-num-seqs</span>: 4'),
        ("`kvdiag run --soak`", '<code>kvdiag run <span class="flag">--soak</span></code>'),
        ("a -- b, x--y", "a -- b, x--y"),
        ("one ` alone", "one &#x27; alone"),
        ("<b>--x-y</b>", '&lt;b&gt;<span class="flag">--x-y</span>&lt;/b&gt;'),
    ],
)
def test_prose_has_flags_that_do_not_break_and_no_backtick(text: str, expected: str) -> None:
    """A flag is one word that does not wrap, also within a command."""
    assert expected == prose(text)
