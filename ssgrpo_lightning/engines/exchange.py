"""What passes between the policy and an engine that keeps a copy of its weights."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ssgrpo_lightning.engines.decode import warpers
from ssgrpo_lightning.engines.engine import Samples, Sampling
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.sharding import whole

FOREIGN = 0.5
"""Median difference of log-probabilities, in nats, that no rounding explains: bfloat16 is far
below .1, and other weights are far above."""


@dataclass(frozen=True)
class Completion:
    """One completion as such an engine reports it.

    Attributes:
        ids: Sampled token ids, the end token included.
        logprobs: Log-probability in nats of each, under the distribution it was drawn from.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]


def weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The policy's weights under the names of its checkpoint, tied ones under both of theirs.

    Low-rank adapters come merged into the weights they adapt, which stay as they are. Sharded
    tensors are gathered when their turn comes, so that no more than one is ever whole; every rank
    has to iterate.
    """
    adapted = {n: m for n, m in policy.model.named_modules() if hasattr(m, "get_delta_weight")}
    for name, tensor in policy.model.state_dict().items():
        owner, inside, kind = name.partition(".base_layer.")
        if ".lora_" in name:
            continue
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if inside and kind == "weight" and not adapted[owner].merged:
            layer = adapted[owner]
            deltas = [layer.get_delta_weight(adapter) for adapter in layer.active_adapters]
            whole = whole + sum(d.full_tensor() if isinstance(d, DTensor) else d for d in deltas)
        name = f"{owner}.{kind}" if inside else name
        yield name.removeprefix("base_model.model."), whole.detach()


def export(
    policy: Policy,
    folder: Path,
    with_weights: bool = True,
    untied: bool = False,
    writes: bool = True,
) -> Path:
    """Write the policy as a folder that a Hugging Face reader loads; returns the folder.

    Args:
        policy: The policy.
        folder: Where to.
        with_weights: Write the weights, and not only what describes the architecture.
        untied: Describe tied embeddings as two matrices, for a reader that takes them apart.
        writes: False on ranks that only have to help with gathering shards.
    """
    # Copies: tied weights may not share memory in a file.
    parts = {name: x.cpu().clone() for name, x in weights(policy) if writes} if with_weights else {}
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(policy.model.config)
        config.tie_word_embeddings = config.tie_word_embeddings and not untied
        config.save_pretrained(folder)
    if parts:
        # In one move, so that no reader sees half a file.
        unfinished = folder / "model.safetensors.part"
        save_file(parts, unfinished, metadata={"format": "pt"})
        unfinished.replace(folder / "model.safetensors")
    return folder


def fingerprint(policy: Policy) -> tuple[int, ...]:
    """A number for each parameter that changes when its content does, whoever changed it.

    The sum of its bits, over all ranks where it is spread: all have to agree on whether to gather
    it. PyTorch's own version counters miss fused optimisers (2.13) and writes to `.data`, and a
    count of updates misses a loaded checkpoint.
    """
    sums = []
    for parameter in policy.model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[local.itemsize]
        sums.append(local.detach().view(bits).sum())
    sums = torch.stack(sums)
    if any(isinstance(parameter, DTensor) for parameter in policy.model.parameters()):
        dist.all_reduce(sums)
    return tuple(sums.tolist())


def seeds(noise: Float[Tensor, "rollout new"]) -> list[int]:
    """A seed for each rollout from its first number: 53 bits, whatever its token budget.

    >>> seeds(torch.tensor([[0.5, 0.1], [0.25, 0.1]], dtype=torch.float64))
    [4503599627370496, 2251799813685248]
    """
    return (noise[:, 0].double() * 2**53).long().tolist()


def refuse_stop_strings(engine: str, sampling: Sampling) -> None:
    """Refuse what engines cannot do that see token ids and no text.

    Raises:
        ValueError: There are stop strings.
    """
    if sampling.stop:
        raise ValueError(
            f"policy.sampling.stop is {sampling.stop}, but {engine} samples token ids and sees no "
            "text: leave stop out, or use TransformersEngine"
        )


def to_samples(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    sampling: Sampling,
    rows_at_once: int,
) -> Samples:
    """Completions as tensors, with the entropies that the policy gives them.

    Args:
        policy: The policy that the completions were sampled from.
        prompts: Prompt of each completion.
        completions: What the engine reports.
        sampling: How they were drawn.
        rows_at_once: Completions of one forward pass of the policy.

    Raises:
        RuntimeError: The policy gives the tokens quite other log-probabilities: the engine does
            not have its weights.
    """
    device, pad = policy.model.device, policy.codec.pad_id
    width = max((len(c.ids) for c in completions), default=0)
    blanks = [width - len(c.ids) for c in completions]
    tokens = [[*c.ids, *[pad] * blank] for c, blank in zip(completions, blanks)]
    logprobs = [[*c.logprobs, *[0.0] * blank] for c, blank in zip(completions, blanks)]
    with whole(policy):
        parts = [
            _reread(policy, prompts[rows], [c.ids for c in completions[rows]], sampling, width)
            for start in range(0, len(completions), rows_at_once)
            for rows in [slice(start, start + rows_at_once)]
        ]
    drawn = torch.tensor(logprobs, device=device, dtype=torch.float32)
    lengths = torch.tensor([len(c.ids) for c in completions], device=device)
    ours, entropy = (torch.cat(x) for x in zip(*parts))
    sampled = torch.arange(width, device=device) < lengths[:, None]
    drift = float((drawn - ours)[sampled].abs().median())
    if drift > FOREIGN:
        raise RuntimeError(
            f"half of the sampled tokens have log-probabilities that differ by {drift:.2f} nats "
            f"or more between the engine and the policy, must be under {FOREIGN}: the engine has "
            "not taken over the policy's weights, so sample with TransformersEngine"
        )
    return Samples(
        tokens=torch.tensor(tokens, device=device, dtype=torch.long),
        lengths=lengths,
        logprobs=drawn,
        entropy=entropy,
        truncated=torch.tensor([c.ids[-1] not in policy.eos_ids for c in completions]).to(device),
    )


@torch.no_grad()
def _reread(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    sampling: Sampling,
    width: int,
) -> tuple[Float[Tensor, "rollout new"], Float[Tensor, "rollout new"]]:
    """Log-probability and entropy of every sampled token, from one forward pass of the policy."""
    device, pad = policy.model.device, policy.codec.pad_id
    rows = [[*prompt, *ids] for prompt, ids in zip(prompts, completions)]
    longest = max(map(len, rows))
    tokens = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
    column = torch.arange(longest, device=device)
    ends = torch.tensor([len(row) for row in rows], device=device)[:, None]
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)[:, None]
    sampled = (column >= starts) & (column < ends)
    training, warp = policy.training, warpers(sampling)
    policy.eval()
    hidden = policy.hidden(tokens, column < ends)[:, :-1][sampled[:, 1:]]
    policy.train(training)
    logprobs, entropies = [], []
    for states, drawn in zip(
        hidden.split(policy.head_chunk), tokens[sampled].split(policy.head_chunk)
    ):
        logits = warp(tokens, policy.head(states).float())  # pyright: ignore[reportArgumentType]
        all_logprobs = logits.log_softmax(-1)
        logprobs.append(all_logprobs.gather(-1, drawn[:, None])[:, 0])
        entropies.append(torch.special.entr(all_logprobs.exp()).sum(-1))
    where = torch.arange(width, device=device) < ends - starts
    blank = torch.zeros(where.shape, device=device)
    return (
        blank.masked_scatter(where, torch.cat(logprobs)),
        blank.masked_scatter(where, torch.cat(entropies)),
    )
