"""Commands on what never ends, or is more than a container has: each refuses or judges, in memory that is bounded."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.sources.hub import read_config
from kvdiag.sources.model_files import read_model
from tests.fixtures.hostile import Answer, Hostile, endless, head, reply

MIB = 2**20
MAX_RESIDENT_BYTES = 512 * MIB

RUN = """
import re, sys
from pathlib import Path
from kvdiag.commands import main
exit_code = main(sys.argv[1:])
print()
# ru_maxrss would hold what the test runner had when it started this program.
print(exit_code, int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def resident_bytes(*arguments: str) -> int:
    """What a command takes, that says something or refuses."""
    told = subprocess.run([sys.executable, "-c", RUN, *arguments], capture_output=True, text=True, check=True).stdout
    exit_code, size = map(int, told.splitlines()[-1].split())
    assert exit_code in (0, 1, 2, 3)
    return size


def series(labels: int) -> bytes:
    """A list of as many series as an answer may have, with labels of their own."""
    one = ",".join(f'"l{number}":"ROW-{number}"' for number in range(labels))
    text = '{"__name__":"vllm:num_requests_running","pod":"pROW",' + one + "}"
    rows = (text.replace("ROW", str(row)) for row in range(20 * MIB // (len(text) + 4 * labels)))
    return b'{"status":"success","data":[' + ",".join(rows).encode() + b"]}"


PROMETHEUS = [
    pytest.param(lambda: b'{"status":"success","data":[' + b"{}," * (8 * MIB) + b"{}]}", id="objects"),
    pytest.param(
        lambda: b'{"status":"success","data":[' + b'{"a":"bb"},' * 490_000 + b'"\xf0\x9f\x98\x80"]}', id="wide"
    ),
    pytest.param(lambda: series(3), id="series"),
    pytest.param(lambda: series(60), id="labels"),
]


@pytest.mark.parametrize("body", PROMETHEUS)
def test_no_prometheus_takes_more_memory_than_a_container_has(body: Callable[[], bytes]) -> None:
    """For each huge answer of a Prometheus, resident memory stays below the container's limit."""
    with Hostile(reply(body(), content_type="application/json")) as server:
        assert resident_bytes("diagnose", "--prometheus", server.url, "--output", "json") < MAX_RESIDENT_BYTES


DRIPS = [
    pytest.param(endless(head(Content_Length="1000"), b" ", pause_seconds=0.01), id="drips"),
    pytest.param(endless(b"", b"HTTP/1.1 102 Processing\r\n\r\n", pause_seconds=0.01), id="interim answers"),
]


@pytest.mark.parametrize("answer", DRIPS)
def test_a_hub_that_does_not_end_is_given_up(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a deadline for all of it, though each read brings something."""
    with Hostile(answer) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(KvdiagError, match="has not sent all"):
            read_config("some/model", MIB, whole_seconds=0.3)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
def test_a_packed_config_is_not_unpacked(encoding: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A few bytes could become any number."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with Hostile(reply(b"\x1f\x8b", Content_Encoding=encoding)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        with pytest.raises(KvdiagError, match="compressed"):
            read_model("some/model")


def tensors(count: int) -> bytes:
    """The header of a tensor file."""
    entry = '"%d":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}'
    text = ("{" + ",".join(entry % number for number in range(count)) + "}").encode()
    return len(text).to_bytes(8, "little") + text


FILES = [
    pytest.param("config.json", lambda: b"[" + b"{}," * (5 * MIB) + b"{}]", id="config"),
    pytest.param("model.safetensors", lambda: b"\0\0\0\2\0\0\0\0" + b"{" + b'"":{},' * (5 * MIB), id="header"),
    pytest.param("model.safetensors", lambda: tensors(230_000), id="tensors"),
]


@pytest.mark.parametrize(("name", "content"), FILES)
def test_no_model_takes_more_memory_than_a_container_has(
    name: str, content: Callable[[], bytes], tmp_path: Path
) -> None:
    """A config or a tensor file of the most that is read."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    for copy in range(3 if name.endswith("safetensors") else 1):
        (tmp_path / (name if not copy else f"{copy}-{name}")).write_bytes(content())
    assert resident_bytes("fit", str(tmp_path), "--gpu", "H100", "--output", "json") < MAX_RESIDENT_BYTES


def test_a_histogram_without_an_end_is_refused() -> None:
    """A device that always has more."""
    arguments = ("llama_70b", "--gpu", "H100", "--request-rate", "1", "--lengths", "/dev/zero")
    assert resident_bytes("fit", *arguments) < MAX_RESIDENT_BYTES // 2
