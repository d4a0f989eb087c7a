"""What the KL holds the policy to: the swap point, its members, and the module that owns a copy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ssgrpo_lightning.functional.shapes import PerToken, TokenMask
from ssgrpo_lightning.losses import BetaControl, KlTerm
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.records import Rollouts


class Reference(ABC):
    """Says where the reference's log-probabilities come from."""

    def check(self, adapter: bool) -> None:
        """Refuse, before weights load, what the policy does not allow.

        Args:
            adapter: Whether the policy learns an adapter instead of its weights.
        """
        return

    def load(self, load: Callable[[], Policy]) -> Policy | None:
        """A copy of the starting policy without gradients; None where none is needed."""
        return None

    @abstractmethod
    def reading(self, policy: Policy, copy: Policy | None) -> AbstractContextManager[Policy]:
        """What reads tokens as the reference, for as long as the context lasts."""

    def follow(self, copy: Policy | None, policy: Policy, updates: int) -> None:
        """Let the copy follow the policy, which has been updated so many times."""
        return


@dataclass(frozen=True)
class FrozenCopy(Reference):
    """The starting policy, kept beside the one that learns: the memory of a second model."""

    def load(self, load: Callable[[], Policy]) -> Policy | None:
        return load().eval().requires_grad_(False)

    def reading(self, policy: Policy, copy: Policy | None) -> AbstractContextManager[Policy]:
        assert copy is not None
        return nullcontext(copy)


@dataclass(frozen=True)
class SlowCopy(FrozenCopy):
    """A copy that now and then moves toward the policy: ``copy + alpha (policy - copy)``.

    TR-DPO (2404.09656); TRL's ``sync_ref_model``.
    """

    alpha: float = 0.6
    """How far it moves; 1 makes it the policy as it is."""
    every: int = 512
    """Updates between two moves."""

    def __post_init__(self) -> None:
        if not (0 < self.alpha <= 1 and self.every >= 1):
            raise ValueError(
                f"SlowCopy has alpha {self.alpha} and every {self.every}, must be 0 < alpha <= 1 "
                "and every >= 1: 0.6 and 512 are usual"
            )

    def check(self, adapter: bool) -> None:
        if adapter:
            raise ValueError(
                "policy.reference is SlowCopy, which copies weights, but the policy learns an "
                "adapter: use AdapterOff, or train the weights"
            )

    @torch.no_grad()
    def follow(self, copy: Policy | None, policy: Policy, updates: int) -> None:
        assert copy is not None
        if updates % self.every == 0:
            for slow, fast in zip(copy.parameters(), policy.parameters(), strict=True):
                slow.lerp_(fast, self.alpha)


@dataclass(frozen=True)
class AdapterOff(Reference):
    """The policy with its LoRA adapter switched off, which is the starting policy: no second model.

    As in TRL and verl where the policy is an adapter. It reads without dropout.
    """

    def check(self, adapter: bool) -> None:
        if not adapter:
            raise ValueError(
                "policy.reference is AdapterOff, but the policy learns no adapter that could be "
                "switched off: use FrozenCopy, or give it one"
            )

    @contextmanager
    def reading(self, policy: Policy, copy: Policy | None) -> Iterator[Policy]:
        training = policy.training
        policy.eval()
        try:
            with policy.without_adapter():
                yield policy
        finally:
            policy.train(training)


class Anchor(nn.Module):
    """Holds the policy to its reference: owns the copy and the weight of the KL, and saves both.

    Args:
        beta: Weight of the KL to start with; 0: there is none, and no reference.
        control: How it moves.
        kl: Where the KL acts, and how it is estimated.
        reference: What the policy is held to.
    """

    def __init__(self, beta: float, control: BetaControl, kl: KlTerm, reference: Reference) -> None:
        super().__init__()
        if control.adapts and not beta:
            raise ValueError(
                f"policy.beta is 0, which {type(control).__name__} cannot move: set it to the "
                "weight to start from, for instance 0.01, or use FixedBeta"
            )
        self.beta, self.control, self.kl, self.reference = beta, control, kl, reference
        self.copy: Policy | None = None

    @property
    def holds_dead(self) -> bool:
        """Whether rollouts without an advantage have a gradient too."""
        return self.beta > 0 and self.kl.holds_dead

    def check(self, adapter: bool) -> None:
        """Refuse, before weights load, a reference that the policy does not allow."""
        if self.beta:
            self.reference.check(adapter)

    def load(self, load: Callable[[], Policy]) -> None:
        """Load the reference, where there is to be one, as the policy is loaded."""
        if self.beta:
            self.copy = self.reference.load(load)

    def reading(self, policy: Policy) -> AbstractContextManager[Policy]:
        """What reads tokens as the reference, for as long as the context lasts."""
        return self.reference.reading(policy, self.copy)

    def penalised(self, rollouts: Rollouts, reference: PerToken, mask: TokenMask) -> Rollouts:
        """The rollouts with the reference's log-probabilities, and the KL's share of penalties."""
        kl = self.kl.estimator(rollouts.logprobs, rollouts.logprobs, reference)
        penalties = self.beta * self.kl.in_reward(kl, mask)
        if rollouts.penalties is not None:
            penalties = rollouts.penalties + penalties
        return replace(rollouts, reference=reference, penalties=penalties)

    def losses(self, kl: PerToken, advantages: PerToken) -> Float[Tensor, "rollout token"]:
        """What is added to the loss of each token."""
        return self.beta * self.kl.in_loss(kl, advantages)

    def follow(self, policy: Policy, updates: int, kl: Tensor | None) -> None:
        """Let weight and reference follow the policy.

        Args:
            policy: The policy after an update.
            updates: Updates made so far.
            kl: Mean KL per token of this one; None where it made no step.
        """
        if kl is not None:
            self.beta = self.control.follow(self.beta, float(kl))
        if self.beta:
            self.reference.follow(self.copy, policy, updates)

    def get_extra_state(self) -> dict[str, float]:
        """A weight that adapts moves while training, so it is saved with the copy."""
        return {"beta": self.beta}

    def set_extra_state(self, state: dict[str, float]) -> None:
        # A fixed one is the config's, also where a run is resumed under another.
        if self.control.adapts:
            self.beta = state["beta"] or self.beta
