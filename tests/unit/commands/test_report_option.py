"""`--report FILE`: refused before anything begins, whole or not there, and nothing in it that is secret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvdiag.commands import cli, main
from kvdiag.commands.diagnose import command
from kvdiag.commands.options.report_file import ReportFile
from kvdiag.errors import KvdiagError
from kvdiag.feeds.recording.trace import TraceWriter
from kvdiag.model import Mark, Sample
from kvdiag.outputs.html.report_page import Making
from tests.builders.runs import run
from tests.builders.values import OOM
from tests.builders.worlds import World, facts
from tests.unit.commands.conftest import Run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A leaking server's trace."""
    return written(tmp_path / "leak.jsonl", World(leaked_blocks_per_request=4))


def written(path: Path, world: World) -> Path:
    """The trace of a run."""
    timeline = run(world)
    entries: list[Sample | Mark] = [*timeline.samples, *timeline.marks]
    entries.sort(key=lambda one: one.at_seconds)
    with TraceWriter(path, facts(world)) as writer:
        for entry in entries:
            writer.add(entry)
    return path


def test_a_trace_gives_a_report(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --report the printed verdict and the exit code are unchanged, and the HTML page is written."""
    assert 2 == main(["diagnose", str(trace)])
    before = capsys.readouterr()
    report = tmp_path / "report.html"
    assert 2 == main(["diagnose", str(trace), "--report", str(report)])

    assert before == capsys.readouterr()
    page = report.read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert page.endswith("</html>\n")
    assert "leak.kv_blocks" in page
    assert f"<code>kvdiag diagnose {trace} --report {report}</code>" in page
    assert ["leak.jsonl", "report.html"] == sorted(one.name for one in tmp_path.iterdir())


def test_json_and_a_report_go_together(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A report changes nothing of the document."""
    main(["diagnose", str(trace), "--output", "json", "--report", str(tmp_path / "report.html")])

    assert "fault" == json.loads(capsys.readouterr().out)["worst"]


def test_several_traces_give_one_report(tmp_path: Path, trace: Path) -> None:
    """All replicas in a table, the worst in full with its plots."""
    healthy = written(tmp_path / "healthy.jsonl", World())

    report = tmp_path / "report.html"
    assert 2 == main(["diagnose", str(healthy), str(trace), "--report", str(report)])

    page = report.read_text(encoding="utf-8")
    assert "2 replicas: 1 fault, 1 ok" in page
    assert f"In full: {trace}" in page
    assert "GPU 0 memory" in page


def test_a_post_mortem_gives_a_report(tmp_path: Path) -> None:
    """A post-mortem of a log alone writes a page with the cause, and says that there are no plots."""
    log = tmp_path / "log"
    log.write_text(OOM)

    report = tmp_path / "report.html"
    code = main(["diagnose", "--postmortem", str(log), "--report", str(report)])

    page = report.read_text(encoding="utf-8")
    assert code in (1, 2)
    assert "Not enough samples" in page


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("nowhere/report.html", "No such file or directory"),
        (".", "not a regular file"),
        ("fifo", "not a regular file"),
        ("loop", "it is a symbolic link"),
        ("x" * 300, "name too long"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, reason: str
) -> None:
    """One line says which file and why, and nothing is read or run before."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = tmp_path / place
    for called in (["diagnose", str(tmp_path / "no.jsonl")], ["run", "--url", "http://127.0.0.1:1"]):
        code = main([*called, "--report", str(path)])
        out, err = capsys.readouterr()

        assert (3, "", 1) == (code, out, err.count("\n"))
        assert f" report to {path}: " in err
        assert reason.lower() in err.lower()


def test_what_was_there_is_kept_where_nothing_comes_of_it(tmp_path: Path) -> None:
    """A failing call leaves the previous report unchanged and no other file in the folder."""
    report = tmp_path / "report.html"
    report.write_text("older")
    assert 3 == main(["diagnose", str(tmp_path / "no.jsonl"), "--report", str(report)])

    assert "older" == report.read_text()
    assert [report] == list(tmp_path.iterdir())


def test_a_report_has_the_mode_that_files_have(tmp_path: Path, trace: Path) -> None:
    """As any file that is made here."""
    plain = tmp_path / "plain"
    plain.touch()

    main(["diagnose", str(trace), "--report", str(tmp_path / "report.html")])

    assert plain.stat().st_mode == (tmp_path / "report.html").stat().st_mode


def test_a_page_that_fails_half_way_leaves_nothing(tmp_path: Path, trace: Path) -> None:
    """An interruption while the report is made leaves no partial report and no temporary file."""
    report = tmp_path / "report.html"

    def interrupted(making: Making) -> str:
        raise KeyboardInterrupt

    with click.Context(click.Command("x")), pytest.raises(KeyboardInterrupt):
        ReportFile(report).write(interrupted)

    assert [trace] == list(tmp_path.iterdir())


def test_a_full_disk_is_told_after_the_verdict(trace: Path) -> None:
    """Where there is no room for the report the verdict is printed all the same, and one line says what is missing."""
    limited = f"ulimit -f 1; exec python -m kvdiag diagnose {trace} --report {trace.parent / 'report.html'}"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    done = subprocess.run(["sh", "-c", limited], env=environment, capture_output=True, text=True, check=False)

    assert 3 == done.returncode
    assert done.stdout.startswith("FAULT  leak.kv_blocks")
    assert done.stderr.endswith(f" report to {trace.parent / 'report.html'}: File too large\n")
    assert 1 == done.stderr.count("\n")
    assert [trace] == list(trace.parent.iterdir())


@pytest.mark.parametrize("how", [(), ("--postmortem",), ("--postmortem", "--trace")], ids=" ".join)
def test_a_report_is_not_written_over_what_it_is_made_of(
    trace: Path, capsys: pytest.CaptureFixture[str], how: tuple[str, ...]
) -> None:
    """Neither under its own name nor under another one of it."""
    kept = trace.read_bytes()
    link = trace.with_name("link")
    link.symlink_to(trace)
    codes = [main(["diagnose", *how, str(trace), "--report", str(target)]) for target in (trace, link)]
    assert [3, 3] == codes
    told = capsys.readouterr()
    assert ("", 2) == (told.out, told.err.count("; give another file\n"))
    assert kept == trace.read_bytes()


def test_no_secret_stands_in_a_report(tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials from options and from the environment do not appear in the report."""
    report = tmp_path / "report.html"
    monkeypatch.setenv("KVDIAG_DIAGNOSE_TOKEN", "hunter3")
    given = ["--prometheus", "http://me:hunter2@host:9090/", "--password", "hunter4", "--header", "X-Key:hunter5"]
    above = click.Context(cli, **cli.context_settings)
    context = command.make_context("diagnose", [*given, "--report", str(report)], parent=above)

    with context:
        ReportFile(report).write(lambda making: making.command)

    assert "hunter" not in report.read_text()
    assert "diagnose --prometheus http://host:9090/ --password ... --token ... --header ..." in report.read_text()


@pytest.mark.parametrize("story", ["healthy", "kv-leak"])
def test_a_run_writes_its_report(story: str, run: Run) -> None:
    """A run's report holds its verdict, its plots and its command line."""
    page = run.report.read_text(encoding="utf-8")

    assert run.document["worst"].upper() in page
    assert "KV pool in use" in page
    assert f"--simulate {story}" in page


def test_an_unwritable_folder_is_told(tmp_path: Path) -> None:
    """A folder that takes no files is known beforehand."""
    if os.geteuid() == 0:
        # Root may write anywhere: a file in the place of the folder stands for it.
        (tmp_path / "folder").touch()
    else:
        (tmp_path / "folder").mkdir(mode=0o500)

    with pytest.raises(KvdiagError, match=r"(Not a directory|Permission denied)"):
        ReportFile(tmp_path / "folder" / "report.html")
