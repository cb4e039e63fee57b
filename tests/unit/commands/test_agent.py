"""`kvdiag agent install`: what it puts where, and that it can be put over itself."""

import importlib.metadata
import os
import stat
from pathlib import Path

import kvdiag
from tests.unit.agent.subject import environment, run
from tests.unit.commands.bad_input.refusals import call as command


def test_server_finds_it_without_installing(tmp_path: Path) -> None:
    """The folder alone on the path is enough for vLLM's entry point, and the words to set are on stdout."""
    result = command("agent", "install", str(tmp_path / "agent"))
    (found,) = importlib.metadata.distributions(path=[str(tmp_path / "agent")])
    (entry,) = found.entry_points.select(group="vllm.general_plugins")
    assert (0, kvdiag.__version__) == (result.code, found.version)
    assert ("kvdiag_agent", "kvdiag_agent:register") == (entry.name, entry.value)
    assert f"KVDIAG_AGENT_DIR={tmp_path}/agent/published\nPYTHONPATH={tmp_path}/agent\n" == result.stdout
    assert "VLLM_PLUGINS" in result.stderr


def test_it_works_from_there_alone(tmp_path: Path) -> None:
    """The installed agent runs without importing kvdiag or its dependencies."""
    command("agent", "install", str(tmp_path / "agent"))
    program = "import json, sys, kvdiag_agent.report as r; r.memory_report()\n"
    tell = "print(json.dumps([name for name in sys.modules if name.split('.')[0] in ('kvdiag', 'click', 'pynvml')]))"
    assert [] == run(program + tell, environment(tmp_path / "agent", None, torch=None))


def test_installed_again_it_is_the_same(tmp_path: Path) -> None:
    """A second installation replaces each file, leaves nothing unfinished, and any user may read all of it."""
    command("agent", "install", str(tmp_path))
    (tmp_path / "kvdiag_agent" / "thread.py").write_text("an older version")
    again = command("agent", "install", str(tmp_path))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert 0 == again.code
    assert "an older version" != (tmp_path / "kvdiag_agent" / "thread.py").read_text()
    assert [] == [path for path in files if path.name.startswith(".") or stat.S_IMODE(path.stat().st_mode) != 0o644]


def test_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A file in the place of the agent's folder is an error of one line."""
    (tmp_path / "file").touch()
    result = command("agent", "install", str(tmp_path / "file"))
    assert (3, "") == (result.code, result.stdout)
    assert f"kvdiag: cannot install into {tmp_path}/file: Not a directory\n" == result.stderr


def test_any_user_can_read_it_whatever_the_umask(tmp_path: Path) -> None:
    """Folders and files are world-readable under a strict umask: the server may run as another user."""
    before = os.umask(0o077)
    try:
        command("agent", "install", str(tmp_path / "volume" / "agent"))
    finally:
        os.umask(before)
    folders = [path for path in (tmp_path / "volume").rglob("*") if path.is_dir()]
    assert {0o755} == {stat.S_IMODE(path.stat().st_mode) for path in folders}


def test_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """Who may write in the folder, as the server may, cannot have kvdiag write elsewhere."""
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "agent" / "kvdiag_agent").mkdir(parents=True)
    (tmp_path / "agent" / "kvdiag_agent" / ".thread.py.new").symlink_to(tmp_path / "precious")
    result = command("agent", "install", str(tmp_path / "agent"))
    assert (0, "precious") == (result.code, (tmp_path / "precious").read_text())
    assert not (tmp_path / "agent" / "kvdiag_agent" / "thread.py").is_symlink()


def test_path_that_no_pythonpath_can_hold_is_refused(tmp_path: Path) -> None:
    """A colon would make two folders of it, of which neither is there."""
    result = command("agent", "install", str(tmp_path / "a:b"))
    assert (3, "") == (result.code, result.stdout)
    assert "PYTHONPATH cannot hold" in result.stderr


def test_server_that_has_kvdiag_installed_needs_nothing_more() -> None:
    """kvdiag itself declares the plugin."""  # noqa: D403 - its name
    entries = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvdiag_agent")
    assert {"kvdiag.agent:register"} == {entry.value for entry in entries}


def test_audit_says_what_it_looked_for(tmp_path: Path) -> None:
    """Without a GPU and without agents the audit has nothing, and says of each why."""
    result = command("audit", "--agent-dir", str(tmp_path))
    assert (3, "", 1) == (result.code, result.stdout, result.stderr.count("\n"))
    assert result.stderr.startswith("kvdiag: nothing to audit: ")
    assert f"; no agent publishes in {tmp_path}" in result.stderr
    assert "--url" in result.stderr
