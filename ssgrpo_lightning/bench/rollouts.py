"""The decode loop against `generate()`: tokens per second on the same prompts and limits."""

import statistics
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.engines.engine import uniform_noise
from ssgrpo_lightning.policy import TINY_POLICY, Policy, Pretrained
from ssgrpo_lightning.tasks import ChainArithmetic


def ours(policy: Policy, prompts: list[list[int]], repeats: int, budget: int, seed: int) -> int:
    """Sampled tokens of one batch through the decode loop."""
    keys = [(0, seed, p, k) for p in range(len(prompts)) for k in range(repeats)]
    sampling, noise = Sampling(budget), uniform_noise(keys, budget)
    samples = TransformersEngine().generate(policy, prompts, repeats, sampling, noise)
    return int(samples.lengths.sum())


def theirs(policy: Policy, prompts: list[list[int]], repeats: int, budget: int, seed: int) -> int:
    """Sampled tokens of one batch through transformers' ``generate()``."""
    torch.manual_seed(seed)
    pad, width = policy.codec.pad_id, max(map(len, prompts))
    rows = [[pad] * (width - len(p)) + p for p in prompts for _ in range(repeats)]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts for _ in range(repeats)]
    policy.eval()
    completions = policy.model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        do_sample=True,
        max_new_tokens=budget,
        pad_token_id=pad,
    )[:, width:]
    ends = torch.isin(completions, torch.tensor(sorted(policy.eos_ids)))
    # A row counts up to and with its end token; what follows is padding.
    return int((ends.cumsum(1) - ends.long() == 0).sum())


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", default=TINY_POLICY, help="policy to sample from")
    parser.add_argument("--problems", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    policy = Pretrained(options.model).load()
    problems = ChainArithmetic().problems("train")[: options.problems]
    prompts = [policy.codec.encode(problem) for problem in problems]
    shape = (policy, prompts, options.group_size, options.max_new_tokens)
    contenders: dict[str, Callable[..., int]] = {"ours": ours, "generate": theirs}
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    rounds = 9 if options.quick else 25
    for seed in tqdm(range(-1, rounds), desc="rounds"):
        for name, run in contenders.items():
            start = time.perf_counter()
            tokens = run(*shape, seed + 1)
            if seed >= 0:  # the first round warms up
                speeds[name].append(tokens / (time.perf_counter() - start))
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["generate"], strict=True)]
    result = {
        "speedup_vs_generate": statistics.median(ratios),
        "ratios": ratios,
        "tokens_per_second": {k: statistics.median(v) for k, v in speeds.items()},
        "rollouts": len(prompts) * options.group_size,
        "max_new_tokens": options.max_new_tokens,
        "model": options.model,
        "threads": torch.get_num_threads(),
    }
    for name, speed in result["tokens_per_second"].items():
        print(f"{name:>10} {speed:10.0f} tokens/s")
    print(f"ratio from {min(ratios):.2f} to {max(ratios):.2f} over {rounds} rounds")
    finish(result, "speedup_vs_generate", options.out)


if __name__ == "__main__":
    main()
