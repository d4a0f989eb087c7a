"""Rebuild the shipped policy: supervised fine-tuning of a tiny Llama on chain arithmetic."""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, decoders
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.policy import Codec, Policy
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.verifiers import FinalNumber

CHARACTERS = "0123456789+-=#\n"
PAD, EOS = "<pad>", "<eos>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {t: i for i, t in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def build_model(tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int) -> LlamaForCausalLM:
    """A Llama of random weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def demonstrations(task: ChainArithmetic, codec: Codec, count: int, rng: random.Random):
    """Token ids and loss mask of `count` worked solutions, padded on the right."""
    rows = []
    for problem in rng.choices(task, k=count):
        prompt = codec.encode(problem)
        answer = codec.tokenizer(ChainArithmetic().solution(problem))["input_ids"] + [codec.tokenizer.eos_token_id]
        rows.append((prompt, answer))
    width = max(len(p) + len(a) for p, a in rows)
    tokens = torch.full((count, width), codec.pad_id)
    learnt = torch.zeros(count, width, dtype=torch.bool)
    for i, (prompt, answer) in enumerate(rows):
        tokens[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        learnt[i, len(prompt) : len(prompt) + len(answer)] = True
    return tokens, learnt


def accuracy(policy: Policy, task: ChainArithmetic, temperature: float = 0.0, k=1) -> float:
    """Share of validation problems solved."""
    problems = task.problems("validation")
    verifier = FinalNumber("#")
    prompts = [policy.codec.encode(p) for p in problems]
    new = 80
    noise = uniform_noise([(0, i) for i in range(len(problems) * k)], new)
    s = TransformersEngine().generate(policy, prompts, k, Sampling(new, temperature), noise)
    right = [
        verifier(policy.codec.decode(t[:n]), problems[i // k]).reward
        for i, (t, n) in enumerate(zip(s.tokens.tolist(), s.lengths.tolist()))
    ]
    r = torch.tensor(right).view(-1, k)
    return float(r.mean()), float(r.amax(1).mean()), float(s.lengths.float().mean())


def main() -> None:
    """Command line."""
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", type=Path)
    ap.add_argument("--updates", type=int, default=1500)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--hidden", type=int, default=128)
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--ops", type=int, default=5)
    ap.add_argument("--high", type=int, default=20)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--stop", type=float, default=1.0); ap.add_argument("--every", type=int, default=100)
    a = ap.parse_args()
    torch.manual_seed(0)
    rng = random.Random(0)
    task = ChainArithmetic(operations=a.ops, highest_number=a.high, train_problems=60000)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, a.hidden, a.layers)
    print(sum(p.numel() for p in model.parameters()))
    policy = Policy(model, Codec(tokenizer), 1 << 20)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.1)
    sch = torch.optim.lr_scheduler.OneCycleLR(opt, a.lr, total_steps=a.updates, pct_start=0.1)
    t0 = time.time()
    train = task.problems('train')
    for u in range(a.updates):
        tokens, learnt = demonstrations(train, policy.codec, a.batch, rng)
        lp, _ = policy(tokens, torch.ones_like(learnt), learnt)
        loss = -lp.sum() / learnt.sum()
        opt.zero_grad(); loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); sch.step()
        if (u + 1) % a.every == 0:
            g, s = accuracy(policy, task), accuracy(policy, task, 1.0, 8)
            print(u + 1, f"{time.time()-t0:.0f}s loss {loss:.4f} greedy {g[0]:.3f} sample {s[0]:.3f} pass@8 {s[1]:.3f} len {s[2]:.0f}", flush=True)
            if g[0] >= a.stop:
                break
    if a.out:
        model.save_pretrained(a.out); tokenizer.save_pretrained(a.out)

if __name__ == "__main__":
    main()
