"""`kvdiag agent profile` as a process next to a server: how it ends, and what it leaves in the folder."""

import signal
from pathlib import Path

from tests.integration.vllm.cli import finished, kvdiag
from tests.integration.vllm.cli import started as command_started
from tests.unit.agent.subject import environment
from tests.unit.agent.test_memory_profile import KEEPS
from tests.unit.agent.test_publishing import started, wait_for


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
        with command_started(*profile) as process:
            wait_for(lambda: bool(list(tmp_path.glob("profile-[0-9]*"))))
            process.kill()
            process.wait()
        assert 3 == kvdiag(*profile).code
        wait_for(lambda: kvdiag(*profile).code == 0)
    assert [] == files(tmp_path)
