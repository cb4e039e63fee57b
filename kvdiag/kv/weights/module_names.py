"""Which linear layers a quantization config names: exact names, prefixes, wildcards and regular expressions.

Each tool writes its own: compressed-tensors names and `re:` expressions
(compressed_tensors/utils.py::should_ignore_layer), ModelOpt wildcards and parts of names
(modelopt.py::is_layer_excluded), AWQ, FP8 and bitsandbytes parts of names (quant_utils.py::is_layer_skipped). Layers
are compared by number and by the name inside the layer, since the prefix before `layers.` differs between a checkpoint
and the engine.
"""

import fnmatch
import functools
import json
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdiag.errors import KvModelError

_BEFORE_LAYERS = re.compile(r"^(?:\w+\.)*?(?:layers|h|blocks|block)\.")
_NUMBERED = re.compile(r"^layers\.(\d{1,4})(?=[.*]|$)")
# Prefixes before `layers.` that an expression which begins with a name may have.
_STEMS = ("model.", "language_model.model.", "model.language_model.", "")
_MAX_WILDCARDS = 32
# The cost limit of matching: each repeat after the first tries as many places as a name has letters. Expressions that
# depend on the layer number are tried in every layer, the others once.
_NAME_LETTERS = 40
_MAX_STEPS = 32 * _NAME_LETTERS**3
_MAX_STEPS_PER_LAYER = 4 * _NAME_LETTERS**2
_LAYER_DEPENDENT = re.compile(r"(?:layers|blocks|\bh\b).*(?:\d|\\d|\[)")
_LONGEST_EXPRESSION = 300
_MAX_REPEATS = 4
# A repeated group can take exponential time, and no published list of layers has one.
_UNREADABLE = re.compile(r"\)[*+{]|\(\?(?![:=!])|\\[1-9]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")
# What else a block or a projection is called: in other families, and once the engine has fused it.
_SPELLINGS: Mapping[str, Any] = json.loads(pkgutil.get_data(__package__, "module_names.json") or b"")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModuleNames:
    """The linear layers that a list of entries names: by names and parts of names, by wildcards in layers of one
    number or (None) of any, and by expressions that do or do not depend on the layer number.
    """

    parts: frozenset[str]
    wild: Mapping[int | None, Sequence[re.Pattern[str]]]
    expressions: Mapping[bool, Sequence[re.Pattern[str]]]

    def match(self, index: int, name: str) -> bool:
        """Whether the linear layer of that name in layer `index` is meant."""
        return _match(self, None, name) or _match(self, index, name)


# Plans ask the same again and again.
@functools.lru_cache(maxsize=1 << 15)
def _match(names: ModuleNames, index: int | None, name: str) -> bool:
    """Whether an entry for layers of any number (None), or one that may hold the number, means the layer."""
    wild, expressions = names.wild.get(index, ()), names.expressions[index is not None]
    for full in (f"layers.{index or 0}.{spelled}" for spelled in spellings(name)):
        if index is not None and names.parts and not names.parts.isdisjoint(_parts(full)):
            return True
        if any(one.match(full) for one in wild) or _expressed(expressions, full):
            return True
    return False


def _expressed(expressions: Sequence[re.Pattern[str]], full: str) -> bool:
    return any(one.match(stem + full) for one in expressions for stem in _STEMS)


def _parts(name: str) -> Iterator[str]:
    """Every run of whole words of a dotted name."""
    words = name.split(".")
    for start in range(len(words)):
        for last in range(start, len(words)):
            yield ".".join(words[start : last + 1])


def parse_module_names(entries: Iterable[str], *, field: str) -> ModuleNames:
    """The layers that the entries name. Raises KvModelError for an expression that is none or could take forever."""
    parts: set[str] = set()
    wild: dict[int | None, list[re.Pattern[str]]] = {None: []}
    expressions: dict[bool, list[re.Pattern[str]]] = {False: [], True: []}
    for entry in dict.fromkeys(entries):
        if entry.startswith("re:"):
            text = entry.removeprefix("re:")
            expressions[_LAYER_DEPENDENT.search(text) is not None].append(_expression(text, field))
            continue
        plain = _BEFORE_LAYERS.sub("layers.", entry.strip("."), count=1)
        found = _NUMBERED.match(plain)
        if not any(mark in plain for mark in "*?"):
            parts.add(plain)
        else:
            wild.setdefault(None if found is None else int(found[1]), []).append(_wildcard(plain, field))
    most = max(map(len, wild.values()))
    if most > _MAX_WILDCARDS:
        raise KvModelError(
            f"{field} has {most} wildcards, at most {_MAX_WILDCARDS} are supported: pass --weights", field
        )
    for layered, limit in ((False, _MAX_STEPS), (True, _MAX_STEPS_PER_LAYER)):
        if sum(_NAME_LETTERS ** max(0, _repeats(one.pattern) - 1) for one in expressions[layered]) > limit:
            raise KvModelError(
                f"{field} has {len(expressions[layered])} patterns, too slow to match: pass --weights BYTES",
                field,
            )
    return ModuleNames(parts=frozenset(parts - {""}), wild=wild, expressions=expressions)


@functools.cache
def spellings(name: str) -> tuple[str, ...]:
    """What the linear layer `mlp.shared_experts.down_proj` is called, in checkpoints and in the engine."""
    first, *inner_parts, last = name.split(".")
    blocks = _SPELLINGS["blocks"].get(first, (first,))
    inner = _SPELLINGS["shared_experts"] if inner_parts == ["shared_experts"] else (".".join(inner_parts),)
    return tuple(
        ".".join(part for part in (block, between, projection) if part)
        for block in blocks
        for between in inner
        for projection in _SPELLINGS["projections"].get(last, (last,))
    )


def _wildcard(entry: str, field: str) -> re.Pattern[str]:
    """A wildcard begins and ends where a part of a name does, and all below what it names is meant."""
    if len(entry) > _LONGEST_EXPRESSION or entry.count("*") > _MAX_REPEATS:
        raise KvModelError(f"{field} has an unsupported wildcard {entry[:60]!a}: pass --weights BYTES", field)
    # Without the frame that `translate` puts around it: "(?s:" and ")\Z", or ")\z" from Python 3.14 on.
    body = fnmatch.translate(entry)[len("(?s:") : -len(r")\Z")]
    before = "" if entry.startswith("*") else r"(?:.*\.)?"
    return re.compile(rf"(?s:{before}{body}(?:\..*)?)\Z")


def _repeats(text: str) -> int:
    return len(_REPEAT.findall(text))


def _expression(text: str, field: str) -> re.Pattern[str]:
    if len(text) > _LONGEST_EXPRESSION or _UNREADABLE.search(text) or _repeats(text) > _MAX_REPEATS:
        raise KvModelError(
            f"{field} has an unsupported pattern {text[:60]!a}: pass --weights FORMAT or --weights BYTES", field
        )
    try:
        return re.compile(text)
    except re.error as error:
        raise KvModelError(f"{field} has an invalid pattern {text[:60]!a}: {error}", field) from error
