"""The model's folder on this host: its weights counted once, its config, and gaps where either is not readable."""

import os
from pathlib import Path

import pytest

from kvdiag.sources.host import SOURCE
from kvdiag.sources.served_model import MAX_CONFIG_BYTES, model_config, weights_bytes
from tests.builders.answers import containing
from tests.unit.sources.host_programs import unseen


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
            id="shards and consolidated",
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
    for name, size in files.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert (expected, ()) == weights_bytes(str(tmp_path))


def test_weights_behind_links_are_counted(tmp_path: Path) -> None:
    """A snapshot of the Hugging Face cache, whose files are links into another folder, has its full size."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "d34db33f").write_bytes(bytes(100))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "d34db33f")
    (tmp_path / "snapshot" / "dangling.safetensors").symlink_to(tmp_path / "nowhere")
    assert (100, ()) == weights_bytes(str(tmp_path / "snapshot"))


INVISIBLE = "not visible here"


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        pytest.param(None, INVISIBLE, id="not told"),
        pytest.param("", INVISIBLE, id="empty"),
        pytest.param("meta-llama/Llama-3.1-8B", INVISIBLE, id="a name on the hub"),
        pytest.param("/models/that/is/not/here", INVISIBLE, id="another host's folder"),
        pytest.param("/etc/passwd", INVISIBLE, id="a file"),
        pytest.param("/models/\0", INVISIBLE, id="a path with a NUL"),
        pytest.param("/" + "x" * 5000, "File name too long", id="a name too long"),
        pytest.param("/\ud800", INVISIBLE, id="a path that cannot be encoded"),
        pytest.param("/proc/1/root/models", "the model's", id="a folder without permission"),
        pytest.param("/proc/1/map_files", "the model's", id="a folder without listing"),
    ],
)
def test_weights_that_cannot_be_seen_are_a_gap(root: str | None, reason: str) -> None:
    """For every unusable model folder that a server names, the weights' size is a gap and never an error."""
    size, gaps = weights_bytes(root)
    assert None is size
    assert [(SOURCE, "absent", True)] == [(gap.source, gap.kind, reason in gap.reason) for gap in gaps]


def test_folder_without_weights_is_a_gap(tmp_path: Path) -> None:
    """A folder that holds no weights says so."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").mkdir()
    assert (None, (unseen(containing("no weight files")),)) == weights_bytes(str(tmp_path))


def test_config_is_read_as_json(tmp_path: Path) -> None:
    """Of the model's config.json the fields that are known are kept, without white space."""
    (tmp_path / "config.json").write_text('{\n "model_type": "llama", "num_hidden_layers":  4, "token": 1 }\n')
    assert '{"model_type": "llama", "num_hidden_layers": 4}' == model_config(str(tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"<html>", id="HTML"),
        pytest.param(b'{"auths": {}}', id="another program's"),
        pytest.param(b"\xff\xfe\xff", id="binary"),
        pytest.param(b"[" * 100_000, id="nested without end"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", id="a number without end"),
        pytest.param(b'"' + b"x" * MAX_CONFIG_BYTES + b'"', id="too long"),
    ],
)
def test_config_that_is_none_is_left_out(tmp_path: Path, content: bytes) -> None:
    """A config.json that is not JSON, or longer than any, is not kept."""
    (tmp_path / "config.json").write_bytes(content)
    assert None is model_config(str(tmp_path))


@pytest.mark.parametrize("root", [None, "", "meta-llama/Llama-3.1-8B", "/models/not/here", "/\0", "/" + "x" * 5000])
def test_config_that_cannot_be_seen_is_left_out(root: str | None) -> None:
    """For every unusable model folder that a server names, the config is None and never an error."""
    assert None is model_config(root)


def test_config_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A pipe in place of the config is skipped: reading it would block forever."""
    os.mkfifo(tmp_path / "config.json")
    assert None is model_config(str(tmp_path))
