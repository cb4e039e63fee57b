"""Parameters outside the layers, the embedding and the output layer: positions, an encoder, more embeddings."""

from kvdiag.kv.families.base import MAX_LAYERS
from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.weights.linear_layers import TYPES

# Layers, width and feed-forward width of vision towers that model files, and not configs, describe (molmo.py,
# transformers_utils/configs/moondream3.py).
_BUILT_IN_VISION = {"molmo": (23, 1024, 4096), "moondream3": (27, 1152, 4304)}


def non_layer_parameters(
    text: Fields, top: Fields, model_type: str, *, vocabulary: int, depth: int, hidden: int
) -> int:
    """The parameters outside a model's layers. A vision tower is an estimate."""
    return (
        _vision(top, model_type)
        + _ngram_embeddings(text, vocabulary, hidden)
        + _encoder(text, model_type, hidden)
        + _layer_embeddings(text, depth, hidden)
        + _alternating_updates(text, model_type, hidden)
        + _position_embeddings(text, model_type, hidden)
    )


def _vision(top: Fields, model_type: str) -> int:
    """A vision tower's parameters: attention and a feed-forward block per layer (an estimate)."""
    if model_type in _BUILT_IN_VISION:
        layers, size, inner = _BUILT_IN_VISION[model_type]
        return layers * (4 * size * size + 2 * size * inner)
    tower = top.child("vision_config")
    if tower is None:
        return 0
    # Where a tower has both, hidden_size is the width of what it hands on (transformers Qwen2VLVisionConfig).
    hidden = tower.maybe_integer("embed_dim", "hidden_size", "width", high=1 << 16)
    depth = tower.maybe_integer("num_hidden_layers", "depth", "layers", "n_layers", high=MAX_LAYERS)
    if hidden is None or depth is None:
        return 0
    width = tower.integer("intermediate_size", default=4 * hidden, high=1 << 18)
    return depth * (4 * hidden * hidden + 2 * hidden * width)


def _ngram_embeddings(text: Fields, vocabulary: int, hidden: int) -> int:
    """Embeddings of pairs, triples, ... of tokens (longcat_flash_ngram.py::NgramEmbedding): tables of so many
    vocabularies each, that share the width, and a projection of each.
    """
    ratio = text.maybe_integer("ngram_vocab_size_ratio", high=1 << 16)
    if ratio is None:
        return 0
    tables = text.integer("emb_split_num", high=1 << 10) * (text.integer("emb_neighbor_num", low=2, high=1 << 10) - 1)
    width = hidden // tables
    return tables * (ratio * vocabulary + tables) * width + tables * width * hidden


def _layer_embeddings(text: Fields, depth: int, hidden: int) -> int:
    """Embeddings per layer (gemma3n.py, gemma4.py): a table of hidden_size_per_layer_input for each layer, and what
    makes as much of the embedding (per_layer_model_projection).
    """
    size = text.integer("hidden_size_per_layer_input", default=0, low=0, high=1 << 14)
    if not size:
        return 0
    return (text.integer("vocab_size_per_layer_input", "vocab_size", high=1 << 26) + hidden) * depth * size


def _alternating_updates(text: Fields, model_type: str, hidden: int) -> int:
    """What makes Gemma 3n's further streams of the first, and one of them all (gemma3n.py: altup_projections)."""
    if model_type != "gemma3n_text":
        return 0
    return 2 * (text.integer("altup_num_inputs", default=4, high=64) - 1) * hidden * hidden


def _position_embeddings(text: Fields, model_type: str, hidden: int) -> int:
    """Learned positions (bert.py, gpt2.py, opt.py and their kin)."""
    if model_type == "whisper":
        positions = text.integer("max_source_positions", default=1500, high=1 << 20)
        return (positions + text.integer("max_target_positions", default=448, high=1 << 20)) * hidden
    if model_type not in TYPES["learned_positions"]:
        return 0
    positions = text.integer("max_position_embeddings", "n_positions", default=512, high=1 << 20)
    # opt.py::OPTLearnedPositionalEmbedding: two more than are used; transformers BioGpt has it from there.
    return (positions + 2 if model_type in ("opt", "biogpt") else positions) * hidden


def _encoder(text: Fields, model_type: str, hidden: int) -> int:
    """Whisper's encoder, and the query and output projections of its decoder's cross-attention are in the layers."""
    if model_type != "whisper":
        return 0
    depth = text.integer("encoder_layers", default=0, low=0, high=MAX_LAYERS)
    width = text.integer("encoder_ffn_dim", default=4 * hidden)
    bins = text.integer("num_mel_bins", default=80, high=1 << 12)
    return depth * (4 * hidden * hidden + 2 * hidden * width) + 3 * hidden * (bins + hidden)
