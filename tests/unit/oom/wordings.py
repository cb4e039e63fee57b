"""How allocators, drivers, libraries, vLLM and the kernel say that memory ran out, with the figures of each text."""

import pytest

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


FORMS = (
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
        {"kind": "host", "process_bytes": 6 * GIB, "killed": "VLLM::EngineCor (pid 42)"},
        id="the kernel",
    ),
    pytest.param(
        "Killed /system.slice/vllm.service due to memory used (66571993088) / total (67108864000) and swap used (1) / "
        "total (2) being more than 90.00%",
        {
            "kind": "host",
            "killed": "/system.slice/vllm.service",
            "usage_bytes": 66571993088,
            "limit_bytes": 67108864000,
        },
        id="systemd-oomd",
    ),
    pytest.param(
        "vllm.service: A process of this unit has been killed by the OOM killer.",
        {"kind": "host", "killed": "vllm.service"},
        id="systemd",
    ),
    pytest.param(
        "memory.events:oom_kill 1\nmemory.max:64424509440\nmemory.peak:64424513536",
        {"kind": "host", "usage_bytes": 64424513536, "limit_bytes": 64424509440},
        id="cgroup v2",
    ),
    pytest.param(
        "OOMKilled, limits: {cpu: 8, memory: 64Gi, nvidia.com/gpu: 1}",
        {"kind": "host", "limit_bytes": 64 * GIB},
        id="Kubernetes, YAML",
    ),
    pytest.param(
        '"reason": "OOMKilled"}, "resources": {"limits": {"memory": "64G"',
        {"kind": "host", "limit_bytes": 64 * 10**9},
        id="Kubernetes, JSON",
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
)
"""A text and the figures that it has, its kind among them."""
