"""All tensor maths of Step-Sparse GRPO.

Every function is pure. The axes are those of `records`. Notation: problem P, rollouts i of a group
of K, reward R_i, group mean m, group deviation s, advantage A_i; rollout i has steps t, prefix
s_<=t; value V_t, weight w_t, estimator logit z_t.
"""

from ssgrpo_lightning.functional.advantages import (
    clipped_baseline,
    group_advantages,
    group_deviation,
    group_mean,
    group_std,
    group_sum,
    mixed_groups,
    others_mean,
    relative_rewards,
)
from ssgrpo_lightning.functional.credit import (
    evidence_logit,
    fall_shares,
    gae,
    gain_weights,
    gated,
    lambda_returns,
    mean_one,
    process_advantages,
    sign_aware,
    step_advantages,
    survival_gains,
    value_gains,
    whiten,
    whiten_by_place,
    window_mean,
)
from ssgrpo_lightning.functional.outcomes import (
    mean_steps,
    noisy_and_logprob,
    outcome_loss,
    pairwise_loss,
    prefix_loss,
    value_loss,
)
from ssgrpo_lightning.functional.shuffles import (
    counted_generator,
    shuffled_across,
    shuffled_within,
)
from ssgrpo_lightning.functional.similarity import Twin, near_duplicates
from ssgrpo_lightning.functional.skill import above_chance, falls_at
from ssgrpo_lightning.functional.steps import (
    group_evidence,
    lay_out_steps,
    pool_steps,
    prefix_fingerprints,
    spread_steps,
    step_fingerprints,
    step_lengths,
)
from ssgrpo_lightning.functional.surrogates import (
    clipped_surrogate,
    kl_k3,
)

__all__ = [
    "Twin",
    "above_chance",
    "clipped_baseline",
    "clipped_surrogate",
    "counted_generator",
    "evidence_logit",
    "fall_shares",
    "falls_at",
    "gae",
    "gain_weights",
    "gated",
    "group_advantages",
    "group_deviation",
    "group_evidence",
    "group_mean",
    "group_std",
    "group_sum",
    "kl_k3",
    "lambda_returns",
    "lay_out_steps",
    "mean_one",
    "mean_steps",
    "mixed_groups",
    "near_duplicates",
    "noisy_and_logprob",
    "others_mean",
    "outcome_loss",
    "pairwise_loss",
    "pool_steps",
    "prefix_fingerprints",
    "prefix_loss",
    "process_advantages",
    "relative_rewards",
    "shuffled_across",
    "shuffled_within",
    "sign_aware",
    "spread_steps",
    "step_advantages",
    "step_fingerprints",
    "step_lengths",
    "survival_gains",
    "value_gains",
    "value_loss",
    "whiten",
    "whiten_by_place",
    "window_mean",
]
