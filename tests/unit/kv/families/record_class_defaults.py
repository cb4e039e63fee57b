"""What config classes fill in where a config.json leaves a field out, as the classes themselves say.

Runs in vLLM's own Python, in the repository's root: `ENV/bin/python -m tests.unit.kv.families.record_class_defaults`
writes kvdiag/kv/families/class_defaults.json and tests/unit/kv/data/class_layers.json. The first has what the class
itself sets, before it derives one field from others: 32 KV heads that LlamaConfig makes of 32 heads are no default.
The second has the layer_types that a class makes of a depth alone, and where each model class is defined: the model
types that transformers has it for, and the file that vLLM loads it from.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.model_executor.models.registry import _VLLM_MODELS
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.transformers_utils.configs.moondream3 import Moondream3TextConfig

from kvdiag.kv.families.attention import encoder_only
from kvdiag.kv.families.registry import FAMILIES, TYPE_OF_ARCHITECTURE

LAYERS = Path(__file__).parents[1] / "data" / "class_layers.json"
DEFAULTS = Path(__file__).parents[4] / "kvdiag" / "kv" / "families" / "class_defaults.json"
# Every field that determines a family's cache, under all the names that families have for it.
KEYS = """
    num_hidden_layers n_layer n_layers num_layers decoder_layers num_layers_per_stack H_cycles L_cycles loop_num
    hidden_size n_embd n_embed d_model dim
    num_attention_heads n_head n_heads num_heads decoder_attention_heads swa_num_attention_heads
    num_key_value_heads n_head_kv num_kv_heads n_kv_heads multi_query_group_num num_attention_groups multi_query
    new_decoder_architecture num_global_key_value_heads swa_num_key_value_heads attention_k_eq_v
    head_dim hidden_size_per_head kv_channels attention_head_dim global_head_dim v_head_dim swa_head_dim swa_v_head_dim
    sliding_window sliding_window_size use_sliding_window max_window_layers sliding_window_pattern loop_window_size
    prefix_dense_sliding_window_pattern global_attn_every_n_layers attention_chunk_size no_rope_layer_interval
    use_bidirectional_attention num_kv_shared_layers full_attention_interval layer_group_size
    kv_lora_rank qk_nope_head_dim qk_rope_head_dim index_topk index_head_dim index_topk_freq index_skip_topk_offset
    index_kpool linear_head_dim linear_num_heads
    num_nextn_predict_layers mtp_num_hidden_layers
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    mamba_ssm_dtype mamba_ssm_cache_dtype attn_layer_period attn_layer_offset
    mamba_d_state mamba_d_conv mamba_expand mamba_d_ssm mamba_n_heads mamba_d_head mamba_n_groups
    state_size ssm_state_size expand conv_kernel n_groups mamba_num_heads mamba_head_dim mamba_ngroups n_mamba_heads
    mamba_headdim conv_L_cache conv_dim short_conv_kernel_size
    intermediate_size ff_dim vocab_size
    max_position_embeddings n_positions max_seq_len seq_length model_max_length max_target_positions
    max_sequence_length max_seq_length seq_len max_context
""".split()  # noqa: SIM905 (a hundred quotes would hide the table)
# Deep enough for two rounds of the longest pattern, a full layer of eight, and a few layers more.
DEPTH = 19


def class_of(model_type: str) -> Any:
    """The config class that vLLM loads, its own before transformers'; None where it comes with the checkpoint."""
    if model_type == "moondream3":
        return Moondream3TextConfig
    for classes in (_CONFIG_REGISTRY, CONFIG_MAPPING):
        # Both load a class when it is asked for, which their get() does not.
        if model_type in classes:
            return classes[model_type]
    return None


def defaults(config_class: Any) -> dict[str, object]:
    """The recorded fields for which the class itself has a value."""
    own = {field.name: field.default for field in dataclasses.fields(config_class)}
    own |= {name: parameter.default for name, parameter in inspect.signature(config_class.__init__).parameters.items()}
    return {key: own[key] for key in KEYS if isinstance(own.get(key), int | str)}


def layer_types(config_class: Any) -> list[str] | None:
    """The names that the class gives to the layers of a config that says how many there are, and no more."""
    if "layer_types" not in {field.name for field in dataclasses.fields(config_class)} | set(
        config_class.attribute_map
    ):
        return None
    try:
        names = config_class(num_hidden_layers=DEPTH).layer_types
    except Exception:  # noqa: BLE001 (Zamba2 has a list of 54 layers and refuses another depth, with an error of its own)
        return None
    return None if names is None else list(names)


def of_class(name: str) -> dict[str, object]:
    """The model types that transformers has a model's class for, and the file of vLLM that it is loaded from."""
    types = [model_type for model_type, served in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if served == name]
    return {"transformers": types, "vllm": _VLLM_MODELS[name][0] if name in _VLLM_MODELS else None}


def rows(values: dict[str, Any]) -> str:
    """A JSON object with one line for each entry."""
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()) + "\n}"


def main() -> None:
    """Write both records, one line for each model type and for each class."""
    classes = {name: found for name in sorted(FAMILIES) if (found := class_of(name)) is not None}
    packages = {"transformers": "transformers", "vllm_version": "vllm"}
    versions = json.dumps({key: metadata.version(name).partition("+")[0] for key, name in packages.items()})[:-1]
    # Encoders keep no cache.
    set_by_class = {
        name: fields
        for name, found in classes.items()
        if FAMILIES[name] is not encoder_only and (fields := defaults(found))
    }
    patterns = {name: names for name, found in classes.items() if (names := layer_types(found)) is not None}
    # The registry's other classes are compared with vLLM itself (tests/integration/vllm/test_registry_on_vllm.py).
    recorded = json.loads(LAYERS.read_text(encoding="utf-8"))["model_classes"]
    models = {name: of_class(name) for name in recorded if name in TYPE_OF_ARCHITECTURE}
    DEFAULTS.write_text(f'{versions}, "defaults": {rows(set_by_class)}}}\n', encoding="utf-8")
    layers = f'"layer_types": {rows(patterns)},\n"model_classes": {rows(models)}'
    LAYERS.write_text(f"{versions}, {layers}}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
