"""How the losses of tokens become one number. One abstract class, then its members."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.functional.shapes import PerToken, TokenMask


class Reduction(ABC):
    """Sums token losses; the divisor is counted once for the whole optimiser step.

    Loss of a micro-batch: ``sum(weigh(mask) * losses) / sum of count(mask)`` over all
    micro-batches and ranks of the optimiser step, so that the gradient is the same however the
    step is split.
    """

    @abstractmethod
    def weigh(self, mask: TokenMask) -> PerToken:
        """Weight of each token within its micro-batch; `mask` marks the tokens that may learn."""

    @abstractmethod
    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        """What a micro-batch adds to the divisor."""


def _rollouts(mask: TokenMask) -> Float[Tensor, ""]:
    return mask.any(1).sum().float()


@dataclass(frozen=True)
class Dapo(Reduction):
    """Mean over all tokens of the optimiser step. DAPO (2503.14476) eq. 8."""

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask.float()

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return mask.sum().float()


@dataclass(frozen=True)
class Grpo(Reduction):
    """Mean over rollouts of each rollout's mean. DeepSeekMath (2402.03300) eq. 3."""

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask / mask.sum(1, keepdim=True).clamp(min=1)

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return _rollouts(mask)


@dataclass(frozen=True)
class DrGrpo(Reduction):
    """Sum over tokens by a constant, mean over rollouts. Dr. GRPO (2503.20783) section 3.2.

    No rollout's length changes the weight of its tokens. Dr. GRPO also leaves the deviation out:
    set ``advantage: {class_path: GroupRelative, init_args: {scale: none}}``.
    """

    max_tokens: int
    """The constant divisor of every rollout: the token budget of a completion."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(
                f"DrGrpo.max_tokens is {self.max_tokens}, must be at least 1: "
                "use the token budget of a completion"
            )

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask / float(self.max_tokens)

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return _rollouts(mask)


@dataclass(frozen=True)
class Luspo(Reduction):
    """Sum over the tokens of each rollout, mean over rollouts. LUSPO (2602.05261).

    With `Gspo` it is the paper's loss: that of a rollout times its length.
    """

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask.float()

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return _rollouts(mask)


@dataclass(frozen=True)
class Bnpo(Reduction):
    """Mean over the tokens of each micro-batch, then over micro-batches. As TRL's ``bnpo``.

    By definition local: its gradient depends on the split. The global form is `Dapo`.
    """

    def weigh(self, mask: TokenMask) -> PerToken:
        return mask / mask.sum().clamp(min=1)

    def count(self, mask: TokenMask) -> Float[Tensor, ""]:
        return torch.ones((), device=mask.device)
