"""Lightning callbacks for training DSpark drafts."""

from dspark_lightning.callbacks.acceptance import AcceptanceMetrics
from dspark_lightning.callbacks.decode_acceptance import DecodeAcceptance
from dspark_lightning.callbacks.draft_export import DraftExport
from dspark_lightning.callbacks.finite_steps import FiniteSteps
from dspark_lightning.callbacks.rank_agreement import RankAgreement
from dspark_lightning.callbacks.rope_precision import RopePrecisionCheck
from dspark_lightning.callbacks.step_timer import StepTimer

__all__ = [
    "AcceptanceMetrics",
    "DecodeAcceptance",
    "DraftExport",
    "FiniteSteps",
    "RankAgreement",
    "RopePrecisionCheck",
    "StepTimer",
]
