"""kvdiag on a real Dynamo 1.6.1: its front end, and two workers whose engines are simulated by Dynamo itself."""

import json
import sys
from typing import Any

import pytest

from tests.fixtures.require import require
from tests.integration.dynamo import dynamo_env
from tests.integration.vllm.cli import Result

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("dynamo")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """The outcome of every command of one session."""
    folder = tmp_path_factory.mktemp("dynamo")
    session = (sys.executable, "-m", "tests.integration.dynamo.dynamo_session")
    try:
        python = str(dynamo_env.dynamo_env() / "bin" / "python")
        printed = dynamo_env.run("unshare", "--map-root-user", "--net", *session, python, str(folder))
    except dynamo_env.DynamoEnvError as error:
        require(False, f"Dynamo ({error})")
        raise
    return {name: Result(**outcome) for name, outcome in json.loads(printed).items()}


def checks(result: Result) -> dict[str, dict[str, Any]]:
    """The checks of `doctor` by their ids."""
    return {check["id"]: check for check in result.document["checks"]}


def test_doctor_knows_the_front_end(outcomes: dict[str, Result]) -> None:
    """With its version, and how many workers it has."""
    found = checks(outcomes["front"])["engine.version"]["found"]
    assert all(part in found for part in ("dynamo 1.6.1", "2 workers", "127.0.0.1"))


def test_doctor_knows_a_worker_before_and_after_its_first_request(outcomes: dict[str, Result]) -> None:
    """The engine inside shows with the first request."""
    before, after = (checks(outcomes[name]) for name in ("before", "worker"))
    assert before["engine.version"]["found"].startswith("dynamo, ")
    assert "warn" == before["engine.series"]["outcome"]
    assert after["engine.version"]["found"].startswith("vllm, ")


def test_doctor_finds_the_pool_that_the_front_end_reports(outcomes: dict[str, Result]) -> None:
    """A worker's engine shows no size of its pool here; its card at the front end does."""
    assert "warn" == checks(outcomes["worker"])["engine.series"]["outcome"]
    assert "pass" == checks(outcomes["both"])["engine.series"]["outcome"]


def test_steps_through_the_front_end_are_exact_at_the_worker(outcomes: dict[str, Result]) -> None:
    """All requests go to the worker that is read, though there are two; every block is released, also in a soak."""
    run = outcomes["run"]
    steps = {step["id"]: step for step in run.document["steps"]}
    # On a busy machine host memory may not settle in these minutes: the soak is then undecided.
    soak = steps.pop("soak")
    assert (soak["status"], run.finding("leak.host")["status"]) in (("ok", "ok"), ("unknown", "unknown")), run.not_ok
    assert {"ok"} == {step["status"] for step in steps.values()}, run.not_ok
    concurrent = steps["concurrent"]
    # A busy client may have yet to read the token with which a request began its newest block.
    unread = concurrent["measured"]["blocks"] - concurrent["expected"]["blocks"]
    assert 0 <= unread <= concurrent["expected"]["requests"], concurrent
    assert "ok" == run.finding("leak.kv_blocks")["status"]
    assert "ok" == run.finding("capacity.concurrency")["status"]
