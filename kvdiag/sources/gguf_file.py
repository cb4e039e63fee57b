"""A GGUF model's headers: of one file, or of all parts of a split one. Weights are never read.

A header has a vocabulary of some megabytes, so a file is read in growing pieces until its header is whole, up to a
limit. The parts of a split model are named `NAME-00001-of-00003.gguf` (llama.cpp src/llama.cpp::llama_split_path);
tensors are in all of them, settings in the first.
"""

import re
from pathlib import Path

from kvdiag.errors import KvdiagError, KvModelError
from kvdiag.files import opened
from kvdiag.kv.pools.gguf_header import MAGIC, CutShortError, GgufHeader, parse_gguf_header

_FIRST_BYTES = 1 << 20
MAX_HEADER_BYTES = 128 << 20
MAX_PARTS = 999
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    try:
        with opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> GgufHeader:
    """The header of a model, with the tensors of all its parts.

    Raises:
        KvdiagError: a file cannot be read, or is not a GGUF file.
    """
    found = _PART.fullmatch(path.name)
    if found is None:
        header = _header(path)
        if isinstance(parts := header.values.get("split.count"), int) and parts > 1:
            raise KvdiagError(f"{path} is one of {parts} parts: keep the names NAME-00001-of-{parts:05}.gguf")
        return header
    count = int(found[3])
    if not 1 <= count <= MAX_PARTS:
        raise KvdiagError(f"{path} says that the model has {count:,} parts: 1 to {MAX_PARTS} are supported")
    parts = [_header(path.with_name(f"{found[1]}-{part:05}-of-{count:05}.gguf")) for part in range(1, count + 1)]
    formats: dict[str, int] = {}
    tensors: dict[str, int] = {}
    for part in parts:
        tensors.update(part.tensor_bytes)
        for name, size in part.formats.items():
            formats[name] = formats.get(name, 0) + size
    first = parts[0]
    return GgufHeader(values=first.values, lengths=first.lengths, tensor_bytes=tensors, formats=formats)


def _header(path: Path) -> GgufHeader:
    try:
        with opened(path) as file:
            content, wanted = b"", _FIRST_BYTES
            while True:
                content += file.read(wanted - len(content))
                try:
                    return parse_gguf_header(content)
                except CutShortError:
                    if len(content) < wanted or wanted >= MAX_HEADER_BYTES:
                        break
                    wanted *= 4
    except OSError as error:
        raise KvdiagError(f"cannot read {path}: {error.strerror}") from error
    except KvModelError as error:
        raise KvdiagError(f"{path}: {error}") from error
    raise KvdiagError(f"{path} ends before its GGUF header does, or has one of more than {MAX_HEADER_BYTES >> 20} MiB")
