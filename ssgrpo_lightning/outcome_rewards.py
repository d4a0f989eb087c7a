"""Outcome reward models: sequence classifiers that judge a whole completion."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers import Verifier


@dataclass(frozen=True)
class OutcomeRewardModel(Verifier):
    """A frozen sequence classifier that reads problem and completion; batched on the device.

    The reward is the probability of class `label`; of a model with one output, its sigmoid, as in
    the Bradley-Terry models that TRL's ``RewardTrainer`` trains. It reads no reference answer. The
    weights load at the first verdict, and only safetensors are read, never code.
    """

    accepts_reference: ClassVar[bool] = False

    name: str
    """Hub name, folder, or ``pkg://package/path`` of an installed package's data."""
    label: int = 1
    """Class that stands for a good completion, of a model with several."""
    micro_batch: int = 32
    """Completions of one forward pass."""
    max_tokens: int = 4096
    """Problem and completion together; a longer one has no verdict."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights."""
    device: str | None = None
    """Where it runs; null: the current GPU, or the CPU where there is none."""

    def __post_init__(self) -> None:
        for field, value in (("micro_batch", self.micro_batch), ("max_tokens", self.max_tokens)):
            if value < 1:
                raise ValueError(f"OutcomeRewardModel.{field} is {value}, must be at least 1")
        try:
            _ = self._tokenizer
        except (OSError, ValueError) as error:
            raise ValueError(
                f"OutcomeRewardModel.name is {self.name!r}, where no tokenizer could be read "
                f"({str(error).splitlines()[0]}): check the name"
            ) from error

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        return self.batch([completion], [problem])[0]

    @torch.inference_mode()
    def batch(self, completions: Sequence[str], problems: Sequence[Problem]) -> list[Verdict]:
        start = perf_counter()
        ids = [self._encode(*pair) for pair in zip(completions, problems, strict=True)]
        fits = [i for i, row in enumerate(ids) if 0 < len(row) <= self.max_tokens]
        too_long = f"not between 1 and {self.max_tokens} tokens"
        verdicts = [Verdict(None, too_long) for _ in ids]
        # Completions of like length share a pass, so that little of it is padding.
        fits.sort(key=lambda i: len(ids[i]))
        for first in range(0, len(fits), self.micro_batch):
            rows = fits[first : first + self.micro_batch]
            for i, reward in zip(rows, self._rewards([ids[i] for i in rows]).tolist()):
                finite = reward == reward
                verdicts[i] = Verdict(reward if finite else None, "" if finite else "gave NaN")
        each = (perf_counter() - start) / max(len(ids), 1)
        return [Verdict(v.reward, v.reason, each) for v in verdicts]

    def _encode(self, completion: str, problem: Problem) -> list[int]:
        tokenizer, prompt = self._tokenizer, problem.prompt
        # Many characters cannot be few tokens; the rest would be read for nothing.
        completion = completion[: self.max_tokens * 64]
        if isinstance(prompt, str):
            return tokenizer(prompt + completion)["input_ids"]
        chat = [*prompt, {"role": "assistant", "content": completion}]
        return tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)

    def _rewards(self, ids: Sequence[Sequence[int]]) -> Float[Tensor, " row"]:
        model = self._model
        width, device = max(map(len, ids)), model.device
        reads_last = hasattr(model, "score")  # decoders; encoders read their first token
        pads = [[0] * (width - len(row)) for row in ids]
        ones = [[1] * len(row) for row in ids]
        order = (lambda pad, row: [*pad, *row]) if reads_last else (lambda pad, row: [*row, *pad])
        attended = torch.tensor(list(map(order, pads, ones)), device=device)
        inputs: dict[str, Tensor] = {
            "input_ids": torch.tensor(list(map(order, pads, ids)), device=device),
            "attention_mask": attended,
        }
        if reads_last:
            inputs["position_ids"] = (attended.cumsum(1) - 1).clamp(min=0)
        logits = model(**inputs).logits.float()
        if logits.shape[1] == 1:
            return logits[:, 0].sigmoid()
        return logits.softmax(-1)[:, self.label]

    @cached_property
    def _tokenizer(self) -> Any:
        source = Pretrained(self.name).source()
        return AutoTokenizer.from_pretrained(**source, trust_remote_code=False)

    @cached_property
    def _model(self) -> Any:
        pretrained = Pretrained(self.name, self.dtype)
        model, found = pretrained.weights(
            AutoModelForSequenceClassification, output_loading_info=True
        )
        labels = model.config.num_labels
        if found["missing_keys"]:
            raise ValueError(
                f"OutcomeRewardModel.name is {self.name!r}, whose weights lack "
                f"{sorted(found['missing_keys'])}: it is no sequence classifier"
            )
        if labels > 1 and not 0 <= self.label < labels:
            raise ValueError(
                f"OutcomeRewardModel.label is {self.label}, must be in [0, {labels - 1}]: see "
                f"id2label in the config of {self.name}"
            )
        # Rows end with their last column; the model would look for the last id that is no padding.
        model.config.pad_token_id = -1
        gpu = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        return model.eval().requires_grad_(False).to(self.device or gpu)
