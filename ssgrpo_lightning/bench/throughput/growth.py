"""How seconds and memory of an update grow: group size, completion length, vocabulary, rollouts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ssgrpo_lightning.bench.throughput.arms import GRPO, SSGRPO, TRL, Workload, interleave
from ssgrpo_lightning.bench.throughput.figures import summarise
from ssgrpo_lightning.policy import Codec, Policy
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.tiny_policy.build import build_model, build_tokenizer, vocabulary
from ssgrpo_lightning.verifiers import FinalNumber, Noisy

ARMS, UPDATES = (TRL, GRPO, SSGRPO), 2
AXES: dict[str, tuple[int, ...]] = {
    "group size": (4, 8, 16, 32),
    "completion length": (32, 64, 128, 192),
    "rollouts": (32, 64, 128, 256),
    "vocabulary": (4_096, 16_384, 49_152, 150_000),
}
FIELDS = {
    "group size": "group_size",
    "completion length": "max_new_tokens",
    "rollouts": "rollouts",
}
# Verdicts are drawn by lot, so that hardly a group is dead and each row is trained on.
BASE = Workload(
    "growth",
    task=ChainArithmetic(train_problems=512),
    verifier=Noisy(FinalNumber("#"), 0.5),
    rollouts=64,
    micro_batch=16,
)


def random_policy(entries: int, folder: Path) -> int:
    """Write a policy of random weights with so many entries in its vocabulary.

    It hardly ever draws the end token, so every completion is as long as it may be.

    Returns:
        Bytes of gradients and optimiser state that its weights take, three numbers each.
    """
    ids = vocabulary(BASE.task)  # pyright: ignore[reportArgumentType]
    ids |= {f"word{i} ": i for i in range(len(ids), entries)}
    torch.manual_seed(0)
    model = build_model(ids)
    Policy(model, Codec(build_tokenizer(ids))).save(folder)
    return 3 * 4 * sum(p.numel() for p in model.parameters())


def points(device: str, threads: int, folder: Path) -> Iterator[tuple[str, int, Workload, float]]:
    """Axis, place on it, workload, and MiB of gradients and optimiser state of its weights."""
    base = replace(BASE, device=device, threads=threads)
    built: dict[int, tuple[str, float]] = {}
    for axis, places in AXES.items():
        for place in places:
            entries = place if axis == "vocabulary" else AXES["vocabulary"][0]
            if entries not in built:
                where = folder / f"vocabulary{entries}"
                built[entries] = str(where.resolve()), random_policy(entries, where) / 2**20
            model, own = built[entries]
            change: dict[str, Any] = {FIELDS[axis]: place} if axis in FIELDS else {}
            name = f"{axis.replace(' ', '-')}-{place}"
            yield axis, place, replace(base, name=name, model=model, **change), own


def measure(
    device: str, threads: int, folder: Path, tick: Callable[[], Any]
) -> dict[str, list[dict[str, Any]]]:
    """Figures of the arms at every point of every axis, freed memory being given back at once."""
    found: dict[str, list[dict[str, Any]]] = {axis: [] for axis in AXES}
    for axis, place, workload, own in points(device, threads, folder):
        told = interleave(workload, ARMS, UPDATES, folder, tick, give_back=device == "cpu")
        arms = {
            arm: {key: figures[key] for key in ("seconds", "memory_mib", "tokens")}
            for arm, figures in summarise(told)["arms"].items()
        }
        found[axis].append({"at": place, "own_mib": own, "arms": arms})
    return found
