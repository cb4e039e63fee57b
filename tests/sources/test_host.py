"""The server's processes and files on this host, with real processes that listen and real folders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvdiag.model import Gap, HostCache, HostProcess
from kvdiag.sources.host import (
    MAX_CONFIG_BYTES,
    SOURCE,
    caches,
    find_server,
    limit_bytes,
    model_config,
    read,
    weights_bytes,
)
from tests.fixtures.hostile import refused_port

LONG_SECONDS = 60.0

WAIT = "import sys; sys.stdin.read()"

SERVER = f"""
import json, os, socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
workers = [subprocess.Popen([sys.executable, "-c", {WAIT!r}]) for _ in range(2)]
pids = [os.getpid(), *(worker.pid for worker in workers)]
print(json.dumps({{"port": listener.getsockname()[1], "pids": pids}}), flush=True)
sys.stdin.read()
"""

LAUNCHER = f"""
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", {SERVER!r}])
"""


@dataclass(frozen=True, slots=True)
class Listening:
    """A server that listens, its workers, and who started it where that was one of its own kind."""

    port: int
    pids: tuple[int, ...]
    launcher: int | None = None


@contextmanager
def listening(program: str, *arguments: str) -> Iterator[Listening]:
    """Run a program that prints where it listens, until its input ends.

    A shell stands between it and the tests, whose own command line may name vLLM.
    """
    shell = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", program, *arguments]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        launcher = int(first) if program is LAUNCHER else None
        said = json.loads(process.stdout.readline() if launcher is not None else first)
        yield Listening(port=said["port"], pids=tuple(said["pids"]), launcher=launcher)
        process.communicate(timeout=LONG_SECONDS)


def unseen(reason: str) -> Gap:
    """The gap of something that cannot be seen from here."""
    return Gap(source=SOURCE, kind="absent", reason=reason)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", socket.gethostname()])
def test_listener_is_found_with_its_children(host: str) -> None:
    """The process that listens on the port and its workers are the server; whoever started it is not."""
    # WHEN
    with listening(SERVER) as server:
        actual = find_server(f"http://{host}:{server.port}")

    # THEN
    assert (tuple(sorted(server.pids)), ()) == actual


def test_launcher_of_the_same_program_belongs_to_the_server() -> None:
    """With several API servers the one that started them is theirs, where it runs vLLM by the same interpreter."""
    # WHEN
    with listening(LAUNCHER, "vllm", "serve") as server:
        actual = find_server(f"http://127.0.0.1:{server.port}")

    # THEN
    assert server.launcher is not None
    assert (tuple(sorted((server.launcher, *server.pids))), ()) == actual


def test_caches_are_read_from_the_command_line() -> None:
    """What the launcher's command says of caches is known, once for all of the server's processes."""
    # WHEN
    with listening(LAUNCHER, "vllm", "serve", "--mm-processor-cache-gb", "2") as server:
        actual = caches((server.launcher or 0, *server.pids, 2**22 + 1))

    # THEN
    expected = HostCache(
        name="vLLM's multimodal processor cache", flag="--mm-processor-cache-gb", limit_bytes=2 * 2**30
    )
    assert (expected,) == actual


def test_starter_of_another_program_stays_out() -> None:
    """A script that starts a server and is no vLLM itself is not counted in."""
    # WHEN
    with listening(LAUNCHER, "benchmark") as server:
        actual = find_server(f"http://127.0.0.1:{server.port}")

    # THEN
    assert (tuple(sorted(server.pids)), ()) == actual


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://192.0.2.1:8000", "192.0.2.1"),
        ("http://[2001:db8::1]:8000", "2001:db8::1"),
        ("https://llm.example.com", "llm.example.com"),
    ],
)
def test_remote_server_is_a_gap(url: str, host: str) -> None:
    """Processes of another host cannot be seen, and the gap says whose."""
    # WHEN
    actual = find_server(url)

    # THEN
    assert (None, (unseen(f"{host} is not this host: its processes cannot be seen from here"),)) == actual


def test_port_without_listener_is_a_gap() -> None:
    """A port that is forwarded from elsewhere, or belongs to another PID namespace, has no process here."""
    # WHEN
    with refused_port() as port:
        actual = find_server(f"http://127.0.0.1:{port}")

    # THEN
    assert (None, (unseen(f"no process of this PID namespace is seen listening on port {port}"),)) == actual


def test_memory_of_the_living_is_read() -> None:
    """Each process that lives comes with its name and its memory; one that has ended is left out."""
    # GIVEN a process that has ended, whose id nobody has yet
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(LONG_SECONDS)

    # WHEN
    found, gaps = read([os.getpid(), ended.pid])

    # THEN
    assert found is not None
    assert [(os.getpid(), psutil.Process().name()[:64])] == [(one.pid, one.name) for one in found]
    assert all(0 < (one.anonymous_bytes or 0) < one.resident_bytes for one in found)
    assert () == gaps


def test_server_that_has_ended_is_a_gap() -> None:
    """When none of its processes lives any more, the reading has failed."""
    # GIVEN
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(LONG_SECONDS)

    # WHEN
    actual = read([ended.pid])

    # THEN
    gap = Gap(source=SOURCE, kind="failed", reason="none of the server's processes lives any more")
    assert (None, (gap,)) == actual


def test_impossible_process_id_is_passed_over() -> None:
    """A process id that no host gives, as a trace could hold, is no process."""
    # WHEN
    actual = read([2**31, 2**40, -1])

    # THEN
    gap = Gap(source=SOURCE, kind="failed", reason="none of the server's processes lives any more")
    assert (None, (gap,)) == actual


def test_own_memory_grows_with_what_is_held() -> None:
    """Memory that a process takes shows in its resident and its anonymous bytes."""

    # GIVEN
    def own() -> HostProcess:
        found, _ = read([os.getpid()])
        assert found is not None
        return found[0]

    before = own()

    # WHEN
    held = bytearray(b"x") * (64 * 2**20)
    after = own()

    # THEN
    assert after.resident_bytes - before.resident_bytes > len(held) // 2
    assert (after.anonymous_bytes or 0) - (before.anonymous_bytes or 0) > len(held) // 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"model.safetensors": 100, "config.json": 7}, 100, id="one file"),
        pytest.param(
            {
                "model-00001-of-00002.safetensors": 100,
                "model-00002-of-00002.safetensors": 60,
                "model.safetensors.index.json": 9,
                "tokenizer.json": 9,
            },
            160,
            id="shards",
        ),
        pytest.param(
            {
                "model-00001-of-00002.safetensors": 100,
                "model-00002-of-00002.safetensors": 60,
                "consolidated.safetensors": 160,
            },
            160,
            id="shards, and the same again consolidated",
        ),
        pytest.param({"consolidated-00001.safetensors": 90, "params.json": 5}, 90, id="consolidated alone"),
        pytest.param({"model.safetensors": 100, "pytorch_model.bin": 100}, 100, id="two formats of the same"),
        pytest.param({"pytorch_model-00001.bin": 70, "pytorch_model-00002.bin": 30}, 100, id="torch files"),
        pytest.param({"model.pt": 50}, 50, id="a torch file"),
        pytest.param({"model-q4.gguf": 40}, 40, id="gguf"),
    ],
)
def test_weights_are_counted_once(tmp_path: Path, files: dict[str, int], expected: int) -> None:
    """The checkpoint's files are summed up, each weight once, and nothing else of the folder."""
    # GIVEN
    for name, size in files.items():
        (tmp_path / name).write_bytes(bytes(size))

    # WHEN
    actual = weights_bytes(str(tmp_path))

    # THEN
    assert (expected, ()) == actual


def test_weights_behind_links_are_counted(tmp_path: Path) -> None:
    """A snapshot of the Hugging Face cache, whose files are links into another folder, has its full size."""
    # GIVEN
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "d34db33f").write_bytes(bytes(100))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "d34db33f")
    (tmp_path / "snapshot" / "dangling.safetensors").symlink_to(tmp_path / "nowhere")

    # WHEN
    actual = weights_bytes(str(tmp_path / "snapshot"))

    # THEN
    assert (100, ()) == actual


INVISIBLE = "the model's files are not visible here: the weights' size is unknown"


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        pytest.param(None, INVISIBLE, id="not told"),
        pytest.param("", INVISIBLE, id="empty"),
        pytest.param("meta-llama/Llama-3.1-8B", INVISIBLE, id="a name on the hub"),
        pytest.param("/models/that/is/not/here", INVISIBLE, id="another host's folder"),
        pytest.param("/etc/passwd", INVISIBLE, id="a file"),
        pytest.param("/models/\0", INVISIBLE, id="a path with a NUL"),
        pytest.param(
            "/" + "x" * 5000,
            "the model's files cannot be read: File name too long",
            id="a name that no file system takes",
        ),
        pytest.param("/\ud800", INVISIBLE, id="a path that cannot be encoded"),
        pytest.param("/proc/1/root/models", "the model's", id="a folder that may not be looked into"),
        pytest.param("/proc/1/map_files", "the model's", id="a folder that may not be listed"),
    ],
)
def test_weights_that_cannot_be_seen_are_a_gap(root: str | None, reason: str) -> None:
    """Whatever the server names as its model's folder, a size that cannot be had is a gap and never an error."""
    # WHEN
    size, gaps = weights_bytes(root)

    # THEN
    assert None is size
    assert [(SOURCE, "absent", True)] == [(gap.source, gap.kind, gap.reason.startswith(reason)) for gap in gaps]


def test_folder_without_weights_is_a_gap(tmp_path: Path) -> None:
    """A folder that holds no weights says so."""
    # GIVEN
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").mkdir()

    # WHEN
    actual = weights_bytes(str(tmp_path))

    # THEN
    assert (None, (unseen("the model's folder has no weight files: the weights' size is unknown"),)) == actual


def test_config_is_read_as_json(tmp_path: Path) -> None:
    """The model's config.json is kept as the JSON that it is, without its white space."""
    # GIVEN
    (tmp_path / "config.json").write_text('{\n "num_hidden_layers":  4 }\n')

    # WHEN
    actual = model_config(str(tmp_path))

    # THEN
    assert '{"num_hidden_layers": 4}' == actual


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>", id="HTML"),
        pytest.param(b"\xff\xfe\xff", id="binary"),
        pytest.param(b"[" * 100_000, id="nested without end"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", id="a number without end"),
        pytest.param(b'"' + b"x" * MAX_CONFIG_BYTES + b'"', id="too long"),
    ],
)
def test_config_that_is_none_is_left_out(tmp_path: Path, content: bytes) -> None:
    """A config.json that is not JSON, or longer than any, is not kept."""
    # GIVEN
    (tmp_path / "config.json").write_bytes(content)

    # WHEN
    actual = model_config(str(tmp_path))

    # THEN
    assert None is actual


@pytest.mark.parametrize("root", [None, "", "meta-llama/Llama-3.1-8B", "/models/not/here", "/\0", "/" + "x" * 5000])
def test_config_that_cannot_be_seen_is_left_out(root: str | None) -> None:
    """Whatever the server names as its model's folder, a config that cannot be had is none and never an error."""
    # WHEN
    actual = model_config(root)

    # THEN
    assert None is actual


def test_config_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe in the config's place, which would be read for ever, is left alone."""
    # GIVEN
    os.mkfifo(tmp_path / "config.json")

    # WHEN
    actual = model_config(str(tmp_path))

    # THEN
    assert None is actual


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, None),
        ({"pod/memory.max": "max\n"}, None),
        ({"pod/memory.max": "4294967296\n"}, 2**32),
        ({"pod/memory.max": "4294967296\n", "memory.max": "1073741824\n"}, 2**30),
        ({"pod/memory.max": "-1\n"}, None),
        ({"pod/memory.max": "9" * 5000}, None),
    ],
    ids=["none", "no limit", "its own", "a parent's", "nonsense", "endless"],
)
def test_limit_is_the_least_of_machine_and_cgroups(
    limits: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    """A container's limit counts where it is below the machine's memory; what is no limit does not."""
    # GIVEN
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text("1:name=systemd:/other\n0::/pod\n")
    (tmp_path / "sys/fs/cgroup/pod").mkdir(parents=True)
    for name, text in limits.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)

    # THEN
    machine = psutil.virtual_memory().total
    assert min(machine, expected or machine) == limit_bytes([7], tmp_path)
    assert machine == limit_bytes([8], tmp_path)
    assert limit_bytes([], tmp_path) is None
