"""The longest request that vLLM accepts of a model, and the one it is served with where the user names none.

As vLLM derives it (0.32.0, transformers_utils/model_arch_config_convertor.py::derive_max_model_len_and_key, then
config/model.py::_get_and_verify_max_len): the smallest of the config's length fields, `model_max_length` before all of
them; less where a tokenizer or a sentence-transformers file says less; times a RoPE factor that the length does not yet
include. The engine does not start with a longer
--max-model-len, however large the pool is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvdiag.kv.families.base import CONFIG_NAMES, window_of
from kvdiag.kv.families.config_fields import Fields

# _get_and_verify_max_len: with these the config's length is already the scaled one.
_SCALED_ROPE: frozenset[str] = frozenset(CONFIG_NAMES["scaled_rope"])
_LEGACY_ROPE: Mapping[str, str] = {"su": "longrope", "mrope": "default", "telechat3-yarn": "yarn"}
# Models with learned positions or ALiBi, which RoPE scaling cannot extend.
_WITHOUT_ROPE: frozenset[str] = frozenset(CONFIG_NAMES["without_rope"])
_MOST_FACTOR = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextLimit:
    """`default_tokens` is what vLLM serves without --max-model-len, `most_tokens` the most it accepts there; None for a
    model whose config has no length, of which it accepts any. `field` is the field that decides.
    """

    default_tokens: int | None = None
    most_tokens: int | None = None
    field: str = ""
    rotary: bool = False
    """Whether RoPE scaling can extend it."""


def context_limit(
    text: Fields, *, beside: Mapping[str, int] | None = None, sliding_window: bool = True
) -> ContextLimit:
    """The limit of a language model's config. `beside` has `model_max_length` of the tokenizer, where vLLM reads it,
    and `max_seq_length` of a sentence-transformers file. Without `sliding_window` no request exceeds the window.
    """
    others = beside or {}
    rotary = text.text("model_type") not in _WITHOUT_ROPE
    derived, field = _derived(text)
    window = None if sliding_window else window_of(text)
    if window is not None and (derived is None or window < derived):
        derived, field = window, "sliding_window"
    if derived is None:
        return ContextLimit(rotary=rotary)
    derived = min(derived, others.get("model_max_length", derived))
    kinds: set[str] = set()
    factor = 1.0
    for parameters in _rope(text):
        kind = parameters.text("rope_type") or parameters.text("type") or "default"
        kinds.add(_LEGACY_ROPE.get(kind, kind))
        if _LEGACY_ROPE.get(kind, kind) not in _SCALED_ROPE:
            factor = parameters.number("factor", default=factor, low=0, high=_MOST_FACTOR)
    # Gemma 3's length is the scaled one, though its RoPE is plain "linear".
    scaled = derived if "gemma3" in (text.text("model_type") or "") else int(derived * factor)
    longest = max(1, others.get("max_seq_length", scaled))
    default = longest
    if "longrope" in kinds:
        default = text.integer("original_max_position_embeddings", default=longest)
    promised = text.maybe_integer("model_max_length", low=0) or 0
    return ContextLimit(default_tokens=default, most_tokens=max(longest, promised), field=field, rotary=rotary)


def _derived(text: Fields) -> tuple[int | None, str]:
    """The smallest length of the config and its field; a `model_max_length` counts before the others."""
    name = "model_max_length"
    if length := text.maybe_integer(name, low=0):
        return length, name
    lengths = {name: length for name in CONFIG_NAMES["max_context"] if (length := text.maybe_integer(name)) is not None}
    field = min(lengths, key=lambda name: lengths[name], default="")
    return lengths.get(field), field


def _rope(text: Fields) -> Iterator[Fields]:
    """A config's RoPE parameters, one object for each kind of layer where they are nested
    (transformers_utils/config.py::iter_rope_parameters).
    """
    for name in ("rope_scaling", "rope_parameters"):
        parameters = text.child(name)
        if parameters is None or not parameters.names():
            continue
        values = [parameters.raw(one) for one in parameters.names()]
        if all(value is None or isinstance(value, Mapping) for value in values):
            yield from (one for key in parameters.names() if (one := parameters.child(key)) is not None)
        else:
            yield parameters
        return
