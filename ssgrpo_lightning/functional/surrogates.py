"""Losses of single tokens, from the log-ratio ``d = logprob - old`` of the policy to itself."""

import math
from typing import Literal

import torch

from ssgrpo_lightning.functional.shapes import PerToken, TokenMask


def sequence_log_ratio(
    log_ratio: PerToken, mask: TokenMask, mean: Literal["sum", "geometric"]
) -> PerToken:
    """Log-ratio of a whole rollout at each of its tokens: ``sum_t d_t``, or that over its length.

    The sum is the log-ratio of the two probabilities of the rollout; over the length it is the log
    of the geometric mean of the ratios of its tokens, GSPO (2507.18071) eq. 7.

    >>> d, mask = torch.tensor([[.2, .4, 9.]]), torch.tensor([[True, True, False]])
    >>> sequence_log_ratio(d, mask, "geometric"), sequence_log_ratio(d, mask, "sum")
    (tensor([[0.3000, 0.3000, 0.3000]]), tensor([[0.6000, 0.6000, 0.6000]]))
    """
    total = torch.where(mask, log_ratio, 0.0).sum(1, keepdim=True)
    if mean == "geometric":
        total = total / mask.sum(1, keepdim=True).clamp(min=1)
    return total.expand_as(log_ratio)


def with_gradient_of(value: PerToken, source: PerToken) -> PerToken:
    """The numbers of `value` with the gradient of `source`: ``sg(value) + source - sg(source)``.

    >>> source = torch.tensor([[2.]], requires_grad=True)
    >>> with_gradient_of(torch.tensor([[5.]]), source).item()
    5.0
    """
    return value.detach() + source - source.detach()


def clipped_surrogate(
    log_ratio: PerToken, advantages: PerToken, low: float, high: float, cap: float = math.inf
) -> PerToken:
    """Clipped surrogate ``-min(min(r, cap) A, clip(r, 1 - low, 1 + high) A)`` with ``r = e^d``.

    PPO (1707.06347) eq. 7; with a cap on what a negative advantage multiplies, dual-clip PPO
    (1912.09729). On-policy the ratio is 1 and the loss value is minus the mean advantage,
    about 0: only its gradient tells.

    >>> d = torch.tensor([[0.5, 3.0]])
    >>> clipped_surrogate(d, torch.tensor([[1.0, -1.0]]), .2, .2, cap=3.0)
    tensor([[-1.2000,  3.0000]])
    """
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio.clamp(max=cap) * advantages, clipped * advantages)


def truncated_reinforce(
    logprobs: PerToken, log_ratio: PerToken, advantages: PerToken, cap: float
) -> PerToken:
    """REINFORCE under a truncated importance weight, ``-sg(min(r, cap)) A logprob``.

    CISPO (MiniMax-M1, 2506.13585) eq. 4: no token loses its gradient.

    >>> lp, d = torch.tensor([[-1.]]), torch.tensor([[2.]])
    >>> truncated_reinforce(lp, d, torch.tensor([[1.]]), cap=5.)
    tensor([[5.]])
    """
    return -log_ratio.exp().clamp(max=cap).detach() * advantages * logprobs


def soft_gate(
    log_ratio: PerToken, advantages: PerToken, positive: float, negative: float
) -> PerToken:
    """Smooth gate in place of a clip, ``-4/tau sigmoid(tau (r - 1)) A``, of slope 1 at ``r = 1``.

    SAPO (2511.20347); `positive` and `negative` are tau by the sign of the advantage.

    >>> soft_gate(torch.tensor([[0.]]), torch.tensor([[1.]]), 1., 1.05)
    tensor([[-2.]])
    """
    tau = torch.where(advantages > 0, positive, negative)
    return -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages


def gamma_weight(log_ratio: PerToken, power: PerToken, decay: PerToken) -> PerToken:
    """Weight ``w^k e^(lambda (1 - w))`` of a rollout with ratio w; it is 1 at ``w = 1``.

    VESPO (2602.10693), with the power k and the decay lambda.

    >>> gamma_weight(torch.zeros(1, 1), torch.full((1, 1), 2.), torch.full((1, 1), 3.))
    tensor([[1.]])
    """
    return (decay + power * log_ratio - decay * log_ratio.exp()).exp()


def geometric_surrogate(
    log_ratio: PerToken, advantages: PerToken, mask: TokenMask, low: float, high: float
) -> PerToken:
    """Geometric mean of ratios clipped on the side of the advantage, ``-exp(mean_t c_t) A``.

    GMPO (2507.20673), with ``c_t = min(d_t, high)`` where A > 0 and ``max(d_t, -low)``
    elsewhere. A token that is not clipped gets the gradient of its own advantage; where tokens of a
    rollout share theirs, that sums to the gradient of the paper's loss.

    >>> d, mask = torch.tensor([[.1, .9]]), torch.ones(1, 2).bool()
    >>> geometric_surrogate(d, torch.ones(1, 2), mask, .4, .4).exp()
    tensor([[0.2769, 0.2769]])
    """
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
    shared = sequence_log_ratio(clipped, mask, "geometric")
    return -with_gradient_of(shared, clipped).exp() * advantages
