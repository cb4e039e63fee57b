"""What config classes fill in, against data/class_defaults.json, which recorded_defaults.py had from the classes.

Compared are all recorded fields of all model types; a difference stands here with its reason.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvdiag.kv.families.architecture import parse_architecture
from kvdiag.kv.families.attention import encoder_only
from kvdiag.kv.families.registry import FAMILIES
from kvdiag.kv.hf_defaults import HF_DEFAULTS
from kvdiag.kv.hf_defaults.attention import ATTENTION
from kvdiag.kv.hf_defaults.latent import LATENT
from kvdiag.kv.hf_defaults.state import STATE
from kvdiag.kv.hf_defaults.windowed import WINDOWED
from kvdiag.kv.layout.layers import AttentionLayer
from kvdiag.kv.weights.parameters import count_parameters
from tests.unit.kv.vectors import DATA

RECORD: dict[str, Any] = json.loads((DATA / "class_defaults.json").read_text())
CLASSES: dict[str, dict[str, object]] = {name: told["defaults"] for name, told in RECORD["classes"].items()}

# Only the weights depend on these; the table has them where published configs leave them out.
OF_WEIGHTS = {"intermediate_size", "ff_dim", "vocab_size"}
# What a family's own reading takes where the field is missing, so that the table need not have it.
READ_SO_ANYWAY = {
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
    "num_nextn_predict_layers": 0,
}
NO_DIFFERENCE = {
    # Latent layers have no head size; both of these are the width of the part with rope.
    ("glm_moe_dsa", "head_dim"),
    ("longcat_flash", "head_dim"),
    # False is what Gemma 3 is read with; of Gemma 4 ("vision") images alone are looked at both ways.
    ("gemma3_text", "use_bidirectional_attention"),
    ("gemma4_unified_text", "use_bidirectional_attention"),
    # A window that a config could mean to leave out: test_mistral_windows, in test_architecture.py.
    ("mistral", "sliding_window"),
    ("ministral", "sliding_window"),
}
LEFT_OUT = {
    # ChatGLM's one KV head counts only with multi_query_attention, which is false by default (chatglm.py).
    "chatglm",
    # Two layers of eight heads: a placeholder, and falcon-40b's first config needs its own reading.
    "RefinedWeb",
    "RefinedWebModel",
    # The sizes of Whisper tiny, for a config that is never nested and must say its width anyway.
    "whisper",
    # Encoders keep no cache.
    *(name for name, family in FAMILIES.items() if family is encoder_only),
}


@pytest.mark.parametrize(
    ("table", "readers"),
    [
        (ATTENTION, {"attention_families", "looped_families"}),
        (WINDOWED, {"windowed_families"}),
        (LATENT, {"latent_families"}),
        (STATE, {"mamba_families", "state_families"}),
    ],
    ids=["attention", "windowed", "latent", "state"],
)
def test_the_defaults_of_a_type_stand_beside_its_family(table: dict[str, object], readers: set[str]) -> None:
    """Each type once, in the file whose name is that of the functions which read it."""
    assert readers == {FAMILIES[name].__module__.rpartition(".")[2] for name in table}
    assert len(HF_DEFAULTS) == sum(map(len, (ATTENTION, WINDOWED, LATENT, STATE)))


def test_the_table_is_what_the_config_classes_say() -> None:
    """Neither a model type nor a field nor a value more, less or other than in the classes."""
    # GIVEN
    compared = {name: fields for name, fields in CLASSES.items() if name not in LEFT_OUT}

    # WHEN
    expected = {
        name: {
            field: value
            for field, value in fields.items()
            if field not in READ_SO_ANYWAY
            and (name, field) not in NO_DIFFERENCE
            and (field not in OF_WEIGHTS or field in HF_DEFAULTS[name])
        }
        for name, fields in compared.items()
    }

    # THEN
    assert expected == HF_DEFAULTS


def test_what_the_table_leaves_to_the_readers_is_what_the_classes_say() -> None:
    """A class that changes one of these defaults must change its reader."""
    told = {(field, fields[field]) for fields in CLASSES.values() for field in READ_SO_ANYWAY if field in fields}

    assert set(READ_SO_ANYWAY.items()) == told


def test_each_difference_that_is_stated_is_there() -> None:
    """A reason for a difference that is gone would hide the next one."""
    stated = {(name, field) for name, field in NO_DIFFERENCE if field in CLASSES[name]}

    assert stated == NO_DIFFERENCE


@pytest.mark.parametrize(
    ("config", "kv_heads", "head_size"),
    [
        # A quarter of the query heads: BitNet 2B4T without the field would cost four times as much.
        ({"model_type": "bitnet", "num_hidden_layers": 30, "hidden_size": 2560, "num_attention_heads": 20}, 5, 128),
        ({"model_type": "qwen2_5_omni_thinker", "text_config": {"model_type": "qwen2_5_omni_text"}}, 4, 128),
        ({"model_type": "step3_vl", "text_config": {"model_type": "step3_text"}}, 1, 256),
        ({"model_type": "step3p5", "num_hidden_layers": 2, "hidden_size": 5120, "num_attention_groups": 4}, 4, 128),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_a_field_that_is_left_out_is_the_classs(config: dict[str, Any], kv_heads: int, head_size: int) -> None:
    """KV heads and head size of configs that leave them to their class."""
    layer = parse_architecture(config).layers[0]

    assert isinstance(layer, AttentionLayer)
    assert (kv_heads, head_size) == (layer.kv_heads, layer.head_size)


def test_a_published_config_without_a_vocabulary_has_weights() -> None:
    """gemma-3-4b-it names neither its heads nor its vocabulary: 4.3 billion parameters, says its card."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    vision = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27}
    config = {"model_type": "gemma3", "text_config": {**text, "sliding_window": 1024}, "vision_config": vision}

    billions = count_parameters(config, parse_architecture(config)).total / 1e9

    assert pytest.approx(4.3, rel=0.025) == billions
