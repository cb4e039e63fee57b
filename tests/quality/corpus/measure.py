"""What the corpus shows when it is judged: incidents by variant and moment, healthy servers by day, leaks by delay."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvdiag.diagnosis import diagnose
from kvdiag.model import Diagnosis, Facts, Timeline
from tests.quality.corpus.drawn import VERDICTS, Drawn, Leak
from tests.quality.corpus.incident import Incident
from tests.quality.corpus.recording import scraped, standard_series
from tests.quality.corpus.score import (
    HEALTHY,
    UNDETERMINED,
    Answer,
    Expected,
    Scored,
    Variant,
    answer,
    answers,
    expectations,
    family,
    messages,
    prefix,
    score,
)
from tests.quality.corpus.tape import seeded
from tests.quality.corpus.today import DETECTORS, explains, seen

EVERY_SECONDS = 1_800.0
HOUR = 3600.0


def moments(timeline: Timeline, from_hours: float = 0.0) -> Iterator[float]:
    """Each half hour after the beginning, and the end."""
    begin, end = timeline.samples[0].at_seconds, timeline.samples[-1].at_seconds
    at = begin + from_hours * HOUR + EVERY_SECONDS
    while at < end:
        yield at
        at += EVERY_SECONDS
    yield end


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """An incident's answers at the end of each variant, and the delays and false alarms until then."""

    scored: tuple[Scored, ...]
    delays_hours: Mapping[Variant, float | None]
    """From the onset to the first right call of each variant; `None` where it never came."""

    alarms: tuple[str, ...]
    """Each interval of half hours with a wrong fault, in words, over both variants of the recording."""

    gpu_hours: float
    fired: Mapping[str, bool | None]
    """By today's alerts: whether it fired and was right; `None` where it never fired."""


def judge_incident(incident: Incident) -> Judged:
    """Judge an incident at every half hour."""
    expected = expectations()[incident.id]
    timeline, facts = incident.recording().play()
    finals = answers(incident, messages(), timeline, facts)
    views: dict[Variant, tuple[Timeline, Facts]] = {
        "recorded": (timeline, facts),
        "series": standard_series(timeline, facts),
    }
    delays: dict[Variant, float | None] = {}
    alarms: list[str] = []
    onset = timeline.samples[0].at_seconds + incident.onset_hours * HOUR
    for variant, (whole, known) in views.items():
        on, delays[variant] = False, None
        for at in moments(whole):
            given = answer(diagnose(prefix(whole, at), known))
            result = score(incident.id, variant, expected, given)
            false = [one for one in result.wrong if given.called[one] == "fault"]
            if false and not on:
                hour = (at - timeline.samples[0].at_seconds) / HOUR
                alarms.append(f"{incident.id} ({variant}) at {hour:.1f} h: {given.said[false[0]]}")
            on = bool(false)
            if delays[variant] is None and result.mark == "right" and given.called:
                delays[variant] = max(at - onset, 0.0) / HOUR
    gpus = len(timeline.samples[0].devices or ()) or 1
    return Judged(
        scored=tuple(score(incident.id, name, expected, answer(made)) for name, made in finals.items()),
        delays_hours=delays,
        alarms=tuple(alarms),
        gpu_hours=2.0 * gpus * incident.hours,
        fired=_fired(timeline, facts, expected),
    )


def _fired(timeline: Timeline, facts: Facts, expected: Expected) -> dict[str, bool | None]:
    series = seen(timeline, facts)
    families = [] if expected.accept in {(HEALTHY,), (UNDETERMINED,)} else _families(expected)
    raised: dict[str, set[str]] = {name: set() for name in DETECTORS}
    for at in moments(timeline):
        now = series.until(at)
        for name, detect in DETECTORS.items():
            raised[name] |= detect(now)
    return {
        name: None if not alerts else any(explains(alert, families) for alert in alerts)
        for name, alerts in raised.items()
    }


def _families(expected: Expected) -> list[str]:
    return [family(one) for one in (*expected.accept, *expected.also)]


def judge_draws(incident: Incident, draws: Iterable[int]) -> tuple[Scored, ...]:
    """Judge other draws of an incident at their ends, scraped as irregularly as anything is."""
    expected = expectations()[incident.id]
    scored: list[Scored] = []
    for draw in draws:
        timeline, facts = incident.recording(draw).play()
        random = seeded(f"scrapes {incident.id} {draw}")
        timeline = scraped(timeline, random, tick_seconds=incident.tick_seconds)
        given = answers(incident, messages(), timeline, facts)
        scored += [score(incident.id, variant, expected, answer(made)) for variant, made in given.items()]
    return tuple(scored)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quiet:
    """A healthy server over hours: intervals of half hours with a fault, with a suspect at most, and with an alert."""

    model: str
    gpu_hours: float
    faults: int
    suspects: int
    said: tuple[str, ...]
    alerts: Mapping[str, int]


def watch_healthy(drawn: Drawn) -> Quiet:
    """Judge a healthy server at every half hour."""
    timeline, facts = drawn.play()
    series = seen(timeline, facts)
    faults = suspects = 0
    before: Answer | None = None
    said: list[str] = []
    alerts, on = dict.fromkeys(DETECTORS, 0), dict.fromkeys(DETECTORS, False)
    for at in moments(timeline):
        given = answer(diagnose(prefix(timeline, at), facts))
        was = "ok" if before is None else _worst(before)
        now = _worst(given)
        faults += now == "fault" != was
        suspects += now == "suspect" and was == "ok"
        if now != "ok" and was == "ok":
            hour = (at - timeline.samples[0].at_seconds) / HOUR
            said += [f"{hour:.1f} h: {given.called[one]} {one}: {text}" for one, text in given.said.items()]
        before = given
        moment = series.until(at)
        for name, detect in DETECTORS.items():
            fires = bool(detect(moment))
            alerts[name] += fires and not on[name]
            on[name] = fires
    return Quiet(
        model=drawn.model,
        gpu_hours=drawn.hours,
        faults=faults,
        suspects=suspects,
        said=tuple(said),
        alerts=alerts,
    )


def _worst(given: Answer) -> str:
    called = set(given.called.values())
    return next((status for status in ("fault", "suspect") if status in called), "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """A leak: hours from its onset until it was called, and called a fault; time to exhaustion against the truth."""

    drawn: Drawn
    called_hours: float | None
    fault_hours: float | None
    exhaustion_ratio: float | None
    instead: str
    alert_hours: Mapping[str, float | None]


def watch_leak(drawn: Drawn, leak: Leak) -> FoundServer:
    """Judge a leaking server at every half hour after the onset, until it is called a fault."""
    timeline, facts = drawn.play()
    series = seen(timeline, facts)
    right = VERDICTS[leak.component]
    called: float | None = None
    fault: float | None = None
    ratio: float | None = None
    instead = ""
    alerts: dict[str, float | None] = dict.fromkeys(DETECTORS)
    for at in moments(timeline, leak.onset_hours):
        hours = (at - timeline.samples[0].at_seconds) / HOUR - leak.onset_hours
        moment = series.until(at)
        for name, detect in DETECTORS.items():
            if alerts[name] is None and any(explains(one, [family(each) for each in right]) for one in detect(moment)):
                alerts[name] = hours
        if fault is not None:
            continue
        diagnosis = diagnose(prefix(timeline, at), facts)
        given = answer(diagnosis)
        statuses = {given.called.get(one) for one in right} - {None}
        if statuses and called is None:
            called, ratio = hours, _exhaustion_ratio(diagnosis, leak)
        if "fault" in statuses:
            fault = hours
        others = [f"{status} {one}" for one, status in given.called.items()]
        undecided = [one.summary for one in diagnosis.findings if one.id in right]
        instead = "; ".join(others or undecided[:1])
    return FoundServer(
        drawn=drawn,
        called_hours=called,
        fault_hours=fault,
        exhaustion_ratio=ratio,
        instead=instead,
        alert_hours=alerts,
    )


def _exhaustion_ratio(diagnosis: Diagnosis, leak: Leak) -> float | None:
    """The reported time to exhaustion over the time that the leak takes for the same room."""
    for finding in diagnosis.findings:
        growth = finding.growth
        if finding.status in {"suspect", "fault"} and growth is not None and growth.exhaustion_seconds is not None:
            truth = (growth.room_bytes or 0) / (leak.mb_per_hour * 10**6 / HOUR)
            return growth.exhaustion_seconds / truth if truth > 0.0 else None
    return None
