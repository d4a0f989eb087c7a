"""What a run is in the middle of, as tensors and plain data, for checkpoints.

Weights, optimisers, schedules and the place in the problems are Lightning's to save; here is the
rest. What each rank has of its own comes from all of them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning import parallel
from ssgrpo_lightning.gating import Watch
from ssgrpo_lightning.records import Problem, Rollouts, ScoredRollouts, StepScores, Verdict
from ssgrpo_lightning.rollouts import join

if TYPE_CHECKING:
    from ssgrpo_lightning.alternation import SSGRPO


def saved(module: "SSGRPO") -> dict[str, Any]:
    """What `taken_up` needs; every rank must call it."""
    waiting = [plain(batch) for batch in module.datamodule.buffer]
    return {
        "policy_step": module.policy_step,
        "num_tokens": module.num_tokens,
        "watch": asdict(module.watch),
        "was_open": module.was_open,
        "temperature": module.heat,
        "skipped_in_a_row": dict(module.skipped_in_a_row),
        # Each rank's updates that wait for the next estimator phase.
        "waiting": parallel.objects(module, waiting) if waiting else [],
    }


def taken_up(module: "SSGRPO", checkpoint: Mapping[str, Any]) -> None:
    """Go on where the run was that wrote the checkpoint, with any number of ranks.

    Raises:
        ValueError: It was written by another kind of module.
    """
    if "ssgrpo" not in checkpoint:
        raise ValueError(
            "--ckpt_path is a checkpoint of another module than SSGRPO: an estimator that was "
            "fitted alone goes to model.estimator.checkpoint"
        )
    state = checkpoint["ssgrpo"]
    module.policy_step, module.num_tokens = state["policy_step"], state["num_tokens"]
    module.watch, module.was_open = Watch(**state["watch"]), state["was_open"]
    module.heat = state["temperature"]
    module.skipped_in_a_row |= state["skipped_in_a_row"]
    trainer, data = module.trainer, module.datamodule
    data.buffer.clear()
    if "train" not in data.problems:  # nothing is trained here
        return
    for update in zip(*state["waiting"]):
        parts = [from_plain(part, data.problems["train"], data.places) for part in update]
        batch = share(parts, trainer.global_rank, trainer.world_size)
        data.buffer.append(_on(batch, module.device))


def plain(batch: ScoredRollouts) -> dict[str, Any]:
    """A batch as tensors and plain data; problems by number, because the task has them."""
    rollouts = batch.rollouts
    return {
        "rollouts": {
            **_values(rollouts),
            "problems": [problem.id for problem in rollouts.problems],
            "texts": list(rollouts.texts),
            "verdicts": [astuple(verdict) for verdict in rollouts.verdicts],
        },
        "scores": _values(batch.scores),
    }


def from_plain(
    state: Mapping[str, Any], problems: Sequence[Problem], places: Mapping[int, int]
) -> ScoredRollouts:
    """A batch from what `plain` made of it.

    Args:
        state: What it made.
        problems: Problems of the task.
        places: Where among them the problem of each number stands.
    """
    rollouts = {
        **state["rollouts"],
        "problems": tuple(problems[places[number]] for number in state["rollouts"]["problems"]),
        "texts": tuple(state["rollouts"]["texts"]),
        "verdicts": tuple(Verdict(*values) for values in state["rollouts"]["verdicts"]),
    }
    return ScoredRollouts(Rollouts(**rollouts), StepScores(**state["scores"]))


def share(parts: Sequence[ScoredRollouts], rank: int, ranks: int) -> ScoredRollouts:
    """This rank's groups of an update, of which `parts` holds those of each rank that sampled it.

    As many ranks as before get back what they had, to the bit. Otherwise groups are dealt anew, in
    the order in which `ProblemLoader` deals problems.
    """
    if len(parts) == ranks:
        return parts[rank]
    rollouts = join([part.rollouts for part in parts])
    steps = max(part.scores.mask.shape[1] for part in parts)
    scores = {
        name: torch.cat([_wider(getattr(part.scores, name), steps) for part in parts])
        for name, value in vars(parts[0].scores).items()
        if isinstance(value, Tensor)
    }
    # Group k of a part was dealt in round k, to its rank.
    rounds = [(k, r) for r, part in enumerate(parts) for k in range(_groups(part))]
    dealt = sorted(range(len(rounds)), key=lambda group: rounds[group])
    own = [(rollouts.group == group).nonzero()[:, 0] for group in dealt[rank::ranks]]
    sizes = torch.tensor([len(rows) for rows in own], device=rollouts.group.device)
    group = torch.arange(len(own), device=sizes.device).repeat_interleave(sizes)
    everything = ScoredRollouts(rollouts, replace(parts[0].scores, **scores))
    picked = everything.select(torch.cat(own))
    return ScoredRollouts(
        replace(picked.rollouts, group=group), replace(picked.scores, group=group)
    )


def random_state() -> dict[str, Any]:
    """State of the global generators of this process: Python, NumPy, torch, every CUDA device."""
    name, key, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, key.tolist(), *rest),  # pyright: ignore[reportAttributeAccessIssue]
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def restore_random(state: Mapping[str, Any]) -> None:
    """Give the global generators the state that `random_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _values(record: Rollouts | StepScores) -> dict[str, Any]:
    """Fields of a record; tensors as copies, because torch saves all of a view's memory."""
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    return {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
        for name, value in found.items()
    }


def _wider(values: Tensor, steps: int) -> Tensor:
    return values if values.ndim == 1 else pad(values, (0, steps - values.shape[1]))


def _groups(part: ScoredRollouts) -> int:
    return len(part.rollouts.group.unique())


def _on(batch: ScoredRollouts, device: torch.device) -> ScoredRollouts:
    scores = batch.scores
    moved = {n: v.to(device) for n, v in vars(scores).items() if isinstance(v, Tensor)}
    return ScoredRollouts(batch.rollouts.to(device), replace(scores, **moved))
