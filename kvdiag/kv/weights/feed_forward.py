"""A layer's feed-forward half: a dense block, or experts and those of them that all tokens share.

Families with a rule of their own come first (Nemotron, Mamba, Moondream, Ernie VL); then a layer is one of experts if
the config has experts and places them in it; else it is dense. Each family has its own config field names for widths
and counts, so that a name counts only where its model file reads it; the docstrings name that file. Experts are counted
with their router, shared experts and narrower space, because all of them take memory, however few a token uses.
"""

from kvdiag.kv.families.base import CONFIG_NAMES, MAX_LAYERS
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.families.mamba import nemotron_pattern
from kvdiag.kv.layout.layers import Architecture, LayerKind
from kvdiag.kv.weights.linear_layers import TYPES, LayerParameters, Linear, block

_MAX_EXPERTS = 1 << 16
_MAX_DIGITS = 4


def feed_forward(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    """The feed-forward half of one layer."""
    matrices = 2 if architecture.model_type in TYPES["ungated"] else 3
    if architecture.model_type in ("nemotron_h", "nemotron_h_puzzle"):
        return _nemotron_feed_forward(text, index, hidden)
    if architecture.model_type in ("mamba", "mamba2", "falcon_mamba"):
        return LayerParameters()
    if architecture.model_type == "moondream3":
        return _moondream_feed_forward(text, index, hidden)
    if isinstance(text.raw("moe_num_experts"), list | tuple):
        return _ernie_vl_feed_forward(text, architecture, index, hidden)
    experts = expert_count(text)
    if experts and is_expert_layer(text, architecture.model_type, index, architecture.depth):
        width = _expert_width(text, index)
        shared = _shared_expert_width(text, architecture.model_type, width)
        # Experts may work in a narrower space than the residual (Kimi-K3).
        inner = text.integer("routed_expert_hidden_size", default=hidden)
        dense = LayerParameters()
        if architecture.model_type.startswith("gemma4") or text.flag("residual_moe", default=False):
            # gemma4.py, grok.py: experts in addition to a dense block, not instead of it.
            dense = block("mlp", inputs=hidden, width=text.integer("intermediate_size"))
            shared = 0
        if architecture.model_type in ("longcat_flash", "longcat_flash_ngram"):
            # longcat_flash.py::FlashDecoderLayer: a dense block after each of the two attention sublayers.
            dense_width_sum = 2 * text.integer("ffn_hidden_size", "intermediate_size")
            dense = block("mlps.0", inputs=hidden, width=dense_width_sum)
        return dense + _experts(experts, hidden=hidden, inner=inner, width=width, shared=shared, matrices=matrices)
    if architecture.model_type == "nemotron-nas":
        return _nas_feed_forward(text, index, hidden)
    width = dense_width(text, architecture.model_type, hidden)
    shares = any(layer.index == index and layer.kind is LayerKind.SHARED for layer in architecture.layers)
    if shares and architecture.model_type.startswith("gemma4") and text.flag("use_double_wide_mlp", default=False):
        # gemma4.py::Gemma4DecoderLayer: twice as wide where the layer reuses another's cache.
        width *= 2
    return block("mlp", inputs=hidden, width=width, matrices=matrices)


def _experts(
    count: int, *, hidden: int, width: int, inner: int | None = None, shared: int = 0, matrices: int = 3
) -> LayerParameters:
    """All experts of a layer with their router, the shared experts, and the way into and out of the narrower space
    (`inner`) that experts may work in. Kernels for MXFP4 pad their sizes (gpt_oss.py).
    """
    inputs = inner or hidden
    padded = count * _up(inputs, 256) * _up(width, 128)
    gates = matrices - 1
    linears: tuple[Linear, ...] = (
        Linear("mlp.experts.0.gate_proj", count * gates * inputs * width, padded_parameters=gates * padded),
        Linear("mlp.experts.0.down_proj", count * inputs * width, padded_parameters=padded),
    )
    if inputs != hidden:
        linears += (Linear("mlp.fc1_latent_proj", 2 * hidden * inputs),)
    return LayerParameters(linears, plain=hidden * count) + block(
        "mlp.shared_experts", inputs=hidden, width=shared, matrices=matrices
    )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _moondream_feed_forward(text: Fields, index: int, hidden: int) -> LayerParameters:
    """moondream3.py: ungated dense blocks below moe.start_layer, gated experts from there on."""
    moe = text.child("moe") or Fields({}, text.path("moe"))
    if index < moe.integer("start_layer", default=4, low=0, high=MAX_LAYERS):
        width = text.integer("ff_dim")
        return block("mlp", inputs=hidden, width=width, matrices=2)
    count = moe.integer("n_experts", default=64, high=_MAX_EXPERTS)
    return _experts(count, hidden=hidden, width=moe.integer("expert_inner_dim", default=1024))


def _ernie_vl_feed_forward(text: Fields, architecture: Architecture, index: int, hidden: int) -> LayerParameters:
    """ernie45_vl_moe.py::Ernie4_5_VLMoeMoE: experts for text and others for images, each in layers of its own; where
    one kind has none it has a dense block.
    """
    counts, widths, starts, ends = (
        _each_kind(text, name, default)
        for name, default in (
            ("moe_num_experts", None),
            ("moe_intermediate_size", None),
            ("moe_layer_start_index", 0),
            ("moe_layer_end_index", architecture.depth - 1),
        )
    )
    dense = block("mlp", inputs=hidden, width=dense_width(text, architecture.model_type, hidden))
    step = text.integer("moe_layer_interval", default=1, high=MAX_LAYERS)
    if (index + 1) % step or not min(starts) <= index <= max(ends):
        return dense
    parts = block("mlp.shared_experts", inputs=hidden, width=widths[0] * _shared_experts(text))
    for count, width, start, end in zip(counts, widths, starts, ends, strict=True):
        if start <= index <= end:
            parts += _experts(count, hidden=hidden, width=width)
        else:
            parts += dense
    return parts


def _each_kind(text: Fields, name: str, default: int | None) -> tuple[int, int]:
    """A number for text and one for images, or one for both."""
    if not isinstance(text.raw(name), list | tuple):
        value = text.integer(name, default=default, low=0)
        return value, value
    values = text.integers(name) or ()
    if len(values) != 2:  # noqa: PLR2004 - text and images
        raise text.error(name, f"has {len(values)} entries: it must have two, for text and images")
    return values[0], values[1]


def _nas_feed_forward(text: Fields, index: int, hidden: int) -> LayerParameters:
    """nemotron_nas.py::_ffn_mult_to_intermediate_size: two thirds of ffn_mult widths, rounded up to 256."""
    blocks = text.children("block_configs") or ()
    ffn = blocks[index].child("ffn") if index < len(blocks) else None
    if ffn is None or ffn.flag("no_op", default=False):
        return LayerParameters()
    width = ffn.maybe_integer("intermediate_size")
    if width is None:
        multiple = ffn.number("ffn_mult", default=0.0, low=0.0, high=1024.0)
        width = _up(int(2 * multiple * hidden / 3), 256)
    if ffn.flag("replace_with_linear", default=False):
        return LayerParameters((Linear("mlp.linear_mlp", hidden * hidden),))
    return block("mlp", inputs=hidden, width=width)


def _nemotron_feed_forward(text: Fields, index: int, hidden: int) -> LayerParameters:
    """nemotron_h.py: a layer is Mamba, attention, MLP or experts, never two of them; experts may work in a narrower
    space (moe_latent_size), and blocks of a puzzle have sizes of their own (block_configs).
    """
    letter = nemotron_pattern(text)[index]
    blocks = text.children("block_configs") or ()
    if index < len(blocks):
        text = text.filled({name: blocks[index].raw(name) for name in blocks[index].names()}, override=True)
    if letter == "-":
        width = text.integer("intermediate_size")
        return block("mlp", inputs=hidden, width=width, matrices=2)
    if letter == "E":
        width = text.integer("moe_intermediate_size")
        shared = text.integer("moe_shared_expert_intermediate_size", default=0, low=0)
        shared *= text.integer("n_shared_experts", default=1, low=0, high=256)
        inner = text.integer("moe_latent_size", default=hidden)
        return _experts(expert_count(text), hidden=hidden, inner=inner, width=width, shared=shared, matrices=2)
    return LayerParameters()


def expert_count(text: Fields) -> int:
    """Experts per layer (ModelArchConfigConvertorBase.get_num_experts); 0 for a dense model."""
    for name in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        value = text.raw(name)
        if isinstance(value, list):
            numbers = text.integers(name, high=_MAX_EXPERTS)
            return numbers[0] if numbers else 0
        if value is not None:
            return text.integer(name, low=0, high=_MAX_EXPERTS)
    ffn = text.child("ffn_config")
    return 0 if ffn is None else ffn.integer("moe_num_experts", default=0, low=0, high=_MAX_EXPERTS)


def _expert_width(text: Fields, index: int) -> int:
    """The width of a layer's experts: one number, or a list with one for each layer (Hunyuan's published configs)."""
    ffn = text.child("ffn_config")
    if ffn is not None:
        # transformers DbrxFFNConfig
        return ffn.integer("ffn_hidden_size")
    if isinstance(text.raw("moe_intermediate_size"), list):
        widths = text.integers("moe_intermediate_size", low=1) or ()
        if index < len(widths):
            return widths[index]
        raise text.error("moe_intermediate_size", f"has {len(widths)} entries, but the model has a layer {index}")
    return text.integer("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")


def _listed_expert_layers(text: Fields) -> frozenset[int] | None:
    """`moe_layers_enum`: the numbers of the layers with experts, in a string (step3_text.py, step3p5.py)."""
    listed = text.text("moe_layers_enum")
    if listed is None:
        return None
    numbers = [part.strip() for part in listed[: 8 * MAX_LAYERS].split(",")]
    if not all(number.isdecimal() and len(number) <= _MAX_DIGITS for number in numbers):
        raise text.error("moe_layers_enum", f"{listed[:40]!a} is not a list of layer numbers")
    return frozenset(int(number) for number in numbers)


def is_expert_layer(text: Fields, model_type: str, index: int, depth: int) -> bool:
    """Whether a layer has experts."""
    names = text.strings("mlp_layer_types")
    if names is not None and index < len(names):
        return names[index] in ("sparse", "moe")
    listed = _listed_expert_layers(text)
    if listed is not None:
        return index in listed
    if index in (text.integers("mlp_only_layers", high=MAX_LAYERS) or ()):
        return False
    if model_type == "jamba":
        period = text.integer("expert_layer_period", default=2, high=MAX_LAYERS)
        return index % period == text.integer("expert_layer_offset", default=1, low=0, high=MAX_LAYERS)
    if model_type == "llama4_text":
        step = text.integer("interleave_moe_layer_step", default=1, low=0, high=MAX_LAYERS)
        return step > 0 and (index + 1) % step == 0
    usual = 1 if model_type in TYPES["first_dense"] else 0
    if index < text.integer(*CONFIG_NAMES["dense_layers_first"], default=usual, low=0, high=MAX_LAYERS):
        return False
    frequency = text.raw("moe_layer_freq")
    if isinstance(frequency, list):
        flags = text.integers("moe_layer_freq", high=1) or ()
        return index < len(flags) and flags[index] == 1
    step = text.integer("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval", default=1, high=MAX_LAYERS)
    if text.has("decoder_sparse_step"):
        return (index + 1) % step == 0
    last = text.integer("moe_layer_end_index", default=depth, low=-1, high=MAX_LAYERS)
    return index % step == 0 and (last < 0 or index <= last)


def _shared_expert_width(text: Fields, model_type: str, width: int) -> int:
    if model_type == "llama4_text":
        return text.integer("intermediate_size")
    own = text.maybe_integer(*CONFIG_NAMES["shared_expert_width"], low=0)
    return width * _shared_experts(text) if own is None else own


def _shared_experts(text: Fields) -> int:
    for name in ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert"):
        if isinstance(text.raw(name), list):
            return max(text.integers(name, high=256) or (0,))
        if text.has(name):
            return text.integer(name, low=0, high=256)
    return 0


def dense_width(text: Fields, model_type: str, hidden: int) -> int:
    """The width of a dense feed-forward block."""
    names = ["intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "n_inner", "block_ff_dim"]
    if model_type == "llama4_text":
        names.insert(0, "intermediate_size_mlp")
    if model_type == "granitemoehybrid":
        names.insert(0, "shared_intermediate_size")
    widths = text.raw("intermediate_size")
    if isinstance(widths, list):
        numbers = text.integers("intermediate_size") or (4 * hidden,)
        return sum(numbers) // len(numbers)
    width = text.integer(*names, default=4 * hidden if model_type in TYPES["ungated"] else None)
    if model_type == "molmo":
        # molmo.py::LanguageModelMLP: the field counts gate and up together.
        return width // 2
    if model_type in ("lfm2", "lfm2_moe") and text.flag("block_auto_adjust_ff_dim", default=model_type == "lfm2"):
        # lfm2.py::Lfm2MLP: two thirds, rounded up to block_multiple_of.
        step = text.integer("block_multiple_of", default=256, high=1 << 16)
        width = _up(2 * width // 3, step)
    return width
