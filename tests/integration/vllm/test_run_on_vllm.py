"""`kvdiag run` against vLLM 0.32 itself: its verdicts, its numbers, and what it does when it is disturbed."""

import gzip
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kvdiag.sources.agents.allocator_files import TorchAllocatorSource
from tests.integration.vllm import gauges
from tests.integration.vllm.cli import Result, finished, kvdiag, started
from tests.integration.vllm.conftest import API_KEY, LEAKED_BLOCKS_PER_REQUEST, SubjectRun
from tests.integration.vllm.engine import Engine
from tests.integration.vllm.meddling import Meddling, published
from tests.integration.vllm.side_by_side import completion
from tests.integration.vllm.traffic import other_traffic

pytestmark = pytest.mark.real_vllm

REQUESTS_OF_STEP = {"single_request": 1, "concurrent": 10, "long_context": 1}


def assert_exact(result: Result, block_tokens: int) -> None:
    """Every loading step agrees with ceil(tokens / block) of each of its requests, to within one block a request."""
    for step_id, requests in REQUESTS_OF_STEP.items():
        step = result.step(step_id)
        assert step["status"] == "ok", step
        measured, expected = step["measured"], step["expected"]
        fewest = measured["tokens"] / block_tokens
        assert fewest <= expected["blocks"] < fewest + requests, step
        assert abs(measured["blocks"] - expected["blocks"]) <= requests, step


def assert_one_line(result: Result, *words: str) -> None:
    """It could not run, and says why in one line on stderr that holds `words`."""
    lines = result.stderr.splitlines()
    assert result.code == 3, result
    assert result.stdout == ""
    assert len(lines) == 1, result.stderr
    assert not [word for word in words if word not in lines[0]], lines


def test_healthy_server_is_ok_and_its_numbers_are_exact(server: Engine) -> None:
    """A healthy server is called ok, and every step's blocks are what the tokens need, to the block."""
    block_tokens = gauges.block_tokens(server.url)
    result = kvdiag("run", "--url", server.url, "--output", "json")
    assert (result.code, result.document["worst"]) == (0, "ok"), result.not_ok
    assert_exact(result, block_tokens)


def test_the_doctor_sees_all_of_a_server(server: Engine) -> None:
    """On a real server without a GPU every engine check of the doctor passes; the GPU's checks fail."""
    result = kvdiag("doctor", "--url", server.url, "--output", "json")
    outcomes = {one["id"]: one["outcome"] for one in result.document["checks"]}
    assert {"pass"} == {outcome for check, outcome in outcomes.items() if check.startswith("engine.")}, outcomes
    assert (2, "fail") == (result.code, outcomes["gpu.driver"])


def assert_leak(result: Result, held_blocks: int) -> None:
    """The blocks that the engine still holds are a fault, with their exact number as evidence."""
    finding = result.finding("leak.kv_blocks")
    in_blocks = [one["value"] for one in finding["evidence"] if one["unit"] == "blocks"]
    assert (result.code, finding["status"]) == (2, "fault"), result.not_ok
    assert held_blocks >= 10 * LEAKED_BLOCKS_PER_REQUEST
    assert held_blocks in in_blocks
    assert result.step("single_request")["status"] == "fault"
    assert result.step("concurrent")["status"] == "ok"


def test_blocks_that_stay_held_are_a_leak(meddling: Meddling) -> None:
    """An engine that leaks two blocks per request is a fault; the same engine without the leak is not."""
    url = meddling.server.url
    with meddling.leaking(LEAKED_BLOCKS_PER_REQUEST):
        result = kvdiag("run", "--url", url, "--output", "json")
        held_blocks = gauges.held_blocks(url)
    assert_leak(result, held_blocks)
    completion(meddling.server)
    gauges.wait_until(url, gauges.idle)


@pytest.mark.parametrize("subject_run", ["leak"], indirect=True)
def test_a_leak_of_small_blocks_without_prefix_caching_is_found_too(subject_run: SubjectRun) -> None:
    """Nor does it depend on the pool's settings: the same leak in blocks of 32 tokens."""
    assert subject_run.block_tokens == 32
    assert_leak(subject_run.result, subject_run.held_blocks_after)


@pytest.mark.parametrize("subject_run", ["fp8", "mla"], indirect=True)
def test_other_ways_to_store_keys_and_values_are_exact_too(subject_run: SubjectRun) -> None:
    """Latent attention, and an fp8 cache in other blocks without prefix caching, are judged as exactly."""
    run = subject_run
    assert (run.result.code, run.result.document["worst"]) == (0, "ok"), run.result.not_ok
    assert run.held_blocks_after == 0
    assert_exact(run.result, run.block_tokens)


@pytest.mark.parametrize("subject_run", ["sliding_window"], indirect=True)
def test_sliding_window_follows_its_own_curve(subject_run: SubjectRun) -> None:
    """A model whose every layer slides is healthy although 16K tokens hold hardly more blocks than 1K."""
    window_tokens = 1024
    run = subject_run
    long_context = run.result.step("long_context")
    touched = window_tokens // run.block_tokens + 1
    assert (run.result.code, run.result.document["worst"]) == (0, "ok"), run.result.not_ok
    assert [run.result.step(step)["status"] for step in REQUESTS_OF_STEP] == ["ok", "ok", "ok"]
    assert touched - 1 <= long_context["measured"]["blocks"] <= touched


@pytest.mark.parametrize("subject_run", ["hybrid"], indirect=True)
def test_several_groups_of_layers_follow_the_models_own_curve(subject_run: SubjectRun) -> None:
    """Where sliding and full layers share the pool, blocks are what the model's config makes of the tokens."""
    run = subject_run
    steps = [run.result.step(step) for step in REQUESTS_OF_STEP]
    assert (run.result.code, run.result.document["worst"]) == (0, "ok"), run.result.not_ok
    assert [step["status"] for step in steps] == ["ok", "ok", "ok"]
    for step, requests in zip(steps, REQUESTS_OF_STEP.values(), strict=True):
        assert abs(step["measured"]["blocks"] - step["expected"]["blocks"]) <= requests, step
    # A straight line would be one group's blocks times the number of groups.
    long_context = steps[-1]["measured"]
    assert long_context["blocks"] < 2 * long_context["tokens"] / run.block_tokens


@pytest.mark.parametrize("subject_run", ["data_parallel"], indirect=True)
def test_both_engines_of_a_data_parallel_server_are_counted(subject_run: SubjectRun) -> None:
    """Two engines behind one address are one server with two pools, and the blocks of both are added up exactly."""
    result = subject_run.result
    assert (result.code, result.document["worst"]) == (0, "ok"), result.not_ok
    assert [pool["engine"] for pool in result.document["subject"]["pools"]] == ["0", "1"]
    assert subject_run.held_blocks_after == 0
    assert_exact(result, subject_run.block_tokens)


@pytest.mark.parametrize(
    ("key", "words"), [(None, "KVDIAG_API_KEY"), ("wrong", "rejected the API key")], ids=["missing", "wrong"]
)
def test_missing_or_wrong_key_is_one_line(guarded_server: Engine, key: str | None, words: str) -> None:
    """A server that wants a key, or another one, ends the run with one line that says which."""
    given = [] if key is None else ["--api-key", key]
    result = kvdiag("run", "--url", guarded_server.url, *given)
    assert_one_line(result, words)


def test_small_context_scales_the_steps_and_says_so(guarded_server: Engine) -> None:
    """With its key, a server that admits 2,048 tokens is healthy, and the steps say what they were scaled down to."""
    env = {"KVDIAG_API_KEY": API_KEY}
    result = kvdiag("run", "--url", guarded_server.url, "--output", "json", env=env)
    assert (result.code, result.document["worst"]) == (0, "ok"), result.not_ok
    assert_exact(result, block_tokens=128)
    for step in ("concurrent", "long_context"):
        assert "2,048" in json.dumps(result.step(step)), result.step(step)


def test_other_traffic_is_refused(server: Engine) -> None:
    """With another client's traffic the run does not start: its requests would be measured as the run's own."""
    with other_traffic(server):
        result = kvdiag("run", "--url", server.url, "--output", "json")
    assert_one_line(result, "traffic", "--force")


@pytest.mark.long
def test_forced_run_says_what_it_cannot_tell(server: Engine) -> None:
    """A forced run next to other traffic finds no fault, and its unknown steps name the traffic as the reason."""
    with other_traffic(server):
        result = kvdiag("run", "--url", server.url, "--output", "json", "--force")
    unknown = [step for step in result.document["steps"] if step["status"] == "unknown"]
    assert (result.code, result.document["worst"]) == (3, "unknown"), result.not_ok
    assert [step["id"] for step in unknown if "traffic" in step["summary"]], result.not_ok
    assert "fault" not in {one["status"] for one in (*result.document["steps"], *result.document["findings"])}


@pytest.mark.kills_the_server
def test_killed_server_is_unknown_and_leaves_stale_files(workers: Meddling) -> None:
    """A server that dies under the run leaves a document that says unknown, and publications of ended processes."""
    server, folder = workers.server, workers.published
    pids = {pid for pid in published(folder) if pid in server.pids()}
    with started("run", "--url", server.url, "--output", "json") as run:
        gauges.wait_until(server.url, gauges.loaded)
        server.kill()
        result = finished(run)
    assert (result.code, result.document["worst"]) == (3, "unknown"), result.not_ok
    assert "Traceback" not in result.stderr

    assert len(workers.processes) == len(pids)
    assert pids <= set(published(folder))
    allocators, gaps, _ = TorchAllocatorSource(folder).read()
    assert allocators is None
    assert pids <= {pid for pid in pids for gap in gaps if f" {pid} exited" in gap.reason}


@pytest.mark.long
def test_interrupted_run_cancels_its_requests_and_keeps_what_it_saw(server: Engine, tmp_path: Path) -> None:
    """Ctrl-C in the middle of a step ends its requests, closes the trace and exits with 3."""
    trace = tmp_path / "partial.jsonl.gz"
    with started("run", "--url", server.url, "--record", str(trace)) as run:
        gauges.wait_until(server.url, gauges.loaded)

        run.send_signal(signal.SIGINT)
        result = finished(run)

    gauges.wait_until(server.url, gauges.idle)
    assert result.code == 3, result.stdout
    assert "interrupted" in result.stderr
    assert "Traceback" not in result.stderr
    assert lines_of(trace)[0]["kvdiag_trace"] == 1
    assert len(lines_of(trace)) > 10
    assert "Traceback" not in kvdiag("diagnose", str(trace)).stderr


def lines_of(trace: Path) -> list[dict[str, Any]]:
    """Every line of a closed trace; a torn gzip member or line raises."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
