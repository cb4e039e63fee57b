"""GGUF files on a disk: one file, several parts, and files that are none."""

from pathlib import Path

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.sources.gguf_file import is_gguf, read_gguf
from tests.unit.sources.gguf_files import SETTINGS, TENSORS, gguf


def test_a_long_vocabulary_is_read_in_pieces(tmp_path: Path) -> None:
    """A header longer than the first piece."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf({**SETTINGS, "tokenizer.ggml.tokens": ["a token of some length"] * 70_000}) + bytes(100))

    header = read_gguf(path)

    assert is_gguf(path)
    assert header.lengths["tokenizer.ggml.tokens"] == 70_000
    assert len(header.tensor_bytes) == len(TENSORS)


def test_parts_are_read_together(tmp_path: Path) -> None:
    """Tensors of all parts, settings of the first."""
    (tmp_path / "a-00001-of-00002.gguf").write_bytes(gguf(SETTINGS, TENSORS[:1]))
    (tmp_path / "a-00002-of-00002.gguf").write_bytes(gguf({}, TENSORS[1:]))

    header = read_gguf(tmp_path / "a-00001-of-00002.gguf")

    assert header.tensor_bytes.keys() == {name for name, _, _ in TENSORS}
    assert header.values["general.architecture"] == "gemma3"


@pytest.mark.parametrize("content", [b"", b"GGUF", gguf()[:-1], b"{}", gguf({**SETTINGS, "split.count": 3})])
def test_files_that_are_refused(tmp_path: Path, content: bytes) -> None:
    """A file that is cut, of another kind, or a renamed part, whose weights are not the model's."""
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(KvdiagError):
        read_gguf(path)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    """A part that is not there is an error that names its file."""
    (tmp_path / "a-00001-of-00002.gguf").write_bytes(gguf())

    with pytest.raises(KvdiagError) as refused:
        read_gguf(tmp_path / "a-00001-of-00002.gguf")

    assert "a-00002-of-00002.gguf" in str(refused.value)
    assert not is_gguf(tmp_path / "absent.gguf")
