"""Keys of a configuration that nobody reads: which of them change nothing, and which would change the result."""

from typing import Any

from configs.errors import CheckpointError

from .values import Values, shown

_WITHOUT_EFFECT = """
    intermediate_size num_experts_per_tok time_step_limit mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head
    mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias mamba_proj_bias
    num_ln_in_parallel_attn rope_parameters.max_position_embeddings rope_scaling.max_position_embeddings
    num_kv_heads num_key_value_heads apply_residual_connection_post_layernorm
    original_max_position_embeddings sliding_window_pattern
    _name_or_path architectures auto_map dtype model_type torch_dtype transformers_version
    transformers.js_config bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    unk_token_id tokenizer_class initializer_range initializer_factor use_cache cache_implementation
    pretraining_tp quantization_config attention_dropout attn_pdrop embd_pdrop embedding_dropout
    hidden_dropout resid_pdrop residual_dropout ffn_dropout output_attentions output_hidden_states return_dict
    chunk_size_feed_forward _attn_implementation attn_implementation is_decoder is_encoder_decoder id2label
    label2id problem_type task_specific_params gradient_checkpointing output_router_logits
    router_aux_loss_coef unsloth_fixed unsloth_version torchscript _sliding_window_pattern is_llama_config
    max_window_layers rope_interleaved rope_theta rope_scaling rope_parameters sliding_window
    use_sliding_window layer_norm_elementwise_affine layerdrop dropout init_std summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj classifier_dropout
    reorder_and_upcast_attn cross_attention_hidden_size add_cross_attention finetuning_task prefix
    keys_to_ignore_at_inference rope_parameters.type rope_scaling.type rope_parameters.finetuned
    rope_scaling.finetuned sentence_transformers rope_local_base_freq layer_types
    vocab_size rope.scaling.finetuned tensor_data_layout attention.value_length attention.layer_norm_epsilon
    attention.layer_norm_rms_epsilon expert_used_count rope.dimension_count rope.scaling.type
    rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scale_linear attention.sliding_window_pattern
    attention.key_length_swa attention.value_length_swa rope.dimension_count_swa rope.freq_base_swa
"""

WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Of training, of text, of other programs, or checked where tensors are: a bias without a place is refused there."""

OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("alibi", "parallel_attn", "qk_layernorm", "use_parallel_residual", "use_qk_norm"), (False,)),
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "use_bidirectional_attention"), (False,)),
    **dict.fromkeys(("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier"), (1,)),
    **dict.fromkeys(("embedding_scale", "residual_scale", "partial_rotary_factor"), (1,)),
    **dict.fromkeys(("moe_intermediate_size", "n_routed_experts", "num_experts", "num_local_experts"), (0,)),
    **dict.fromkeys(("no_rope_layer_interval", "num_kv_shared_layers"), (0,)),
    **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"), (0,)),
    **dict.fromkeys(("attention.temperature_length", "attention.temperature_scale"), (0,)),
    **dict.fromkeys(("attention_multiplier", "clip_qkv", "kv_lora_rank", "query_pre_attn_scalar"), ()),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ()),
    **dict.fromkeys((f"rope_{form}.llama_4_scaling_beta" for form in ("parameters", "scaling")), (0,)),
    **dict.fromkeys((f"rope_{form}.mrope_section" for form in ("parameters", "scaling")), ()),
    "is_causal": (True,),
    "no_rope_layers": ([],),
}
"""Key -> values that change nothing, where the family does not read it; every other is refused. GGUF's are here too."""


def check_unread(values: Values, architecture: str) -> list[str]:
    """Names of keys that nobody has read and nobody knows. Raises CheckpointError for one that changes the result."""
    unread = values.not_asked()
    for key, value in unread.items():
        if key in OFF and value not in OFF[key]:
            name = f"{values.prefix}{key} {shown(value)}"
            raise CheckpointError(f"{values.file}: {name} is not supported for {architecture}")
    kinds = unread.get("layer_types", [])
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError(f"{values.file}: layer_types {shown(kinds)} is not supported for {architecture}")
    return sorted(unread.keys() - OFF.keys() - WITHOUT_EFFECT)


def unknown_note(values: Values, architecture: str) -> list[str]:
    """As `check_unread`, in a sentence for the start-up message."""
    unknown = ", ".join(f"{values.prefix}{key}" for key in check_unread(values, architecture))
    return [f"{values.file.name} has keys that are not known and passed over: {unknown}"] if unknown else []
