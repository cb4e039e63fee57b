"""Profiles as text and as a document."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from rich.console import Group

import kvdiag.outputs.documents
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.growth.profile_conclusion import conclude
from kvdiag.feeds.recording.trace import TraceWriter, read_trace
from kvdiag.model import Facts, Frame, MemoryProfile, ProfiledLoad, Sample, StackGrowth
from kvdiag.outputs.documents.diagnosis_document import document
from kvdiag.outputs.documents.profile_document import profile_document, profile_entry
from kvdiag.outputs.html.report_page import Making
from kvdiag.outputs.html.report_page import render as render_report
from kvdiag.outputs.terminal.profile_text import render_profiles
from kvdiag.outputs.terminal.text import render
from tests.builders.allocation_profiles import profile, stack
from tests.builders.values import MIB
from tests.unit.outputs.texts import HOSTILE, harmful, piped

FOLDER = Path(kvdiag.outputs.documents.__path__[0])
SCHEMA, PARTS = (json.loads((FOLDER / name).read_text()) for name in ("profile.schema.json", "diagnosis.schema.json"))
VALIDATOR = Draft202012Validator(
    SCHEMA, registry=Registry().with_resource("diagnosis.schema.json", Resource.from_contents(PARTS))
)
LOAD = ProfiledLoad(requests=225.0, before_per_second=10.0, during_per_second=5.0, after_per_second=10.0)
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
    counted = [conclude(replace(one, load=LOAD)) for one in PROFILES.values()]
    golden("terminal/profiles.txt", piped(Group(*map(render_profiles, (counted, [conclude(PROFILES["named"])])))))


@pytest.mark.parametrize("name", PROFILES)
def test_document_follows_its_schema(name: str) -> None:
    """Every figure is there, unknown ones as null."""
    found = conclude(PROFILES[name])
    document = profile_document([found], ["worker 7: no answer"])
    VALIDATOR.validate(document)
    assert (found.answer, 1) == (document["processes"][0]["answer"], len(document["problems"]))


def test_diagnosis_has_the_profiles_of_its_timeline(tmp_path: Path) -> None:
    """Also that of a recording: the same entry in the document, and the line of code in text and in the report."""
    sample = Sample(at_seconds=9.0, profiles=(PROFILES["named"],))
    with TraceWriter(tmp_path / "trace.jsonl", Facts()) as trace:
        trace.add(sample)
    timeline, facts = read_trace(tmp_path / "trace.jsonl")
    diagnosis = diagnose(timeline, facts)
    assert (conclude(PROFILES["named"]),) == diagnosis.profiles
    assert [profile_entry(diagnosis.profiles[0])] == document(diagnosis)["profiles"]
    page = render_report(diagnosis, timeline, Making(version="1", command="kvdiag run", made_seconds=0.0))
    assert [True, True] == ["/opt/engine/file_12.py:12" in shown for shown in (piped(render(diagnosis)), page)]


def test_names_of_the_server_do_no_harm() -> None:
    """Neither a file's name, nor a function's, nor the title acts on a terminal."""
    frames = (Frame(file=HOSTILE, line=1, function=HOSTILE),)
    plain = profile(process=40 * MIB, traced=40 * MIB, stacks=(StackGrowth(frames=frames, bytes=40 * MIB, blocks=1),))
    hostile = MemoryProfile(**{name: getattr(plain, name) for name in plain.__slots__} | {"title": HOSTILE})
    assert set() == harmful(piped(render_profiles([conclude(hostile)])))
