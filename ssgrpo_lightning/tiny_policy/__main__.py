"""Rebuild the shipped policy: supervised fine-tuning of a tiny Llama on chain arithmetic.

It is stopped early on purpose, while it still errs: reinforcement needs something to improve.
`--task` builds a policy for one of the variants of chain arithmetic in the same way.
"""

import argparse
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.policy import Codec, Policy
from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.rollouts import Judge, collect
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.tasks import (
    ChainArithmetic,
    DecisiveLine,
    DecoyChain,
    FillerChain,
    RepairChain,
)
from ssgrpo_lightning.verifiers import FinalNumber

TASKS = {
    task.__name__: task
    for task in (ChainArithmetic, FillerChain, DecoyChain, RepairChain, DecisiveLine)
}
PAD, EOS = "<pad>", "<eos>"
BATCH, UPDATES, LEARNING_RATE, LOOK_EVERY = 32, 6000, 2e-3, 20


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


def accuracy(policy: Policy, problems: list[Problem]) -> float:
    """Share of problems solved greedily."""
    judge, greedy = Judge(FinalNumber("#"), ByLine()), Sampling(80, temperature=0.0)
    rollouts = collect(policy, TransformersEngine(), judge, problems, 1, greedy, 0, 0)
    return float(rollouts.rewards.mean())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--task", choices=TASKS, default="ChainArithmetic")
    parser.add_argument("--operations", type=int, default=3, help="operations of a problem")
    parser.add_argument("--accuracy", type=float, default=0.28, help="stop at this accuracy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    task = TASKS[arguments.task](operations=arguments.operations, train_problems=20_000)
    train, held_out = task.problems("train"), task.problems("validation")
    ids = {token: i for i, token in enumerate([PAD, EOS, *task.characters])}
    tokenizer, model = build_tokenizer(ids), build_model(ids)
    policy = Policy(model, Codec(tokenizer), head_chunk=1 << 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=UPDATES, pct_start=0.1
    )
    bar = tqdm(range(1, UPDATES + 1), unit="update")
    for update in bar:
        batch = rng.choices(train, k=BATCH)
        tokens, real, learnt = demonstrations(task, batch, policy.codec, rng)
        logprobs, _ = policy(tokens, real, learnt)
        loss = -logprobs.sum() / learnt.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % LOOK_EVERY == 0:
            solved = accuracy(policy, held_out)
            bar.set_postfix(loss=f"{float(loss):.3f}", accuracy=f"{solved:.3f}")
            if solved >= arguments.accuracy:
                break
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    print(f"greedy accuracy {accuracy(policy, held_out):.3f} on {len(held_out)} held-out problems")


if __name__ == "__main__":
    main()
