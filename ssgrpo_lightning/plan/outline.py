"""A policy and its rollouts in outline: every shape, no numbers, nothing loaded."""

from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from ssgrpo_lightning.engines import Samples
from ssgrpo_lightning.layout import Layout, SharedPrompt
from ssgrpo_lightning.lora import Lora
from ssgrpo_lightning.policy import Codec, Policy, Pretrained
from ssgrpo_lightning.records import CreditedRollouts, Problem, Verdict
from ssgrpo_lightning.rollouts import assemble


class OutlinedPolicy(Policy):
    """A policy of fake tensors."""

    def _check(self) -> None:
        """There are no numbers to compare."""


@dataclass(frozen=True)
class Outline(Pretrained):
    """Stands in for a model to load: its config makes the same modules, of fake tensors.

    Fake tensors know their shape, precision and device, and take no memory. Those on the CPU stand
    for a GPU's: what is kept for the backward pass is the same.
    """

    architecture: Path | None = None
    """Config of transformers that says what the model is like, a JSON file; None: the model's."""

    @classmethod
    def of(cls, model: Pretrained, architecture: Path | None) -> "Outline":
        """In place of `model`.

        Raises:
            ValueError: It is quantised, or the file is none.
        """
        if model.quantize is not None:
            raise ValueError(
                f"policy.model.quantize is {model.quantize!r}, whose tensors cannot be faked: plan "
                "with null, and take off what the parameters then take less"
            )
        if architecture is not None and not architecture.is_file():
            raise ValueError(
                f"architecture is {str(architecture)!r}, which is no file: give the config.json of "
                "a model, or leave it out to read the config that belongs to policy.model.name"
            )
        return cls(
            **{f.name: getattr(model, f.name) for f in fields(model)}, architecture=architecture
        )

    def weights(self, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
        source = self.source()
        if self.architecture is not None:
            source = {"pretrained_model_name_or_path": str(self.architecture)}
        config = AutoConfig.from_pretrained(**source, trust_remote_code=False)
        return kind.from_config(
            config, dtype=getattr(torch, self.dtype), attn_implementation=self.attention
        )

    def tokenizer(self) -> Codec:
        """A tokenizer in outline, too: rollouts are given as token ids."""
        return Codec(SimpleNamespace(pad_token_id=0))

    def load(
        self,
        head_chunk: int = 1024,
        gradient_checkpointing: bool = False,
        layout: Layout = SharedPrompt(),
        lora: Lora | None = None,
        compile: bool = False,
    ) -> Policy:
        with torch.device("meta"):
            model = self._model(gradient_checkpointing)
            if lora is not None:
                lora.add_to(model)
        _fake(model)
        return OutlinedPolicy(model, self.tokenizer(), head_chunk, layout)


def _fake(model: nn.Module) -> None:
    """Put fake tensors of the CPU in place of a model's; what was shared stays shared."""
    done: dict[Any, Any] = {}
    # Real tensors may meet fake ones: token ids and masks decide on shapes.
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                for name, old in held.items():
                    if old is None:
                        continue
                    if old not in done:
                        new = torch.empty_like(old, device="cpu")
                        if isinstance(old, nn.Parameter):
                            new = nn.Parameter(new, old.requires_grad)
                        done[old] = new
                    held[name] = done[old]


def outlined_rollouts(
    groups: int, group_size: int, prompt: int, completion: int, vocabulary: int
) -> CreditedRollouts:
    """Rollouts of random tokens, all of one length, all with an advantage.

    Args:
        groups: Problems.
        group_size: Rollouts of each.
        prompt: Tokens of every prompt.
        completion: Tokens of every completion.
        vocabulary: Token ids are drawn below it.
    """
    generator, rows = torch.Generator().manual_seed(0), groups * group_size
    prompts = torch.randint(vocabulary, (groups, prompt), generator=generator).tolist()
    tokens = torch.randint(vocabulary, (rows, completion), generator=generator)
    rollouts = assemble(
        prompts=[p for p in prompts for _ in range(group_size)],
        samples=Samples(
            tokens=tokens,
            lengths=torch.full((rows,), completion),
            logprobs=torch.zeros(rows, completion),
            entropy=torch.zeros(rows, completion),
            truncated=torch.zeros(rows, dtype=torch.bool),
        ),
        # As many steps as a worked solution has lines: about 16 tokens each.
        steps=[[t // 16 for t in range(completion)]] * rows,
        verdicts=[Verdict(float(row % 2)) for row in range(rows)],
        group=[row // group_size for row in range(rows)],
        problems=[Problem(row // group_size, "", "") for row in range(rows)],
        texts=[""] * rows,
        pad_id=0,
        policy_step=0,
    )
    return CreditedRollouts(rollouts, rollouts.sampled.float())
