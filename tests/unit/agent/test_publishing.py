"""The agent in its own process with a stand-in for torch: what it publishes, and what it never does."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdiag.agent.process import parse_sizes
from kvdiag.agent.publication import encoded
from tests.integration.vllm.sessions import kill_session
from tests.unit.agent.subject import BUSY, ONCE, environment, names_in, published, run

LIMIT_SECONDS = 30.0


def wait_for(reached: Callable[[], bool]) -> None:
    """Poll until `reached`."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not reached within {LIMIT_SECONDS} s")
        time.sleep(0.01)


@contextmanager
def started(program: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A program, running; killed at the end, its children with it."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            kill_session(process.pid)


def test_everything_of_a_process_is_published(agent: Path, tmp_path: Path) -> None:
    """One file has torch's statistics, the split of its reserved bytes, and who the process is."""
    pid = run(
        BUSY + ONCE + "agent.publish(); print(os.getpid())", environment(agent, tmp_path, env={"LOCAL_RANK": "3"})
    )

    (told,) = published(tmp_path)
    (device,) = told["devices"]
    split = device["fragmentation"]
    mib = 2**20
    assert (1, 1, {"local": 3}) == (told["kvdiag_agent"], told["sequence"], told["ranks"])
    assert pid == told["process"]["pid"] == told["process"]["namespace_pids"][-1]
    assert os.getuid() == told["process"]["user_id"]
    # Anonymous memory may be in swap.
    assert min(told["process"]["resident_bytes"], told["process"]["anonymous_bytes"]) > mib
    assert (True, "native", "2.13.0+standin") == tuple(
        told["torch"][name] for name in ("cuda_initialised", "backend", "version")
    )
    assert told["torch"]["settings"]["expandable_segments"] is False
    assert "01234567-89ab-cdef-0123-456789abcdef" == device["uuid"]
    assert 516 * mib == device["statistics"]["allocated_bytes"]["current"]
    assert {"count": 1, "reserved_bytes": 30 * mib} == device["statistics"]["private_pools"]
    assert (20 * mib, 60 * mib, 30 * mib) == (
        split["releasable_bytes"],
        split["stranded_bytes"],
        split["private_bytes"],
    )
    assert {"driver": "DriverError: no libnvidia-ml.so.1 here"} == told["errors"]


def test_a_size_that_the_kernel_does_not_report_is_left_out() -> None:
    """A process without memory of its own has no VmRSS: that is not 0 bytes."""
    assert {} == parse_sizes(b"Name:\tworker\nThreads:\t1\n")
    assert {"resident_bytes": 4096} == parse_sizes(b"VmRSS:\t4 kB\n")


def test_torch_is_never_imported(agent: Path, tmp_path: Path) -> None:
    """A process without torch publishes nothing, and has none afterwards."""
    assert (False, []) == (
        run(
            "import json, os, sys\n" + ONCE + "agent.publish(); print(json.dumps('torch' in sys.modules))",
            environment(agent, tmp_path),
        ),
        published(tmp_path),
    )


def test_without_its_variable_it_does_nothing(agent: Path) -> None:
    """A server that merely has the agent on its path starts no thread and imports nothing of it but the way in."""
    program = "import json, sys, threading, kvdiag_agent; kvdiag_agent.register()\n"
    tell = "print(json.dumps([threading.active_count(), [name for name in sys.modules if 'kvdiag' in name]]))"
    assert [1, ["kvdiag_agent"]] == run(program + tell, environment(agent, None))


def test_it_is_renewed_each_second_by_one_thread(agent: Path, tmp_path: Path) -> None:
    """Registered twice, it publishes once a second; an orderly end takes the file away."""
    program = BUSY + "import kvdiag_agent as agent; agent.register(); agent.register(); input()"
    with started(program, environment(agent, tmp_path)) as process:
        wait_for(lambda: any(one["sequence"] >= 3 for one in published(tmp_path)))
        (told,) = published(tmp_path)
        threads = names_in(Path(f"/proc/{process.pid}/task"))
        process.communicate("\n", timeout=LIMIT_SECONDS)

    assert 1.0 == told["period_seconds"]
    assert 2 == len(threads)
    assert [] == published(tmp_path)


def test_killed_process_leaves_its_last_word(agent: Path, tmp_path: Path) -> None:
    """A file that stays, and stays as it is, is what is left of a process that died."""
    program = BUSY + "import kvdiag_agent; kvdiag_agent.register(); input()"
    with started(program, environment(agent, tmp_path)) as process:
        wait_for(lambda: published(tmp_path) != [])

        process.kill()
        process.wait()

    (told,) = published(tmp_path)
    assert process.pid == told["process"]["pid"]
    assert [f"agent-{process.pid}-{told['process']['start_ticks']}.json"] == names_in(tmp_path)


def test_forked_processes_publish_too(agent: Path, tmp_path: Path) -> None:
    """The child of a fork has no threads: it gets an agent of its own, and the parent keeps its."""
    program = BUSY + (
        "import kvdiag_agent; kvdiag_agent.register()\n"
        "child = os.fork()\n"
        "if child == 0: time.sleep(60); os._exit(0)\n"
        "print(child, flush=True); input(); os.kill(child, 9)"
    )
    with started(program, environment(agent, tmp_path)) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())

        wait_for(lambda: len(published(tmp_path)) == 2 and all(one["sequence"] >= 2 for one in published(tmp_path)))
        told = {one["process"]["pid"]: one for one in published(tmp_path)}
        process.communicate("\n", timeout=LIMIT_SECONDS)

    assert {process.pid, child} == set(told)
    assert told[child]["process"]["start_ticks"] >= told[process.pid]["process"]["start_ticks"]


def test_a_forked_worker_that_ends_normally_leaves_nothing(agent: Path, tmp_path: Path) -> None:
    """Only a killed process leaves a file; a worker of multiprocessing ends without atexit."""
    program = BUSY + (
        "import kvdiag_agent, multiprocessing; kvdiag_agent.register()\n"
        "workers = multiprocessing.get_context('fork')\nleave = workers.Event()\n"
        "worker = workers.Process(target=leave.wait)\nworker.start(); input(); leave.set(); worker.join()"
    )
    with started(program, environment(agent, tmp_path)) as process:
        wait_for(lambda: len(published(tmp_path)) == 2)
        process.communicate("\n", timeout=LIMIT_SECONDS)
    assert [] == published(tmp_path)


def test_reader_never_sees_half_a_file(agent: Path, tmp_path: Path) -> None:
    """A reader gets a whole publication at each read while the agent writes at full speed, and never an older one."""
    program = BUSY + ONCE + "end = time.monotonic() + 1.5\nwhile time.monotonic() < end: agent.publish()"
    seen: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            seen.extend(one["sequence"] for one in published(tmp_path))

    reader = threading.Thread(target=read)
    reader.start()

    try:
        run(program, environment(agent, tmp_path))
    finally:
        over.set()
        reader.join()

    assert len(set(seen)) > 10
    assert sorted(seen) == seen


@pytest.mark.parametrize("umask", ["0o077", "0o000"])
def test_file_is_for_the_owner_and_its_group(agent: Path, tmp_path: Path, umask: str) -> None:
    """With any umask of the server the file has mode 0640, and a folder that the agent creates 0750."""
    run(BUSY + f"os.umask({umask})\n" + ONCE + "agent.publish()", environment(agent, tmp_path / "made"))
    (file,) = (tmp_path / "made").iterdir()
    assert (0o640, 0o750) == (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE((tmp_path / "made").stat().st_mode))


def test_summary_is_made_when_it_is_asked_for(agent: Path, tmp_path: Path) -> None:
    """The blocks are looked at once a minute; sooner where that was asked for, though not twice within ten seconds."""
    # A clock that the test moves
    program = (
        BUSY
        + ONCE
        + (
            "import types; from kvdiag_agent import document\n"
            "now, counts, asked = [1000.0], [], [0]\n"
            "document.time = types.SimpleNamespace(monotonic=lambda: now[0], time=time.time)\n"
            "request = os.path.join(os.environ['KVDIAG_AGENT_DIR'], 'summary-request')\n"
            "def look(seconds=0.0): now[0] += seconds; agent.publish(); counts.append(WORLD.snapshots)\n"
            "def ask(): open(request, 'w').close(); asked[0] += 1; os.utime(request, (asked[0], asked[0]))\n"
            "look(); look(); look(30.0)\n"
            "ask(); look(); look()\n"
            "ask(); look(9.0); look(2.0); look()\n"
            "look(59.0); look(2.0); print(json.dumps(counts))"
        )
    )
    assert [1, 1, 1, 2, 2, 2, 3, 3, 3, 4] == run(program, environment(agent, tmp_path))


def test_all_that_torch_counts_is_there_too(agent: Path, tmp_path: Path) -> None:
    """Of every array all pools and figures, from the slow reading before; private pools are only summed up."""
    program = BUSY + ONCE + "agent.publish(); WORLD.segment((40 * MIB, ACTIVE)); agent.publish()\n"
    tell = "told = torch.cuda.memory_stats_as_nested_dict(0); print(json.dumps(sorted(told.keys())))"

    known = run(program + tell, environment(agent, tmp_path))

    mib = 2**20
    (told,) = published(tmp_path)
    (device,) = told["devices"]
    whole = told["memory_stats"]["devices"]["0"]
    assert set(known) - {"reserved_bytes_by_private_pools"} == set(whole)
    assert {"current", "peak", "allocated", "freed"} == set(whole["allocated_bytes"]["small_pool"])
    assert (556 * mib, 516 * mib) == (
        device["statistics"]["allocated_bytes"]["current"],
        whole["allocated_bytes"]["all"]["current"],
    )
    assert told["monotonic_seconds"] > told["memory_stats"]["at_monotonic_seconds"]


def test_what_torch_counts_strangely_costs_nothing_else(agent: Path, tmp_path: Path) -> None:
    """A figure of a torch to come that is no JSON is named, and all that is judged by is published."""
    strange = (
        "kept = torch.cuda.memory_stats_as_nested_dict\n"
        "torch.cuda.memory_stats_as_nested_dict = lambda device: {**kept(device), 'new': object()}\n"
    )

    run(BUSY + strange + ONCE + "agent.publish(); agent.publish()", environment(agent, tmp_path))

    (told,) = published(tmp_path)
    assert "TypeError" in told["errors"]["memory_stats"]
    assert ({}, 516 * 2**20) == (told["memory_stats"], told["devices"][0]["statistics"]["allocated_bytes"]["current"])


def test_older_torch_is_asked_in_its_own_way(agent: Path, tmp_path: Path) -> None:
    """Before torch 2.11 a snapshot takes no word about traces, and earlier ones no pool either."""
    change = "torch.cuda.memory_snapshot = lambda {0}: 0\n"
    tell = ONCE + "agent.publish(); print(WORLD.snapshots)"

    actual = [
        run(BUSY + change.format(parameters) + tell, environment(agent, tmp_path / str(number)))
        for number, parameters in enumerate(("mempool_id=None", ""))
    ]

    segments = [published(tmp_path / name)[0]["devices"][0]["fragmentation"]["segments"] for name in ("0", "1")]
    assert ([1, 1], [4, 4]) == (actual, segments)


def test_files_of_agents_long_gone_are_removed(agent: Path, tmp_path: Path) -> None:
    """A new agent clears away what is an hour old, and keeps what is younger or not the agents'."""
    ages = {
        "agent-1-1.json": 4000,
        ".agent-2-2.json.new": 4000,
        "agent-3-3.json": 60,
        "oom-1-1-0.json": 4000,
        "notes": 10**7,
    }
    for name, age_seconds in ages.items():
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (time.time() - age_seconds,) * 2)

    run(BUSY + ONCE + "agent.publish()", environment(agent, tmp_path))

    assert {"agent-3-3.json", "oom-1-1-0.json", "notes"} == {name for name in names_in(tmp_path) if name in ages}


def test_command_line_is_not_shown(agent: Path, tmp_path: Path) -> None:
    """Only a process's short name is reported, since command lines can contain keys."""
    run(BUSY + ONCE + "agent.publish()  # --api-key=secret", environment(agent, tmp_path))
    (file,) = tmp_path.iterdir()
    assert "secret" not in file.read_text()
    assert json.loads(file.read_text())["process"]["title"].startswith("python")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("bin/trtllm-serve", "serve", "m", "--host=secret"), "trtllm-serve"),
        (("-m", "mpi4py.futures.server"), "mpi4py.futures.server"),
        (("-m", "tensorrt_llm.llmapi.mgmn_worker_node"), "tensorrt_llm.llmapi.mgmn_worker_node"),
        (("-m", "sglang.launch_server", "--api-key", "secret"), "sglang.launch_server"),
        (("bin/lmdeploy", "serve", "api_server", "m"), "lmdeploy"),
        (("bin/text-generation-server", "serve", "m", "--json-output"), "text-generation-server"),
        (("bin/secret.py", "--engine", "vllm"), "python"),
    ],
)
def test_engines_programs_are_named(words: tuple[str, ...], expected: str, agent: Path, tmp_path: Path) -> None:
    """A process that is called python has the name of the engine's script or module that it runs, and no argument."""
    file = tmp_path / (words[0] if words[0] != "-m" else f"{words[1].replace('.', '/')}.py")
    file.parent.mkdir(parents=True)
    file.write_text("from kvdiag_agent.process import title; print(title())")
    told = environment(agent, None, torch=None)
    told["PYTHONPATH"] += f"{os.pathsep}{tmp_path}"
    done = subprocess.run([sys.executable, *words], env=told, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(expected)
    assert "secret" not in done.stdout


def test_ranks_that_mpi_gives_are_published(agent: Path, tmp_path: Path) -> None:
    """TensorRT-LLM's ranks have no torch.distributed: Open MPI's environment has their ranks."""
    given = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    program = "import json; from kvdiag_agent.process import ranks; print(json.dumps(ranks()))"
    assert {"global": 5, "world": 8, "local": 1} == run(program, environment(agent, None, torch=None, env=given))


def test_other_servers_get_it_from_sitecustomize(agent: Path, tmp_path: Path) -> None:
    """With its folder on the path every Python process publishes, and the sitecustomize it hides runs as before."""
    (tmp_path / "distribution").mkdir()
    (tmp_path / "distribution" / "sitecustomize.py").write_text("import os; os.environ['SEEN'] = 'yes'\n")
    told = environment(agent, tmp_path / "published")
    told["PYTHONPATH"] = os.pathsep.join(
        (str(agent / "sitecustomize"), told["PYTHONPATH"], str(tmp_path / "distribution"))
    )

    actual = run("import json, os, threading; print(json.dumps([os.environ['SEEN'], threading.active_count()]))", told)

    assert ["yes", 2] == actual


def test_a_part_that_changes_is_written_anew() -> None:
    """What is as it was is not made JSON again; what is another, or another part, is what it is now."""
    kept: dict[str, tuple[dict[str, object], str]] = {}
    parts = (("a", {"x": [1]}), ("a", {"x": [1]}), ("a", {"x": [2]}), ("b", {"x": [1]}))
    told = [encoded(kept, *one) for one in parts]
    assert ['{"x":[1]}', '{"x":[1]}', '{"x":[2]}', '{"x":[1]}'] == told
    assert told[0] is told[1]
    assert "null" == encoded(kept, "a", None)
    assert '{"x":[2]}' == encoded(kept, "a", {"x": [2]})
