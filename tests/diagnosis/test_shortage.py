from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.diagnosis.failure_log import read_failures
from kvdiag.diagnosis.shortage import ANCHORS, Kind, Shortage, parse_shortage

KIB, MIB, GIB = 2**10, 2**20, 2**30
NEW = (
    "CUDA out of memory. Tried to allocate 786.00 MiB. GPU 0 has a total capacity of 79.11 GiB of which 140.75 MiB is "
    "free. Process 3270336 has 78.96 GiB memory in use. Of the allocated memory 68.83 GiB is allocated by "
    "PyTorch, with "
    "660.00 MiB allocated in private pools (e.g., CUDA Graphs), and 331.08 MiB is reserved by PyTorch but unallocated. "
    "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation.  See documentation for Memory Management"
)
ASYNC = (
    "torch.cuda.OutOfMemoryError: Allocation on device 1 would exceed allowed memory. (out of memory)\n"
    "Currently allocated     : 9.64 GiB\nRequested               : 1.49 MiB\nDevice limit            : 39.39 GiB\n"
    "Free (according to CUDA): 3.06 MiB\nPyTorch limit (set by user-supplied memory fraction)\n"
    "                        : 17179869184.00 GiB"
)


def gib(size: float) -> int:
    """Bytes of a size that is printed in GiB."""
    return int(size * GIB)


def test_every_kind_has_a_wording() -> None:
    """And every wording is of a kind."""
    assert set(get_args(Kind)) == {kind for kind, _ in ANCHORS}


def told(text: str) -> dict[str, Any]:
    """The figures of the first failure of a text, its kind among them."""
    found = read_failures(text)
    assert found is not None, text
    values = {name: getattr(found.shortage, name) for name in Shortage.__slots__ if name != "message"}
    return {name: value for name, value in values.items() if value not in (None, ())}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            f"torch.OutOfMemoryError: {NEW}",
            {
                "kind": "torch",
                "device": 0,
                "asked_bytes": 786 * MIB,
                "free_bytes": int(140.75 * MIB),
                "total_bytes": gib(79.11),
                "process_bytes": gib(78.96),
                "allocated_bytes": gib(68.83),
                "private_bytes": 660 * MIB,
                "unallocated_bytes": int(331.08 * MIB),
            },
            id="2.4 and later, the own process listed by the host's id",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacty of 23.69 GiB of which "
            "3.09 GiB is "
            "free. Including non-PyTorch memory, this process has 20.57 GiB memory in use. Process 77 has 1,024.00 MiB "
            "memory in use. Of the allocated memory 20.13 GiB is allocated by PyTorch, and 755.50 KiB is reserved by "
            "PyTorch but unallocated. If reserved but unallocated memory is large try setting max_split_size_mb",
            {
                "kind": "torch",
                "device": 0,
                "asked_bytes": gib(3.5),
                "free_bytes": gib(3.09),
                "total_bytes": gib(23.69),
                "process_bytes": gib(20.57),
                "others": ((77, GIB),),
                "allocated_bytes": gib(20.13),
                "unallocated_bytes": int(755.5 * KIB),
            },
            id="2.1, misspelt, with another process and a thousands separator",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU  has a total capacity of 22.00 GiB of which "
            "4.00 MiB is "
            "free. 11.00 GiB allowed; Of the allocated memory 10.90 GiB is allocated by PyTorch",
            {
                "kind": "torch",
                "asked_bytes": 20 * MIB,
                "free_bytes": 4 * MIB,
                "total_bytes": 22 * GIB,
                "allowed_bytes": 11 * GIB,
                "allocated_bytes": gib(10.9),
            },
            id="no index, and a limit",
        ),
        pytest.param(
            "RuntimeError: CUDA out of memory. Tried to allocate 1.63 GiB (GPU 3; 44.56 GiB total capacity; 27.91 GiB "
            "already allocated; 565.31 MiB free; 27.93 GiB reserved in total by PyTorch) If reserved memory is >>",
            {
                "kind": "torch",
                "device": 3,
                "asked_bytes": gib(1.63),
                "free_bytes": int(565.31 * MIB),
                "total_bytes": gib(44.56),
                "allocated_bytes": gib(27.91),
                "unallocated_bytes": gib(27.93) - gib(27.91),
            },
            id="up to 2.0",
        ),
        pytest.param(
            "CUDA out of memory. Tried to allocate 8.00 MiB (GPU 0; 10.92 GiB total capacity; 10.12 GiB already "
            "allocated; "
            "7.50 MiB free; 32.25 MiB cached)",
            {
                "kind": "torch",
                "device": 0,
                "asked_bytes": 8 * MIB,
                "free_bytes": int(7.5 * MIB),
                "total_bytes": gib(10.92),
                "allocated_bytes": gib(10.12),
                "unallocated_bytes": int(32.25 * MIB),
            },
            id="up to 1.3",
        ),
        pytest.param(
            ASYNC,
            {
                "kind": "async",
                "device": 1,
                "asked_bytes": int(1.49 * MIB),
                "free_bytes": int(3.06 * MIB),
                "total_bytes": gib(39.39),
                "allocated_bytes": gib(9.64),
            },
            id="cudaMallocAsync, whose limit is not one",
        ),
        pytest.param(
            ASYNC.replace("17179869184.00 GiB", "20.00 GiB"),
            {
                "kind": "async",
                "device": 1,
                "asked_bytes": int(1.49 * MIB),
                "free_bytes": int(3.06 * MIB),
                "total_bytes": gib(39.39),
                "allowed_bytes": 20 * GIB,
                "allocated_bytes": gib(9.64),
            },
            id="cudaMallocAsync, with a limit of its own",
        ),
        pytest.param(
            "RuntimeError: MPS backend out of memory (MPS allocated: 5.05 GiB, other allocations: 1.00 GiB, max "
            "allowed: 6.80 GiB). Tried to allocate 256.00 MiB on private pool.",
            {
                "kind": "torch",
                "asked_bytes": 256 * MIB,
                "allowed_bytes": gib(6.8),
                "allocated_bytes": gib(5.05),
            },
            id="Apple's",
        ),
        pytest.param(
            "CUDA out of memory. Allocation was preemptively rejected because it would exceed "
            "per_process_memory_fraction "
            "limit. Requested size: 2.00 GiB",
            {"kind": "limit", "asked_bytes": 2 * GIB},
            id="2.12, rejected",
        ),
        pytest.param(
            "Preemptively rejecting allocation: requested 512.00 MiB on device 1. Set throw_on_cudamalloc_oom:false",
            {"kind": "limit", "asked_bytes": 512 * MIB, "device": 1},
            id="2.12, rejected by the throttle",
        ),
        pytest.param("CUDA out of memory. Tried to allocate more than 1EB memory.", {"kind": "absurd"}, id="1EB"),
        pytest.param(
            "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 512 bytes. GPU 5 has a total capacity of",
            {"kind": "torch", "asked_bytes": 512, "device": 5},
            id="HIP, cut off",
        ),
        pytest.param("torch.cuda.OutOfMemoryError: CUDA out of memory.", {"kind": "torch"}, id="no figures"),
        pytest.param(
            "cuda out of memory: tried to allocate 12 GiB", {"kind": "torch", "asked_bytes": 12 * GIB}, id="in passing"
        ),
        pytest.param(
            "NPU out of memory. Tried to allocate 5.50 GiB (NPU 3; 60.97 GiB total capacity; 52.30 GiB already "
            "allocated; 52.30 GiB current active; 1.20 GiB free; 53.00 GiB reserved in total by PyTorch)",
            {
                "kind": "torch",
                "device": 3,
                "asked_bytes": gib(5.5),
                "free_bytes": gib(1.2),
                "total_bytes": gib(60.97),
                "allocated_bytes": gib(52.3),
                "unallocated_bytes": gib(53) - gib(52.3),
            },
            id="NPU",
        ),
        pytest.param("RuntimeError: CUDA error: out of memory\nCUDA kernel errors", {"kind": "driver"}, id="driver"),
        pytest.param(
            "cuda runtime error (2) : out of memory at /pytorch/THCStorage.cu:58", {"kind": "driver"}, id="torch 0.4"
        ),
        pytest.param(
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 1024.00 MiB on device 1: cudaMalloc failed: out of "
            "memory",
            {"kind": "driver", "asked_bytes": GIB, "device": 1},
            id="llama.cpp",
        ),
        pytest.param(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.",
            {"kind": "torch", "asked_bytes": GIB},
            id="XLA",
        ),
        pytest.param(
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
            {"kind": "library"},
            id="cuBLAS",
        ),
        pytest.param("NCCL WARN Cuda failure 2 'out of memory'", {"kind": "library"}, id="NCCL"),
        pytest.param(
            "NCCL WARN Failed to CUDA calloc 2,097,152 bytes",
            {"kind": "library", "asked_bytes": 2 * MIB},
            id="NCCL size",
        ),
        pytest.param(
            "RuntimeError: Error in function 'aligned_alloc': Failed to allocate memory for batch_prefill_tmp_v "
            "with size "
            "402653184 and alignment 16 in AlignedAllocator",
            {"kind": "workspace", "asked_bytes": 402653184},
            id="FlashInfer",
        ),
        pytest.param(
            'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":995',
            {"kind": "masked"},
            id="MIG",
        ),
        pytest.param(
            "ValueError: Free memory on device cuda:1 (19.77/22.05 GiB) on startup is less than desired GPU memory "
            "utilization (0.9, 19.84 GiB). Decrease",
            {
                "kind": "budget",
                "device": 1,
                "free_bytes": gib(19.77),
                "total_bytes": gib(22.05),
                "fraction_ratio": 0.9,
                "needed_bytes": gib(19.84),
            },
            id="vLLM: budget",
        ),
        pytest.param(
            "ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (0.71 GiB). Based on the available memory, the "
            "estimated maximum model length is 5632. Try increasing",
            {
                "kind": "context",
                "asked_tokens": 131072,
                "needed_bytes": 16 * GIB,
                "available_bytes": gib(0.71),
                "fitting_tokens": 5632,
            },
            id="vLLM: context",
        ),
        pytest.param(
            "The model's max seq len (163840) is larger than the maximum number of tokens that can be stored in "
            "KV cache "
            "(13360). Try increasing",
            {"kind": "context", "asked_tokens": 163840, "fitting_tokens": 13360},
            id="vLLM V0: context",
        ),
        pytest.param(
            "ValueError: No available memory for the cache blocks. Try increasing",
            {"kind": "blocks"},
            id="vLLM: no blocks",
        ),
        pytest.param(
            "AssertionError: Error in memory profiling. Initial free memory 82.94 GiB, current free memory 90.17 GiB.",
            {"kind": "profiling", "before_bytes": gib(82.94), "free_bytes": gib(90.17)},
            id="vLLM: profiling",
        ),
        pytest.param(
            "Error in memory profiling. Initial free memory 15772483584, current free memory 25293225984",
            {"kind": "profiling", "before_bytes": 15772483584, "free_bytes": 25293225984},
            id="vLLM V0: profiling, in bytes",
        ),
        pytest.param(
            "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please",
            {"kind": "warmup", "requests": 1024},
            id="vLLM: sampler",
        ),
        pytest.param(
            "Out of memory: Killed process 42 (VLLM::EngineCor) total-vm:9000000kB, anon-rss:6291456kB, file-rss:0kB",
            {"kind": "host", "process_bytes": 6 * GIB},
            id="the kernel",
        ),
        pytest.param("command terminated with exit code 137", {"kind": "host"}, id="exit 137"),
        pytest.param("./serve.sh: line 3:\n[1]+ 4711 Killed", {"kind": "host"}, id="a shell"),
        pytest.param(
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "68719476736 "
            "bytes. Error code 12 (Cannot allocate memory)",
            {"kind": "host", "asked_bytes": 64 * GIB},
            id="the CPU's allocator",
        ),
    ],
)
def test_every_form_is_read(text: str, expected: dict[str, Any]) -> None:
    """Each wording gives its kind and every figure it has, and no figure that it has not."""
    assert expected == told(text)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize(
    "prefix", ["", "(Worker_TP0 pid=7) ERROR 10-25 13:12:42 [multiproc_executor.py:671] ", "[rank0]: "]
)
def test_wrapped_lines_are_one_message(width: int, prefix: str) -> None:
    """A terminal or a logger that breaks lines, in words and in numbers, changes nothing."""
    # GIVEN
    lines = [prefix + NEW[at : at + width] for at in range(0, len(NEW), width)]

    # THEN
    assert told(NEW) == told("\n".join(lines))


def test_json_logs_and_representations_are_read() -> None:
    """Line ends that a logger has escaped, and quotes round a message, are no part of it."""
    # GIVEN
    escaped = '{"level":"error","message":"' + ASYNC.replace("\n", "\\n") + '"}'

    # THEN
    assert told(ASYNC) == told(escaped)
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
    # WHEN
    actual = parse_shortage("torch", NEW.replace("79.11 GiB", "0.01 GiB").replace("786.00 MiB", "9999999999 PiB"))

    # THEN
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
    """What it is listed with is at least what torch has reserved; a process with a GiB less is somebody else's."""
    # GIVEN two processes, of which the first has just so much
    listed = f"Process 1 has {first}.00 GiB memory in use. Process 2 has {second}.00 GiB memory in use."
    text = f"CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79.00 GiB. {listed} "

    # WHEN
    actual = told(f"{text}Of the allocated memory {', and '.join(parts)}.")

    # THEN
    assert (first * GIB, ((2, second * GIB),)) == (actual["process_bytes"], actual["others"])


@pytest.mark.parametrize("parts", ["31.00 GiB is allocated by PyTorch", "29.00 GiB is allocated by PyTorch"])
def test_own_process_is_left_open_where_none_or_two_can_be_it(parts: str) -> None:
    """Then all that are listed are others, as far as is known."""
    # GIVEN
    listed = "Process 1 has 30.00 GiB memory in use. Process 2 has 30.50 GiB memory in use."
    text = f"CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 79.00 GiB. {listed} {parts}"

    # THEN
    assert ((1, 30 * GIB), (2, gib(30.5))) == told(text)["others"]
    assert "process_bytes" not in told(text)


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
    """Whatever stands in a log, reading it raises nothing, and every figure is one that can be."""
    # WHEN
    found = read_failures(text)

    # THEN
    for name in () if found is None else Shortage.__slots__:
        value = getattr(found.shortage, name) if found is not None else None
        assert value is None or not isinstance(value, int) or 0 <= value <= 2**60
    assert all(parse_shortage(kind, text).kind == kind for kind in {kind for kind, _ in ANCHORS})
