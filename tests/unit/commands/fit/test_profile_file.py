"""The file of profiles: its location, that it is written whole, and the errors of an unusable one."""

from pathlib import Path

import pytest

from kvdiag.commands.fitting.profile_file import MAX_FILE_BYTES, default_path, read_profiles, write_profiles
from kvdiag.errors import KvdiagError
from tests.unit.kv.calibration.profiled import PROFILE


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """Profiles are written into new folders and read back, and no other file is left in the folder."""
    path = tmp_path / "a" / "b" / "profiles.json"
    write_profiles(path, [PROFILE])
    write_profiles(path, [PROFILE, PROFILE])
    assert (PROFILE, PROFILE) == read_profiles(path, required=True)
    assert [path] == list(path.parent.iterdir())


def test_no_file_is_no_profiles(tmp_path: Path) -> None:
    """Unless it was asked for by name."""
    path = tmp_path / "profiles.json"
    assert () == read_profiles(path, required=False)
    with pytest.raises(KvdiagError, match="no such profile file"):
        read_profiles(path, required=True)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no list `profiles`"),
        (b'{"profiles": []}', "schema_version"),
        (b'{"schema_version": 2, "profiles": []}', "reads 1"),
        (b'{"schema_version": 1, "profiles": [1]}', "profile 1"),
        (b'{"schema_version": 1, "profiles": [{"model": {}}]}', "digest"),
        (b" " * (MAX_FILE_BYTES + 1), "larger than 8 MiB"),
    ],
)
def test_a_broken_file_is_named_with_the_way_out(tmp_path: Path, content: bytes, word: str) -> None:
    """One line: which file, what is wrong, and what to do."""
    path = tmp_path / "profiles.json"
    path.write_bytes(content)
    with pytest.raises(KvdiagError) as caught:
        read_profiles(path, required=False)
    message = str(caught.value)
    assert [True] * 3 == [part in message for part in (str(path), word, "--no-profile")]
    assert "\n" not in message


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    """A file where a folder should be."""
    (tmp_path / "file").touch()
    with pytest.raises(KvdiagError, match="cannot write the profile to"):
        write_profiles(tmp_path / "file" / "profiles.json", [PROFILE])


@pytest.mark.parametrize(
    ("data_home", "expected"), [("/data", "/data/kvdiag"), ("", "/home/x/.local/share/kvdiag"), ("rel", None)]
)
def test_the_usual_place_is_the_desktop_specifications(
    monkeypatch: pytest.MonkeyPatch, data_home: str, expected: str | None
) -> None:
    """XDG_DATA_HOME where it is absolute, else below the home."""
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("XDG_DATA_HOME", data_home)
    assert Path(expected or "/home/x/.local/share/kvdiag", "profiles.json") == default_path()
