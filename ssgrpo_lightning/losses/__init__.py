"""Policy losses, as swap points that combine freely.

A surrogate says what a token's loss is, a reduction how tokens become one number, a correction how
much a token counts that another program sampled, a KL term what holds the policy to its reference.
"""

from ssgrpo_lightning.losses.corrections import (
    Correction,
    NoCorrection,
    SequenceMasked,
    SequenceTruncated,
    TokenMasked,
    TokenTruncated,
)
from ssgrpo_lightning.losses.divergence import (
    K1,
    K2,
    K3,
    AdaptiveBeta,
    BetaControl,
    FixedBeta,
    KlEstimator,
    KlInLoss,
    KlInReward,
    KlTerm,
    RatioCorrected,
    StraightThroughK3,
)
from ssgrpo_lightning.losses.reductions import Bnpo, Dapo, DrGrpo, Grpo, Luspo, Reduction
from ssgrpo_lightning.losses.sequences import Gmpo, Gspo, GspoToken, Vespo
from ssgrpo_lightning.losses.surrogates import (
    Cispo,
    ClippedSurrogate,
    Dppo,
    DualClip,
    OffPolicyMask,
    Reinforce,
    Sapo,
    Surrogate,
)

__all__ = [
    "K1",
    "K2",
    "K3",
    "AdaptiveBeta",
    "BetaControl",
    "Bnpo",
    "Cispo",
    "ClippedSurrogate",
    "Correction",
    "Dapo",
    "Dppo",
    "DrGrpo",
    "DualClip",
    "FixedBeta",
    "Gmpo",
    "Grpo",
    "Gspo",
    "GspoToken",
    "KlEstimator",
    "KlInLoss",
    "KlInReward",
    "KlTerm",
    "Luspo",
    "NoCorrection",
    "OffPolicyMask",
    "RatioCorrected",
    "Reduction",
    "Reinforce",
    "Sapo",
    "SequenceMasked",
    "SequenceTruncated",
    "StraightThroughK3",
    "Surrogate",
    "TokenMasked",
    "TokenTruncated",
    "Vespo",
]
