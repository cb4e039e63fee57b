"""`kvdiag agent profile` as a process next to a server: how it ends, and what it leaves in the folder."""

import signal
from pathlib import Path
from urllib.request import Request, urlopen

from tests.fixtures.hostile import free_port
from tests.integration.vllm.cli import finished, kvdiag
from tests.integration.vllm.cli import started as command_started
from tests.unit.agent.subject import environment
from tests.unit.agent.test_memory_profile import KEEPS
from tests.unit.agent.test_publishing import started, wait_for
from tests.unit.commands.serve.test_serve import daemon


def files(folder: Path) -> list[str]:
    """Requests and answers in the agents' folder."""
    return [path.name for path in folder.glob("*profile-*")]


def test_interrupted_profile_ends_the_tracing(agent: Path, tmp_path: Path) -> None:
    """Ctrl-C, SIGTERM of a supervisor and SIGHUP of a closed terminal: no request stays, and the next one is made."""
    with started(KEEPS, environment(agent, tmp_path)):
        wait_for(lambda: bool(list(tmp_path.glob("agent-*"))))
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with command_started("agent", "profile", "--agent-dir", str(tmp_path), "--seconds", "300") as process:
                wait_for(lambda: "tracing" in "".join(path.read_text() for path in tmp_path.glob("profile-[0-9]*")))
                process.send_signal(sent)
                result = finished(process)
            assert (3, "") == (result.code, result.stdout), sent
            assert result.stderr.splitlines()[-1].startswith("kvdiag: interrupted: "), result.stderr
            assert [] == files(tmp_path)
        again = kvdiag("agent", "profile", "--agent-dir", str(tmp_path), "--seconds", "2", "--output", "json")
    assert (0, "named") == (again.code, again.document["processes"][0]["answer"]), again.stderr


def test_profile_after_one_whose_command_was_killed(agent: Path, tmp_path: Path) -> None:
    """Its request stays until the agent has answered it, and not for the time of the longest one."""
    profile = ("agent", "profile", "--agent-dir", str(tmp_path), "--seconds", "2")
    with started(KEEPS, environment(agent, tmp_path)):
        wait_for(lambda: bool(list(tmp_path.glob("agent-*"))))
        # Longer than the command next to it takes to start on a busy machine.
        with command_started(*profile[:-1], "12") as process:
            wait_for(lambda: bool(list(tmp_path.glob("profile-[0-9]*"))))
            process.kill()
            process.wait()
        assert 3 == kvdiag(*profile).code
        wait_for(lambda: kvdiag(*profile).code == 0)
    assert [] == files(tmp_path)


def test_a_daemon_takes_profiles_where_they_are_allowed(agent: Path, tmp_path: Path) -> None:
    """POST begins it, GET has the document of `agent profile`, and the daemon's end leaves no request behind."""
    with started(KEEPS, environment(agent, tmp_path)):
        wait_for(lambda: bool(list(tmp_path.glob("agent-*"))))
        with daemon(f"http://127.0.0.1:{free_port()}", "--agent-dir", str(tmp_path), "--allow-profile") as serving:
            asked = Request(f"{serving.address}/api/v1/profile?seconds=2", method="POST")
            with urlopen(asked, timeout=10) as answer:
                assert 202 == answer.status
            wait_for(lambda: (serving.get("/api/v1/profile") or {}).get("state") == "done")
            assert ["named"] == [one["answer"] for one in serving.get("/api/v1/profile")["processes"]]
            with urlopen(Request(f"{serving.address}/api/v1/profile?seconds=300", method="POST"), timeout=10):
                wait_for(lambda: bool(list(tmp_path.glob("profile-[0-9]*"))))
            serving.process.terminate()
            assert 0 == serving.process.wait(30)
    assert [] == files(tmp_path)
