"""Failures of other engines than vLLM in their own words: what is read, whose log it is, and what is concluded."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvdiag.diagnosis.postmortem import postmortem
from kvdiag.feeds.postmortem_inputs import gather
from kvdiag.model import Diagnosis
from kvdiag.oom.log import read_failures
from tests.builders.answers import evidence, finding

FOLDER = Path(__file__).parents[3] / "fixtures" / "failures"
INCIDENTS: list[dict[str, Any]] = json.loads((FOLDER / "engines.json").read_text())
TEXTS: list[dict[str, Any]] = json.loads((FOLDER / "engines_kept_aside.json").read_text())


def judged(text: str, folder: Path) -> Diagnosis:
    """The post-mortem of a log file with this text."""
    log = folder / "server.log"
    log.write_text(text)
    return postmortem(gather([log]))


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: str(incident["id"]))
def test_public_incident_gets_its_verdict(incident: dict[str, Any], tmp_path: Path) -> None:
    """The log's lines give the verdict of the public thread and no other, or its known miss as unknown."""
    actual = judged(incident["text"], tmp_path)
    assert incident["status"] == actual.worst
    called = {one.id: one.status for one in actual.findings if one.status in {"fault", "suspect"}}
    assert called == ({} if "miss" in incident else {incident["verdict"]: incident["status"]})


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: str(incident["id"]))
def test_log_is_never_taken_for_another_engines(incident: dict[str, Any], tmp_path: Path) -> None:
    """A log without an engine's words has no engine; every other log has its own, whose flags the remedy names."""
    name = judged(incident["text"], tmp_path).facts.engine_name
    assert name in {incident["engine"], None}
    assert name is not None or not incident["id"].startswith(("lcpp-", "ollama-", "sgl-"))


def test_misses_have_a_reason() -> None:
    """At most one text in six is one."""
    misses = [incident for incident in INCIDENTS if "miss" in incident]
    assert len(misses) <= len(INCIDENTS) // 6
    assert all(incident["miss"]["why"] for incident in misses)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text["id"]))
def test_text_is_read_and_judged(text: dict[str, Any], tmp_path: Path) -> None:
    """Texts chosen after the wordings had been written: engine, kind, figures, status, and one verdict alone."""
    found = read_failures(text["text"])
    actual = judged(text["text"], tmp_path)
    assert text["kind"] == (None if found is None else found.shortage.kind)
    assert found is None or text["figures"] == {name: getattr(found.shortage, name) for name in text["figures"]}
    assert text["status"] == actual.worst
    assert text["engine"] == actual.facts.engine_name
    called = [one.id for one in actual.findings if one.status in {"fault", "suspect"}]
    assert called == ([text["verdict"]] if text["status"] != "unknown" else [])


@pytest.mark.parametrize("spelling", ["Available", "Avaliable"])
def test_tokens_that_others_left_are_no_longest_context(spelling: str, tmp_path: Path) -> None:
    """SGLang names the pool's free tokens at that moment, in its older versions misspelled."""
    said = next(incident["text"] for incident in INCIDENTS if incident["id"] == "sgl-4602")
    found = finding(judged(said.replace("Avaliable", spelling), tmp_path), "capacity.concurrency")
    assert {"needed_tokens": 148, "tokens_left": 2048}.items() <= evidence(found).items()
    assert "max_fitting_model_len" not in evidence(found)


def of_incident(incident_id: str, folder: Path) -> Diagnosis:
    """The post-mortem of a public incident's log."""
    return judged(next(one["text"] for one in INCIDENTS if one["id"] == incident_id), folder)


def test_processes_on_the_device_do_not_explain_that_the_host_ran_out(tmp_path: Path) -> None:
    """llama.cpp asked the host for its KV pool: `nvidia-smi` shows nothing of that."""
    assert "ok" == finding(of_incident("lcpp-8101", tmp_path), "baseline.foreign_memory").status


def test_tokens_released_twice_are_not_called_lost(tmp_path: Path) -> None:
    """More are free or cached than the pool has."""
    found = finding(of_incident("sgl-6888", tmp_path), "leak.kv_blocks")
    assert ("fault", False) == (found.status, "lost" in found.summary)


def test_warm_up_of_tgi_is_its_trial_prefill(tmp_path: Path) -> None:
    """The pool does not exist yet: a smaller memory fraction would free nothing."""
    found = finding(of_incident("tgi-563", tmp_path), "spike.activation")
    assert ("profile", False) == (evidence(found)["phase"], "--cuda-memory-fraction" in (found.remedy or ""))
