"""What a failed allocation says of itself: every wording is read, on broken lines and in logs, and nothing else is."""

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.oom.log import read_failures
from kvdiag.oom.message import ANCHORS, Kind, Shortage, parse_shortage
from tests.unit.oom.wordings import ASYNC, FORMS, GIB, NEW, gib


def test_every_kind_has_a_wording() -> None:
    """And every wording is of a kind."""
    assert set(get_args(Kind)) == {kind for kind, _ in ANCHORS}


def told(text: str) -> dict[str, Any]:
    """The figures of the first failure of a text, its kind among them."""
    found = read_failures(text)
    assert found is not None, text
    values = {name: getattr(found.shortage, name) for name in Shortage.__slots__ if name != "message"}
    return {name: value for name, value in values.items() if value not in (None, ())}


@pytest.mark.parametrize(("text", "expected"), FORMS)
def test_every_form_is_read(text: str, expected: dict[str, Any]) -> None:
    """Each wording gives its kind and every figure it has, and no figure that it has not."""
    assert expected == json.loads(json.dumps(told(text)))


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(
    "prefix", ["", "(Worker_TP0 pid=7) ERROR 10-25 13:12:42 [multiproc_executor.py:671] ", "[rank0]: "]
)
def test_wrapped_lines_are_one_message(width: int, prefix: str) -> None:
    """A terminal or a logger that breaks lines, in words and in numbers, changes nothing."""
    assert told(NEW) == told("\n".join([prefix + NEW[at : at + width] for at in range(0, len(NEW), width)]))


def test_json_logs_and_representations_are_read() -> None:
    """Line ends that a logger has escaped, and quotes round a message, are no part of it."""
    assert told(ASYNC) == told('{"level":"error","message":"' + ASYNC.replace("\n", "\\n") + '"}')
    assert told(NEW) == told(f"ERROR 10-11 12:27:29 engine.py:157] OutOfMemoryError('{NEW}')")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "INFO If out-of-memory error occurs during cudagraph capture, consider decreasing `gpu_memory_utilization`.",
        "If you are running out of memory, consider decreasing",
        "Free memory on device (78.6/79.19 GiB) on startup. Desired GPU memory utilization is (0.92, 72.85 GiB).",
        "INFO Received request cmpl-1: prompt: 'CUDA out of memory. Tried to allocate 2.00 GiB', params:",
        '{"messages": [{"role": "user", "content": "what is torch.OutOfMemoryError: CUDA out of memory?"}]}',
        "process 137 started, code 1370, exit code 1",
    ],
)
def test_hints_and_users_words_are_no_failure(text: str) -> None:
    """What an engine advises beforehand, prints when all is well, or quotes from a request, is no failure."""
    assert read_failures(text) is None


def test_impossible_figures_are_left_out() -> None:
    """More free, or held, than the device has is a damaged message."""
    actual = parse_shortage("torch", NEW.replace("79.11 GiB", "0.01 GiB").replace("786.00 MiB", "9999999999 PiB"))
    assert (None, None, None, None) == (
        actual.asked_bytes,
        actual.free_bytes,
        actual.allocated_bytes,
        actual.process_bytes,
    )


@pytest.mark.parametrize(
    ("parts", "first", "second"),
    [
        (("30.00 GiB is allocated by PyTorch", "2.00 GiB is reserved by PyTorch but unallocated"), 32, 31),
        (("30.00 GiB is allocated by PyTorch",), 30, 29),
        (("2.00 GiB is reserved by PyTorch but unallocated",), 2, 1),
    ],
    ids=["both parts", "allocated alone", "unallocated alone"],
)
def test_the_own_process_is_the_one_that_can_hold_what_torch_does(
    parts: tuple[str, ...], first: int, second: int
) -> None:
    """The listed bytes are at least torch's reserved bytes; a process with a GiB less is a foreign one."""
    # Two processes, of which the first has just so much
    listed = f"Process 1 has {first}.00 GiB memory in use. Process 2 has {second}.00 GiB memory in use."
    text = f"CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79.00 GiB. {listed} "
    actual = told(f"{text}Of the allocated memory {', and '.join(parts)}.")
    assert (first * GIB, ((2, second * GIB),)) == (actual["process_bytes"], actual["others"])


@pytest.mark.parametrize("parts", ["31.00 GiB is allocated by PyTorch", "29.00 GiB is allocated by PyTorch"])
def test_own_process_is_left_open_where_none_or_two_can_be_it(parts: str) -> None:
    """Then all that are listed are others, as far as is known."""
    listed = "Process 1 has 30.00 GiB memory in use. Process 2 has 30.50 GiB memory in use."
    text = f"CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79.00 GiB. {listed} {parts}"
    assert ((1, 30 * GIB), (2, gib(30.5))) == told(text)["others"]
    assert "process_bytes" not in told(text)


def test_own_process_is_left_open_where_torch_s_bytes_are_missing() -> None:
    """Of a message that ends after the list, a small process is not torch's own for its size."""
    listed = "Process 1 has 70.00 GiB memory in use. Process 2 has 1.00 GiB memory in use."
    found = told(f"CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79.00 GiB. {listed}")
    assert ("process_bytes" in found, len(found["others"])) == (False, 2)


WORDS = st.sampled_from(
    [
        *(NEW[at : at + 17] for at in range(0, 300, 11)),
        "Traceback (most recent call last):\n",
        "(Worker_TP0 pid=1) ERROR ",
        "Killed\n",
        "NVML_SUCCESS == r INTERNAL ASSERT",
        "1,000,000,000,000,000,000,000.0 GiB",
        "Dumping scheduler output for model execution: num_scheduled_tokens={",
        "Process 1 has 1 GiB memory in use. ",
        "\r\n\x1b[31m\x00\\n",
        "9" * 400,
    ]
)


@settings(deadline=None)
@given(st.lists(st.one_of(WORDS, st.text(max_size=40)), max_size=40).map("".join))
def test_garbage_is_read_or_not_and_never_fails(text: str) -> None:
    """Any log text is read without an error, and every figure is a possible one."""
    found = read_failures(text)
    for name in () if found is None else Shortage.__slots__:
        value = getattr(found.shortage, name) if found is not None else None
        assert value is None or not isinstance(value, int) or 0 <= value <= 2**60
    assert all(parse_shortage(kind, text).kind == kind for kind in {kind for kind, _ in ANCHORS})
