"""What profiles of a server's processes showed, as text: for each process one answer, then the stacks that grew most.

Names of files and functions come from the server and are escaped.
"""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvdiag.model import ConcludedProfile, ProfileAnswer, ProfiledLoad, StackGrowth
from kvdiag.outputs.profile_words import (
    load_line,
    location,
    other_stacks,
    profile_notes,
    profile_sentence,
    shown_stacks,
    stack_line,
)
from kvdiag.outputs.terminal.cells import columns, heading, indented, plain

STYLES: Mapping[ProfileAnswer, str] = {
    "named": "bold red",
    "partly": "bold yellow",
    "native": "bold yellow",
    "flat": "green",
}


def render_profiles(profiles: Sequence[ConcludedProfile]) -> RenderableType:
    """Every process, then the speed of the server."""
    load = next((one.profile.load for one in profiles), ProfiledLoad())
    return Group(*map(_process, profiles), Text(), plain(load_line(load), "dim"))


def _process(one: ConcludedProfile) -> RenderableType:
    answer = Text.assemble((one.answer, STYLES[one.answer]), "  ", plain(profile_sentence(one)))
    rest = filter(None, (other_stacks(one), *profile_notes(one.profile)))
    return Group(
        heading(f"{one.profile.title} {one.profile.pid}"),
        answer,
        *(_stack(stack, one) for stack in shown_stacks(one)),
        *(plain(line, "dim") for line in rest),
    )


def _stack(stack: StackGrowth, one: ConcludedProfile) -> RenderableType:
    table = columns("=", "", header=False)
    for frame in stack.frames:
        table.add_row("", plain(location(frame), "" if frame is stack.frames[0] else "dim"))
    return Group(plain(stack_line(stack, one)), indented(table))
