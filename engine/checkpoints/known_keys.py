"""Keys of a configuration that nobody reads: which of them change nothing, and which would change the result."""

from typing import Any

from configs.errors import CheckpointError

from .values import Values, shown

_WITHOUT_EFFECT = """
    _name_or_path architectures auto_map dtype model_type torch_dtype transformers_version
    transformers.js_config bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id
    unk_token_id tokenizer_class initializer_range initializer_factor use_cache cache_implementation
    pretraining_tp quantization_config attention_dropout attn_pdrop embd_pdrop embedding_dropout
    hidden_dropout resid_pdrop residual_dropout ffn_dropout output_attentions output_hidden_states return_dict
    chunk_size_feed_forward _attn_implementation attn_implementation is_decoder is_encoder_decoder id2label
    label2id problem_type task_specific_params gradient_checkpointing output_router_logits
    router_aux_loss_coef unsloth_fixed unsloth_version torchscript _sliding_window_pattern is_llama_config
    max_window_layers rope_interleaved rope_theta rope_scaling rope_parameters use_sliding_window
    cross_attention_hidden_size add_cross_attention finetuning_task prefix keys_to_ignore_at_inference
    rope_parameters.type rope_scaling.type rope_parameters.finetuned rope_scaling.finetuned
    sentence_transformers rope_local_base_freq layer_types use_mup z_loss_coefficient
"""

WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
"""Of training, of text, of other programs, or checked where tensors are: a bias without a place is refused there."""

OFF: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "kv_lora_rank": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "moe_intermediate_size": (0,),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_kv_shared_layers": (0,),
    "num_local_experts": (0,),
    "parallel_attn": (False,),
    "partial_rotary_factor": (1,),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_parameters.llama_4_scaling_beta": (0,),
    "rope_parameters.mrope_section": (),
    "rope_scaling.llama_4_scaling_beta": (0,),
    "rope_scaling.mrope_section": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "use_bidirectional_attention": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Key -> values that change nothing, where the family does not read it; every other is refused."""


def check_unread(values: Values, architecture: str) -> list[str]:
    """Names of keys that nobody has read and nobody knows. Raises CheckpointError for one that changes the result."""
    unread = values.not_asked()
    for key, value in unread.items():
        if key in OFF and value not in OFF[key]:
            raise CheckpointError(f"{values.file}: {key} {shown(value)} is not supported for {architecture}")
    if "layer_types" in unread and set(map(str, unread["layer_types"])) - {"full_attention"}:
        raise CheckpointError(f"{values.file}: layer_types are not supported for {architecture}")
    return sorted(unread.keys() - OFF.keys() - WITHOUT_EFFECT)
