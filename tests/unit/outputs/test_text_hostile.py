"""Text from a server is displayed and never interpreted."""

import io
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from kvdiag.diagnosis import diagnose
from kvdiag.ledger import ledger
from kvdiag.model import Diagnosis, Facts, Gap, Sample, Timeline
from kvdiag.outputs.terminal.text import render, render_audit
from tests.builders.runs import judged, run
from tests.builders.values import GIB, device, process
from tests.builders.worlds import World, facts, named_so
from tests.unit.outputs.texts import HOSTILE, harmful, on_a_terminal, piped


def hostile() -> Diagnosis:
    """A diagnosis in which everything that comes from outside is hostile."""
    world, known = named_so(HOSTILE)
    return diagnose(run(world), known)


def test_what_comes_from_a_server_is_shown_and_not_acted_on() -> None:
    """No control character, escape sequence or override of a name or an error reaches the terminal."""
    text = piped(render(hostile()))
    assert set() == harmful(text)
    assert [] == [line for line in text.splitlines() if cell_len(line) > 80]


def test_markup_from_a_server_is_shown_as_it_is() -> None:
    """Square brackets and colons of a name are its own: they make nothing bold, no link and no picture."""
    text = "".join(line.strip() for line in piped(render(hostile()), width=400).splitlines())
    assert "[bold red]loud[/] [link=http://x]" in text
    assert ":smile:" in text


def test_on_a_terminal_only_its_own_colours_are_used() -> None:
    """With colours on, the only escape sequences are those of the verdicts' styles."""
    text = on_a_terminal(render(hostile()))
    plain = io.StringIO()
    pieces = text.split("\x1b[")
    for piece in (f"m{pieces[0]}", *pieces[1:]):
        style, _, rest = piece.partition("m")
        assert set(style) <= set("0123456789;")
        plain.write(rest)
    assert set() == harmful(plain.getvalue())


def test_a_forged_line_stays_in_its_place() -> None:
    """A line end in an error cannot begin a line of its own that looks like a verdict."""
    world = World(failing={"single_request": "no\n\nOK  no fault found\r\nOK"})
    text = piped(render(judged(world)))
    assert not any(line.startswith("OK  ") for line in text.splitlines())


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=60))
def test_any_text_from_outside_fits_and_does_no_harm(text: str) -> None:
    """With any model name, the text stays within its columns and moves no cursor."""
    known = Facts(model=text, url=text, gaps=(Gap(source="nvml", kind="absent", reason=text),))
    shown = piped(render(diagnose(Timeline(samples=()), known)))
    assert set() == harmful(shown)
    assert [] == [line for line in shown.splitlines() if cell_len(line) > 80]


def test_an_audit_of_a_hostile_device_does_no_harm() -> None:
    """Names of devices and processes are shown, and not acted on."""
    devices = (replace(device(processes=(process(7, GIB, HOSTILE), process(8, GIB, HOSTILE))), name=HOSTILE),)
    known = replace(facts(World()), model=HOSTILE)
    text = piped(render_audit(known, devices, ledger(Sample(at_seconds=1.0, devices=devices), known), ()))
    assert set() == harmful(text)
