"""Files that are no startup log of vLLM, or a long, torn or unreadable one: refused in one line, or read in part."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdiag.engines import read_startup_log
from kvdiag.engines.vllm import startup_log
from kvdiag.engines.vllm.startup_log import parse_log
from kvdiag.errors import KvdiagError
from kvdiag.kv.calibration.engine_report import EngineReport
from tests.unit.engines.vllm.vllm_logs import LOGS, gib


@pytest.mark.parametrize(
    "text",
    ["", "\n" * 1000, "hello", "INFO 01-01 00:00:00 [x.py:1] Available KV cache memory: GiB", "\0" * 4096, "(" * 9999],
)
def test_what_tells_no_memory_is_refused(text: str) -> None:
    """One line that names what was looked for."""
    with pytest.raises(KvdiagError, match="memory figures") as caught:
        parse_log(text)
    assert str(caught.value).startswith("the log has none")


def test_binary_and_torn_lines_do_no_harm(tmp_path: Path) -> None:
    """Bytes that are no text, a figure cut in half, and a last line without its end."""
    path = tmp_path / "torn.log"
    path.write_bytes(
        b"\xff\xfe\x00\x80INFO [g.py:1] Available KV cache mem\nINFO [g.py:1] Available KV cache memory: 18.69 GiB\r\n"
        b"INFO [k.py:1] GPU KV cache size: 136,080 tokens\nINFO [k.py:1] Maximum concurrency for 40,960 tok"
    )
    report = read_startup_log(path)
    assert (gib(18.69), 136_080, None) == (report.ranks[0].pool, report.tokens, report.concurrency)


def test_of_a_long_log_both_ends_are_read(tmp_path: Path) -> None:
    """The head and the end of a log of gigabytes are read, with a note that the middle was not."""
    path = tmp_path / "long.log"
    with path.open("wb") as file:
        file.write((LOGS / "vllm-0.9.1-V1-reconstructed.log").read_bytes())
        file.truncate(12 * 2**20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nINFO [x.py:1] the end\n")

    report = read_startup_log(path)

    assert 136_080 == report.tokens
    assert "beginning" in report.notes[-1]


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    """A log that another command writes: the tail is kept, the middle dropped."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    start = (LOGS / "vllm-0.9.1-V1-reconstructed.log").read_bytes()
    content = b"x" * 100 + b"\n" + b"noise\n" * (16 * 2**20 // 6) + start
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()

    report = read_startup_log(path)
    writer.join()

    assert 136_080 == report.tokens


def test_an_endless_line_is_cut(tmp_path: Path) -> None:
    """What lies beyond the longest line is not looked at."""
    path = tmp_path / "line.log"
    path.write_text("x" * (startup_log.MAX_LINE_CHARACTERS + 1) + "Available KV cache memory: 1.00 GiB")
    with pytest.raises(KvdiagError):
        read_startup_log(path)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that is not there, and a folder."""
    with pytest.raises(KvdiagError, match=r"nothing\.log: No such file"):
        read_startup_log(tmp_path / "nothing.log")
    with pytest.raises(KvdiagError, match="is a folder"):
        read_startup_log(tmp_path)


FRAGMENTS = st.sampled_from(
    [
        "INFO 01-01 00:00:00 [x.py:1] ",
        "(Worker_PP9999_TP0 pid=1) ",
        "(EngineCore_DP99999 pid=0) ",
        "Available KV cache memory: 999999999.999999999 GiB",
        "Available KV cache memory: -1.0 GiB",
        "GPU KV cache size: 999,999,999,999,999 tokens",
        "Maximum concurrency for 0 tokens per request: 0.0x",
        "Maximum concurrency for 999999999999999 tokens per request: 999999999999.9x",
        "# GPU blocks: 0, # CPU blocks: 0",
        "non-default args: {'tensor_parallel_size': 0, 'gpu_memory_utilization': 9.9, 'model': ''}",
        "Initializing a V1 LLM engine (v9) with config: model='', block_size=0, kv_cache_dtype=",
        "gpu_memory_utilization=1e-99",
        "\n",
        "\r",
        "\x1b[31m",
        "\u2028",
        "\0",
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(FRAGMENTS, st.text(max_size=30)), max_size=30).map("".join))
def test_any_text_is_a_report_or_refused(text: str) -> None:
    """Any file content gives a report or one KvdiagError."""
    try:
        report = parse_log(text)
    except KvdiagError:
        return
    assert isinstance(report, EngineReport)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_are_a_report_or_refused(content: bytes) -> None:
    """The same for bytes put into the middle of a real log."""
    real = (LOGS / "vllm-0.7.3-V0-reconstructed.log").read_bytes()
    half = len(real) // 2
    try:
        report = parse_log((real[:half] + content + real[half:]).decode("utf-8", "replace"))
    except KvdiagError:
        return
    assert isinstance(report, EngineReport)
