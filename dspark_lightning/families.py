"""One LightningModule per family; each refuses the targets of the others.

`DSparkModule` itself serves every registered family.
"""

from dspark_lightning.drafts.deepseek_v4 import DEEPSEEK_V4
from dspark_lightning.drafts.gemma4 import GEMMA4
from dspark_lightning.drafts.glm_5_2 import GLM_5_2
from dspark_lightning.drafts.kimi_k3 import KIMI_K3
from dspark_lightning.drafts.minimax_m3 import MINIMAX_M3
from dspark_lightning.drafts.qwen3 import QWEN3
from dspark_lightning.module import DSparkModule


class Qwen3DSpark(DSparkModule):
    """`DSparkModule` bound to the Qwen3 draft: Qwen3 (dense, MoE), Qwen2, Llama, Mistral and Qwen-VL targets."""

    spec = QWEN3


class Gemma4DSpark(DSparkModule):
    """`DSparkModule` bound to the Gemma4 draft: Gemma4 and Gemma4-Unified targets."""

    spec = GEMMA4


class DeepseekV4DSpark(DSparkModule):
    """`DSparkModule` bound to the DeepSeek V4 draft."""

    spec = DEEPSEEK_V4


class Glm5_2DSpark(DSparkModule):
    """`DSparkModule` bound to the GLM-5.2 draft."""

    spec = GLM_5_2


class KimiK3DSpark(DSparkModule):
    """`DSparkModule` bound to the Kimi draft: Kimi K3 and Kimi-Linear targets."""

    spec = KIMI_K3


class MiniMaxM3DSpark(DSparkModule):
    """`DSparkModule` bound to the MiniMax M3 draft."""

    spec = MINIMAX_M3
