"""GPU names and the memory NVML reports for them, for plans made where there is no such GPU."""

import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvdiag.errors import KvModelError
from kvdiag.kv.bounds import MAX_BYTES, check_range

MIB = 1 << 20
_TABLE: Mapping[str, Any] = json.loads(pkgutil.get_data(__package__, "gpus.json") or b"")
# NVML's total, in MiB, as nvidia-smi shows it (a little less than the name says: ECC and firmware keep some); "sources"
# in the table says where a figure is from another source, or not verified.
_MEMORY_MIB: Mapping[str, int] = _TABLE["memory_mib"]
_ALIASES: Mapping[str, str] = _TABLE["aliases"]
_CAPABILITY: Mapping[str, int] = {
    name: int(capability) for capability, names in _TABLE["compute_capability"].items() for name in names
}
_UNSUPPORTED: Mapping[str, Sequence[str]] = _TABLE["unsupported_levers"]
# vLLM 0.32: kernels that read an 8-bit cache need compute capability 8.0 (flashinfer.py, flash_attn.py), fp8 weights
# 7.5 (quantization/fp8.py::get_min_capability).
_BRAND_WORDS = frozenset({"", "nvidia", "geforce", "tesla", "amd", "instinct"})
_SIZE_SUFFIX = re.compile(r"-\d+gb$")
_SIZE_WORD = re.compile(r"\d{1,4}gb")
_BESIDE = re.compile(r"sxm\d?|pcie\d?|oam|hbm\d\w?|rtx|generation|blackwell|server|workstation|edition|max|q|ac")
"""Words of a driver's name that do not depend on the memory size."""

_RTX = re.compile(r"\brtx-(pro-)?(\d)")
_SIZE = re.compile(r"(\d{1,19}(?:\.\d{1,19})?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_MIN_GPU_BYTES = 1 << 20
GPU_NAMES: tuple[str, ...] = tuple(_MEMORY_MIB)


def gpu_bytes(name: str) -> int:
    """The memory of a GPU by its name, or a size such as 80GB, 80GiB or 85899345920."""
    if (key := _key(name)) is not None:
        return _MEMORY_MIB[key] * MIB
    try:
        size = parse_bytes(name, field="gpu")
    except KvModelError:
        known = ", ".join(GPU_NAMES)
        raise KvModelError(f"unknown gpu {name[:40]!a}: give its memory (80GB) or one of {known}", "gpu") from None
    if size < _MIN_GPU_BYTES:
        raise KvModelError(f"gpu {name[:40]!a} is {size:,} bytes: give a unit, as in 80GB, or a name", "gpu")
    return size


def unsupported_levers(name: str) -> frozenset[str]:
    """The names of the levers that a GPU has no kernels for; none for a size."""
    return frozenset(_UNSUPPORTED.get(_key(name) or "", ()))


def compute_capability(name: str) -> int | None:
    """The CUDA compute capability of a GPU, 90 for 9.0; None for a size, an AMD GPU, or a name not in the table."""
    return _CAPABILITY.get(_key(name) or "")


def _key(name: str) -> str | None:
    """The GPU's key in the table; `None` for a size, or a name that is not in it."""
    key = name.strip().lower().removeprefix("nvidia").strip(" -").replace(" ", "").replace("_", "-")
    key = _ALIASES.get(key, key)
    return key if key in _MEMORY_MIB else _as_drivers_spell(name)


def _as_drivers_spell(name: str) -> str | None:
    """The GPU that NVML calls so, as in "NVIDIA A100-SXM4-80GB" or "NVIDIA H100 NVL"; `None` for none of the table.

    Every word has to be known: a laptop's, a virtual GPU's or a slice's has another amount of memory.
    """
    joined = _RTX.sub(lambda found: f"rtx{'pro' if found[1] else ''}{found[2]}", "-".join(_words(name)))
    words = set(joined.split("-"))
    for key in (*_MEMORY_MIB, *_ALIASES):
        parts, family = set(key.split("-")), _ALIASES.get(key, key)
        others = {word for word in words - parts if not _BESIDE.fullmatch(word)}
        sizes = {word for word in others if _SIZE_WORD.fullmatch(word)}
        same = all(abs(_MEMORY_MIB[family] / 1024 - int(word[:-2])) <= int(word[:-2]) / 10 for word in sizes)
        if parts <= words and others == sizes and same:
            return family
    return None


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", text.lower()[:80]) if word not in _BRAND_WORDS]


def gpu_name(text: str) -> str | None:
    """The family of a GPU by which two names of it are equal: "h100" for h100, H100-80GB and NVIDIA H100 80GB HBM3.
    None for a size, or a name that is not in the table.
    """
    joined = "-".join(_words(text))
    best, length = None, 0
    for name in (*_MEMORY_MIB, *_ALIASES):
        family = _SIZE_SUFFIX.sub("", _ALIASES.get(name, name))
        for spelling in (name, family, f"rtx-{family}", family.replace("rtxpro", "rtx-pro-").replace("rtx", "rtx-")):
            spelled = spelling.replace("--", "-")
            if len(spelled) > length and (joined == spelled or joined.startswith(f"{spelled}-")):
                best, length = family, len(spelled)
    return best


def parse_bytes(text: str, *, field: str, least: int = 1) -> int:
    """Bytes from a number with a unit: GB is a thousand million, GiB is 2**30, no unit is bytes, `least` or more."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise KvModelError(f"{field} {text[:40]!a} is not a size: give 80GB, 80GiB or a number of bytes", field)
    number, prefix, binary = found.groups()
    size = int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.lower()])
    if prefix == "" and "." not in number:
        size = int(number)
    if size < least:
        raise KvModelError(f"{field} {text[:40]!a} is {size:,} bytes: give a unit, as in 80GB", field)
    check_range(field, size, 1, MAX_BYTES)
    return size
