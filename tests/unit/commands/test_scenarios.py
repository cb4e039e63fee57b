"""Each scenario and its verdict, through the command line, from observation alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import kvdiag.outputs.documents
from tests.unit.commands.bad_input.refusals import call
from tests.unit.commands.conftest import OPTIONS, Run

SCHEMA = Path(kvdiag.outputs.documents.__path__[0]) / "diagnosis.schema.json"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What has to come out: the exit code, the worst status, and the one finding that says why."""

    code: int
    worst: str
    finding: str
    status: str


VERDICTS: Mapping[str, Verdict] = {
    "healthy": Verdict(0, "ok", "leak.kv_blocks", "ok"),
    "kv-leak": Verdict(2, "fault", "leak.kv_blocks", "fault"),
    "device-leak": Verdict(2, "fault", "leak.device_torch", "fault"),
    "fragmentation": Verdict(2, "fault", "fragmentation.allocator", "fault"),
    "foreign-memory": Verdict(2, "fault", "baseline.foreign_memory", "fault"),
    "duplicate-model": Verdict(2, "fault", "baseline.duplicate_model", "fault"),
    "concurrency-thrash": Verdict(2, "fault", "capacity.concurrency", "fault"),
    "long-context-oom": Verdict(2, "fault", "capacity.long_context", "fault"),
    "warmup": Verdict(0, "ok", "benign.warmup", "ok"),
    "salt-ignored": Verdict(2, "fault", "isolation.prefix_cache", "fault"),
    "trtllm-healthy": Verdict(0, "ok", "leak.kv_blocks", "ok"),
    "trtllm-kv-leak": Verdict(2, "fault", "leak.kv_blocks", "fault"),
    "tgi-healthy": Verdict(0, "ok", "leak.kv_blocks", "ok"),
    "tgi-kv-leak": Verdict(2, "fault", "leak.kv_blocks", "fault"),
    "lmdeploy-healthy": Verdict(0, "ok", "leak.kv_blocks", "ok"),
    "lmdeploy-kv-leak": Verdict(2, "fault", "leak.kv_blocks", "fault"),
    "llamacpp-healthy": Verdict(0, "ok", "leak.kv_blocks", "ok"),
    "llamacpp-kv-leak": Verdict(2, "fault", "leak.kv_blocks", "fault"),
}

SLOW = ("lmdeploy-healthy", "lmdeploy-kv-leak")
"""Their figures are renewed every ten seconds: a run takes minutes."""

STORIES = [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in VERDICTS]

ALSO: Mapping[str, tuple[str, ...]] = {"trtllm-kv-leak": ("fragmentation.kv_waste",)}
"""What else a fault looks like: the small requests during a load leak, too, which reads as waste of the load."""


@pytest.mark.parametrize("story", STORIES)
def test_story_is_found_out(story: str, run: Run) -> None:
    """A run of a scenario ends with its expected finding, status and exit code."""
    expected = VERDICTS[story]
    finding = run.result.finding(expected.finding)
    actual = Verdict(run.result.code, run.document["worst"], finding["id"], finding["status"])
    assert expected == actual, run.document["findings"]


@pytest.mark.parametrize("story", STORIES)
def test_nothing_else_is_blamed(story: str, run: Run) -> None:
    """No other verdict is a fault, and a healthy server is not even suspected."""
    blamed = {one["id"]: one["status"] for one in run.document["findings"] if one["status"] in ("suspect", "fault")}
    for also in ALSO.get(story, ()):
        blamed.pop(also, None)
    expected = VERDICTS[story]
    assert ({expected.finding: "fault"} if expected.code else {}) == blamed


@pytest.mark.parametrize("story", STORIES)
def test_document_meets_its_schema(story: str, run: Run) -> None:
    """What is printed is one JSON document of the committed schema."""
    validator = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    assert [] == list(validator.iter_errors(run.document))


@pytest.mark.parametrize("story", STORIES)
def test_progress_names_the_steps(story: str, run: Run) -> None:
    """Each step is announced once on stderr, in order, and stderr holds no other line."""
    lines = run.result.stderr.splitlines()
    count = 1 if story in OPTIONS else 4
    assert [f"step {number} of {count}" for number in range(1, count + 1)] == [line[:11] for line in lines]


@pytest.mark.parametrize("story", STORIES)
def test_trace_gives_the_same_diagnosis(story: str, run: Run) -> None:
    """The recorded trace is judged to the very bytes that the run printed, with the same exit code."""
    again = call("diagnose", str(run.trace), "--output", "json")
    assert (run.result.code, run.result.stdout, "") == (again.code, again.stdout, again.stderr)
