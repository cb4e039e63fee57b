"""The server's processes on this host, with real ones that listen: which they are, what they hold and may hold."""

import mmap
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kvdiag.engines.llamacpp import ENGINE
from kvdiag.model import Gap, HostProcess
from kvdiag.sources.host import SOURCE, commands, find_server, limit_bytes, read
from tests.builders.answers import containing
from tests.fixtures.hostile import refused_port
from tests.unit.sources.host_programs import LAUNCHER, LONG_SECONDS, SERVER, listening, unseen


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", socket.gethostname()])
def test_listener_is_found_with_its_children(host: str) -> None:
    """The process that listens on the port and its workers are the server; the parent that started it is not."""
    with listening(SERVER) as server:
        actual = find_server(f"http://{host}:{server.port}", "vllm")
    assert (tuple(sorted(server.pids)), ()) == actual


def test_a_listener_of_another_address_is_not_the_server() -> None:
    """Anybody can listen on the same port of another loopback address."""
    with listening(SERVER) as server:
        actual, _ = find_server(f"http://127.0.0.2:{server.port}", "vllm")
    assert actual is None


def test_launcher_of_the_same_program_belongs_to_the_server() -> None:
    """With several API servers the one that started them is theirs, where it runs vLLM by the same interpreter."""
    with listening(LAUNCHER, "vllm", "serve") as server:
        actual = find_server(f"http://127.0.0.1:{server.port}", "vllm")
    assert server.launcher is not None
    assert (tuple(sorted((server.launcher, *server.pids))), ()) == actual


@pytest.mark.parametrize(
    ("starter", "argument", "program"),
    [
        ("text-generation-launcher", "--json-output", "text-generation"),
        ("mpirun", "trtllm-llmapi-launch", "trtllm"),
    ],
)
def test_launcher_of_another_program_belongs_to_the_server(
    starter: str, argument: str, program: str, tmp_path: Path
) -> None:
    """TGI's router listens, its launcher started the shards; MPI starts TensorRT-LLM's ranks: all are the server."""
    copied = shutil.copy(Path(shutil.which("sh") or "").resolve(), tmp_path / starter)
    with listening(SERVER, argument, starter=str(copied)) as server:
        launcher = psutil.Process(server.pids[0]).ppid()
        actual = find_server(f"http://127.0.0.1:{server.port}", program)
    assert (tuple(sorted((launcher, *server.pids))), ()) == actual


def test_a_server_of_one_process_has_no_launcher(tmp_path: Path) -> None:
    """llama-swap and llama.cpp's router start several servers: the others and their options are not this server's."""
    copied = shutil.copy(Path(shutil.which("sh") or "").resolve(), tmp_path / "llama-swap")
    with listening(SERVER, "llama-server", starter=str(copied)) as server:
        actual = find_server(f"http://127.0.0.1:{server.port}", ENGINE.program)
    assert (tuple(sorted(server.pids)), ()) == actual


def test_command_lines_are_read() -> None:
    """Each process has its command line; an exited one has none."""
    with listening(LAUNCHER, "vllm", "serve", "--mm-processor-cache-gb", "2") as server:
        launcher, gone = commands((server.launcher or 0, 2**22 + 1))
    assert launcher.endswith(" vllm serve --mm-processor-cache-gb 2")
    assert gone == ""


def test_starter_of_another_program_stays_out() -> None:
    """A script that starts a server and is no vLLM itself is not counted in."""
    with listening(LAUNCHER, "benchmark") as server:
        actual = find_server(f"http://127.0.0.1:{server.port}", "vllm")
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
    """Processes of another host are a gap that names that host."""
    assert (None, (unseen(containing(f"{host} is another host")),)) == find_server(url, "vllm")


def test_port_without_listener_is_a_gap() -> None:
    """A port that is forwarded from elsewhere, or belongs to another PID namespace, has no process here."""
    with refused_port() as port:
        actual = find_server(f"http://127.0.0.1:{port}", "vllm")
    assert (None, (unseen(containing(f"port {port}")),)) == actual


def test_memory_of_the_living_is_read() -> None:
    """Each process that lives comes with its name and its memory; one that has ended is left out."""
    # An exited process, whose id is not in use again yet
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(LONG_SECONDS)
    found, gaps = read([os.getpid(), ended.pid])
    assert found is not None
    assert [(os.getpid(), psutil.Process().name()[:64])] == [(one.pid, one.name) for one in found]
    assert all(0 < (one.anonymous_bytes or 0) < one.resident_bytes for one in found)
    assert () == gaps


@pytest.mark.parametrize("swapped", ["VmSwap:\t 9437184 kB\n", "", "VmSwap: much\n"])
def test_memory_in_swap_is_the_processs_own(swapped: str, tmp_path: Path) -> None:
    """A leak that is never read again is moved to swap: 9 GiB of it count, though little is resident."""
    status = tmp_path / "proc" / str(os.getpid()) / "status"
    status.parent.mkdir(parents=True)
    status.write_text(f"VmRSS:\t   71680 kB\n{swapped}Threads:\t1\n")
    found, _ = read([os.getpid()], root=tmp_path)
    assert found is not None
    assert ("9437184" in swapped) is ((found[0].anonymous_bytes or 0) >= 9 * 2**30)
    assert found[0].resident_bytes < 9 * 2**30


def test_server_that_has_ended_is_a_gap() -> None:
    """When all of the server's processes have exited, the read fails."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(LONG_SECONDS)
    assert (None, (Gap(source=SOURCE, kind="failed", reason=containing("have exited")),)) == read([ended.pid])


def test_impossible_process_id_is_passed_over() -> None:
    """A process id that no host gives, as a trace could hold, is no process."""
    assert (None, (Gap(source=SOURCE, kind="failed", reason=containing("have exited")),)) == read([2**31, 2**40, -1])


def test_own_memory_grows_with_what_is_held() -> None:
    """Memory that a process takes shows in its resident and its anonymous bytes."""

    def own() -> HostProcess:
        found, _ = read([os.getpid()])
        assert found is not None
        return found[0]

    before = own()

    size_bytes = 64 * 2**20
    # Not by malloc, which may hand out again what an earlier test has given back to it.
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        held.write(b"x" * size_bytes)
        after = own()

    assert after.resident_bytes - before.resident_bytes > size_bytes // 2
    assert (after.anonymous_bytes or 0) - (before.anonymous_bytes or 0) > size_bytes // 2


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
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text("1:name=systemd:/other\n0::/pod\n")
    (tmp_path / "sys/fs/cgroup/pod").mkdir(parents=True)
    for name, text in limits.items():
        (tmp_path / "sys/fs/cgroup" / name).write_text(text)

    machine = psutil.virtual_memory().total
    assert min(machine, expected or machine) == limit_bytes([7], tmp_path)
    assert machine == limit_bytes([8], tmp_path)
    assert limit_bytes([], tmp_path) is None
