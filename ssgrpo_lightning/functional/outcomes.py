"""Losses of the estimator, per rollout: outcomes against the logits of steps."""

import torch
import torch.nn.functional as F

from ssgrpo_lightning.functional.shapes import Groups, PerRollout, PerStep, StepMask


def mean_steps(x: PerStep, mask: StepMask) -> PerRollout:
    """Mean over the steps a rollout has; 0 where it has none.

    >>> mean_steps(torch.tensor([[1., 3., 9.]]), torch.tensor([[True, True, False]]))
    tensor([2.])
    """
    return torch.where(mask, x, 0.0).sum(1) / mask.sum(1).clamp(min=1)


def noisy_and_logprob(logits: PerStep, mask: StepMask) -> PerRollout:
    """Log-probability of success if every step must be sound, ``log P = sum_t log sigmoid(z_t)``.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> noisy_and_logprob(torch.zeros(1, 2), m).exp()
    tensor([0.2500])
    """
    return torch.where(mask, F.logsigmoid(logits), 0.0).sum(1)


def outcome_loss(logprob: PerRollout, rewards: PerRollout) -> PerRollout:
    """Cross-entropy of a success probability P to the outcome, ``-R log P - (1 - R) log(1 - P)``.

    >>> outcome_loss(torch.tensor([.25]).log(), torch.tensor([0.]))
    tensor([0.2877])
    """
    logprob = logprob.clamp(max=-1e-6)
    return -(rewards * logprob + (1 - rewards) * torch.log(-torch.expm1(logprob)))


def prefix_loss(
    logits: PerStep, mask: StepMask, rewards: PerRollout, baseline: PerRollout
) -> PerRollout:
    """Cross-entropy of every prefix value ``V_t = sigmoid(logit(m) + z_t)`` to the outcome.

    The offset leaves only differences within a group to be learnt. Source: token-level verifiers
    (Cobbe et al., 2110.14168).

    >>> m = torch.ones(1, 1, dtype=torch.bool)
    >>> prefix_loss(torch.zeros(1, 1), m, torch.tensor([1.]), torch.tensor([.5]))
    tensor([0.6931])
    """
    z = torch.logit(baseline)[:, None] + logits
    target = rewards[:, None].expand_as(z)
    return mean_steps(F.binary_cross_entropy_with_logits(z, target, reduction="none"), mask)


def pairwise_loss(z: PerRollout, rewards: PerRollout, group: Groups, margin: float) -> PerRollout:
    """Mean over a rollout's better or worse group members of ``softplus(margin - (z_+ - z_-))``.

    Source: Bradley-Terry within the group, as iStar (2509.19199) and PQM (2410.11287).

    >>> z, r = torch.tensor([2., 0.]), torch.tensor([1., 0.])
    >>> pairwise_loss(z, r, torch.tensor([0, 0]), margin=2.)
    tensor([0.6931, 0.6931])
    """
    same = group[:, None] == group[None]
    order = torch.where(same, rewards[:, None] - rewards[None], 0.0).nan_to_num().sign()
    loss = F.softplus(margin - order * (z[:, None] - z[None])) * order.abs()
    return loss.sum(1) / order.abs().sum(1).clamp(min=1)


def value_loss(
    values: PerStep, targets: PerStep, old: PerStep, clip: float | None = None
) -> PerStep:
    """Squared error of values to their targets, pessimistic about moves away from the old values.

    ``max((V - G)^2, (clip(V, V_old - clip, V_old + clip) - G)^2)``: a value that has moved by more
    than `clip` has no gradient towards its target. Source: PPO's reference implementation (OpenAI
    baselines), of 1707.06347.

    >>> v, g, old = torch.tensor([[.9]]), torch.tensor([[1.]]), torch.tensor([[.5]])
    >>> value_loss(v, g, old), value_loss(v, g, old, clip=.2)
    (tensor([[0.0100]]), tensor([[0.0900]]))
    """
    error = (values - targets).square()
    if clip is None:
        return error
    near = old + (values - old).clamp(-clip, clip)
    return torch.maximum(error, (near - targets).square())
