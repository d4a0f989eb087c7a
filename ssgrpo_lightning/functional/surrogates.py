"""Losses of single tokens."""

import torch

from ssgrpo_lightning.functional.shapes import PerToken


def clipped_surrogate(
    logprobs: PerToken, old: PerToken, advantages: PerToken, low: float, high: float
) -> PerToken:
    """Clipped surrogate ``-min(r A, clip(r, 1 - low, 1 + high) A)``, PPO (1707.06347) eq. 7.

    On-policy the ratio is 1 and the loss value is minus the mean advantage, about 0: only its
    gradient tells.

    >>> lp, old = torch.tensor([[0.5]]), torch.tensor([[0.0]])
    >>> clipped_surrogate(lp, old, torch.tensor([[1.0]]), .2, .2)
    tensor([[-1.2000]])
    """
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def kl_k3(logprobs: PerToken, reference: PerToken) -> PerToken:
    """Estimate of KL(policy || reference) per token, ``e^d - d - 1`` with ``d = ref - logprob``.

    Source: DeepSeekMath (2402.03300) eq. 4 ("k3"); never negative, in nats.

    >>> kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]))
    tensor([[0.]])
    """
    difference = reference - logprobs
    return difference.exp() - difference - 1
