"""Estimates of the KL divergence of a policy to its reference at one sampled token, in nats.

All three follow Schulman, "Approximating KL divergence" (2020). Their values have (k1, k3) or
nearly have (k2) the expectation KL(policy || reference) over tokens the policy samples; their
gradients do not: only that of k2 does.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.functional.shapes import PerToken


def kl_k1(logprobs: PerToken, reference: PerToken) -> PerToken:
    """``k1 = logprob - ref``: right on average in value; its gradient is 0 on average.

    >>> kl_k1(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.5000]])
    """
    return logprobs - reference


def kl_k2(logprobs: PerToken, reference: PerToken) -> PerToken:
    """``k2 = (logprob - ref)^2 / 2``: a biased value whose gradient is right on average.

    >>> kl_k2(torch.tensor([[-1.0]]), torch.tensor([[-1.5]]))
    tensor([[0.1250]])
    """
    return (logprobs - reference).square() / 2


def kl_k3(logprobs: PerToken, reference: PerToken) -> PerToken:
    """``k3 = e^d - d - 1`` with ``d = ref - logprob``; its gradient is that of another divergence.

    Source: DeepSeekMath (2402.03300) eq. 4; right on average in value, never negative.

    >>> kl_k3(torch.tensor([[-1.0]]), torch.tensor([[-1.0]]))
    tensor([[0.]])
    """
    difference = reference - logprobs
    return difference.exp() - difference - 1


def adapted_beta(beta: float, kl: float, target: float, horizon: float) -> float:
    """Weight of the KL after an update, ``beta (1 + clip(kl / target - 1, -.2, .2) / horizon)``.

    Source: Ziegler et al. (1909.08593) section 2.2, where ``1 / horizon`` is 0.1.

    >>> round(adapted_beta(0.1, kl=0.5, target=0.1, horizon=10), 4)
    0.102
    """
    return beta * (1 + min(max(kl / target - 1, -0.2), 0.2) / horizon)


def top_threshold(values: Float[Tensor, " value"], share: float) -> Float[Tensor, ""]:
    """Least of the greatest `share` of the values: ``floor(share (n - 1)) + 1`` of n, and ties.

    >>> top_threshold(torch.tensor([1., 5., 3., 4., 2.]), 0.4)
    tensor(4.)
    """
    if not len(values):
        return values.new_tensor(torch.inf)
    return values.kthvalue(len(values) - int(share * (len(values) - 1))).values
