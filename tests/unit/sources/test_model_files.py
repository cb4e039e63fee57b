"""Reading models: folders, files, names, the Hub's cache, and everything that is none of these."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvdiag.errors import KvdiagError
from kvdiag.sources.model_files import ModelFiles, catalogue, read_model

CONFIG = {"model_type": "llama", "num_hidden_layers": 2}
HEADER = {"model.embed_tokens.weight": {"dtype": "BF16", "shape": [8, 4], "data_offsets": [0, 64]}}


@pytest.fixture(autouse=True)
def _no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the machine's own Hub cache, nor the network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)


def write_header(path: Path, header: Any) -> None:
    """A safetensors file: the header's length, the header, and no data."""
    content = json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content)


@contextmanager
def hub(*, status: int, body: bytes) -> Iterator[str]:
    """A Hub on loopback that answers everything with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer."""
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_folder_gives_its_config_and_headers(tmp_path: Path) -> None:
    """A downloaded model is read from its folder, the tensor files by their headers."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    write_header(tmp_path / "model-00001-of-00002.safetensors", HEADER)
    write_header(tmp_path / "model-00002-of-00002.safetensors", {})
    assert ModelFiles(origin=str(tmp_path), config=CONFIG, headers=(HEADER, {})) == read_model(str(tmp_path))


def test_a_format_beside_the_config_is_merged_in(tmp_path: Path) -> None:
    """ModelOpt's hf_quant_config.json becomes the config's quantization."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    actual = read_model(str(tmp_path))
    merged = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}
    assert {**CONFIG, "quantization_config": merged} == actual.config


def test_a_config_alone_has_no_headers(tmp_path: Path) -> None:
    """A config.json is enough."""
    path = tmp_path / "any name"
    path.write_text(json.dumps(CONFIG))
    assert ModelFiles(origin=str(path), config=CONFIG) == read_model(str(path))


def test_a_name_comes_from_the_catalogue() -> None:
    """Known names need no file, in upper or lower case."""
    assert catalogue().find("llama_70b") is not None
    assert 80 == read_model("llama_70b").config["num_hidden_layers"]


def test_a_cached_model_is_found_by_its_id(tmp_path: Path) -> None:
    """The Hub's cache is searched before the network."""
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    assert CONFIG == read_model("some/model").config


def test_the_hub_is_asked_for_what_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's config is downloaded where that is allowed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with hub(status=200, body=json.dumps(CONFIG).encode()) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        actual = read_model("some/model")
    assert ModelFiles(origin=f"{endpoint}/some/model/resolve/main/config.json", config=CONFIG) == actual


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [(401, b"", "answered 401"), (200, b"<html>", "not valid JSON"), (200, b"[1]", "holds a list")],
)
def test_what_the_hub_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, reason: str
) -> None:
    """A gated model, a proxy's page, something else: the reason is named."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with hub(status=status, body=body) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(KvdiagError) as caught:
            read_model("some/model")
    assert reason in str(caught.value)


def test_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network the way out is named."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(KvdiagError) as caught:
        read_model("some/model")
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("model", ["", "nope", "some/model", "x" * 5000, "~nobody-has-this-home/x", "a\0b", "\ud800"])
def test_what_is_no_model_says_what_would_be(model: str) -> None:
    """An unknown name is refused with the ways to name a model."""
    with pytest.raises(KvdiagError) as caught:
        read_model(model)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["./model", "../models/model", "/models/model", "~/model"])
def test_a_path_is_no_hub_id(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can only be a path is not asked for at the Hub."""
    # Nothing there, and a Hub that could be asked
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(KvdiagError) as caught:
        read_model(model)
    assert str(caught.value).startswith(f"no such folder or file '{model}'")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b"1" * 5000])
def test_what_is_no_config_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that holds no JSON object names itself."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(KvdiagError) as caught:
        read_model(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"\xff" * 16, (5).to_bytes(8, "little") + b"[1,2]", (3).to_bytes(8, "little") + b"{x}"]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A tensor file that is cut off or something else names itself."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(KvdiagError) as caught:
        read_model(str(tmp_path))
    assert str(path) in str(caught.value)
