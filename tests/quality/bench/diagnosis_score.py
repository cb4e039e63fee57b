"""Print how the diagnosis does on the corpus: reported incidents, healthy servers over days, leaks of every rate.

python -m tests.quality.bench.diagnosis_score                  everything, on the drawn servers of seed 1
python -m tests.quality.bench.diagnosis_score --seed 7         fresh draws
python -m tests.quality.bench.diagnosis_score --incidents      the incidents alone
python -m tests.quality.bench.diagnosis_score --write          keep the table in tests/quality/bench/diagnosis_score.md
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.confidence import confidence_of
from kvdiag.feeds.recording.trace import read_trace
from tests.quality.bench.table import note
from tests.quality.corpus.drawn import COMPONENTS, NULLS, RATES, Leak, healthy, leaking
from tests.quality.corpus.incidents import INCIDENTS
from tests.quality.corpus.measure import (
    FoundServer,
    Judged,
    Quiet,
    judge_draws,
    judge_incident,
    watch_healthy,
    watch_leak,
)
from tests.quality.corpus.scenarios import SCENARIOS
from tests.quality.corpus.score import HEALTHY, UNDETERMINED, Scored, answer, answers, half, score
from tests.quality.corpus.today import DETECTORS
from tests.quality.worlds.calibrate import mean_square

TABLE = Path(__file__).with_suffix(".md")
TRACES = Path(__file__).parents[2] / "golden" / "traces"
WIDTH = 98
HALVES = ("fitted", "held out")
BENIGN = {(HEALTHY,), (UNDETERMINED,)}
FILLS = "filling cache"

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--incidents", action="store_true")
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args(arguments)
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    judged = [judge_incident(incident) for incident in INCIDENTS.values()]
    _incidents(judged, say)
    _verdicts(judged, say)
    _confidence(judged, say)
    _drawn_anew(judged, chosen.seed, say)
    _on_the_way(judged, say)
    _misses(judged, say)
    _scenarios(say)
    _recorded(say)
    if not chosen.incidents:
        quiet = [watch_healthy(one) for one in healthy(chosen.seed)]
        _quiet(quiet, chosen.seed, say)
        found = [(one.leak, watch_leak(one, one.leak)) for one in leaking(chosen.seed) if one.leak is not None]
        _leaks(found, chosen.seed, say)
        _today(judged, quiet, found, say)
    if chosen.write:
        TABLE.write_text("# What `make bench-diagnosis` prints\n\n```\n" + "\n".join(lines) + "\n```\n")
    return 0


def _title(text: str, say: Say) -> None:
    for line in ("", text, "-" * len(text)):
        say(line)


def _row(name: str, cells: Sequence[object], widths: Sequence[int], say: Say) -> None:
    """A line of a table: the name, then each cell to the right of its column."""
    texts = [percent(cell) if isinstance(cell, float) or cell is None else str(cell) for cell in cells]
    say(f"{name:{widths[0]}}" + "".join(f"{text:>{width}}" for text, width in zip(texts, widths[1:], strict=True)))


def _wrapped(text: str, say: Say) -> None:
    for line in textwrap.wrap(text, WIDTH - 4)[:3]:
        say(f"    {line}")


def percent(share: float | None) -> str:
    """A share for a table, empty where there is none."""
    return "" if share is None else f"{share:.0%}"


def _scored(judged: Sequence[Judged]) -> list[Scored]:
    return [one for each in judged for one in each.scored]


def _incidents(judged: Sequence[Judged], say: Say) -> None:
    _title(f"{len(judged)} reported incidents, each at its end", say)
    say("recorded: as kvdiag's recorder sees it in the pod. series: vLLM's page, DCGM and cAdvisor alone.")
    say("message: what a crash printed, beside the recording. unseen: unknown where there is no evidence.")
    say("half: of the right family. wrong: verdicts that are not so, one of the right family for a half.")
    say("Constants may be fitted on the incidents of the one half, and are reported on the other.")
    say("")
    widths = (20, 7, 7, 6, 8, 8, 8, 8, 8, 11)
    heads = ("cases", "right", "half", "missed", "unseen", "recall", "called", "wrong", "precision")
    _row("", heads, widths, say)
    rows = _scored(judged)
    groups = [
        (f"{variant}, {part}", [one for one in rows if one.variant == variant and half(one.incident) == part])
        for variant in ("recorded", "series", "message")
        for part in HALVES
    ]
    groups += [(f"all, {part}", [one for one in rows if half(one.incident) == part]) for part in HALVES]
    for status in ("", "fault"):
        for name, chosen in (*groups, ("all", rows)) if not status else (*groups[-2:], ("all", rows)):
            marks = [one.mark for one in chosen]
            called, wrong = calls(chosen, status)
            share = recall([one for one in chosen if one.expected.accept not in BENIGN], status)
            counts = [marks.count(mark) for mark in ("right", "half", "missed", "honest")]
            precision = (called - wrong) / called if called else None
            cells = (len(chosen), *(counts if not status else [""] * 4), share, called, f"{wrong:g}", precision)
            _row(name if not status else f"{name}, faults", cells, widths, say)
    share = recall([one for one in rows if one.expected.accept not in BENIGN], "fault", open_counts=True)
    left = sum(one.variant in one.expected.open for one in rows)
    say(f"Of {left} cases the evidence leaves open what it is, and a suspect is all that can be said of them: a cache")
    say("whose bound nobody told, holders that are not seen, what is gone. With these as suspects, all others as")
    say(f"faults: recall {percent(share)}.")


def recall(rows: Sequence[Scored], status: str = "", *, open_counts: bool = False) -> float | None:
    """The share that was called rightly, `half` for the right family; as a fault where `status` says so.

    With `open_counts` any status is enough of those that the evidence leaves open.
    """
    counted = [one for one in rows if one.mark != "honest"]
    credit = 0.0
    for one in counted:
        named = [name for name in one.answer.called if name in (*one.expected.accept, *one.near)]
        left_open = open_counts and one.variant in one.expected.open
        if not status or left_open or any(one.answer.called[name] == status for name in named):
            credit += {"right": 1.0, "half": 0.5}.get(one.mark, 0.0)
    return credit / len(counted) if counted else None


def calls(rows: Sequence[Scored], status: str) -> tuple[int, float]:
    """How many verdicts were called, as that status where one is named, and how many of them wrongly."""
    called, wrong = 0, 0.0
    for row in rows:
        for verdict, given in row.answer.called.items():
            if given == (status or given):
                called += 1
                wrong += 1.0 if verdict in row.wrong else 0.5 * (verdict in row.near)
    return called, wrong


def _verdicts(judged: Sequence[Judged], say: Say) -> None:
    _title("By verdict, all variants; hours from the onset to the first right call", say)
    widths = (26, 6, 8, 8, 10, 8, 11, 11, 8)
    heads = ("cases", "recall", "fitted", "held out", "called", "precision", "of faults", "delay")
    _row("", heads, widths, say)
    rows = _scored(judged)
    for name in sorted({one.expected.accept[0] for one in rows} | {name for one in rows for name in one.answer.called}):
        mine = [one for one in rows if one.expected.accept[0] == name]
        if name in {HEALTHY, UNDETERMINED}:
            kept = sum(one.mark == "right" for one in mine)
            told = "nothing was called" if name == HEALTHY else "unknown, as it should be"
            say(f"{name:26}{len(mine):6}{percent(kept / len(mine)):>8}  {told}")
            continue
        delays = [
            delay
            for each in judged
            if each.scored[0].expected.accept[0] == name
            for delay in each.delays_hours.values()
            if delay is not None
        ]
        parts = [recall([one for one in mine if half(one.incident) == part]) for part in HALVES]
        called, precision, of_faults = _precision(rows, name)
        delay = f"{median(delays):.1f} h" if delays else ""
        _row(name, (len(mine), recall(mine), *parts, called, precision, of_faults, delay), widths, say)


def _confidence(judged: Sequence[Judged], say: Say) -> None:
    """The Brier score of what findings say of themselves: 0 is best, 0.25 what a coin gets."""
    pairs = [
        (known.ratio, name not in row.wrong and row.expected.accept not in BENIGN)
        for row in _scored(judged)
        for name, status in row.answer.called.items()
        if (known := confidence_of(name, status)) is not None
    ]
    if (found := mean_square(pairs)) is not None:
        say(f"Brier score of the confidence: {found[0]:.4f}, of {found[1]} findings")


def _precision(rows: Sequence[Scored], name: str) -> tuple[int, float | None, float | None]:
    credit = [
        (row.answer.called[name], 0.0 if name in row.wrong else 0.5 if name in row.near else 1.0)
        for row in rows
        if name in row.answer.called
    ]
    faults = [share for status, share in credit if status == "fault"]
    every = sum(share for _, share in credit) / len(credit) if credit else None
    return len(credit), every, sum(faults) / len(faults) if faults else None


DRAWS = 4


def _drawn_anew(judged: Sequence[Judged], seed: int, say: Say) -> None:
    """Whether the score hangs on one draw of the noise."""
    _title(f"The incidents drawn anew {DRAWS} times, a reading in 100 lost, the others up to a fifth late", say)
    first = {(one.incident, one.variant): one.mark for one in _scored(judged)}
    draws = range(DRAWS * seed, DRAWS * (seed + 1))
    rows = [one for incident in INCIDENTS.values() for one in judge_draws(incident, draws)]
    for status in ("", "fault"):
        called, wrong = calls(rows, status)
        share = recall([one for one in rows if one.expected.accept not in BENIGN], status)
        precision = (called - wrong) / called if called else None
        name = "faults" if status else "suspects and faults"
        say(f"{name}: recall {percent(share)}, {called} called, {wrong:g} wrong, precision {percent(precision)}")
    for (incident, variant), mark in first.items():
        others = [one for one in rows if (one.incident, one.variant) == (incident, variant)]
        differing = [one for one in others if one.mark != mark]
        if differing:
            said = sorted({name for one in differing for name in one.answer.called}) or ["nothing called"]
            _wrapped(f"{incident} ({variant}): {mark}, but {len(differing)} of {DRAWS} are not: {', '.join(said)}", say)


def _on_the_way(judged: Sequence[Judged], say: Say) -> None:
    _title("Incidents at every half hour on the way to their ends, recorded and series", say)
    benign = [each for each in judged if each.scored[0].expected.accept in BENIGN]
    others = [each for each in judged if each not in benign]
    for name, chosen in (("benign", benign), ("the others", others)):
        alarms, hours = [text for one in chosen for text in one.alarms], sum(one.gpu_hours for one in chosen)
        say(f"{name}: {len(alarms)} false faults in {hours:.0f} GPU-hours")
        for text in alarms:
            _wrapped(text, say)


def _misses(judged: Sequence[Judged], say: Say) -> None:
    _title("Misses and wrong calls", say)
    for row in _scored(judged):
        if row.mark in {"right", "honest"} and not row.wrong:
            continue
        called = ", ".join(f"{status} {name}" for name, status in row.answer.called.items())
        say(f"{row.incident} ({row.variant}, {half(row.incident)}): {row.mark}")
        _wrapped(f"expected {' or '.join(row.expected.accept)}; said {called or row.answer.worst}", say)
        for name in (*row.wrong, *row.near):
            _wrapped(row.answer.said[name], say)


def _scenarios(say: Say) -> None:
    _title(f"{len(SCENARIOS)} scenarios of operations, recorded and series", say)
    rows = [
        score(name, variant, expected, answer(made))
        for name, (incident, expected) in SCENARIOS.items()
        for variant, made in answers(incident, {}, *incident.recording().play()).items()
    ]
    marks = [one.mark for one in rows]
    say(", ".join(f"{marks.count(mark)} {mark}" for mark in ("right", "half", "missed", "honest")))
    for one in rows:
        if one.mark in {"half", "missed"}:
            called = ", ".join(f"{status} {name}" for name, status in one.answer.called.items())
            expected = " or ".join(one.expected.accept)
            _wrapped(f"{one.incident} ({one.variant}): expected {expected}; said {called or one.answer.worst}", say)


def _recorded(say: Say) -> None:
    _title("Recorded runs of real engines, all healthy", say)
    for path in sorted(TRACES.glob("*.jsonl.gz")):
        given = answer(diagnose(*read_trace(path)))
        say(f"{path.name}: {given.worst}, called: {', '.join(given.called) or 'nothing'}")


def _quiet(quiet: Sequence[Quiet], seed: int, say: Say) -> None:
    _title(f"Healthy servers of seed {seed}, 36 h each (4 read each 2 s: 3 h), judged every half hour", say)
    widths = (28, 11, 8, 10, 28)
    _row("", ("GPU-hours", "faults", "suspects", "faults in 1,000 GPU-hours"), widths, say)
    groups = [(model, [one for one in quiet if one.model == model]) for model in NULLS]
    groups += [(f"all but a {FILLS}", [one for one in quiet if one.model != FILLS]), ("all", list(quiet))]
    for name, chosen in groups:
        hours, faults = sum(one.gpu_hours for one in chosen), sum(one.faults for one in chosen)
        suspects = sum(one.suspects for one in chosen)
        _row(name, (round(hours), faults, suspects, f"{1_000.0 * faults / hours:.2f}"), widths, say)
    for one in quiet:
        for text in one.said:
            _wrapped(f"{one.model}, {text}", say)


Leaks = Sequence[tuple[Leak, FoundServer]]


def _leaks(found: Leaks, seed: int, say: Say) -> None:
    _title(f"Leaks of seed {seed} in such servers: called, as a fault / of how many; hours to the call", say)
    _row("MB/h", COMPONENTS, (8, *[18] * len(COMPONENTS)), say)
    for rate in RATES:
        cells = []
        for component in COMPONENTS:
            mine = [one for leak, one in found if leak.component == component and leak.mb_per_hour == rate]
            hours = [one.called_hours for one in mine if one.called_hours is not None]
            faults = sum(one.fault_hours is not None for one in mine)
            cells.append(f"{len(hours)}, {faults} / {len(mine)}" + (f" {median(hours):5.1f} h" if hours else " " * 8))
        _row(f"{rate:g}", cells, (8, *[18] * len(COMPONENTS)), say)
    say("")
    for least, most, allowed in ((500.0, 5_000.0, 1.5), (50.0, 50.0, 10.0)):
        mine = [one for leak, one in found if least <= leak.mb_per_hour <= most]
        inside = sum(one.called_hours is not None and one.called_hours <= allowed for one in mine)
        rates = f"{least:g} MB/h" if least == most else f"{least:g} to {most:g} MB/h"
        say(f"{rates} called within {allowed:g} h: {inside} of {len(mine)}")
    ratios = sorted(one.exhaustion_ratio for _, one in found if one.exhaustion_ratio is not None)
    if ratios:
        ends = (ratios[min(int(part * len(ratios)), len(ratios) - 1)] for part in (0.1, 0.5, 0.9))
        told = "  ".join(f"{one:.2f}" for one in ends)
        say(f"time to exhaustion over the truth at the call, 10-50-90 % of {len(ratios)}: {told}")
    for leak, one in found:
        if one.called_hours is None and leak.mb_per_hour >= 50.0:
            _wrapped(f"{one.drawn.name}: {one.instead}", say)


def _beside(judged: Sequence[Judged], faulty: Sequence[Judged], precision: float, found_share: float) -> None:
    """Note kvdiag's precision and recall on the incidents next to those of the best existing alert."""
    best: tuple[float, float, str] = (0.0, 0.0, "")
    for name in DETECTORS:
        fired = [one.fired[name] for one in judged if one.fired[name] is not None]
        theirs = sum(one is True for one in fired) / len(fired) if fired else 0.0
        found = sum(one.fired[name] is True for one in faulty) / len(faulty)
        if 2.0 * theirs * found / ((theirs + found) or 1.0) > 2.0 * best[0] * best[1] / ((best[0] + best[1]) or 1.0):
            best = (theirs, found, name)
    note("incidents: precision", 100 * precision, 100 * best[0], than=best[2], unit="%")
    note("incidents: recall", 100 * found_share, 100 * best[1], than=best[2], unit="%")
    faults = sum(
        one.mark == "right" and any(one.answer.called.get(name) == "fault" for name in one.expected.accept)
        for one in (each.scored[0] for each in faulty)
    )
    share = 100 * faults / len(faulty)
    note("incidents: recall, fault verdicts only", share, 100 * best[1], than=best[2], unit="%")


def _today(judged: Sequence[Judged], quiet: Sequence[Quiet], found: Leaks, say: Say) -> None:
    _title("The same traces by what people use today", say)
    say("Incidents: recorded, at any half hour; an alert on the right component is right, whatever it says.")
    say("Leaks: of 50 MB/h and more. False alarms: in 1,000 GPU-hours of healthy servers.")
    say("")
    widths = (30, 7, 11, 8, 8, 9, 14)
    _row("", ("fired", "precision", "recall", "leaks", "delay", "false alarms"), widths, say)
    faulty = [one for one in judged if one.scored[0].expected.accept not in BENIGN]
    hours = sum(one.gpu_hours for one in quiet)
    counted = [one for leak, one in found if leak.mb_per_hour >= 50.0]
    for name in DETECTORS:
        fired = [one.fired[name] for one in judged if one.fired[name] is not None]
        delays = [hour for one in counted if (hour := one.alert_hours[name]) is not None]
        cells = (
            len(fired),
            sum(one is True for one in fired) / len(fired) if fired else None,
            sum(one.fired[name] is True for one in faulty) / len(faulty),
            len(delays) / len(counted),
            f"{median(delays):.1f} h" if delays else "",
            f"{1_000.0 * sum(one.alerts[name] for one in quiet) / hours:.1f}",
        )
        _row(name, cells, widths, say)
    rows = [one.scored[0] for one in judged]
    called = [one for one in rows if one.answer.called]
    delays = [one.called_hours for one in counted if one.called_hours is not None]
    right = sum(one.mark == "right" for one in rows if one.expected.accept not in BENIGN)
    precision = sum(not one.wrong for one in called) / len(called)
    _beside(judged, faulty, precision, right / len(faulty))
    cells = (
        len(called),
        precision,
        right / len(faulty),
        len(delays) / len(counted),
        f"{median(delays):.1f} h" if delays else "",
        f"{1_000.0 * sum(one.faults + one.suspects for one in quiet) / hours:.1f}",
    )
    _row("kvdiag, suspects and faults", cells, widths, say)


if __name__ == "__main__":
    sys.exit(main())
