"""Critics: estimators that read a language model's hidden states, as PPO's value model does.

Compared systems; members of the same swap point as the tiny ones in `estimators`. Use them with the
objective `ValueRegression` and the credit rule `GAE`. The shorter the steps, the closer to PPO:
with steps of one token (segmenter `ByTokens`) every token has its value.
"""

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ssgrpo_lightning.estimators import Estimator
from ssgrpo_lightning.policy import Policy, Pretrained, Trunk, decoder_layers
from ssgrpo_lightning.records import Rollouts
from ssgrpo_lightning.rollouts import Resampler
from ssgrpo_lightning.sharding import Shardable


class ValueModel(Estimator, Shardable):
    """A language model of its own with a scalar head, read at the last token of each step.

    As large as the policy if it is loaded from the same name, which then costs about as much again
    in memory and time. Source: the critic of PPO (1707.06347) as used for language models.

    Args:
        model: Language model whose layers to start from; it must share the policy's vocabulary.
        gradient_checkpointing: Recompute activations in the backward pass, to save memory.
    """

    passes = ("idle",)

    def __init__(
        self, model: Pretrained = Pretrained(), gradient_checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.model, self.gradient_checkpointing = model, gradient_checkpointing
        self.trunk: Trunk | None = None
        self.head: nn.Linear | None = None

    def load(self) -> None:
        self.trunk = self.model.load_trunk(self.gradient_checkpointing)
        self.head = _zero(nn.Linear(self.trunk.width, 1))

    def bind(self, policy: Policy, resample: Resampler) -> None:
        """Check that critic and policy mean the same by a token id.

        Raises:
            ValueError: Their vocabularies differ.
        """
        own = self.model.tokenizer().tokenizer.get_vocab()
        if own != policy.codec.tokenizer.get_vocab():
            raise ValueError(
                f"ValueModel.model.name is {self.model.name!r}, whose vocabulary is not the "
                "policy's: the critic reads the token ids that the policy sampled; use a model of "
                "the policy's family, such as the policy's own name"
            )

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        assert self.trunk is not None and self.head is not None
        hidden = self.trunk(rollouts.tokens, rollouts.attended)
        return self.head(_at_step_ends(hidden, rollouts))[..., 0]

    def layers(self) -> list[nn.Module]:
        assert self.trunk is not None
        return decoder_layers(self.trunk.model)

    def idle(self) -> Tensor:
        assert self.trunk is not None and self.head is not None
        hidden = self.trunk(*_one_token(self.head.weight.device))
        return 0 * self.head(hidden.float()).sum()


class SharedTrunk(Estimator):
    """A small head on the policy's own last hidden states, which it does not train.

    Every reading costs one more forward pass of the policy, without gradient: one to score the
    rollouts and one per pass of the estimator phase. There is nothing to fit without a policy.

    Args:
        hidden: Width of the head's one hidden layer.
    """

    reads_policy: ClassVar[bool] = True

    def __init__(self, hidden: int = 256) -> None:
        super().__init__()
        if hidden < 1:
            raise ValueError(f"SharedTrunk.hidden is {hidden}, must be at least 1: use 256")
        self.hidden = hidden
        self.head: nn.Sequential | None = None
        self._bound: tuple[Policy, ...] = ()  # in a tuple, so that it becomes no submodule

    def bind(self, policy: Policy, resample: Resampler) -> None:
        self._bound = (policy,)
        if self.head is None:
            into, out = nn.Linear(policy.width, self.hidden), nn.Linear(self.hidden, 1)
            self.head = nn.Sequential(into, nn.GELU(), _zero(out))

    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        assert self.head is not None
        (policy,) = self._bound
        with torch.no_grad():
            hidden = policy.hidden(rollouts.tokens, rollouts.attended)
        return self.head(_at_step_ends(hidden, rollouts))[..., 0]

    def idle(self) -> Tensor:
        (policy,) = self._bound
        with torch.no_grad():
            policy.hidden(*_one_token(policy.model.device))
        return super().idle()


def _one_token(device: torch.device) -> tuple[Tensor, Tensor]:
    """The smallest thing that can be read."""
    tokens = torch.zeros(1, 1, dtype=torch.long, device=device)
    return tokens, tokens == 0


def _zero(layer: nn.Linear) -> nn.Linear:
    """A read-out that starts at logit 0 for everything, so that training sets every difference."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def _at_step_ends(
    hidden: Float[Tensor, "rollout token h"], rollouts: Rollouts
) -> Float[Tensor, "rollout step h"]:
    """Hidden state of the last token of each step, in full precision."""
    ends = step_ends(rollouts)[..., None].expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, ends).float()


def step_ends(rollouts: Rollouts) -> Int[Tensor, "rollout step"]:
    """Column of the last token of each step; of the rollout's last one where there is no step."""
    step = rollouts.step
    column = torch.arange(step.shape[1], device=step.device).expand_as(step)
    # Never a column of padding: its hidden state may be anything, and would reach the gradient.
    last = torch.where(rollouts.attended, column, 0).amax(1, keepdim=True)
    ends = last.repeat(1, rollouts.steps + 1)
    return ends.scatter_reduce(1, step + 1, column, "amax", include_self=False)[:, 1:]
