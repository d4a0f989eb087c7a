"""The swap point: what a rollout engine must do."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning.policy import Policy


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    max_new_tokens: int = 64
    """Token budget of a completion; one that reaches it without an end is truncated."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int | None = None
    """Draw from this many most likely tokens only; None: all. Not in training."""
    top_p: float | None = None
    """Draw from the most likely tokens that hold this probability; None: all. Not in training."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings in its text. It keeps
    the string, and is not truncated."""

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "temperature": (self.temperature >= 0, "at least 0 (0 is greedy)"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1, or null for all tokens"),
            "top_p": (self.top_p is None or 0 < self.top_p <= 1, "in (0, 1], or null for all"),
            "stop": (all(self.stop), "strings of at least one character"),
        }
        for field, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(
                    f"Sampling.{field} is {getattr(self, field)}, must be {rule}: change it"
                )

    @property
    def truncates_support(self) -> bool:
        """True where some tokens cannot be drawn that the policy gives probability to."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)


GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Samples:
    """Completions as an engine returns them; entry 0 of the token axis is the first sampled token.

    Attributes:
        tokens: Sampled token ids, the end token included; padded on the right.
        lengths: Sampled tokens of each completion.
        logprobs: Log-probability in nats of each token under the distribution it was drawn from.
        entropy: Entropy in nats of that distribution.
        truncated: True where the budget ran out before an end token or stop string.
    """

    tokens: Int[Tensor, "rollout new"]
    lengths: Int[Tensor, " rollout"]
    logprobs: Float[Tensor, "rollout new"]
    entropy: Float[Tensor, "rollout new"]
    truncated: Bool[Tensor, " rollout"]

    @classmethod
    def join(cls, parts: Sequence["Samples"]) -> "Samples":
        """Samples one after the other, padded to the longest completion of all."""
        width = max(int(part.lengths.max()) for part in parts)

        def joined(name: str) -> Tensor:
            values = [getattr(part, name) for part in parts]
            if values[0].ndim == 2:  # a negative padding cuts
                values = [pad(x, (0, width - x.shape[1])) for x in values]
            return torch.cat(values)

        return cls(**{f.name: joined(f.name) for f in fields(cls)})


class RolloutEngine(ABC):
    """Samples completions of prompts from a policy."""

    follows_noise: ClassVar[bool] = True
    """Tokens are drawn by the noise itself, so that rows may be batched anyhow. False: the noise
    seeds another generator: the same call gives the same completions, and another batch gives them
    up to the rounding of its arithmetic."""

    keeps_copy: ClassVar[bool] = False
    """Samples from a copy of the weights, which it is sent part by part; the policy need not be
    held whole meanwhile."""

    @abstractmethod
    def generate(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Float[Tensor, "rollout new"],
    ) -> Samples:
        """Sample `repeats` completions of every prompt; those of one prompt are neighbours.

        Args:
            policy: The policy to sample from; its parameters are not changed.
            prompts: Token ids of each prompt, without padding.
            repeats: Completions of each prompt.
            sampling: How to draw.
            noise: Uniform numbers in [0, 1), one for every token that may be drawn. The same
                numbers give the same completions, as far as `follows_noise` says.
        """

    def stream(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        repeats: int,
        sampling: Sampling,
        noise: Float[Tensor, "rollout new"],
    ) -> Iterator[Samples]:
        """What `generate` gives, in its order, portion by portion as completions are done.

        So that those that are done can be verified while others are still sampled; an engine that
        does not override it gives all at once.
        """
        yield self.generate(policy, prompts, repeats, sampling, noise)

    def close(self, policy: Policy) -> None:  # noqa: B027
        """Free what runs for this policy outside of it; the next call starts it anew."""


def uniform_noise(
    keys: Sequence[tuple[int, int, int, int]], count: int
) -> Float[Tensor, "rollout new"]:
    """Uniform numbers in [0, 1) from one counter-based stream per key, `count` each.

    A rollout's noise depends on its key alone (seed, update, problem, replica; each below 2**32),
    so neither the number of ranks nor the order of rows changes what is sampled. Source: Philox,
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

    >>> uniform_noise([(0, 0, 7, 0)], 2).equal(uniform_noise([(0, 0, 1, 0), (0, 0, 7, 0)], 2)[1:])
    True
    """
    noise = np.empty((len(keys), count))
    for row, (seed, update, problem, replica) in enumerate(keys):
        key = seed << 96 | update << 64 | problem << 32 | replica
        np.random.Generator(np.random.Philox(key=key)).random(out=noise[row])
    return torch.from_numpy(noise)
