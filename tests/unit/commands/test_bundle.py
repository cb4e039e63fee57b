"""`kvdiag bundle`: what goes in is what `kvdiag diagnose` finds in it again; an archive of anybody else is refused."""

import io
import json
import zipfile
from pathlib import Path

import pytest

from kvdiag.feeds.recording.archive import MAX_ENTRIES, NEWEST_SECONDS, newest
from kvdiag.feeds.recording.folder_timeline import read_recorded
from kvdiag.model import Sample, Timeline
from tests.fixtures.hostile import Hostile, free_port
from tests.unit.commands.bad_input.refusals import SERVER, call, refusal

TRACE = Path(__file__).parents[2] / "golden" / "traces" / "vllm-0.32.0-starved.jsonl.gz"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a recorded run."""
    path = tmp_path_factory.mktemp("bundle") / "report.zip"
    done = call("bundle", str(TRACE), "--out", str(path))
    assert (0, "") == (done.code, done.stderr)
    assert [] == [name for name in zipfile.ZipFile(path).namelist() if name not in done.stdout]
    return path


def test_diagnosis_of_a_bundle_is_that_of_its_recording(bundle: Path) -> None:
    """The same document from both."""
    assert call("diagnose", str(TRACE), "--output", "json") == call("diagnose", str(bundle), "--output", "json")
    timeline, facts = read_recorded(TRACE)
    assert (newest(timeline), facts) == read_recorded(bundle)


def test_newest_hour_is_packed() -> None:
    """By the last sample."""
    samples = tuple(Sample(at_seconds=float(at)) for at in range(0, 7201, 60))
    kept = newest(Timeline(samples=samples)).samples
    assert (7200.0 - NEWEST_SECONDS, 7200.0) == (kept[0].at_seconds, kept[-1].at_seconds)


def test_no_key_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of the option nor one in the address."""
    monkeypatch.setenv("KVDIAG_API_KEY", "sesame-of-the-server")
    path = tmp_path / "report.zip"
    assert 0 == call("bundle", str(TRACE), "--out", str(path), "--api-key", "sesame-of-the-flag").code
    archive = zipfile.ZipFile(path)
    texts = [archive.read(name).decode() for name in archive.namelist()]
    assert [] == [text for text in texts if "sesame" in text]
    about = json.loads(archive.read("about.json"))
    assert TRACE.name == about["recording"]


def test_no_key_of_an_address_is_packed(tmp_path: Path) -> None:
    """Neither a password nor what a query has."""
    path = tmp_path / "report.zip"
    with Hostile(SERVER) as server:
        address = f"{server.url.replace('//', '//me:sesame@')}/v1?token=sesame"
        assert 0 == call("bundle", "--url", address, "--watch", "5s", "--out", str(path)).code
        archive = zipfile.ZipFile(path)
        assert server.url == json.loads(archive.read("about.json"))["url"]
    assert [] == [name for name in archive.namelist() if b"sesame" in archive.read(name)]


def test_an_archive_is_never_overwritten(bundle: Path) -> None:
    """It may be the only copy."""
    done = call("bundle", str(TRACE), "--out", str(bundle))
    assert (3, "") == (done.code, done.stdout)


@pytest.mark.parametrize("out", ["-", "x" * 300])
def test_a_file_that_cannot_be_is_refused(out: str) -> None:
    """In one line, before anything is read."""
    assert "cannot write" in refusal("bundle", str(TRACE), "--out", out)


def test_a_server_that_is_not_there_makes_no_bundle(tmp_path: Path) -> None:
    """One line, and no file."""
    path = tmp_path / "report.zip"
    done = call("bundle", "--url", f"http://127.0.0.1:{free_port()}", "--out", str(path))
    assert (3, 1, False) == (done.code, len(done.stderr.splitlines()) - 1, path.exists())


def archive(*names: str, comment: bytes = b"", packed: int = zipfile.ZIP_DEFLATED) -> bytes:
    """An archive of files that hold nothing of ours."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", packed) as one:
        for name in names:
            one.writestr(name, "{}\n")
        one.comment = comment
    return made.getvalue()


HOSTILE = {
    "no trace": archive("about.json"),
    "many files": archive(*(f"{number}" for number in range(MAX_ENTRIES + 1))),
    "long names": archive("trace.jsonl", "a" * 5000),
    "comment": archive("trace.jsonl", comment=b"PK\x05\x06" * 8),
    "cut off": archive("trace.jsonl")[:-8],
    "begin alone": b"PK\x03\x04",
    "no header": archive("trace.jsonl"),
    "otherwise packed": archive("trace.jsonl", packed=zipfile.ZIP_LZMA),
    "in a folder": archive("report/trace.jsonl"),
    "names that are no text": archive("\u00fc", "trace.jsonl").replace(b"\xc3\xbc", b"\xff\xff"),
    "wide": archive("trace.jsonl")[:-22] + b"PK\x06\x07" + bytes(16) + archive("trace.jsonl")[-22:],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_archive_of_anybody_else_is_refused(name: str, tmp_path: Path) -> None:
    """In one line that names the file, with no traceback."""
    path = tmp_path / "archive.zip"
    path.write_bytes(HOSTILE[name])
    done = call("diagnose", str(path))
    assert (3, "", 1) == (done.code, done.stdout, len(done.stderr.splitlines()))
    assert str(path) in done.stderr


def test_a_damaged_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    """A byte of the packed trace is another."""
    with zipfile.ZipFile(bundle) as one:
        place = one.getinfo("trace.jsonl").header_offset + 200
    content = bytearray(bundle.read_bytes())
    content[place] ^= 0xFF
    path = tmp_path / "damaged.zip"
    path.write_bytes(content)
    done = call("diagnose", str(path))
    assert (3, "", 1) == (done.code, done.stdout, len(done.stderr.splitlines()))
