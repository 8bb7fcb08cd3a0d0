"""DSpark speculative-decoding drafters, trained with PyTorch Lightning."""

from pathlib import Path

# In a source checkout callbacks/, datamodules/ and configs/ lie beside this package; installed, they lie inside it.
if not (Path(__file__).parent / "callbacks").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

from dspark_lightning.anchors import (
    build_anchor_candidate_mask,
    build_eval_mask,
    context_doc_ids,
    create_noise_embed,
    create_position_ids,
    sample_anchor_positions,
)
from dspark_lightning.datamodules.vlm_collate import dspark_vlm_collate_fn
from dspark_lightning.datamodules.vlm_loader import build_dspark_vlm_dataloader
from dspark_lightning.decoding.generate import SpeculativeOutput, speculative_generate
from dspark_lightning.drafts.base import DSparkDraft
from dspark_lightning.drafts.deepseek_v4 import DeepseekV4DSparkModel, build_deepseek_v4_draft_config
from dspark_lightning.drafts.gemma4 import Gemma4DSparkModel, build_gemma4_draft_config
from dspark_lightning.drafts.glm_5_2 import Glm5_2DSparkModel, build_glm_5_2_draft_config
from dspark_lightning.drafts.kimi_k3 import KimiK3DSparkModel, build_kimi_k3_draft_config
from dspark_lightning.drafts.minimax_m3 import MiniMaxM3DSparkModel, build_minimax_m3_draft_config
from dspark_lightning.drafts.qwen3 import Qwen3DSparkModel, build_qwen3_draft_config
from dspark_lightning.drafts.registry import (
    DSPARK_DRAFT_REGISTRY,
    build_draft_config,
    build_draft_model,
    register_draft_family,
    resolve_dspark_draft_spec,
)
from dspark_lightning.drafts.spec import DraftSpec
from dspark_lightning.export import export_draft
from dspark_lightning.families import (
    DeepseekV4DSpark,
    Gemma4DSpark,
    Glm5_2DSpark,
    KimiK3DSpark,
    MiniMaxM3DSpark,
    Qwen3DSpark,
)
from dspark_lightning.heads import (
    AcceptRatePredictor,
    GatedMarkovHead,
    RNNHead,
    VanillaMarkov,
    build_markov_head,
)
from dspark_lightning.loss import compute_dspark_loss
from dspark_lightning.module import DSparkModule
from dspark_lightning.outputs import DSparkForwardOutput
from dspark_lightning.pretrained import load_pretrained_draft
from dspark_lightning.rope import pin_rope_inv_freq_fp32
from dspark_lightning.target import (
    DSparkTargetBatch,
    HFDSparkTargetModel,
    build_target_layer_ids,
    extract_context_feature,
    validate_target_layer_ids,
)

__version__ = "0.1.0"

__all__ = [
    "DSPARK_DRAFT_REGISTRY",
    "AcceptRatePredictor",
    "DSparkDraft",
    "DSparkForwardOutput",
    "DSparkModule",
    "DSparkTargetBatch",
    "DeepseekV4DSpark",
    "DeepseekV4DSparkModel",
    "DraftSpec",
    "GatedMarkovHead",
    "Gemma4DSpark",
    "Gemma4DSparkModel",
    "Glm5_2DSpark",
    "Glm5_2DSparkModel",
    "HFDSparkTargetModel",
    "KimiK3DSpark",
    "KimiK3DSparkModel",
    "MiniMaxM3DSpark",
    "MiniMaxM3DSparkModel",
    "Qwen3DSpark",
    "Qwen3DSparkModel",
    "RNNHead",
    "SpeculativeOutput",
    "VanillaMarkov",
    "build_anchor_candidate_mask",
    "build_deepseek_v4_draft_config",
    "build_draft_config",
    "build_draft_model",
    "build_dspark_vlm_dataloader",
    "build_eval_mask",
    "build_gemma4_draft_config",
    "build_glm_5_2_draft_config",
    "build_kimi_k3_draft_config",
    "build_markov_head",
    "build_minimax_m3_draft_config",
    "build_qwen3_draft_config",
    "build_target_layer_ids",
    "compute_dspark_loss",
    "context_doc_ids",
    "create_noise_embed",
    "create_position_ids",
    "dspark_vlm_collate_fn",
    "export_draft",
    "extract_context_feature",
    "load_pretrained_draft",
    "pin_rope_inv_freq_fp32",
    "register_draft_family",
    "resolve_dspark_draft_spec",
    "sample_anchor_positions",
    "speculative_generate",
    "validate_target_layer_ids",
]
