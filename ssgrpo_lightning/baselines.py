"""Estimators that learn nothing: what the group alone, or the task itself, says about a step.

Compared systems; members of the same swap point as the learnt ones in `estimators`. Use
`GroupStatistics` with the objective `LeaveOneOut`, `ExactSteps` with `NoisyAnd`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.estimators import Estimator, others_logit
from ssgrpo_lightning.functional import step_fingerprints, step_lengths
from ssgrpo_lightning.records import Rollouts
from ssgrpo_lightning.tasks import ChainArithmetic

CERTAIN = 12.0


class GroupStatistics(Estimator):
    """Share of successes among the other rollouts of the group that contain the same step.

    In the spirit of KTAE (2505.16826), for steps in place of tokens. A step that no other rollout
    contains has the mean of the others.

    Args:
        prior: Rollouts at the others' mean that are counted beside those that were seen.
    """

    def __init__(self, prior: float = 1.0) -> None:
        super().__init__()
        if prior <= 0:
            raise ValueError(
                f"{type(self).__name__}.prior is {prior}, must be greater than 0: a step that no "
                "other rollout contains has nothing else to go by"
            )
        self.prior = prior

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        key = step_fingerprints(rollouts.tokens, rollouts.step, rollouts.steps)
        return others_logit(rollouts, key, torch.tensor(self.prior).to(rollouts.logprobs))


class ExactSteps(Estimator):
    """The task's own checker of steps: the best that any estimator could know of soundness.

    An oracle, for comparison. Steps must be lines (segmenter `ByLine`).

    Args:
        task: Task with `step_truth`.
    """

    def __init__(self, task: ChainArithmetic) -> None:
        super().__init__()
        self.task = task

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        logits = rollouts.logprobs.new_zeros(len(rollouts), rollouts.steps)
        mask = step_lengths(rollouts.step, rollouts.steps) > 0
        for row, (problem, text) in enumerate(zip(rollouts.problems, rollouts.texts)):
            lines = text.split("\n")[: int(mask[row].sum())]
            truth = self.task.step_truth(problem, lines)
            logits[row, : len(truth)] = logits.new_tensor(truth) * 2 * CERTAIN - CERTAIN
            self.calls += len(truth)
        return logits
