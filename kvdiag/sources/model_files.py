"""A model's config and tensor headers: from a folder, a file, the catalogue, the local Hub cache, or the Hub itself.

Looked for in this order, the user's own files first and the network last. A folder's tensor headers come with its
config: they give the weights exactly, where a config alone has them counted. Weights themselves are never read: a
safetensors file begins with its header. Nothing read is trusted: sizes, counts and times are bounded, and JSON is all
that is ever parsed.
"""

import json
import os
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kvdiag.errors import KvdiagError
from kvdiag.files import opened
from kvdiag.kv.families.mistral_params import config_of_params
from kvdiag.kv.fit.model_catalogue import Catalogue, parse_catalogue
from kvdiag.sources.bounded_json import TooManyValuesError, decode, decode_object, most_values
from kvdiag.sources.gguf_file import is_gguf

MAX_CONFIG_BYTES = 16 * 2**20
"""The largest published config.json (a quantized 400B model that lists every layer) has 6 MB."""

MAX_CONFIG_VALUES = 500_000
"""That config has 100,000."""

MAX_HEADER_BYTES = 32 * 2**20
"""The format allows 100 MiB; 200,000 tensors in one file take 24."""

MAX_HEADERS_BYTES = 64 * 2**20
"""Of all files of a model, and of what is read of them; Kimi K2's 61 files have 200,000 tensors."""

MAX_HEADERS_VALUES = 2_000_000
MAX_FILES = 2000
MAX_LENGTH_TOKENS = 1 << 40
"""Tokenizers without a limit state 1e30."""

PARAMS = "params.json"
"""Mistral's own form of a config."""

_SENTENCE_MODELS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
_FILE_ENDINGS = (".json", ".safetensors")
_HEADER_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What was found: the config, the headers of the tensor files where they are at hand, and from where.

    `limits` are lengths of requests that files next to the config state, by their field (`context_limit`). `note` is a
    caution where the config is that of a similar model; empty otherwise.
    """

    origin: str
    config: Mapping[str, Any]
    headers: tuple[Mapping[str, Any], ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    note: str = ""


def catalogue() -> Catalogue:
    """The models that the package knows by name."""
    return parse_catalogue(json.loads(pkgutil.get_data("kvdiag.kv.fit", "models.json") or b""))


def read_model(model: str, *, offline: bool = False) -> ModelFiles:
    """The files of `model`: a path, a catalogue name, or a Hub id from the local cache or the network.

    Raises:
        KvdiagError: there is no such model, or what is there is not a config.
    """
    try:
        path = Path(model).expanduser()
        folder, file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError):
        # A name too long for the system, a home without a user: no path.
        path, folder, file = Path(), False, False
    if folder:
        return _folder(path)
    if file:
        if is_gguf(path):
            raise KvdiagError(
                f"{path} is a GGUF file: for vLLM pass the config.json of the model that it was made of, with "
                f"--weights {path.stat().st_size}; for llama.cpp pass --engine llamacpp"
            )
        return ModelFiles(origin=str(path), config=_config_file(path))
    if model.startswith((".", "/", "~")):
        raise KvdiagError(
            f"no such folder or file {model[:120]!a}: "
            "pass a folder with a config.json, a Hub id, or a name from `kvdiag fit --list`"
        )
    known = catalogue()
    entry = known.find(model)
    if entry is not None:
        return ModelFiles(origin=f"catalogue entry {entry.name}", config=entry.config)
    if _HUB_ID.fullmatch(model) and not model.endswith(_FILE_ENDINGS):
        cached = _cached(model)
        if cached is not None:
            return _folder(cached)
        if not offline and os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
            # Its HTTP client costs more than the answer, and few calls come here.
            from kvdiag.sources import hub  # noqa: PLC0415

            try:
                url, content = hub.read_config(model, MAX_CONFIG_BYTES)
            except hub.UnreachableHubError:
                entry = known.find_named(model.partition("/")[2])
                if entry is None:
                    raise
                origin = f"catalogue entry {entry.name}, as the Hub cannot be reached for {model}"
                note = f"config of {entry.name}, not of {model}: another publisher may have changed it"
                return ModelFiles(origin=origin, config=entry.config, note=note)
            return ModelFiles(origin=url, config=_json(content, url))
    near = known.similar(model)
    hint = f"; similar names: {', '.join(near)}" if near else ""
    raise KvdiagError(
        f"unknown model {model[:120]!a}: no such file, catalogue name or cached Hub id{hint}. "
        "Pass a folder, a config.json, a Hub id, or a name from `kvdiag fit --list`"
    )


def _config_file(path: Path) -> Mapping[str, Any]:
    """A config.json, or what vLLM makes of Mistral's own params.json."""
    content = _json_file(path)
    return config_of_params(content) if path.name == PARAMS else content


def _folder(path: Path) -> ModelFiles:
    own = path / PARAMS
    hub = path / "config.json"
    # config/model.py: the Hub's format counts first.
    config = dict(_config_file(own if own.is_file() and not hub.is_file() else hub))
    separate = path / "hf_quant_config.json"
    if "quantization_config" not in config and separate.is_file():
        # ModelOpt writes its format next to the config; vLLM merges it (transformers_utils/config.py).
        config["quantization_config"] = {"quant_method": "modelopt", **_json_file(separate)}
    return ModelFiles(origin=str(path), config=config, headers=tuple(_headers(path)), limits=_limits(path, config))


def _limits(folder: Path, config: Mapping[str, Any]) -> Mapping[str, int]:
    """Lengths in files next to the config: a sentence-transformers file's, and the tokenizer's where positions are
    absolute (vLLM transformers_utils/config.py::get_sentence_transformer_tokenizer_config, config/model.py).
    """
    found: dict[str, int] = {}
    files = [(f"sentence_{name}_config.json", "max_seq_length") for name in _SENTENCE_MODELS]
    if config.get("position_embedding_type") == "absolute":
        files.append(("tokenizer_config.json", "model_max_length"))
    for name, key in files:
        length = _json_file(folder / name).get(key) if (folder / name).is_file() else None
        if isinstance(length, int) and not isinstance(length, bool) and 0 < length < MAX_LENGTH_TOKENS:
            found.setdefault(key, length)
    return found


def _json_file(path: Path) -> Mapping[str, Any]:
    try:
        with opened(path) as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    return _json(content, str(path))


def _json(content: bytes, origin: str) -> Mapping[str, Any]:
    if len(content) > MAX_CONFIG_BYTES:
        raise KvdiagError(f"{origin} is larger than {MAX_CONFIG_BYTES // 2**20} MiB: it is not a model config")
    try:
        document = decode(content, max_values=MAX_CONFIG_VALUES)
    except TooManyValuesError as error:
        raise KvdiagError(f"{origin} is not a model's config: {error}") from error
    except ValueError as error:
        raise KvdiagError(f"{origin} is not valid JSON: {' '.join(str(error).split())[:120]}") from error
    if not isinstance(document, dict):
        raise KvdiagError(f"{origin} holds a {type(document).__name__}, not a model's config (a JSON object)")
    return document


def _headers(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The header of each tensor file; KvdiagError if one cannot be read, or all of them exceed one budget."""
    total_bytes = values = 0
    for path in sorted(islice(folder.glob("*.safetensors"), MAX_FILES)):
        content = _header(path)
        total_bytes += len(content)
        values += most_values(content)
        if total_bytes > MAX_HEADERS_BYTES or values > MAX_HEADERS_VALUES:
            raise KvdiagError(
                f"the headers of the tensor files in {folder} have more than {MAX_HEADERS_BYTES >> 20} MiB or "
                f"{MAX_HEADERS_VALUES:,} values: give its config.json instead"
            )
        try:
            header = decode_object(content, max_values=MAX_HEADERS_VALUES)
        except ValueError as error:
            raise KvdiagError(f"{path} does not begin with a safetensors header") from error
        yield header


def _header(path: Path) -> bytes:
    try:
        with opened(path) as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                raise KvdiagError(f"{path} does not begin with a safetensors header")
            return file.read(length)
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error


def _cached(model: str) -> Path | None:
    """The newest snapshot of a model in the local Hub cache (huggingface_hub's own layout)."""
    home = os.environ.get("HF_HOME")
    hub = os.environ.get("HF_HUB_CACHE") or Path(home or Path.home() / ".cache" / "huggingface", "hub")
    snapshots = Path(hub) / f"models--{model.replace('/', '--')}" / "snapshots"
    try:
        found = [path for path in snapshots.iterdir() if (path / "config.json").is_file()]
    except OSError:
        return None
    return max(found, key=lambda path: (path / "config.json").stat().st_mtime, default=None)
