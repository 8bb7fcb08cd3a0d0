"""The names a user imports, with the order of their arguments."""

import inspect

import pytest

import dspark_lightning

ARGUMENTS = {
    "DSparkForwardOutput": "draft_logits target_ids eval_mask block_keep_mask confidence_pred aligned_target_logits "
    "block_weights",
    "AcceptRatePredictor": "input_dim",
    "build_anchor_candidate_mask": "seq_len loss_mask doc_remaining",
    "sample_anchor_positions": "seq_len loss_mask num_anchors device doc_remaining generators",
    "build_eval_mask": "seq_len loss_mask label_indices safe_label_indices block_keep_mask doc_remaining "
    "anchor_positions",
    "context_doc_ids": "seq_lens seq_len device",
    "create_noise_embed": "embed_tokens input_ids anchor_positions block_keep_mask mask_token_id block_size",
    "create_position_ids": "anchor_positions block_size context_position_ids",
    "extract_context_feature": "hidden_states layer_ids",
    "validate_target_layer_ids": "layer_ids num_target_layers",
    "build_target_layer_ids": "num_target_layers num_feature_layers",
    "pin_rope_inv_freq_fp32": "rotary_emb",
    "build_markov_head": "config",
    "build_draft_config": "target_config model_args",
    "build_draft_model": "target_config model_args",
    "resolve_dspark_draft_spec": "architectures",
    "HFDSparkTargetModel": "model target_layer_ids",
    "DSparkTargetBatch": "target_hidden_states target_last_hidden_states input_ids loss_mask position_ids seq_lens "
    "doc_remaining",
    "compute_dspark_loss": "outputs loss_decay_gamma ce_loss_alpha l1_loss_alpha confidence_head_alpha return_terms",
    "dspark_vlm_collate_fn": "examples processor max_length inject_fake_image",
    "build_dspark_vlm_dataloader": "dataset_cfg processor batch_size max_length shuffle num_workers distributed "
    "dp_mesh inject_fake_image",
    "Qwen3DSparkModel": "config",
    "Gemma4DSparkModel": "config",
    "DeepseekV4DSparkModel": "config",
    "Glm5_2DSparkModel": "config",
    "KimiK3DSparkModel": "config",
    "MiniMaxM3DSparkModel": "config",
    "build_qwen3_draft_config": "target_config model_args",
    "build_gemma4_draft_config": "target_config model_args",
    "build_deepseek_v4_draft_config": "target_config model_args",
    "build_glm_5_2_draft_config": "target_config model_args",
    "build_kimi_k3_draft_config": "target_config model_args",
    "build_minimax_m3_draft_config": "target_config model_args",
    "register_draft_family": "spec",
    "load_pretrained_draft": "path",
    "export_draft": "draft path weights layout target record",
}
METHODS = {
    "HFDSparkTargetModel.generate_batch": "input_ids attention_mask loss_mask position_ids seq_lens doc_remaining "
    "multimodal",
    "Qwen3DSparkModel.forward": "input_ids target_hidden_states loss_mask target_last_hidden_states position_ids "
    "seq_lens doc_remaining anchor_positions block_keep_mask attention_mask output loss_weights",
    "Qwen3DSparkModel.initialize_embeddings_and_head": "embed_tokens lm_head freeze",
    "Qwen3DSparkModel.predict_confidence_step": "hidden prev_token_ids",
    "Qwen3DSparkModel.sample_draft_tokens": "base_logits first_prev_token_ids temperature hidden_states generator",
    "Qwen3DSparkModel.sample_draft_token_step": "base_logits prev_token_ids temperature hidden_states generator",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_functions_and_classes(name: str) -> None:
    assert list(inspect.signature(getattr(dspark_lightning, name)).parameters) == ARGUMENTS[name].split()
    assert name in dspark_lightning.__all__


@pytest.mark.parametrize("name", METHODS)
def test_methods(name: str) -> None:
    owner, method = name.split(".")
    parameters = inspect.signature(getattr(getattr(dspark_lightning, owner), method)).parameters
    assert list(parameters)[1:] == METHODS[name].split()


def test_everything_listed_exists() -> None:
    assert [name for name in dspark_lightning.__all__ if not hasattr(dspark_lightning, name)] == []
    assert len(set(dspark_lightning.__all__)) == len(dspark_lightning.__all__)
