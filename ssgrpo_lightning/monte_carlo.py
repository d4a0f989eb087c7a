"""Values of steps by sampling on from them: no network, but many rollouts."""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.estimators import Estimator
from ssgrpo_lightning.functional import group_mean, mixed_groups, step_lengths
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.records import Rollouts
from ssgrpo_lightning.rollouts import Resampler, step_prefixes

NEAREST = 1e-7  # in float32 the logits of 0 and 1 then come back to within 1e-6


class MonteCarlo(Estimator):
    """Value of a step: mean reward of fresh rollouts that continue after it.

    The last step's value is the rollout's own outcome, and V_0 is the mean of the group that was
    sampled anyway. Use it with the objective `PublishedMSE`, which reads the logits back as values,
    and the rule `StepAdvantage`. Its price is `calls` re-rollouts beside those of the update, and
    as many calls of the verifier. Source: VinePPO (2410.01679), which takes 9 repeats.

    Args:
        repeats: Re-rollouts after every step but the last.
        mixed_only: Spare the groups whose rewards are all equal: their steps have the value of
            the outcome.
    """

    sees_outcome: ClassVar[bool] = True
    reads_policy: ClassVar[bool] = True

    def __init__(self, repeats: int = 4, mixed_only: bool = True) -> None:
        super().__init__()
        if not 1 <= repeats < 4096:
            raise ValueError(
                f"MonteCarlo.repeats is {repeats}, must be 1 to 4095: 9 is what VinePPO takes"
            )
        self.repeats, self.mixed_only = repeats, mixed_only
        self.resample: Resampler | None = None

    def bind(self, policy: Policy, resample: Resampler) -> None:
        self.resample = resample

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        if self.resample is None:
            raise ValueError(
                "MonteCarlo has no policy to sample with: use it as the estimator of SSGRPO, or "
                "call bind(policy, Resampler(…)) first"
            )
        rewards, group = rollouts.rewards, rollouts.group
        mask = step_lengths(rollouts.step, rollouts.steps) > 0
        expected = group_mean(rewards, group)[:, None].expand(mask.shape)
        values = torch.where(rewards.isnan()[:, None], expected, rewards[:, None])
        known = mixed_groups(rewards, group) if self.mixed_only else ~rewards.isnan()
        # The value after a step is the one before the next.
        before = mask & known[:, None]
        before[:, 0] = False
        after = before.roll(-1, 1)
        prefixes = step_prefixes(rollouts, before)
        found = self.resample(prefixes, self.repeats, rollouts.policy_step).to(values)
        self.calls = self.resample.calls
        found = torch.where(found.isnan(), expected[after], found)
        return torch.logit(values.masked_scatter(after, found), eps=NEAREST)
