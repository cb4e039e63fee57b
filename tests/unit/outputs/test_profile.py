"""Profiles as text and as a document."""

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from rich.console import Group

import kvdiag.outputs.documents
from kvdiag.diagnosis.growth.profile_conclusion import conclude
from kvdiag.model import Frame, MemoryProfile, StackGrowth
from kvdiag.outputs.documents.profile_document import profile_document
from kvdiag.outputs.terminal.profile_text import render_load, render_profile
from tests.builders.allocation_profiles import profile, stack
from tests.builders.values import MIB
from tests.unit.outputs.texts import HOSTILE, harmful, piped

SCHEMA = json.loads((Path(kvdiag.outputs.documents.__path__[0]) / "profile.schema.json").read_text(encoding="utf-8"))
COUNTS = [(90.0, 0), (100.0, 100), (110.0, 150), (120.0, 200), (160.0, 400), (170.0, 500)]
LEAK = (stack(300 * MIB, 4800, 12, 40, 7), stack(3 * MIB, 3, 99), *(stack(1000 - n, 1, n) for n in range(20)))
PROFILES = {
    "named": profile(process=310 * MIB, traced=303 * MIB, stacks=LEAK, other_stacks=9),
    "partly": profile(process=620 * MIB, traced=303 * MIB, stacks=LEAK[:2]),
    "native": profile(process=310 * MIB, traced=2 * MIB, stacks=LEAK[1:2]),
    "flat": profile(process=-MIB, traced=0),
    "device": profile(process=310 * MIB, traced=300 * MIB, stacks=LEAK[:1], kind="device"),
    "unread": profile(process=None, traced=300 * MIB, stacks=LEAK[:1]),
}


def test_profiles_are_worded_as_reviewed(golden: Callable[[str, str], None]) -> None:
    """Each answer, with requests and without."""
    counted = [(one, conclude(one, COUNTS)) for one in PROFILES.values()]
    alone = [(one, conclude(one)) for one in PROFILES.values()]
    shown = [render_profile(*each) for each in (*counted, *alone[:1])]
    loads = [render_load(each[0][1].load) for each in (counted, alone)]
    golden("terminal/profiles.txt", piped(Group(*shown, *loads), width=100))


@pytest.mark.parametrize("name", PROFILES)
def test_document_follows_its_schema(name: str) -> None:
    """Every figure is there, unknown ones as null."""
    found = conclude(PROFILES[name], COUNTS)
    document = profile_document([(PROFILES[name], found)], ["worker 7: no answer"], found.load)
    jsonschema.validate(document, SCHEMA)
    assert (found.answer, 1) == (document["processes"][0]["answer"], len(document["problems"]))


def test_names_of_the_server_do_no_harm() -> None:
    """Neither a file's name, nor a function's, nor the title acts on a terminal."""
    frames = (Frame(file=HOSTILE, line=1, function=HOSTILE),)
    plain = profile(process=40 * MIB, traced=40 * MIB, stacks=(StackGrowth(frames=frames, bytes=40 * MIB, blocks=1),))
    hostile = MemoryProfile(**{name: getattr(plain, name) for name in plain.__slots__} | {"title": HOSTILE})
    assert set() == harmful(piped(render_profile(hostile, conclude(hostile))))
