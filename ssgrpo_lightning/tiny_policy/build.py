"""Supervised fine-tuning of a tiny character-level Llama, stopped while it still errs."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.policy import Codec, Policy, Pretrained
from ssgrpo_lightning.records import Problem, Rollouts
from ssgrpo_lightning.rollouts import Judge, collect
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.tasks import (
    CarelessChain,
    ChainArithmetic,
    DecisiveLine,
    DecoyChain,
    FillerChain,
    RepairChain,
)
from ssgrpo_lightning.verifiers import FinalNumber

PAD, EOS = "<pad>", "<eos>"
LOOK_EVERY = 20


@dataclass(frozen=True)
class Recipe:
    """How a policy is trained on a task, and when it is good enough."""

    task: ChainArithmetic
    """Whose demonstrations it learns."""
    start: Literal["scratch", "shipped"] = "shipped"
    """Random weights, or those of the shipped policy with rows for the task's new characters."""
    accuracy: float = 0.45
    """Training stops where this share of held-out problems is solved."""
    temperature: float = 1.0
    """Temperature at which it is; 0 is greedy."""
    updates: int = 1000
    """Most optimiser steps; the learning rate is planned for them."""
    batch: int = 32
    """Demonstrations of each."""
    lr: float = 1.5e-3
    """Greatest learning rate."""


RECIPES = {
    "ChainArithmetic": Recipe(
        ChainArithmetic(), "scratch", accuracy=0.28, temperature=0.0, updates=6000, lr=2e-3
    ),
    "CarelessChain": Recipe(
        CarelessChain(operations=8, highest_number=9), accuracy=0.25, updates=600
    ),
    "FillerChain": Recipe(FillerChain()),
    # To the end, because its decoys take longer to learn than its sums.
    "DecoyChain": Recipe(DecoyChain(mistakes=0.2, agreement=0.9), accuracy=1.0, updates=500),
    "RepairChain": Recipe(RepairChain()),
    "DecisiveLine": Recipe(DecisiveLine()),
}


def vocabulary(task: ChainArithmetic) -> dict[str, int]:
    """Id of every token: two special ones, then the task's characters in their order."""
    return {token: i for i, token in enumerate([PAD, EOS, *task.characters])}


def build_tokenizer(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def build_model(ids: dict[str, int]) -> LlamaForCausalLM:
    """A Llama of half a million random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ids),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=ids[EOS],
            pad_token_id=ids[PAD],
        )
    )


def untrained(recipe: Recipe) -> Policy:
    """The policy that training starts from."""
    ids = vocabulary(recipe.task)
    if recipe.start == "scratch":
        model = build_model(ids)
    else:
        model = Pretrained().load().model
        # A task's own characters stand after those of the shipped tokenizer, so its rows remain.
        model.resize_token_embeddings(len(ids), mean_resizing=False)
    return Policy(model, Codec(build_tokenizer(ids)), head_chunk=1 << 20)


def demonstrations(
    task: ChainArithmetic, problems: list[Problem], codec: Codec, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids of worked solutions padded on the right, which are real, and which are learnt."""
    rows = []
    for problem in problems:
        solution = codec.tokenizer(task.solution(problem, rng))["input_ids"]
        rows.append((codec.encode(problem), [*solution, codec.tokenizer.eos_token_id]))
    lengths = torch.tensor([[len(prompt), len(prompt) + len(rest)] for prompt, rest in rows])
    width = int(lengths.max())
    tokens = [p + rest + [codec.pad_id] * (width - len(p) - len(rest)) for p, rest in rows]
    column = torch.arange(width)
    real = column < lengths[:, 1:]
    return torch.tensor(tokens), real, real & (column >= lengths[:, :1])


def attempts(policy: Policy, problems: list[Problem], temperature: float) -> Rollouts:
    """One completion of each problem; their mean reward is the share solved."""
    judge, sampling = Judge(FinalNumber("#"), ByLine()), Sampling(96, temperature=temperature)
    return collect(policy, TransformersEngine(), judge, problems, 1, sampling, 0, 0)


def train(recipe: Recipe, seed: int = 0) -> tuple[Policy, float]:
    """The trained policy, and the share of held-out problems it solves."""
    torch.manual_seed(seed)
    rng, task = random.Random(seed), replace(recipe.task, train_problems=20_000)
    problems, held_out = task.problems("train"), task.problems("validation")
    policy = untrained(recipe)
    weights = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(weights, lr=recipe.lr, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.lr, total_steps=recipe.updates, pct_start=0.1
    )
    solved = 0.0
    bar = tqdm(range(1, recipe.updates + 1), unit="update", desc=type(task).__name__)
    for update in bar:
        batch = rng.choices(problems, k=recipe.batch)
        tokens, real, learnt = demonstrations(task, batch, policy.codec, rng)
        logprobs, _ = policy(tokens, real, learnt)
        loss = -logprobs.sum() / learnt.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        if update % LOOK_EVERY == 0 or update == recipe.updates:
            solved = float(attempts(policy, held_out, recipe.temperature).rewards.mean())
            bar.set_postfix(loss=f"{loss.item():.3f}", solved=f"{solved:.3f}")
            if solved >= recipe.accuracy:
                break
    return policy, solved


def load_or_build(name: str, folder: Path) -> Policy:
    """The policy of one of RECIPES from its folder, trained and written there if it is missing."""
    if not (folder / "model.safetensors").is_file():
        train(RECIPES[name])[0].save(folder)
    return Pretrained(str(folder.resolve())).load()


def outcome_classifier(folder: Path, labels: int = 1) -> None:
    """Write an untrained outcome reward model with the body of the shipped policy."""
    torch.manual_seed(0)
    policy = Pretrained()
    model, _ = policy.weights(
        AutoModelForSequenceClassification, num_labels=labels, output_loading_info=True
    )
    torch.nn.init.normal_(model.score.weight, std=0.1)
    model.save_pretrained(folder)
    policy.tokenizer().tokenizer.save_pretrained(folder)
