import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

import kvdiag.outputs.documents
from kvdiag.diagnosis import diagnose
from kvdiag.diagnosis.knowledge import KNOWLEDGE
from kvdiag.diagnosis.steps import ISOLATION, SOAK, STEPS
from kvdiag.model import (
    Diagnosis,
    Evidence,
    Facts,
    Finding,
    Gap,
    LedgerLine,
    MeasuredFigures,
    Sample,
    StepFigures,
    StepResult,
    Timeline,
)
from kvdiag.outputs.documents.diagnosis_document import audit_document, document
from tests.builders.runs import judged
from tests.builders.soak_timeline import SOAKS, facts_of, soak
from tests.builders.values import GIB, NO_NVML, device, pool
from tests.builders.worlds import WORLDS, World, facts

SCHEMA = json.loads((Path(kvdiag.outputs.documents.__path__[0]) / "diagnosis.schema.json").read_text(encoding="utf-8"))
VALIDATOR = Draft202012Validator(SCHEMA)

Json = dict[str, Any]


def test_the_schema_is_a_schema() -> None:
    """The committed file is itself valid JSON Schema 2020-12."""
    assert [] == list(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(SCHEMA))


def test_every_object_is_closed() -> None:
    """No object takes a field that the schema does not name, and every field has to be there."""
    objects = {name: one for name, one in SCHEMA["$defs"].items() if one.get("type") == "object"}
    assert {"document", "subject", "step", "step_figures", "measured_figures", "finding", "evidence"} < set(objects)
    for name, one in objects.items():
        assert one["additionalProperties"] is False, name
        assert set(one["required"]) == set(one["properties"]), name


def test_the_schema_knows_every_id() -> None:
    """Verdicts and steps of the code are those of the schema; the vocabulary may be larger than the rules so far."""
    defined = SCHEMA["$defs"]
    assert set(KNOWLEDGE) <= set(defined["finding"]["properties"]["id"]["enum"])
    assert [one.id for one in (*STEPS, SOAK, ISOLATION)] == defined["step"]["properties"]["id"]["enum"]


@pytest.mark.parametrize("name", WORLDS)
def test_the_document_of_every_world_is_valid(name: str) -> None:
    """With any samples, the document meets its schema after a JSON round trip."""
    written = json.dumps(document(judged(WORLDS[name])), allow_nan=False)
    assert [] == list(VALIDATOR.iter_errors(json.loads(written)))


@pytest.mark.parametrize("name", SOAKS)
def test_the_document_of_every_soak_is_valid(name: str) -> None:
    """A soak's step and its findings meet the schema too, with any result."""
    diagnosis = diagnose(soak(SOAKS[name]), facts_of())
    written = json.dumps(document(diagnosis), allow_nan=False)
    assert "soak" == diagnosis.steps[-1].id
    assert [] == list(VALIDATOR.iter_errors(json.loads(written)))


def test_the_document_of_nothing_is_valid() -> None:
    """An empty timeline of an unknown server has a document too."""
    assert [] == list(VALIDATOR.iter_errors(document(diagnose(Timeline(samples=()), Facts()))))


def test_the_whole_document_of_a_diagnosis(golden: Callable[[str, str], None]) -> None:
    """Each field of a diagnosis has its one place in the document."""
    # a diagnosis of one of each
    diagnosis = Diagnosis(
        worst="fault",
        facts=Facts(
            url="http://127.0.0.1:8000",
            engine_name="vllm",
            engine_version="0.32.0",
            model="m",
            max_model_len_tokens=2048,
            pools=(pool(max_concurrency=3.0, capacity_tokens=98_304),),
            server_pids=(7, 8),
            weights_bytes=GIB,
            forced=True,
        ),
        start_seconds=1.5,
        end_seconds=9.5,
        samples=80,
        steps=(
            StepResult(
                id="single_request",
                status="ok",
                summary="all blocks came back",
                expected=StepFigures(blocks=39),
                measured=MeasuredFigures(cycles_judged=7),
                notes=("scaled down",),
            ),
        ),
        findings=(
            Finding(
                id="leak.kv_blocks",
                status="fault",
                summary="84 blocks",
                evidence=(Evidence(name="held", value=84, unit="blocks", source="engine"),),
                likely_cause="a plugin",
                confirm="stop all traffic",
                remedy="restart",
                runbook="alerts/runbooks/leak.kv_blocks.md",
            ),
        ),
        ledger=(
            LedgerLine(
                gpu=0, uuid="GPU-a", component="unaccounted", bytes=-5, provenance="computed", detail="nobody's"
            ),
        ),
        gaps=(Gap(source="nvml", kind="absent", reason="no driver"),),
    )
    # it is written
    VALIDATOR.validate(document(diagnosis))
    golden("documents/diagnosis.json", json.dumps(document(diagnosis), indent=2) + "\n")


def _set(*path: str | int, to: Any) -> Callable[[Json], None]:
    """Put a value at a path of the document."""

    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = to

    return change


def _drop(*path: str | int) -> Callable[[Json], None]:
    """Take the value at a path out of the document."""

    def change(found: Any) -> None:
        for key in path[:-1]:
            found = found[key]
        del found[path[-1]]

    return change


MUTATIONS: dict[str, Callable[[Json], None]] = {
    "another version": _set("schema_version", to=1),
    "a status that does not exist": _set("worst", to="healthy"),
    "no verdict": _drop("worst"),
    "a field of its own": _set("extra", to=1),
    "no gaps": _drop("gaps"),
    "a step that does not exist": _set("steps", 0, "id", to="warmup"),
    "a step without a sentence": _set("steps", 0, "summary", to=""),
    "a step's field of its own": _set("steps", 1, "title", to="x"),
    "six steps": lambda found: found["steps"].extend(found["steps"][:2]),
    "a figure that does not exist": _set("steps", 1, "measured", "gigabytes", to=1),
    "a figure that is text": _set("steps", 1, "measured", "blocks", to="39"),
    "a share of a byte": _set("steps", 1, "measured", "bytes", to=0.5),
    "a verdict that does not exist": _set("findings", 0, "id", to="leak.everything"),
    "a finding's status that does not exist": _set("findings", 0, "status", to="warning"),
    "no remedy": _drop("findings", 0, "remedy"),
    "an empty remedy": _set("findings", 0, "remedy", to=None),
    "a runbook elsewhere": _set("findings", 0, "runbook", to="https://example.org"),
    "evidence without a source": _drop("findings", 0, "evidence", 0, "source"),
    "evidence that is a list": _set("findings", 0, "evidence", 0, "value", to=[1]),
    "a line without bytes": _drop("ledger", 0, "bytes"),
    "a line of unknown origin": _set("ledger", 0, "source", to="guessed"),
    "a line's share of a byte": _set("ledger", 0, "bytes", to=1.5),
    "a GPU by name": _set("ledger", 0, "gpu", to="GPU 0"),
    "a window without an end": _drop("window", "end"),
    "a time as text": _set("window", "start", to="now"),
    "fewer than no samples": _set("window", "samples", to=-1),
    "a pool of no blocks": _set("subject", "pools", 0, "usable_blocks", to=0),
    "a process id as text": _set("subject", "server_pids", to=["7"]),
    "forced or not": _set("subject", "forced", to=None),
    "a gap of another kind": lambda found: found["gaps"].append({"source": "a", "kind": "late", "reason": "b"}),
    "a gap without a reason": lambda found: found["gaps"].append({"source": "a", "kind": "absent"}),
}


@pytest.fixture(scope="module")
def leaking() -> Json:
    """The document of a server that leaks."""
    return document(judged(World(leaked_blocks_per_request=4)))


@pytest.mark.parametrize("what", MUTATIONS)
def test_the_schema_rejects_what_is_not_the_document(what: str, leaking: Json) -> None:
    """One thing changed is enough to be refused."""
    changed = copy.deepcopy(leaking)
    VALIDATOR.validate(changed)
    MUTATIONS[what](changed)
    with pytest.raises(ValidationError):
        VALIDATOR.validate(changed)


def test_text_from_a_server_stays_what_it_is() -> None:
    """Escapes, quotes and line ends in a name come through JSON unchanged."""
    name = 'a"b\n\x1b[31m</script>[bold]\u202e\ud800'
    known = Facts(model=name, pools=(pool(),))
    written = json.dumps(document(diagnose(Timeline(samples=()), known)), allow_nan=False)
    assert written.isascii()
    assert name == json.loads(written)["subject"]["model"]


def test_an_audit_shows_devices_and_lines() -> None:
    """The audit's document has what is there and what is used of each device."""
    sample = Sample(at_seconds=1.0, devices=(device(used_bytes=GIB), device(1, used_bytes=None)))
    line = LedgerLine(gpu=0, uuid="GPU-0", component="unaccounted", bytes=GIB, provenance="computed")
    actual = audit_document(facts(World()), sample, (line,), (NO_NVML,))
    devices = [
        {
            "gpu": 0,
            "uuid": "GPU-0",
            "name": "NVIDIA Test",
            "total_bytes": 24 * GIB,
            "used_bytes": GIB,
            "free_bytes": 23 * GIB,
        },
        {"gpu": 1, "uuid": "GPU-1", "name": "NVIDIA Test", "total_bytes": None, "used_bytes": None, "free_bytes": None},
    ]

    assert devices == actual["devices"]
    assert [NO_NVML.reason] == [gap["reason"] for gap in actual["gaps"]]
    assert {"schema_version", "subject", "devices", "ledger", "block_owners", "gaps"} == set(actual)
