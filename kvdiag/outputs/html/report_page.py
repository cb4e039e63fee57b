"""The report: a Diagnosis and its Timeline as one HTML file that needs nothing else, to be kept and passed on. Pure.

The verdict comes first, then the server and its lives, each problem with what to do about it, the steps, the memory and
the plots; what was explained, checked and unknown, and what data is missing, comes last: a reader who stops early has
what is needed to act. It has what the terminal shows, in more detail. `kit` builds the parts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvdiag.formatting import format_bytes, format_count, format_duration, format_ratio, format_time, plural
from kvdiag.kv.calibration.running_server import pool_bytes
from kvdiag.model import ConcludedProfile, Device, Diagnosis, Status, StepFigures, StepResult, Timeline
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged
from kvdiag.outputs.html import kit
from kvdiag.outputs.html.markup import Html, element, joined
from kvdiag.outputs.html.report_plots import Unit, draw
from kvdiag.outputs.presentation import (
    NOT_REPORTED,
    UNKNOWN,
    engine_of,
    pool_title,
    problems_of,
    problems_shown,
    sections,
    sentence,
    spaced,
    time_span,
    word,
)
from kvdiag.outputs.profile_words import TITLE, location, profile_sentence, shown_stacks, stack_line

COMPARED: tuple[tuple[str, Callable[[StepFigures], float | None], Unit], ...] = (
    ("blocks", lambda one: one.blocks, format_count),
    ("bytes", lambda one: one.bytes, format_bytes),
    ("device used, at most", lambda one: one.device_used_bytes, format_bytes),
    ("blocks kept", lambda one: one.blocks_kept, format_count),
    ("highest blocks", lambda one: one.highest_blocks, format_count),
    ("other salt hit ratio", lambda one: one.other_salt_hit_ratio, format_ratio),
    ("other unsalted hit ratio", lambda one: one.other_unsalted_hit_ratio, format_ratio),
)
"""The figures of a step that have an expectation, and how they are written."""

MAX_ROWS = 500
"""Of the table, the worst first; the JSON document lists every replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """Where a report comes from: the version, the command line, and when it was written.

    A daemon that serves reports of many servers gives each one's name, and the address of the page with all of them.
    """

    version: str
    command: str
    made_seconds: float
    subject: str | None = None
    index: str | None = None


def render(diagnosis: Diagnosis, timeline: Timeline, making: Making) -> str:
    """The whole document."""
    return report(
        diagnosis.worst,
        sentence(diagnosis),
        making.subject or diagnosis.facts.model or diagnosis.facts.url or "no server",
        making,
        *body(diagnosis, timeline, served=making.index is not None),
        shown=word(diagnosis),
    )


def report(worst: Status, summary: str, subject: str, making: Making, *content: Html, shown: str = "") -> str:
    """A report with its verdict, its content, and where it comes from; `shown` stands in place of the status."""
    written = format_time(making.made_seconds)
    index = () if making.index is None else (element("a", "all replicas", href=making.index),)
    parts = (
        element(
            "header", element("h1", "kvdiag report"), element("span", f"{subject}, {written}", class_="dim"), *index
        ),
        kit.verdict(worst, summary, shown),
        element("main", *content),
        element(
            "footer",
            element("p", f"kvdiag {making.version}, ", element("code", making.command)),
            element("p", f"Written {written}. All times are UTC."),
        ),
    )
    generator = element("meta", name="generator", content=f"kvdiag {making.version}")
    return kit.document(worst, f"{subject} - kvdiag report", parts, generator, shown=shown)


def body(diagnosis: Diagnosis, timeline: Timeline, *, served: bool = False) -> Iterator[Html]:
    """Everything in a diagnosis below its verdict."""
    devices = {device.uuid: device for sample in timeline.samples for device in sample.devices or ()}
    yield _about(diagnosis, list(devices.values()))
    yield from kit.lives_table(diagnosis)
    problems = problems_shown(diagnosis)
    if problems:
        yield element("h2", "Findings")
        yield from (kit.finding_card(one, time_span(one, diagnosis), served=served) for one in problems)
    if diagnosis.steps:
        yield element("h2", "Test steps")
        yield _steps(diagnosis.steps)
    if diagnosis.profiles:
        yield element("h2", TITLE)
        yield from map(_profile, diagnosis.profiles)
    yield element("h2", "Memory ledger")
    yield kit.ledger_cards(diagnosis.ledger, devices)
    yield from kit.owners_table(diagnosis.block_owners, diagnosis.facts)
    yield element("h2", "Over time ", element("small", "UTC; a break in a line is time without samples"))
    yield from draw(diagnosis, timeline)
    for title, findings in sections(diagnosis):
        yield element("h2", title)
        yield kit.unknown_rows(findings) if title == UNKNOWN else kit.verdict_rows(findings)
    if diagnosis.gaps:
        yield element("h2", "Missing data")
        yield kit.gap_rows(diagnosis.gaps)


def _profile(one: ConcludedProfile) -> Html:
    """One process: its answer, and the stacks that grew most."""
    stacks = (
        element("li", f"{stack_line(stack, one)}: ", element("code", " < ".join(map(location, stack.frames))))
        for stack in shown_stacks(one)
    )
    answer = element("p", element("b", f"{one.profile.title} {one.profile.pid}: {one.answer}. "), profile_sentence(one))
    return element("section", answer, element("ul", *stacks))


def _about(diagnosis: Diagnosis, devices: Sequence[Device]) -> Html:
    facts = diagnosis.facts
    pools = [pool_title(pool, facts.capabilities.unit, pool_bytes(facts, pool)) for pool in facts.pools]
    ranks = ((facts.tensor_parallel, "tensor"), (facts.pipeline_parallel, "pipeline"))
    sizes = ["" if device.memory is None else format_bytes(device.memory.total_bytes) for device in devices]
    names = [", ".join(filter(None, (device.name, size))) for device, size in zip(devices, sizes, strict=True)]
    context = facts.max_model_len_tokens
    return kit.definitions(
        (
            ("model", facts.model or NOT_REPORTED),
            ("server", facts.url or NOT_REPORTED),
            ("engine", engine_of(facts) or NOT_REPORTED),
            ("context", NOT_REPORTED if context is None else plural(context, "token")),
            ("KV pool", "; ".join(_counted(pools)) or NOT_REPORTED),
            ("parallel", ", ".join(f"{count} {name}" for count, name in ranks if count) or NOT_REPORTED),
            ("GPUs", "; ".join(_counted(names)) or "not observed"),
            ("time", _window(diagnosis)),
        )
    )


def _counted(names: Sequence[str]) -> list[str]:
    """Equal names once, with their number."""
    return [one if names.count(one) == 1 else f"{names.count(one)} x {one}" for one in dict.fromkeys(names)]


def _window(diagnosis: Diagnosis) -> str:
    if not diagnosis.samples:
        return "no samples"
    length = format_duration(diagnosis.end_seconds - diagnosis.start_seconds)
    return f"{format_time(diagnosis.start_seconds)}, {length}, {plural(diagnosis.samples, 'sample')}"


def _steps(steps: Iterable[StepResult]) -> Html:
    rows = []
    for number, step in enumerate(steps, start=1):
        name = f"{number} {spaced(step.id)}"
        notes = [element("p", note, class_="dim") for note in step.notes]
        result, compared = joined(kit.prose(step.summary), *notes), joined(*_compared(step))
        rows.append(kit.row(kit.mark(step.status), name, result, (compared, "figures dim"), header=1))
    titles = (("", ""), ("step", ""), ("result", ""), ("expected / measured", "figures"))
    return kit.table(titles, rows, "steps")


def _compared(step: StepResult) -> Iterator[Html]:
    for title, figure, unit in COMPARED:
        pair = figure(step.expected), figure(step.measured)
        if pair != (None, None):
            expected, measured = (NOT_REPORTED if one is None else unit(one) for one in pair)
            yield element("div", f"{title}: {expected} / {measured}")


def render_fleet(result: FleetDiagnosis, timeline_of: Callable[[Judged], Timeline], making: Making) -> str:
    """The report of many replicas: a table with the worst first, the comparison of all, then the worst in full.

    `timeline_of` gives the history of the one replica that is shown in full.
    """
    source = result.source
    subject = "recorded traces" if source is None else source.url + (f" {{{source.match}}}" if source.match else "")
    return report(result.worst, result.sentence, subject, making, *_fleet(result, timeline_of))


def _fleet(result: FleetDiagnosis, timeline_of: Callable[[Judged], Timeline]) -> Iterator[Html]:
    source = result.source
    if source is not None:
        window = f"{format_time(source.start_seconds)} to {format_time(source.end_seconds)}"
        yield element("p", f"{window}; {source.joined}", class_="dim")
    yield element("h2", "Replicas")
    rows = [
        kit.row(
            kit.mark(one.diagnosis.worst),
            one.name,
            (format_count(one.hours), "number hours"),
            (kit.prose(one.summary), "result"),
            header=1,
        )
        for one in result.judged[:MAX_ROWS]
    ]
    yield kit.table((("", ""), ("replica", ""), ("hours", "number"), ("result", "result")), rows, "replicas")
    if len(result.judged) > MAX_ROWS:
        yield element("p", f"and {len(result.judged) - MAX_ROWS:,} more: --output json lists them all")
    called = problems_of(result.fleet.findings)
    if called:
        yield element("h2", "Comparison of replicas")
        yield from map(kit.finding_card, called)
    left = [one for one in result.fleet.findings if one.status == "unknown"]
    if left and len(result.judged) > 1:
        yield element("h2", "Comparison of replicas: unknown")
        yield kit.unknown_rows(left)
    if result.gaps:
        yield element("h2", "Not assigned to a replica")
        yield kit.gap_rows(result.gaps)
    if result.judged:
        worst = result.judged[0]
        yield element("h2", f"In full: {worst.name}")
        yield kit.verdict(worst.diagnosis.worst, sentence(worst.diagnosis), word(worst.diagnosis))
        timeline = timeline_of(worst) if worst.diagnosis.samples else Timeline(samples=())
        yield from body(worst.diagnosis, timeline)
