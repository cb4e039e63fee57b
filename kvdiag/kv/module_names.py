"""Which linear layers a quantization config names: exact names, prefixes, wildcards and regular expressions.

Each tool writes its own: compressed-tensors names and `re:` expressions
(compressed_tensors/utils.py::should_ignore_layer), ModelOpt wildcards and parts of names
(modelopt.py::is_layer_excluded), AWQ, FP8 and bitsandbytes parts of names (quant_utils.py::is_layer_skipped). Layers
are compared by number and by the name inside the layer, since what stands before `layers.` differs between a checkpoint
and the engine.
"""

import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvdiag.kv.errors import KvModelError

_BEFORE_LAYERS = re.compile(r"^(?:\w+\.)*?(?:layers|h|blocks|block)\.")
_NUMBERED = re.compile(r"^layers\.(\d{1,4})(?=[.*]|$)")
# What may stand before `layers.` where an expression begins with a name.
_STEMS = ("model.", "language_model.model.", "model.language_model.", "")
_MOST_EXPRESSIONS = 32
_LONGEST_EXPRESSION = 300
_MOST_REPEATS = 4
# A repeated group can take exponential time, and no published list of layers has one.
_UNREADABLE = re.compile(r"\)[*+{]|\(\?(?![:=!])|\\[1-9]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")
_DIGIT = re.compile(r"\d|\\d")
# What else a block or a projection is called: in other families, and once the engine has fused it.
_BLOCKS = {
    "self_attn": ("self_attn", "attn", "attention", "mixer"),
    "linear_attn": ("linear_attn", "mixer"),
    "mamba": ("mamba", "mixer"),
    "mlp": ("mlp", "feed_forward", "block_sparse_moe", "ffn", "mixer", "moe"),
}
_SHARED = ("shared_experts", "shared_expert", "share_expert")
_PROJECTIONS = {
    "q_proj": ("q_proj", "qkv_proj"),
    "k_proj": ("k_proj", "qkv_proj"),
    "v_proj": ("v_proj", "qkv_proj"),
    "gate_proj": ("gate_proj", "up_proj", "gate_up_proj"),
    "in_proj_qkv": ("in_proj_qkv", "in_proj_qkvz"),
    "in_proj_z": ("in_proj_z", "in_proj_qkvz"),
    "in_proj_ba": ("in_proj_ba", "in_proj_b", "in_proj_a"),
    "q_a_proj": ("q_a_proj", "fused_qkv_a_proj"),
    "kv_a_proj_with_mqa": ("kv_a_proj_with_mqa", "fused_qkv_a_proj"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleNames:
    """The linear layers that a list of entries names: by expressions and parts of names in every layer, and by names
    in layers of one number.
    """

    expressions: tuple[re.Pattern[str], ...]
    parts: tuple[re.Pattern[str], ...]
    numbered: Mapping[int, tuple[re.Pattern[str], ...]]

    def __post_init__(self) -> None:
        if any(number < 0 for number in self.numbered):
            raise KvModelError("a layer's number cannot be negative", "ignore")

    @property
    def tells_layers_apart(self) -> bool:
        """Whether an expression may name a layer by its number."""
        return any(_DIGIT.search(expression.pattern) for expression in self.expressions)

    def match(self, index: int, name: str) -> bool:
        """Whether the linear layer of that name in layer `index` is meant."""
        here = self.numbered.get(index)
        if here and any(one.match(f"layers.{index}.{spelled}") for spelled in spellings(name) for one in here):
            return True
        return _anywhere(self, index if self.tells_layers_apart else 0, name)


@functools.lru_cache(maxsize=1 << 14)
def _anywhere(names: ModuleNames, index: int, name: str) -> bool:
    """Whether an entry without a layer's number means the layer. Plans ask again and again."""
    for spelled in spellings(name):
        if any(part.match(f"layers.{index}.{spelled}") for part in names.parts):
            return True
        if any(one.match(f"{stem}layers.{index}.{spelled}") for one in names.expressions for stem in _STEMS):
            return True
    return False


def parse_module_names(entries: Iterable[str], *, field: str) -> ModuleNames:
    """The layers that the entries name. Raises KvModelError for an expression that is none or could take for ever."""
    expressions: list[re.Pattern[str]] = []
    parts: list[re.Pattern[str]] = []
    numbered: dict[int, list[re.Pattern[str]]] = {}
    for entry in dict.fromkeys(entries):
        if entry.startswith("re:"):
            expressions.append(_expression(entry.removeprefix("re:"), field))
            continue
        plain = _BEFORE_LAYERS.sub("layers.", entry.strip("."), count=1)
        found = _NUMBERED.match(plain)
        if found is not None:
            numbered.setdefault(int(found.group(1)), []).append(_named(plain))
        elif plain:
            parts.append(_named(plain))
    if len(expressions) > _MOST_EXPRESSIONS:
        raise KvModelError(f"{field} has {len(expressions)} patterns; at most {_MOST_EXPRESSIONS} are read", field)
    return ModuleNames(
        expressions=tuple(expressions),
        parts=tuple(parts),
        numbered={number: tuple(found) for number, found in numbered.items()},
    )


@functools.cache
def spellings(name: str) -> tuple[str, ...]:
    """What the linear layer `mlp.shared_experts.down_proj` is called, in checkpoints and in the engine."""
    first, *middle, last = name.split(".")
    blocks = _BLOCKS.get(first, (first,))
    inner = _SHARED if middle == ["shared_experts"] else (".".join(middle),)
    return tuple(
        ".".join(part for part in (block, between, projection) if part)
        for block in blocks
        for between in inner
        for projection in _PROJECTIONS.get(last, (last,))
    )


def _named(entry: str) -> re.Pattern[str]:
    """A name or wildcard: what it matches begins and ends where a part of a name does, and all below it is meant."""
    wild = any(mark in entry for mark in "*?")
    body = fnmatch.translate(entry).removeprefix("(?s:").removesuffix(")\\Z") if wild else re.escape(entry)
    before = "" if entry.startswith("*") else r"(?:.*\.)?"
    return re.compile(rf"(?s:{before}{body}(?:\..*)?)\Z")


def _expression(text: str, field: str) -> re.Pattern[str]:
    if len(text) > _LONGEST_EXPRESSION or _UNREADABLE.search(text) or len(_REPEAT.findall(text)) > _MOST_REPEATS:
        raise KvModelError(
            f"{field} has the pattern {text[:60]!a}, which is not read; pass --weights FORMAT or --weights BYTES", field
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise KvModelError(f"{field} has the pattern {text[:60]!a}: {error}", field) from error
