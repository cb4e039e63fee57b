"""The fields of a model's config.json that kvdiag keeps: those that the cost model reads.

The config is recorded in traces, which are passed on. A file that is not a model's config, or that contains more than
one, must not get there: unknown fields and texts with spaces are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

KNOWN_KEYS = frozenset(
    """
    H_cycles L_cycles adapter_rank altup_num_inputs architectures attention attention_chunk_size
    attention_gate_func attention_head_dim attention_k_eq_v attention_other_setting attention_type attn_config
    attn_layer_indices attn_layer_offset attn_layer_period audio_config bits block_auto_adjust_ff_dim
    block_configs block_ff_dim block_multiple_of block_size block_structure bnb_4bit_use_double_quant
    compression_config config config_groups conv_L_cache conv_dim conv_kernel d_model decoder_attention_heads
    decoder_ffn_dim decoder_layers decoder_sparse_step depth dim dtype dynamic emb_neighbor_num emb_split_num
    embed_dim encoder_ffn_dim encoder_layers exclude_modules expand expert_ffn_hidden_size expert_inner_dim
    expert_layer_offset expert_layer_period extra_config ff_dim ffn ffn_config ffn_dim ffn_hidden_size ffn_mult
    first_k_dense_replace full_attention_interval full_attn_idxs gating global_attn_every_n_layers
    global_head_dim group_size head_dim head_size head_size_v hidden_size hidden_size_per_head
    hidden_size_per_layer_input hybrid_layer_ids hybrid_layer_pattern hybrid_override_pattern ignore
    ignored_layers index_head_dim index_n_heads index_skip_topk_offset index_topk index_topk_freq
    index_topk_pattern interleave_moe_layer_step interleaved_sliding_window intermediate_size
    intermediate_size_mlp is_causal kda_layers kv_cache_quant_algo kv_cache_scheme kv_channels kv_lora_rank
    kv_n_heads language_config language_model laurel_rank layer_group_size layer_types layer_types_count layers
    layers_block_type linear_attn_config linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
    linear_num_value_heads linear_value_head_dim llm_config llm_int8_skip_modules lm_head load_in_8bit loop_num
    loop_window_size mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_dt_rank mamba_expand
    mamba_head_dim mamba_headdim mamba_n_groups mamba_n_heads mamba_ngroups mamba_num_heads
    mamba_ssm_cache_dtype mamba_ssm_dtype max_context max_position_embeddings max_seq_len max_sequence_length
    max_source_positions max_target_positions max_window_layers mlp_layer_types mlp_only_layers mm_vision_tower
    model_max_length model_type modules_to_not_convert moe moe_intermediate_size moe_latent_size
    moe_layer_end_index moe_layer_freq moe_layer_interval moe_layer_start_index moe_layers_enum moe_num_experts
    moe_num_shared_experts moe_shared_expert_intermediate_size mova_num_experts mtp_num_hidden_layers
    multi_query multi_query_group_num n_embd n_embed n_experts n_groups n_head n_head_kv n_heads
    n_heads_in_group n_inner n_kv_heads n_layer n_layers n_mamba_heads n_positions n_routed_experts
    n_shared_experts new_decoder_architecture ngram_vocab_size_ratio no_kda_lora no_op no_rope_layer_interval
    no_rope_layers num_attention_groups num_attention_heads num_attention_heads_per_layer num_bits
    num_dense_layers num_experts num_global_key_value_heads num_heads num_hidden_layers num_key_value_heads
    num_kv_heads num_kv_shared_layers num_layers num_layers_per_stack num_local_experts num_mel_bins
    num_mem_blocks num_nextn_predict_layers num_shared_expert num_shared_experts padded_vocab_size
    prefix_dense_sliding_window_pattern producer q_group_size q_lora_rank qk_nope_head_dim qk_rope_head_dim
    quant_algo quant_method quantization quantization_config replace_with_linear routed_expert_hidden_size
    seq_length share_expert_dim shared_expert_intermediate_size shared_intermediate_size short_conv_kernel_size
    sliding_window sliding_window_pattern sliding_window_size sliding_windows ssm_state_size start_layer
    state_size strategy swa_head_dim swa_num_attention_heads swa_num_key_value_heads swa_v_head_dim symmetric
    targets text text_config text_model_config text_model_id thinker_config tie_embedding tie_word_embeddings
    time_step_rank torch_dtype type use_attn_output_gate use_bidirectional_attention use_double_wide_mlp
    use_shared_attention_adapter use_sliding_window v_head_dim vision_config visual vocab_size
    vocab_size_per_layer_input w_bit weight_block_size weight_tying weights width zero_point
    """.split()  # noqa: SIM905 - as a list it has four times the lines
)
"""Names of fields that kvdiag/kv reads, at any depth."""

FREELY_NAMED = frozenset(("config_groups", "dynamic", "extra_config", "layer_types_count"))
"""Fields whose keys are names of layers or groups of layers."""

MOST_DEPTH = 16
WORD = re.compile(r"[!-~]{0,512}")
"""A name, a number format or a module pattern, without spaces."""


def known_part(config: object) -> dict[str, object] | None:
    """Return the known fields of a model's config; `None` if it has neither `architectures` nor `model_type`."""
    if not isinstance(config, Mapping):
        return None
    listed = config.get("architectures")
    named = isinstance(listed, list) and bool(listed) and all(isinstance(one, str) for one in listed)
    if not named and not isinstance(config.get("model_type"), str):
        return None
    return _kept_fields(config, free=False, depth=0)


def _kept_fields(fields: Mapping[object, object], *, free: bool, depth: int) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if isinstance(name, str) and (WORD.fullmatch(name) if free else name in KNOWN_KEYS):
            left = _kept(value, free=not free and name in FREELY_NAMED, depth=depth + 1)
            if left is not _DROPPED:
                kept[name] = left
    return kept


_DROPPED = object()


def _kept(value: object, *, free: bool, depth: int) -> object:
    """Return a value without its unknown fields; `_DROPPED` if nothing is left."""
    if isinstance(value, str):
        return value if WORD.fullmatch(value) else _DROPPED
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth > MOST_DEPTH:
        return _DROPPED
    if isinstance(value, Mapping):
        return _kept_fields(value, free=free, depth=depth)
    if isinstance(value, list):
        return [left for one in value if (left := _kept(one, free=False, depth=depth + 1)) is not _DROPPED]
    return _DROPPED
