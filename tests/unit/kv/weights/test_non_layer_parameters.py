"""A model's parameters outside its layers, embedding and output layer, by hand."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from kvdiag.kv.families.config_fields import Fields
from kvdiag.kv.weights.non_layer_parameters import non_layer_parameters

H = 60


def beside(model_type: str, /, *, top: Mapping[str, Any] = MappingProxyType({}), **text: Any) -> int:
    """The parameters of such a model outside its three layers."""
    return non_layer_parameters(
        Fields({"vocab_size": 211, **text}), Fields(top), model_type, vocabulary=211, depth=3, hidden=H
    )


def test_most_models_have_nothing_else() -> None:
    """A text model with rotary positions is its embedding, layers and output layer."""
    assert 0 == beside("llama", max_position_embeddings=4096)


@pytest.mark.parametrize(
    ("tower", "parameters"),
    [
        # Attention of four matrices and a block of two: 5 * (4 * 40 * 40 + 2 * 40 * 96).
        ({"hidden_size": 40, "num_hidden_layers": 5, "intermediate_size": 96}, 70_400),
        # Qwen2-VL: hidden_size is the language model's width; a block four times as wide as the tower.
        ({"embed_dim": 40, "hidden_size": 60, "depth": 5}, 5 * (4 * 1600 + 2 * 40 * 160)),
        ({"width": 40, "layers": 5}, 96_000),
        ({"hidden_size": 40, "n_layers": 5}, 96_000),
        ({"hidden_size": 40}, 0),
        ({"depth": 5}, 0),
    ],
)
def test_a_vision_tower_is_estimated(tower: dict[str, int], parameters: int) -> None:
    """Under each family's names for its width and depth; a tower that says neither is not counted."""
    assert parameters == beside("qwen2_vl_text", top={"vision_config": tower})


@pytest.mark.parametrize(
    ("model_type", "parameters"),
    [("molmo", 23 * (4 * 1024 * 1024 + 2 * 1024 * 4096)), ("moondream3", 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304))],
)
def test_towers_that_the_model_file_describes(model_type: str, parameters: int) -> None:
    """Molmo's CLIP and Moondream's SigLIP stand in no config."""
    assert parameters == beside(model_type)


def test_tables_of_several_tokens() -> None:
    """LongCat's two tables each for pairs and triples, of 7 vocabularies and a few, share the width, and each is
    projected (longcat_flash_ngram.py::NgramEmbedding).
    """
    tables, width = 2 * (3 - 1), 60 // 4
    config: dict[str, Any] = {"ngram_vocab_size_ratio": 7, "emb_split_num": 2, "emb_neighbor_num": 3}

    assert tables * (7 * 211 + tables) * width + tables * width * H == beside("longcat_flash_ngram", **config)


def test_embeddings_of_each_layer() -> None:
    """Gemma 3n and 4 have a table for each layer and what makes as much of the embedding; Gemma 3n also what makes
    further streams, four in all, and what makes one of them again.
    """
    assert 199 * 3 * 12 + H * 3 * 12 == beside(
        "gemma4_text", hidden_size_per_layer_input=12, vocab_size_per_layer_input=199
    )
    assert 211 * 3 * 12 + H * 3 * 12 == beside("gemma4_text", hidden_size_per_layer_input=12)
    assert 2 * 3 * H * H == beside("gemma3n_text")


@pytest.mark.parametrize(
    ("model_type", "text", "parameters"),
    [
        ("bert", {}, 512 * H),
        ("roberta", {"max_position_embeddings": 97}, 97 * H),
        ("xlm-roberta", {"max_position_embeddings": 97}, 97 * H),
        ("gpt2", {"n_positions": 97}, 97 * H),
        ("gpt_bigcode", {"n_positions": 97}, 97 * H),
        ("gpt_neo", {"max_position_embeddings": 97}, 97 * H),
        # Two more than are used.
        ("opt", {"max_position_embeddings": 97}, 99 * H),
        ("biogpt", {"max_position_embeddings": 97}, 99 * H),
        ("gptj", {"n_positions": 97}, 0),
    ],
)
def test_learned_positions(model_type: str, text: dict[str, Any], parameters: int) -> None:
    """Models without rotary positions have a row for each."""
    assert parameters == beside(model_type, **text)


def test_whispers_encoder_has_what_its_class_fills_in() -> None:
    """80 Mel bins, blocks four times as wide, 1,500 positions and 448 of the decoder; layers only if in the config."""
    convolutions, positions = 3 * H * (80 + H), (1500 + 448) * H

    assert convolutions + positions == beside("whisper")
    assert convolutions + positions + 2 * 12 * H * H == beside("whisper", encoder_layers=2)
    assert convolutions + positions + 2 * (4 * H * H + 2 * H * 74) == beside(
        "whisper", encoder_layers=2, encoder_ffn_dim=74
    )
