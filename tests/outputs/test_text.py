from __future__ import annotations

import io
import unicodedata
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from kvdiag.commands.show import print_diagnosis
from kvdiag.diagnosis import diagnose
from kvdiag.ledger import ledger
from kvdiag.model import Diagnosis, Evidence, Facts, Finding, Gap, Sample, StepResult, Timeline
from kvdiag.outputs.text import evidence_value, readable, render, render_audit
from tests.builders import (
    GIB,
    KIB,
    MIB,
    NO_ANSWER,
    NO_NVML,
    OOM,
    WORLDS,
    World,
    device,
    facts,
    judged,
    pool,
    process,
    run,
)
from tests.soak_timeline import SOAKS, facts_of, soak

HOSTILE = "\x1b[31mred\x1b]0;title\x07\x9b2J[bold red]loud[/] [link=http://x]\r\bOK\u202etxt\u2028\ud800 :smile:"
"""What a name or an error may bring: escape sequences, carriage returns, markup, overrides, surrogates."""


def piped(result: RenderableType, width: int = 80) -> str:
    """What a pipe would get."""
    file = io.StringIO()
    Console(file=file, width=width, highlight=False, color_system=None, force_terminal=False).print(result)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def on_a_terminal(result: RenderableType) -> str:
    """What a terminal with colours would get."""
    file = io.StringIO()
    Console(file=file, width=80, highlight=False, color_system="truecolor", force_terminal=True).print(result)
    return file.getvalue()


def parts(text: str) -> dict[str, str]:
    """The text by its headings; what comes first stands under "verdict"."""
    found, heading = {"verdict": ""}, "verdict"
    for before, line in zip(["x", *text.splitlines()], text.splitlines(), strict=False):
        if not before.strip() and line.strip() and not line.startswith(" "):
            heading = line.strip()
            found[heading] = ""
        else:
            found[heading] += f"{line}\n"
    return found


def test_the_whole_text_of_a_leaking_server() -> None:
    """Verdict, server, steps, the finding with its evidence and its remedy, then what was not found or not told."""
    # GIVEN a leaking server
    text = piped(render(judged(World(leaked_blocks_per_request=4))))

    # THEN the verdict is the first thing, and the parts follow in order
    assert text.startswith("FAULT  leak.kv_blocks: 84 of 6,144 KV blocks (168 MiB) stay held at idle")
    assert [
        "verdict",
        "Test steps",
        "leak.kv_blocks",
        "Explained",
        "Looked at and not found",
        "Could not tell",
        "Where the memory is",
    ] == list(parts(text))


@pytest.mark.parametrize("name", WORLDS)
def test_the_verdict_comes_first(name: str) -> None:
    """The first word is the verdict, whatever it is."""
    # GIVEN any run
    diagnosis = judged(WORLDS[name])

    # THEN
    assert diagnosis.worst.upper() == piped(render(diagnosis)).split(maxsplit=1)[0]


@pytest.mark.parametrize("name", WORLDS)
def test_within_a_finding_evidence_comes_before_the_remedy_and_the_remedy_last(name: str) -> None:
    """A finding is told by its sentence, its numbers, its cause, how to confirm it, and last what to do."""
    # GIVEN any run
    diagnosis = judged(WORLDS[name])
    found = parts(piped(render(diagnosis)))

    # THEN
    for one in diagnosis.findings:
        if one.status in {"fault", "suspect"}:
            lines = found[one.id].splitlines()
            names = [line[:9].strip() for line in lines if line[:9].strip()]
            assert [one.status.upper(), "cause", "confirm", "runbook", "remedy"] == names
            told = next(number for number, line in enumerate(lines) if line[:9].strip() == "cause")
            numbers = " ".join(line.strip() for line in lines[:told])
            assert all(f"{part.name.replace('_', ' ')}: " in numbers for part in one.evidence)


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_is_wider_than_80_columns(name: str) -> None:
    """Every line of every world fits a terminal of 80 columns."""
    # GIVEN any run
    text = piped(render(judged(WORLDS[name])))

    # THEN
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]


@pytest.mark.parametrize("name", SOAKS)
def test_a_soak_is_not_wider_than_80_columns(name: str) -> None:
    """Every line of a soak's result fits a terminal too; what it found stands in its step, what would show in notes."""
    # GIVEN any soak
    text = piped(render(diagnose(soak(SOAKS[name]), facts_of())))

    # THEN
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]
    assert "5 soak: " in text


def test_long_words_and_wide_characters_are_folded() -> None:
    """Names and errors without a space, or of double-width characters, are broken rather than cut."""
    # GIVEN a server full of them
    long, wide = "x" * 300, "模" * 200
    world = World(failing={"single_request": long, "concurrent": wide, "long_context": OOM + long}, notes=(long, wide))
    known = replace(facts(world), model=long, url=f"http://{long}", engine_version=wide)
    text = piped(render(diagnose(run(world), known)))

    # THEN
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]
    assert 300 * 2 < text.count("x")


def hostile() -> Diagnosis:
    """A diagnosis in which everything that comes from outside is hostile."""
    world = World(
        foreign={0: (process(7, 6 * GIB, HOSTILE),)},
        device_bytes=48 * GIB,
        failing={"long_context": f"{OOM}{HOSTILE}", "concurrent": HOSTILE},
        notes=(HOSTILE,),
    )
    known = replace(
        facts(world),
        model=HOSTILE,
        url=f"http://{HOSTILE}",
        engine_name=HOSTILE,
        engine_version=HOSTILE,
        gaps=(Gap(source=HOSTILE, kind="failed", reason=HOSTILE),),
    )
    return diagnose(run(world), known)


def harmful(text: str) -> set[str]:
    """Characters of a text that a terminal would act on."""
    return {one for one in text if one != "\n" and unicodedata.category(one) in {"Cc", "Cf", "Cs", "Zl", "Zp"}}


def test_what_comes_from_a_server_is_shown_and_not_acted_on() -> None:
    """No control character, escape sequence or override of a name or an error reaches the terminal."""
    # WHEN a hostile server's diagnosis is piped
    text = piped(render(hostile()))

    # THEN
    assert set() == harmful(text)
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]


def test_markup_from_a_server_is_shown_as_it_is() -> None:
    """Square brackets and colons of a name are its own: they make nothing bold, no link and no picture."""
    # WHEN a hostile server's diagnosis is piped
    text = "".join(line.strip() for line in piped(render(hostile()), width=400).splitlines())

    # THEN
    assert "[bold red]loud[/] [link=http://x]" in text
    assert ":smile:" in text


def test_on_a_terminal_only_its_own_colours_are_used() -> None:
    """With colours on, the only escape sequences are those of the verdicts' styles."""
    # WHEN a hostile server's diagnosis is shown on a terminal
    text = on_a_terminal(render(hostile()))

    # THEN without its own colour sequences nothing of the kind is left
    plain = io.StringIO()
    pieces = text.split("\x1b[")
    for piece in (f"m{pieces[0]}", *pieces[1:]):
        style, _, rest = piece.partition("m")
        assert set(style) <= set("0123456789;")
        plain.write(rest)
    assert set() == harmful(plain.getvalue())


def test_a_forged_line_stays_in_its_place() -> None:
    """A line end in an error cannot begin a line of its own that looks like a verdict."""
    # GIVEN an error that brings a verdict along
    world = World(failing={"single_request": "no\n\nOK  no fault found\r\nOK"})
    text = piped(render(judged(world)))

    # THEN
    assert not any(line.startswith("OK") for line in text.splitlines())


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60))
def test_any_text_from_outside_fits_and_does_no_harm(text: str) -> None:
    """Whatever a model is called, the text stays within its columns and moves no cursor."""
    # GIVEN a server of any name
    known = Facts(model=text, url=text, gaps=(Gap(source="nvml", kind="absent", reason=text),))
    shown = piped(render(diagnose(Timeline(samples=()), known)))

    # THEN
    assert set() == harmful(shown)
    assert [] == [line for line in shown.splitlines() if cell_len(line) > 80]


@pytest.mark.parametrize("name", WORLDS)
def test_unknown_is_never_shown_as_ok(name: str) -> None:
    """What could not be told stands under that heading or with that word, and under no other."""
    # GIVEN any run
    diagnosis = judged(WORLDS[name])
    found = parts(piped(render(diagnosis)))

    # THEN
    steps = found.get("Test steps", "")
    for number, result in enumerate(diagnosis.steps, start=1):
        assert f"{result.status.upper()} {number} {result.id}: " in " ".join(steps.split())
    for one in diagnosis.findings:
        assert (one.status == "unknown") == (one.id in found.get("Could not tell", ""))
        seen = found.get("Looked at and not found", "") + found.get("Explained", "")
        assert (one.status == "ok") == (one.id in seen)


def test_unknowns_with_one_reason_are_told_together() -> None:
    """Six findings that lack the same thing are not six paragraphs."""
    # GIVEN no NVML
    told = parts(piped(render(judged(World(nvml=NO_NVML)))))["Could not tell"]

    # THEN both kinds of leak stand beside one reason
    assert "cannot tell" not in told
    assert 2 == " ".join(told.split()).count("no NVIDIA driver here")


def test_ok_says_what_it_does_not_cover() -> None:
    """Without a GPU the good news is about the pool alone, and says so."""
    # GIVEN a healthy server with and without a GPU
    with_gpu, without = (piped(render(judged(world))) for world in (World(), World(nvml=NO_NVML)))

    # THEN
    assert "OK  no fault found in what could be seen" == with_gpu.splitlines()[0]
    assert "OK  no fault found in what could be seen; device memory was not seen" == without.splitlines()[0]


def test_the_headline_is_the_worst_finding() -> None:
    """The first line has what is worst, and how much more there is."""
    # GIVEN a leak and a co-tenant
    world = World(leaked_blocks_per_request=4, foreign={0: (process(7, 3 * GIB, "train.py"),)})

    # THEN
    assert [
        "FAULT  leak.kv_blocks: 84 of 6,144 KV blocks (168 MiB) stay held at idle, 4 more",
        "with each request (and 1 more)",
    ] == piped(render(judged(world))).splitlines()[:2]


def test_the_headline_is_the_step_that_could_not_be_told() -> None:
    """Where nothing accuses, the first unknown step is why the verdict is unknown."""
    # GIVEN a step with other traffic
    text = piped(render(judged(World(other_prompt_tokens={"concurrent": 9}))))

    # THEN
    assert [
        "UNKNOWN  step concurrent: cannot tell: other traffic: the server took 9 prompt",
        "tokens that are not ours",
    ] == text.splitlines()[:2]


def test_the_headline_of_nothing_says_so() -> None:
    """An empty timeline is no good news."""
    # THEN
    shown = piped(render(diagnose(Timeline(samples=()), Facts())))
    assert ["UNKNOWN  not enough was seen to judge", "  server   not told"] == shown.splitlines()[:2]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "index", "0"),
        (1_536, "bytes", "1.50 KiB"),
        (1_536, "bytes per request", "1.50 KiB per request"),
        (0.125, "ratio", "12.5%"),
        (2_029, "requests", "2,029 requests"),
        (None, "bytes", "not known"),
    ],
)
def test_evidence_is_told_in_its_unit(value: float | None, unit: str, text: str) -> None:
    """An index is a name, and has none."""
    assert text == evidence_value(Evidence(name="it", value=value, unit=unit, source="vllm"))


def test_faults_come_before_what_is_only_suspect() -> None:
    """The order of the findings is that of their weight."""
    # GIVEN a suspect finding that the rules name first, and a fault
    diagnosis = replace(
        judged(),
        worst="fault",
        findings=(
            Finding(id="leak.kv_blocks", status="suspect", summary="perhaps"),
            Finding(id="capacity.concurrency", status="fault", summary="surely"),
        ),
    )

    # THEN
    assert ["verdict", "Test steps", "capacity.concurrency", "leak.kv_blocks"] == list(parts(piped(render(diagnosis))))[
        :4
    ]


def test_a_fault_of_a_step_alone_is_the_headline() -> None:
    """Where only a step accuses, its sentence is the verdict."""
    # GIVEN such a diagnosis
    diagnosis = replace(
        judged(), worst="fault", steps=(StepResult(id="concurrent", status="fault", summary="too much"),), findings=()
    )

    # THEN
    assert "FAULT  step concurrent: too much" == piped(render(diagnosis)).splitlines()[0]


def test_a_pipe_gets_plain_text_without_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    """What `kvdiag run | less` shows is text: no colours, no padding."""
    # WHEN a diagnosis is printed to something that is no terminal
    print_diagnosis(judged(World(leaked_blocks_per_request=4)), "text")
    text = capsys.readouterr().out

    # THEN
    assert set() == harmful(text)
    assert [] == [line for line in text.splitlines() if line != line.rstrip()]


def test_an_audit_heads_each_gpu_with_its_lines() -> None:
    """Every device has its total and its own lines, the pool without a device its own heading."""
    # GIVEN two GPUs, of which one does not tell its memory
    known = facts(World())
    devices = (device(used_bytes=20 * GIB, processes=(process(100, 19 * GIB),)), device(1, used_bytes=None))
    text = piped(render_audit(known, devices, ledger(Sample(at_seconds=1.0, devices=devices), known), (NO_ANSWER,)))
    found = parts(text)

    # THEN
    assert "20.00 GiB used of 24.00 GiB, 4.00 GiB free (83% taken)" in found["GPU 0  NVIDIA Test"]
    assert "kv_pool" in found["GPU 0  NVIDIA Test"]
    assert "memory cannot be read" == found["GPU 1  NVIDIA Test"].strip()
    assert "connection refused" in found["Not seen"]


def test_an_audit_of_slices_gives_each_its_own_lines() -> None:
    """MIG slices share their GPU's index; lines are matched by UUID."""
    # GIVEN two slices of one GPU
    devices = tuple(
        device(uuid=f"MIG-{part}", mig_parent_uuid="GPU-0", used_bytes=size, driver_reserved_bytes=None)
        for part, size in (("a", 3 * GIB), ("b", 5 * GIB))
    )
    known = Facts(pools=(pool(),))
    text = piped(render_audit(known, devices, ledger(Sample(at_seconds=1.0, devices=devices), known), ()))

    # THEN
    assert (1, 1) == (text.count("3.00 GiB  computed"), text.count("5.00 GiB  computed"))


def test_an_audit_without_a_device_shows_the_pool() -> None:
    """Without a GPU the engine's own figures stand under a heading that says so."""
    # GIVEN no device
    sample = judged(World(nvml=NO_NVML)).ledger
    found = parts(piped(render_audit(facts(World()), (), sample, (NO_NVML,))))

    # THEN
    assert "kv_free" in found["KV pool, as the engine reports it (no device was seen)"]


def test_an_audit_of_a_hostile_device_does_no_harm() -> None:
    """Names of devices and processes are shown, and not acted on."""
    # GIVEN hostile names
    devices = (replace(device(processes=(process(7, GIB, HOSTILE), process(8, GIB, HOSTILE))), name=HOSTILE),)
    known = replace(facts(World()), model=HOSTILE)
    text = piped(render_audit(known, devices, ledger(Sample(at_seconds=1.0, devices=devices), known), ()))

    # THEN
    assert set() == harmful(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.00 KiB"),
        (3 * MIB // 2, "1.50 MiB"),
        (-2 * GIB, "-2.00 GiB"),
        (2000 * GIB, "2,000.00 GiB"),
    ],
)
def test_bytes_are_readable(size: int, text: str) -> None:
    """Sizes come with the unit that suits them, negative ones with their sign."""
    # THEN
    assert text == readable(size)
