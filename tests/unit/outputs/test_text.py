"""A diagnosis as text: what stands first, what stands together, and that it fits."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.cells import cell_len

from kvdiag.commands.printing import print_diagnosis
from kvdiag.diagnosis import diagnose
from kvdiag.model import Evidence, Facts, Finding, StepResult, Timeline
from kvdiag.outputs.presentation import evidence_value, fixes, known_reports, sentence, spaced
from kvdiag.outputs.terminal.text import render
from tests.builders import lives
from tests.builders.runs import judged, run
from tests.builders.soak_timeline import SOAKS, facts_of, soak
from tests.builders.values import GIB, NO_NVML, OOM, process
from tests.builders.worlds import WORLDS, World, facts
from tests.unit.outputs.texts import harmful, parts, piped

LEAKING = lives.life(100.0, lives.LEAKED_BLOCKS, tokens=900)


@pytest.mark.parametrize("name", ["healthy", "leaking", "without a GPU", "two problems", "empty", "lives", "down"])
def test_the_whole_text(golden: Callable[[str, str], None], name: str) -> None:
    """Verdict, server, steps, findings with evidence and remedy, then explained, not found and unknown verdicts."""
    worlds = {
        "healthy": World(),
        "leaking": World(leaked_blocks_per_request=4),
        "without a GPU": World(nvml=NO_NVML),
        "two problems": World(leaked_blocks_per_request=4, foreign={0: (process(7, 3 * GIB, "train.py"),)}),
    }
    others = {
        "empty": diagnose(Timeline(samples=()), Facts()),
        "lives": lives.judged(LEAKING, lives.outage(120.0), lives.life(140.0, 0)),
        "down": lives.judged(LEAKING, lives.outage(120.0), lives.life(140.0, 0), lives.outage(160.0)),
    }
    diagnosis = judged(worlds[name]) if name in worlds else others[name]
    golden(f"terminal/{name.replace(' ', '-')}.txt", piped(render(diagnosis)))


@pytest.mark.parametrize("name", WORLDS)
def test_the_verdict_comes_first(name: str) -> None:
    """The first word is the verdict, for any verdict."""
    diagnosis = judged(WORLDS[name])
    first = "DOWN" if diagnosis.down_since_seconds is not None else diagnosis.worst.upper()
    assert first == piped(render(diagnosis)).split(maxsplit=1)[0]


@pytest.mark.parametrize("name", WORLDS)
def test_within_a_finding_evidence_comes_before_the_remedy_and_the_remedy_last(name: str) -> None:
    """A finding lists its sentence, its numbers, its cause, how to confirm it, and last what to do and the fix."""
    diagnosis = judged(WORLDS[name])
    found = parts(piped(render(diagnosis)))
    for one in diagnosis.findings:
        if one.status in {"fault", "suspect"}:
            lines = found[one.title].splitlines()
            names = [line[:9].strip() for line in lines if line[:9].strip()]
            known = ["known"] if known_reports(one)[0] else []
            order = [one.status.upper(), *known, "cause", "confirm", "runbook", "remedy"]
            assert order + [title.lower() for title, *_ in fixes(one)] == names
            told = next(number for number, line in enumerate(lines) if line[:9].strip() == "cause")
            numbers = " ".join(line.strip() for line in lines[:told])
            assert all(f"{spaced(part.name)}: " in numbers for part in one.evidence if part.value is not None)


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_is_wider_than_80_columns(name: str) -> None:
    """Every line of every world fits a terminal of 80 columns."""
    text = piped(render(judged(WORLDS[name])))
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]


@pytest.mark.parametrize("name", SOAKS)
def test_a_soak_is_not_wider_than_80_columns(name: str) -> None:
    """Every line of a soak's result fits a terminal too; findings are in its step, detection limits in its notes."""
    text = piped(render(diagnose(soak(SOAKS[name]), facts_of())))
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]
    assert "5 soak: " in text


def test_long_words_and_wide_characters_are_folded() -> None:
    """Names and errors without a space, or of double-width characters, are broken rather than cut."""
    long, wide = "x" * 300, "模" * 200
    world = World(failing={"single_request": long, "concurrent": wide, "long_context": OOM + long}, notes=(long, wide))
    known = replace(facts(world), model=long, url=f"http://{long}", engine_version=wide)
    text = piped(render(diagnose(run(world), known)))
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]
    assert 300 * 2 < text.count("x")


@pytest.mark.parametrize("name", WORLDS)
def test_unknown_is_never_shown_as_ok(name: str) -> None:
    """What is unknown stands under that heading alone; of growth that may be either's, the fault speaks for both."""
    diagnosis = judged(WORLDS[name])
    found = parts(piped(render(diagnosis)))
    steps = found.get("Test steps", "")
    for number, result in enumerate(diagnosis.steps, start=1):
        assert f"{result.status.upper()} {number} {result.id}: " in " ".join(steps.split())
    named = {one.or_id for one in diagnosis.findings}
    for one in diagnosis.findings:
        assert (one.status == "unknown" and one.id not in named) == (one.id in found.get("Unknown", ""))
        seen = found.get("Checked, not found", "") + found.get("Explained", "")
        assert (one.status == "ok") == (one.id in seen)


def test_unknowns_with_one_reason_are_told_together() -> None:
    """Six findings that lack the same thing are not six paragraphs."""
    told = parts(piped(render(judged(World(nvml=NO_NVML)))))["Unknown"]
    assert 2 == " ".join(told.split()).count("no libnvidia-ml.so.1 here")


@pytest.mark.parametrize("name", WORLDS)
def test_every_unknown_has_its_reason_beside_it(name: str) -> None:
    """One that lacks what another one lacks says so, and does not stand there without a reason."""
    diagnosis = judged(WORLDS[name])
    lines = parts(piped(render(diagnosis))).get("Unknown", "").splitlines()
    named = {one.or_id for one in diagnosis.findings}
    unknown = [one.id for one in diagnosis.findings if one.status == "unknown" and one.id not in named]
    rows = [line.split(maxsplit=1) for line in lines]
    assert [] == [row for row in rows if row and row[0] in unknown and len(row) == 1]
    assert sorted(unknown) == sorted(row[0] for row in rows if row and row[0] in unknown)


def test_the_headline_is_the_step_that_is_unknown() -> None:
    """Where no finding is a problem, the first unknown step is why the verdict is unknown."""
    diagnosis = judged(World(other_prompt_tokens={"concurrent": 9}))
    unknown = next(step for step in diagnosis.steps if step.status == "unknown")
    assert f"step {unknown.id}: {unknown.summary}" == sentence(diagnosis)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "index", "0"),
        (1_536, "bytes", "1.50 KiB"),
        (11 * 2**20, "bytes per hour", "11.0 MiB/h"),
        (7_500, "seconds", "2 h 5 min"),
        (1_536, "bytes per request", "1.50 KiB per request"),
        (0.124, "ratio", "12 %"),
        (2_029, "requests", "2,029 requests"),
        (1, "requests", "1 request"),
        (1, "blocks per request", "1 block per request"),
        (1, "processes", "1 process"),
        (1, "ms", "1 ms"),
        (3, "", "3"),
        (None, "bytes", "not reported"),
    ],
)
def test_evidence_is_told_in_its_unit(value: float | None, unit: str, text: str) -> None:
    """An index is a name, and has none."""
    assert text == evidence_value(Evidence(name="it", value=value, unit=unit, source="engine"))


def test_faults_come_before_what_is_only_suspect() -> None:
    """The order of the findings is that of their weight."""
    diagnosis = replace(
        judged(),
        worst="fault",
        findings=(
            Finding(id="leak.kv_blocks", status="suspect", summary="perhaps"),
            Finding(id="capacity.concurrency", status="fault", summary="surely"),
        ),
    )
    assert ["verdict", "Test steps", "capacity.concurrency", "leak.kv_blocks"] == list(parts(piped(render(diagnosis))))[
        :4
    ]


def test_a_fault_of_a_step_alone_is_the_headline() -> None:
    """Where only a step accuses, its sentence is the verdict."""
    diagnosis = replace(
        judged(),
        worst="fault",
        steps=(StepResult(id="concurrent", status="fault", summary="too much"),),
        findings=(),
        lives=(),
    )
    assert "FAULT  step concurrent: too much" == piped(render(diagnosis)).splitlines()[0]


def test_a_pipe_gets_plain_text_without_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    """What `kvdiag run | less` shows is text: no colours, no padding."""
    print_diagnosis(judged(World(leaked_blocks_per_request=4)), "text")
    text = capsys.readouterr().out
    assert set() == harmful(text)
    assert [] == [line for line in text.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(("lives_seen", "told"), [(2, False), (3, True)])
def test_restarts_that_nothing_explains_stand_in_the_verdict(lives_seen: int, told: bool) -> None:
    """A server that died eight times a day was led by advice to pause its traffic; one restart is an update."""
    parts = [lives.life(40.0 * number, 0, tokens=900 - 300 * number) for number in range(lives_seen)]
    line = sentence(lives.judged(*parts))
    assert line.startswith("no fault found")
    assert told == ("; the server restarted 2 times; " in line)
