"""What a server did when memory ran out: by a function of each engine's, a line of each log, and how near they are."""

from typing import get_args

import pytest

from kvdiag.oom.account import Phase
from kvdiag.oom.message import Kind
from kvdiag.oom.phase import IN_WORDS, SERVING, phase_of

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
NEXT_LINE = "\n"
HEAD = "Traceback (most recent call last)\n"


def frame(function: str) -> str:
    """A line of a traceback."""
    return f'  File "/x/y.py", line 7, in {function}\n'


def told(
    before: str = "", after: str = "", *, kind: Kind = "torch", log: tuple[str, ...] = ()
) -> tuple[Phase | None, str | None]:
    """The phase of a message with this before it and this after it, after these lines of a log."""
    return phase_of(f"{before}{OOM}{after}", kind, len(before), log)


def test_every_phase_has_its_words() -> None:
    """Those in which requests are served are named."""
    every = set(get_args(Phase))
    assert every == set(IN_WORDS)
    assert {"prefill", "decode", "request", "sampler", "logprobs", "encoder", "kv_growth", "scratch"} == SERVING
    assert every - SERVING == {"load", "profile", "compute", "kv_pool", "graph_capture", "warmup", "startup", "wake"}


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        ("capture_model", "graph_capture"),
        ("wake_up", "wake"),
        ("load_weights", "load"),
        ("determine_available_memory", "profile"),
        ("initialize_kv_cache_tensors", "kv_pool"),
        ("_dummy_sampler_run", "warmup"),
        ("_get_prompt_logprobs_dict", "logprobs"),
        ("_execute_mm_encoder", "encoder"),
        ("compute_logits", "sampler"),
        ("DynamicCache", "kv_growth"),
        ("forward_extend", "prefill"),
        ("forward_decode", "decode"),
        ("execute_model", "request"),
    ],
)
def test_functions_of_the_engines_tell_their_phase(function: str, phase: Phase) -> None:
    """Functions of vLLM, SGLang and transformers set the phase, other frames and partial names do not."""
    assert (phase, "traceback") == told(f"{HEAD}{frame('forward')}{frame(function)}{frame('linear')}")
    assert (None, None) == told(f"{HEAD}{frame(f'not{function}s')}")


def test_outer_frames_come_before_inner_ones() -> None:
    """A capture goes through the same model code as a request, a profile run too."""
    inner = frame("execute_model")
    assert ("graph_capture", "traceback") == told(f"{HEAD}{inner}{frame('capture_graph')}")
    assert ("profile", "traceback") == told(f"{HEAD}{frame('profile_run')}{inner}")


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("vLLM API server version 0.32.0", "startup"),
        ("Starting to load model m", "load"),
        ("Model loading took 15.1 GiB", "profile"),
        ("Available KV cache memory: 3.2 GiB", "kv_pool"),
        ("GPU KV cache size: 62,000 tokens", "warmup"),
        ("Capturing CUDA graphs: 10%", "graph_capture"),
        ("Application startup complete.", "request"),
    ],
)
def test_log_tells_how_far_a_server_had_come(line: str, phase: Phase) -> None:
    """The last line that names a phase counts."""
    assert (phase, "progress") == told(log=("Available KV cache memory: 1 GiB", line, "INFO something else"))
    assert (None, None) == told(log=("INFO something else",))


@pytest.mark.parametrize(
    ("said", "phase"),
    [
        ("Failed to load model", "load"),
        ("while capturing", "graph_capture"),
        ("warming up sampler", "warmup"),
        ("during memory profiling", "profile"),
        ("in function alloc at ", "scratch"),
        (f"warming up the model{NEXT_LINE}CUDA error: out of memory", "warmup"),
    ],
)
def test_what_stands_beside_a_message_tells_its_phase(said: str, phase: Phase) -> None:
    """Within 400 characters on either side, before the log's progress and before a frame that any request has."""
    log = ("Application startup complete.",)
    assert (phase, "message") == told(f"{said} ", log=log)
    assert (phase, "message") == told(said + " " * (400 - len(said)), log=log)
    assert ("request", "progress") == told(said + " " * (401 - len(said)), log=log)
    tail = " " * (400 - len(OOM) - len(said)) + said
    assert (phase, "message") == told(after=tail, log=log)
    assert ("request", "progress") == told(after=f" {tail}", log=log)
    assert (phase, "message") == told(f"{HEAD}{frame('execute_model')}{said} ", log=log)


@pytest.mark.parametrize(("said", "phase"), [("timed out", "wake"), ('HTTP/1.1" 200 OK', "request")])
def test_a_server_that_has_woken_up_serves(said: str, phase: Phase) -> None:
    """The access log of a wake-up that succeeded is no sign of one that is under way."""
    found = told(f'"POST /resume_memory_occupation {said} ', log=("Application startup complete.",))
    assert phase == found[0]


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("warmup", "warmup"),
        ("profiling", "profile"),
        ("blocks", "kv_pool"),
        ("context", "kv_pool"),
        ("budget", "startup"),
        ("capture", "graph_capture"),
    ],
)
def test_refusals_tell_their_phase_themselves(kind: Kind, phase: Phase) -> None:
    """A refusal sets its phase, with any frames."""
    assert (phase, "message") == told(f"{HEAD}{frame('forward_decode')}", kind=kind)


def test_frames_of_a_phase_outweigh_what_is_said_but_for_a_capture() -> None:
    """Frames that show only that the engine served or started have lower priority."""
    assert ("sampler", "traceback") == told(f"Failed to load model {HEAD}{frame('compute_logits')}")
    assert ("graph_capture", "message") == told(f"while capturing {HEAD}{frame('compute_logits')}")
    loading = ("Starting to load model m",)
    assert ("load", "progress") == told(f"{HEAD}{frame('run_engine_core')}", log=loading)
    assert ("startup", "traceback") == told(f"{HEAD}{frame('run_engine_core')}")
    assert ("startup", "traceback") == told(f"{HEAD}{frame('run_engine_core')}", log=("Uvicorn running",))
    assert ("request", "traceback") == told(f"{HEAD}{frame('execute_model')}", log=loading)


def test_traceback_is_the_one_that_ends_in_the_message_or_follows_it() -> None:
    """The last before it, else the first after it, within what a message may be long."""
    older = f"{HEAD}{frame('load_weights')}"
    assert ("decode", "traceback") == told(f"{older}{HEAD}{frame('forward_decode')}")
    assert ("load", "traceback") == told(after=f"\n{older}")
    assert ("decode", "traceback") == told(f"{HEAD}{frame('forward_decode')}", f"\n{older}")
    # The message itself takes some of the 3,000 characters in which a traceback has to begin.
    room = 3000 - len(OOM) - len(HEAD.rstrip())
    assert ("load", "traceback") == told(after=" " * room + older)
    assert (None, None) == told(after=" " * (room + 1) + older)


def test_frames_without_their_head_count_where_they_are_near() -> None:
    """Of a traceback that was cut off the last 10,000 characters before the message are looked at."""
    cut = frame("load_weights")
    assert ("load", "traceback") == told(cut + " " * (10_000 - len(cut)))
    assert (None, None) == told(cut + " " * 10_000)
    assert (None, None) == told("load_weights " * 3)
    whole = f"{HEAD}{cut}"
    assert ("load", "traceback") == told(whole + " " * (40_000 - len(whole)))
    assert (None, None) == told(whole + " " * 40_000)
