import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from rich.console import Console

import kvdiag.outputs.documents
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.fleet import compare
from kvdiag.diagnosis.limits import DEFAULT_LIMITS
from kvdiag.model import Facts, Gap, Timeline
from kvdiag.outputs.documents import fleet_document
from kvdiag.outputs.fleet_results import FleetDiagnosis, Judged, Source
from kvdiag.outputs.terminal import fleet_text
from tests.builders.runs import judged
from tests.builders.values import engine, holding, pool, seen
from tests.builders.worlds import WORLDS

OUTPUTS = Path(kvdiag.outputs.documents.__path__[0])
SCHEMAS = {name: json.loads((OUTPUTS / name).read_text()) for name in ("diagnosis.schema.json", "fleet.schema.json")}
SCHEMA = SCHEMAS["fleet.schema.json"]
VALIDATOR = Draft202012Validator(
    SCHEMA, registry=Registry().with_resources((name, Resource.from_contents(one)) for name, one in SCHEMAS.items())
)

SOURCE = Source(
    url="http://prometheus:9090", match='namespace="x"', start_seconds=1.0, end_seconds=2.0, join_seconds=90.0
)
KNOWN = Facts(url="x/vllm-0", pools=(pool(),))
LOST = Gap(source="prometheus", kind="failed", reason="00:00 to 01:00 could not be read: disk gone")
EMPTY = Gap(source="prometheus", kind="absent", reason="no series has a sample in this window; widen --window")

REPLICAS = tuple(
    sorted(
        (
            Judged(
                key=f"pod /x/{name}", subject=(("namespace", "x"), ("pod", name)), diagnosis=diagnose(timeline, facts)
            )
            for name, timeline, facts in (
                ("fine", seen(*[holding(0)] * 3), KNOWN),
                ("leaking", seen(*[holding(5)] * 3), KNOWN),
                ("busy", seen(*[engine(running=1)] * 3), KNOWN),
                ("lost", seen(*[holding(0)] * 3), replace(KNOWN, gaps=(LOST,))),
                ("gone", Timeline(samples=()), replace(KNOWN, gaps=(EMPTY,))),
            )
        ),
        key=Judged.order,
    )
)
FLEET = FleetDiagnosis(
    source=SOURCE,
    judged=REPLICAS,
    fleet=compare((), DEFAULT_LIMITS),
    gaps=(Gap(source="nvml", kind="absent", reason="GPU of two"),),
)


def text(result: FleetDiagnosis) -> list[str]:
    """The lines at 80 columns."""
    console = Console(width=80, highlight=False, color_system=None, file=io.StringIO())
    with console.capture() as capture:
        console.print(fleet_text.render(result))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_the_schema_is_a_schema() -> None:
    """The committed file is itself valid, and every object in it but a subject's labels is closed."""
    assert [] == list(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(SCHEMA))
    for name, one in ((name, one) for name, one in SCHEMA["$defs"].items() if one.get("type") == "object"):
        assert one["additionalProperties"] is False, name
        assert set(one["required"]) == set(one["properties"]), name


@pytest.mark.parametrize("name", WORLDS)
def test_a_replica_of_any_world_meets_the_schema(name: str) -> None:
    """With any samples, the document meets its schema after a JSON round trip."""
    one = Judged(key=name, subject=(("pod", name),), diagnosis=judged(WORLDS[name]))
    written = json.dumps(fleet_document.document(replace(FLEET, judged=(one,))), allow_nan=False)
    assert [] == [error.message for error in VALIDATOR.iter_errors(json.loads(written))]


def test_the_document_holds_every_replica() -> None:
    """The worst first, with their labels; how many there are of each status."""
    document: dict[str, Any] = fleet_document.document(FLEET)
    assert "fault" == document["worst"]
    assert ["leaking", "busy", "gone", "lost", "fine"] == [one["subject"]["pod"] for one in document["replicas"]]
    assert {"fault": 1, "suspect": 0, "unknown": 3, "ok": 1} == document["fleet"]["by_worst"]
    assert [{"source": "nvml", "kind": "absent", "reason": "GPU of two"}] == document["gaps"]
    assert 90.0 == document["source"]["join_tolerance_seconds"]


def test_the_table_says_why(golden: Callable[[str, str], None]) -> None:
    """A line for each replica: what was found, or why there is no verdict; within 80 columns."""
    lines = text(FLEET)
    assert max(map(len, lines)) <= 80
    golden("terminal/fleet.txt", "\n".join(lines) + "\n")


def test_nobody_is_unknown() -> None:
    """Without replicas there is no ground for ok."""
    assert "unknown" == replace(FLEET, judged=()).worst


def test_a_long_table_is_cut() -> None:
    """The worst ones are shown, and the others counted."""
    many = tuple(replace(REPLICAS[-1], key=f"pod /x/{number}") for number in range(50))
    assert any(line.strip().startswith("and 10 more") for line in text(replace(FLEET, judged=many)))


def test_names_from_outside_do_no_harm() -> None:
    """A label may hold what moves a cursor; the table shows it as what it is."""
    nasty = replace(REPLICAS[-1], subject=(("pod", "\x1b[2Jgone\n[red]"),))
    assert "\x1b" not in "".join(text(replace(FLEET, judged=(nasty,))))


def test_what_is_missing_of_a_replica_stands_next_to_its_ok() -> None:
    """Its series have ended, for instance: `ok` is not of a server that works."""
    one = next(one for one in REPLICAS if one.diagnosis.worst == "ok")
    ended = Gap(source="prometheus", kind="absent", reason="its series end at 12:00")
    noted = replace(one, diagnosis=replace(one.diagnosis, gaps=(*one.diagnosis.gaps, ended)))
    assert f"{one.summary}; {ended.reason}" == noted.summary
