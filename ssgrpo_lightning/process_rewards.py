"""Process reward models: frozen language models that judge every step.

Compared systems; members of the same swap point as the learnt estimators. They ask a model as
large as a policy about every step, and count it: that is the cost that SS-GRPO avoids. Use them
with the objective `PublishedMSE`, which reads a score as it stands, or with `NoisyAnd`.
"""

from abc import abstractmethod
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForTokenClassification, AutoTokenizer

from ssgrpo_lightning.estimators import Estimator
from ssgrpo_lightning.functional import lay_out_steps, step_lengths
from ssgrpo_lightning.policy import Codec, Policy, Pretrained
from ssgrpo_lightning.records import Rollouts
from ssgrpo_lightning.rollouts import Resampler

Tokens = Int[Tensor, "row position"]
Real = Bool[Tensor, "row position"]
Ends = Int[Tensor, "row step"]


class ProcessRewardModel(Estimator):
    """A frozen language model that gives every step of a rollout the logit of its soundness.

    One pass over [prompt; step 1; step 2; …], read at the end of each step. Until it is bound to a
    policy, and where the policy's vocabulary is part of its own, it reads the rollouts' token ids
    as they are; otherwise the text of each step is tokenised anew. The weights load at the first
    use. They stand in no ``state_dict`` and are no parameters of this module.

    Args:
        name: Hub name, folder, or ``pkg://package/path`` of an installed package's data; only
            safetensors are read, and no remote code.
        micro_batch: Rollouts of one forward pass.
        dtype: Precision of the weights.
    """

    separator_id: int | None = None

    def __init__(
        self,
        name: str,
        micro_batch: int = 64,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> None:
        super().__init__()
        if micro_batch < 1:
            raise ValueError(
                f"{type(self).__name__}.micro_batch is {micro_batch}, must be at least 1"
            )
        self.name, self.micro_batch = name, micro_batch
        self.pretrained = Pretrained(name, dtype)
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                **self.pretrained.source(), trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{type(self).__name__}.name is {name!r}, where no tokenizer could be read "
                f"({str(error).splitlines()[0]}): check the name, or build a tiny process reward "
                "model with `python -m ssgrpo_lightning.tiny_prm`"
            ) from error
        self.codec = Codec(tokenizer)
        # Kept from nn.Module: a frozen model has no place in checkpoints and optimisers.
        self._loaded: tuple[nn.Module, ...] = ()
        self._foreign: tuple[Codec, ...] = ()

    @property
    def model(self) -> Any:
        """The frozen model."""
        if not self._loaded:
            self._loaded = (self.pretrained_model().eval().requires_grad_(False),)
        return self._loaded[0]

    @abstractmethod
    def pretrained_model(self) -> nn.Module:
        """Load the weights."""

    @abstractmethod
    def read(self, tokens: Tokens, real: Real, ends: Ends) -> Float[Tensor, "row step"]:
        """Logit of soundness at the given positions of rows that are padded on the right."""

    def bind(self, policy: Policy, resample: Resampler) -> None:
        """Load the weights, and find out whether the policy's token ids can be read as they are."""
        theirs, ours = (c.tokenizer.get_vocab() for c in (policy.codec, self.codec))
        self._foreign = () if theirs.items() <= ours.items() else (policy.codec,)
        self.model.to(policy.model.device)

    @torch.no_grad()
    def forward(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        self.calls += int((step_lengths(rollouts.step, rollouts.steps) > 0).sum())
        return self.logits(rollouts)

    def logits(self, rollouts: Rollouts) -> Float[Tensor, "rollout step"]:
        """Logit of every step, with a gradient where the model's weights have one."""
        mask = step_lengths(rollouts.step, rollouts.steps) > 0
        read = rollouts.tokens, rollouts.attended, rollouts.step
        if self._foreign:
            read = self._tokenised_anew(rollouts, *self._foreign)
        tokens, lengths, ends = lay_out_steps(*read, mask, self.separator_id)
        self.model.to(tokens.device)
        logits = torch.zeros(mask.shape, device=tokens.device)
        # Rollouts of like length share a pass, so that little of it is padding.
        for rows in lengths.argsort(stable=True).split(self.micro_batch):
            width = int(lengths[rows].max())
            real = torch.arange(width, device=tokens.device) < lengths[rows, None]
            logits[rows] = self.read(tokens[rows, :width], real, ends[rows])
        return logits

    def _tokenised_anew(self, rollouts: Rollouts, theirs: Codec) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, which are real, and their steps, in the vocabulary of this model."""
        problems = dict(zip(rollouts.group.tolist(), rollouts.problems))
        prompts = {group: self.codec.encode(problem) for group, problem in problems.items()}
        texts = [_step_texts(rollouts, theirs, row) for row in range(len(rollouts))]
        every = list(chain.from_iterable(texts))
        ids = iter(
            self.codec.tokenizer(every, add_special_tokens=False)["input_ids"] if every else []
        )
        tokens, steps = [], []
        for group, own in zip(rollouts.group.tolist(), texts):
            parts = [prompts[group], *(next(ids) for _ in own)]
            tokens.append(torch.tensor(list(chain.from_iterable(parts)), dtype=torch.long))
            sizes = torch.tensor([len(part) for part in parts])
            steps.append(torch.arange(-1, len(own)).repeat_interleave(sizes))
        lengths = torch.tensor([len(row) for row in tokens])
        token = pad_sequence(tokens, batch_first=True)
        step = pad_sequence(steps, batch_first=True, padding_value=-1)
        attended = torch.arange(token.shape[1]) < lengths[:, None]
        device = rollouts.tokens.device
        return token.to(device), attended.to(device), step.to(device)


class TokenClassifierPRM(ProcessRewardModel):
    """A token classifier, read at the last token of every step.

    The usual form of TRL's ``PRMTrainer`` and of models trained on PRM800K (Let's Verify Step by
    Step, 2305.20050).

    Args:
        name: Hub name, folder, or ``pkg://package/path`` of an installed package's data; only
            safetensors are read, and no remote code.
        label: Class that stands for a sound step.
        micro_batch: Rollouts of one forward pass.
        dtype: Precision of the weights.
    """

    def __init__(
        self,
        name: str,
        label: int = 1,
        micro_batch: int = 64,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> None:
        super().__init__(name, micro_batch, dtype)
        self.label = label

    def pretrained_model(self) -> nn.Module:
        model, found = self.pretrained.weights(
            AutoModelForTokenClassification, output_loading_info=True
        )
        labels = model.config.num_labels
        if found["missing_keys"]:
            raise ValueError(
                f"TokenClassifierPRM.name is {self.name!r}, whose weights lack "
                f"{sorted(found['missing_keys'])}: it is no token classifier; a causal language "
                "model is read by SeparatorPRM"
            )
        if not 0 <= self.label < labels or labels < 2:
            raise ValueError(
                f"TokenClassifierPRM.label is {self.label}, but {self.name} tells {labels} classes "
                f"apart, must be in [0, {labels - 1}] of at least 2: see id2label in its config"
            )
        model.config.use_cache = False
        return model

    def read(self, tokens: Tokens, real: Real, ends: Ends) -> Float[Tensor, "row step"]:
        logits = self.model(input_ids=tokens, attention_mask=real.long()).logits
        at_end = _at(logits, ends).float()
        good = nn.functional.one_hot(torch.tensor(self.label), at_end.shape[-1]).bool()
        others = at_end.masked_fill(good.to(at_end.device), -torch.inf)
        return at_end[..., self.label] - others.logsumexp(-1)


class SeparatorPRM(ProcessRewardModel):
    """A causal language model that answers a separator after every step with good or bad.

    The form of Math-Shepherd (2312.08935). A step's score is the probability of `good` against
    `bad` as the token after the separator.

    Args:
        name: Hub name, folder, or ``pkg://package/path`` of an installed package's data; only
            safetensors are read, and no remote code.
        separator: Token put after every step, as the vocabulary spells it.
        good: Token that stands for a sound step.
        bad: Token that stands for an unsound one.
        micro_batch: Rollouts of one forward pass.
        dtype: Precision of the weights.
    """

    def __init__(
        self,
        name: str,
        separator: str,
        good: str,
        bad: str,
        micro_batch: int = 64,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    ) -> None:
        super().__init__(name, micro_batch, dtype)
        vocabulary = self.codec.tokenizer.get_vocab()
        for field, token in (("separator", separator), ("good", good), ("bad", bad)):
            if token not in vocabulary:
                raise ValueError(
                    f"SeparatorPRM.{field} is {token!r}, which is no token of {name}: it spells "
                    f"that as {self.codec.tokenizer.tokenize(token)}"
                )
        self.separator_id = vocabulary[separator]
        self.answer_ids = [vocabulary[good], vocabulary[bad]]

    def pretrained_model(self) -> nn.Module:
        return Policy(self.pretrained.weights(), self.codec)

    def read(self, tokens: Tokens, real: Real, ends: Ends) -> Float[Tensor, "row step"]:
        # The head sees the ends alone: rows x positions x vocabulary never exists.
        logits = self.model.head(_at(self.model.hidden(tokens, real), ends))
        good, bad = logits[..., self.answer_ids].float().unbind(-1)
        return good - bad


def _at(x: Float[Tensor, "row position feature"], ends: Ends) -> Float[Tensor, "row step feature"]:
    """The vectors at the given positions; the last one for steps that do not exist."""
    index = ends.clamp(max=x.shape[1] - 1)[..., None]
    return x.gather(1, index.expand(-1, -1, x.shape[2]))


def _step_texts(rollouts: Rollouts, codec: Codec, row: int) -> list[str]:
    """Text of every step of one rollout.

    Differences of decoded prefixes: decoded alone, tokens of many vocabularies lose their space.
    """
    mask = rollouts.sampled[row]
    ids, steps = rollouts.tokens[row][mask].tolist(), rollouts.step[row][mask].tolist()
    ends = [i + 1 for i, s in enumerate(steps) if i + 1 == len(steps) or steps[i + 1] != s]
    text = codec.decode(ids)
    cuts = [0, *(len(codec.decode(ids[:end])) for end in ends)]
    return [text[start:end] for start, end in pairwise(cuts)]
