"""How a log is parsed: the process of each line, the lines of one message, and which adjacent lines count."""

import pytest

from kvdiag.oom.account import Account, Work
from kvdiag.oom.log import MAX_STREAMS, read_failures
from tests.builders.values import GIB, MIB

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"
RUN = 'Traceback (most recent call last):\n File "x", line 1, in execute_model\n'
EARLIER = "Running: 9 reqs, Waiting: 9 reqs, GPU KV cache usage: 9.0%\n"
DUMP = "Dumping scheduler output for model execution: "


def read(text: str) -> Account:
    """What is known to be found."""
    found = read_failures(text)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("line", "process", "rank"),
    [
        (OOM, "", None),
        (f"ERROR 01-02 03:04:05 [x.py:7] {OOM}", "", None),
        (f"(Worker_TP1 pid=7) ERROR 01-02 03:04:05 [x.py:7] {OOM}", "Worker_TP1", 1),
        (f"(VllmWorker rank=3 pid=7) {OOM}", "VllmWorker rank=3", 3),
        (f"(RayWorkerWrapper pid=7, ip=10.0.0.1) {OOM}", "RayWorkerWrapper", None),
        (f"[rank2]: {OOM}", "rank2", 2),
        (f"[2026-01-02 03:04:05 TP5] {OOM}", "TP5", 5),
        (f"[2026-01-02 03:04:05 DP1 TP6] {OOM}", "DP1 TP6", 6),
        (f"\x1b[36m(EngineCore_DP0 pid=7)\x1b[0;0m {OOM}", "EngineCore_DP0", None),
    ],
)
def test_process_and_rank_are_those_of_the_line(line: str, process: str, rank: int | None) -> None:
    """As vLLM, Ray, torchrun and SGLang write them, in colour or not."""
    found = read(f"first\n{line}")
    assert (process, rank, 2, 2 * GIB) == (found.process, found.rank, found.line, found.shortage.asked_bytes)


def test_wrapped_line_is_the_process_before_it() -> None:
    """A line with neither level nor name continues the one before it; one with a level is the main process's."""
    wrapped = read("(Worker_TP1 pid=7) ERROR 01-02 03:04:05 [x.py:7] CUDA out of memory.\nTried to allocate 2.00 GiB.")
    main = read(f"(Worker_TP1 pid=7) hello\nINFO 01-02 03:04:05 [x.py:7] hello\n{OOM}")
    assert ("Worker_TP1", 2 * GIB) == (wrapped.process, wrapped.shortage.asked_bytes)
    assert "" == main.process


def test_first_by_line_counts_and_the_rest_are_later() -> None:
    """Whichever process comes first in the log, its failures and the others' after it are counted."""
    found = read(
        "\n".join(("(B pid=1) hello", f"(A pid=2) {OOM}", "." * 500, f"(B pid=1) {OOM}", "." * 500, f"(A pid=2) {OOM}"))
    )
    assert ("A", 2, 2) == (found.process, found.line, found.later)


def test_line_is_found_among_many_short_ones() -> None:
    """Its number is its line number in the log, with any lines around it."""
    assert 51 == read("\n".join(["ab"] * 50 + [OOM] + ["ab"] * 50)).line


def test_processes_of_one_name_are_told_apart_by_their_pids() -> None:
    """Workers of two engines have the same names, and print at once."""
    log = (
        "(Worker pid=1) CUDA out of memory.\n(Worker pid=2) Tried to allocate 3.00 GiB.\n"
        "(Worker pid=1) Tried to allocate 2.00 GiB."
    )
    assert 2 * GIB == read(log).shortage.asked_bytes


def test_colours_within_a_message_are_no_part_of_it() -> None:
    """A terminal's codes may stand anywhere."""
    log = "CUDA out of\x1b[0m memory. Tried to \x1b[1;31mallocate 2.00 GiB."
    assert 2 * GIB == read(log).shortage.asked_bytes


def test_statistics_of_a_long_log_are_found_from_its_failure_back() -> None:
    """However much was printed after it."""
    found = read("\n".join(["Running: 3 reqs, Waiting: 2 reqs", OOM, *["."] * 20_000]))
    assert (3, 2) == (found.running, found.waiting)


@pytest.mark.parametrize("newline", ["\r\n", "\n", "\r", "\\n", "\\r\\n"])
def test_lines_end_as_systems_and_loggers_end_them(newline: str) -> None:
    """A repr or a JSON logger puts many into one."""
    found = read(newline.join(("one", "two", OOM)))
    assert (3, 2 * GIB) == (found.line, found.shortage.asked_bytes)


@pytest.mark.parametrize(
    "quoted", ["Received request cmpl-1: ", "prompt: '", "x Generated response cmpl-1: ", '{"messages": [{']
)
def test_what_users_write_is_no_failure(quoted: str) -> None:
    """A line that quotes a prompt may say anything."""
    assert read_failures(f"INFO {quoted}{OOM}") is None


def test_longest_line_is_cut() -> None:
    """What stands behind 16 KiB of one line is not looked at."""
    assert read_failures("." * 16 * 1024 + OOM) is None
    assert read("." * (16 * 1024 - len(OOM)) + OOM).shortage.asked_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("scheduled", "phase"),
    [
        ("num_scheduled_tokens={'a': 16}", "decode"),
        ("num_scheduled_tokens={'a': 17}", "prefill"),
        ("num_scheduled_tokens={'a': 16, 'b': 17}", "prefill"),
        ("total_num_scheduled_tokens=16", "decode"),
        ("total_num_scheduled_tokens=17", "prefill"),
        ("num_scheduled_tokens={}, total_num_scheduled_tokens=17", "prefill"),
        ("num_scheduled_tokens={}", "request"),
    ],
)
def test_more_than_sixteen_tokens_of_a_request_are_a_prompt(scheduled: str, phase: str) -> None:
    """Up to sixteen tokens may be the next token and its drafts, more are a prompt; with none scheduled: unknown."""
    assert phase == read(f"{RUN}{OOM}\n{DUMP}{scheduled}").phase


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (
            "num_scheduled_tokens={'a': 5, 'b': 9}, total_num_scheduled_tokens=20",
            Work(scheduled_tokens=20, requests=2, largest_request="b", largest_tokens=9),
        ),
        (
            "num_scheduled_tokens={'a': 5, 'b': 9}",
            Work(scheduled_tokens=14, requests=2, largest_request="b", largest_tokens=9),
        ),
        (
            "NewRequestData(req_id='a',prompt_token_ids_len=40), NewRequestData(req_id=b, prompt_token_ids_len=60)",
            Work(scheduled_tokens=None, requests=None, largest_request="b"),
        ),
        (
            "NewRequestData(req_id=a,prompt_token_ids_len=40), num_scheduled_tokens={'a': 32}",
            Work(scheduled_tokens=32, requests=1, largest_request="a", largest_tokens=32),
        ),
        ("nothing", Work(scheduled_tokens=None, requests=None)),
    ],
)
def test_step_is_read_as_far_as_it_is_dumped(dump: str, expected: Work) -> None:
    """All tokens, how many requests, and the largest of them."""
    assert expected == read(f"{OOM}\n{DUMP}{dump}").work


@pytest.mark.parametrize(
    ("before", "after", "told"), [(3000, 0, True), (3001, 0, False), (0, 2999, True), (0, 3000, False)]
)
def test_dump_counts_within_three_thousand_lines(before: int, after: int, told: bool) -> None:
    """Another step's dump is not this one's."""
    # So many lines from the dump to the failure, or the other way
    dump = f"{DUMP}total_num_scheduled_tokens=9"
    lines = [dump, *["."] * (before - 1), OOM] if before else [OOM, *["."] * (after - 1), dump]
    assert told == (read("\n".join(lines)).work is not None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"{EARLIER}Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 25.0%", (3, 2, 0.25)),
        (f"{EARLIER}Running: 1 req, Swapped: 4 reqs, Pending: 0 reqs, GPU KV cache usage: 100.2%", (1, 0, 1.0)),
        (f"{EARLIER}Running: 3 reqs, Waiting: 2 reqs", (3, 2, None)),
        ("Running: 3 reqs, Waiting: 2 reqs", (3, 2, None)),
        ("Running: three reqs", (None, None, None)),
    ],
)
def test_last_statistics_before_it_count(line: str, expected: tuple[object, ...]) -> None:
    """Those after it are of what was left."""
    found = read(f"{line}\n{OOM}\nRunning: 7 reqs, Waiting: 7 reqs")
    assert expected == (found.running, found.waiting, found.kv_usage_ratio)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("'max_num_seqs': 256", 256),
        ("max_num_seqs=128,", 128),
        ("xmax_num_seqs=128", None),
        ("max_num_seqs=None", None),
    ],
)
def test_most_requests_are_the_settings(line: str, expected: int | None) -> None:
    """As an argument or a dictionary has them, before the failure."""
    assert expected == read(f"{line}\n{OOM}\nmax_num_seqs=7").max_num_seqs


@pytest.mark.parametrize(
    ("text", "kind", "later"),
    [
        # One message with two names.
        ("RuntimeError: CUDA error: out of memory\ncudaErrorMemoryAllocation", "driver", 0),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling; CUDA error: out of memory", "library", 0),
        ("CUDA error: out of memory, then CUBLAS_STATUS_ALLOC_FAILED", "library", 0),
        ("Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB", "torch", 0),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate more than 1EB memory.", "absurd", 0),
        ("torch.OutOfMemoryError: CUDA out of memory. Allocation was preemptively rejected", "limit", 0),
        ("NVML_SUCCESS == r INTERNAL ASSERT FAILED; CUDA error: out of memory", "masked", 0),
        ("CUDA error: out of memory; NVML_SUCCESS == r INTERNAL ASSERT FAILED", "masked", 0),
        ("torch.OutOfMemoryError: NVML_SUCCESS == r INTERNAL ASSERT FAILED", "torch", 0),
        ("CUDA error: out of memory. Capture cuda graph failed", "driver", 0),
        ("MemoryError while the Capture cuda graph failed", "capture", 0),
        # Two, since figures, a traceback, or much else stand between them.
        (f"{OOM} 1 GiB. CUDA error: out of memory", "torch", 1),
        ("CUDA error: out of memory\nTraceback (most recent call last):\nCUDA error: out of memory", "driver", 1),
        ("CUDA error: out of memory" + "." * 199 + "CUDA error: out of memory", "driver", 0),
        ("CUDA error: out of memory" + "." * 200 + "CUDA error: out of memory", "driver", 1),
        ("No available memory for the cache blocks. CUDA error: out of memory", "blocks", 1),
        # The kernel's words on one kill.
        ("Memory cgroup out of memory: x\nTraceback\nOOMKilled", "host", 0),
        ("Memory cgroup out of memory: x\nTraceback\nCUDA error: out of memory", "host", 1),
    ],
)
def test_names_of_one_message_are_one_failure(text: str, kind: str, later: int) -> None:
    """The more telling name counts; what is far apart is another failure."""
    found = read(text)
    assert (kind, later) == (found.shortage.kind, found.later)


def test_librarys_message_has_the_figures_before_it() -> None:
    """NCCL and the driver's wrappers report the device and the size before the message; torch reports them after it."""
    before = read("Failed to CUDA calloc async 608 bytes on device 3: Cuda failure 2 'out of memory'")
    line = read("on GPU 5\ndevice 3, malloc 64 MiB: CUDA error: out of memory")
    cuda = read("on GPU 5\ndevice 3, malloc 64 MiB: Cuda failure 2 'out of memory'")
    assert ("library", 3) == (before.shortage.kind, before.shortage.device)
    assert (64 * MIB, 3) == (line.shortage.asked_bytes, line.shortage.device)
    assert ("library", 64 * MIB, 3) == (cuda.shortage.kind, cuda.shortage.asked_bytes, cuda.shortage.device)


def test_figures_of_the_next_message_are_not_the_firsts() -> None:
    """A message ends where the next one begins."""
    found = read(f"CUDA error: out of memory\nTraceback (most recent call last):\n{OOM}")
    assert ("driver", None, 1) == (found.shortage.kind, found.shortage.asked_bytes, found.later)


def test_processes_beyond_those_that_are_told_apart_are_nobody_s() -> None:
    """A log of more processes than are kept apart names none of the later ones, rather than the wrong one."""
    told_apart = [f"(Worker pid={pid}) it works" for pid in range(1, MAX_STREAMS + 1)]
    beyond = ["(First rank=7 pid=900001) it works", f"(Second rank=8 pid=900002) {OOM}"]
    actual = read("\n".join([*told_apart, *beyond]))
    assert ("", None, MAX_STREAMS + 2) == (actual.process, actual.rank, actual.line)
