"""Classes of vLLM's registry: each is mapped to a family or to the model that it wraps, or refused by its name."""

import pytest

from kvdiag.errors import KvModelError
from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.registry import FAMILIES, TYPE_OF_ARCHITECTURE, TYPE_OF_WRAPPER, UNMODELLED
from kvdiag.kv.layout.layers import LayerKind
from tests.unit.kv.families.test_families import EVERYTHING, OF_TYPE

QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 64}


@pytest.mark.parametrize("name", [*TYPE_OF_ARCHITECTURE, *TYPE_OF_WRAPPER])
def test_a_class_and_plain_fields_are_enough(name: str) -> None:
    """Without a model type the class decides, also where a wrapper's language model is written at the top."""
    fields = {**EVERYTHING, **OF_TYPE.get({**TYPE_OF_WRAPPER, **TYPE_OF_ARCHITECTURE}[name], {})}

    assert parse_architecture({**fields, "architectures": [name]}).layers


@pytest.mark.parametrize("name", UNMODELLED)
def test_what_is_not_modelled_is_refused_by_its_name(name: str) -> None:
    """Also with a model type that is known, since the class has another cache."""
    with pytest.raises(KvModelError, match=f"{name} is not modelled yet: {UNMODELLED[name]}"):
        parse_architecture({**EVERYTHING, "model_type": "llama", "architectures": [name]})


def test_each_class_is_in_one_table() -> None:
    """And leads to a type that has a reader."""
    tables = (set(TYPE_OF_ARCHITECTURE), set(TYPE_OF_WRAPPER), set(UNMODELLED))

    assert sum(map(len, tables)) == len(set.union(*tables))
    assert {*TYPE_OF_ARCHITECTURE.values(), *TYPE_OF_WRAPPER.values()} <= set(FAMILIES)


@pytest.mark.parametrize("place", ["text_config", "llm_config", "thinker_config"])
def test_a_wrapper_is_read_as_its_language_model(place: str) -> None:
    """Not as the type that the wrapper has, or usually wraps."""
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", place: QWEN3}

    assert ("qwen3", 3) == (parse_architecture(config).model_type, parse_architecture(config).depth)


def test_a_wrapper_of_an_unnamed_language_model_has_its_class_default() -> None:
    """Transformers' LlavaConfig takes a text config without a type for Llama's."""
    text = {name: value for name, value in QWEN3.items() if name != "model_type"}
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}

    assert "llama" == parse_architecture(config).model_type


def test_a_wrapper_of_an_unknown_language_model_is_refused() -> None:
    """It is not taken for the usual one."""
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": {**QWEN3, "model_type": "unheard"}}

    with pytest.raises(KvModelError, match="unheard"):
        parse_architecture(config)


def test_hy_v4_indexes_the_sparse_layers_that_select_for_themselves() -> None:
    """Latent rows everywhere; a layer that shares the selection before it has no indexer."""
    config = {
        "architectures": ["HYV4ForCausalLM"],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
        "layer_types": ["full_attention", "sparse_attention", "sparse_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
    }

    kinds = [layer.kind for layer in parse_architecture(config).layers]

    assert [LayerKind.MLA, LayerKind.MLA_DSA, LayerKind.MLA, LayerKind.MLA_DSA] == kinds
