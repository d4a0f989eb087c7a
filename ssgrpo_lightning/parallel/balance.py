"""The rollouts of an update, shared out so that every rank trains on about as many tokens."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import lightning as L
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ssgrpo_lightning.functional import spread_steps
from ssgrpo_lightning.parallel.collectives import objects
from ssgrpo_lightning.records import CreditedRollouts, Rollouts
from ssgrpo_lightning.rollouts import join

if TYPE_CHECKING:
    from ssgrpo_lightning.alternation import SSGRPO


def even_shares(work: Sequence[float], ranks: int) -> list[int]:
    """Which rank takes each piece of work, so that the greatest load is small.

    The largest piece first, each to the rank with the least so far, and of those with as little to
    the one with the fewest pieces: at most 4/3 of the best possible. Source: Graham, "Bounds on
    multiprocessing timing anomalies" (1969).

    >>> even_shares([5, 4, 3, 3, 1], 2)
    [0, 1, 1, 0, 1]
    """
    loads, taken = [(0.0, 0, rank) for rank in range(ranks)], [0] * len(work)
    for piece in sorted(range(len(work)), key=lambda piece: -work[piece]):
        load, count, rank = min(loads)
        loads[rank], taken[piece] = (load + work[piece], count + 1, rank), rank
    return taken


def credited(
    module: "SSGRPO", rollouts: Rollouts, advantages: Float[Tensor, "rollout step"]
) -> CreditedRollouts:
    """What the policy learns from: on several ranks this one's even share of the rollouts of all.

    Args:
        module: Module that the trainer knows.
        rollouts: Rollouts of this rank.
        advantages: Advantage of each of their steps.
    """
    batch = CreditedRollouts(rollouts, spread_steps(advantages, rollouts.step))
    if module.trainer.world_size == 1:
        return batch
    tokens = rollouts.attended.sum(1) * module.policy.learns(batch).float()
    together = module.policy.layout.shares_prompts
    rollouts, advantages = _shared(module, rollouts, advantages, tokens, together)
    return CreditedRollouts(rollouts, spread_steps(advantages, rollouts.step))


def _shared(
    module: L.LightningModule,
    rollouts: Rollouts,
    advantages: Float[Tensor, "rollout step"],
    tokens: Float[Tensor, " rollout"],
    together: bool,
) -> tuple[Rollouts, Float[Tensor, "shared step"]]:
    """Even shares of the rollouts of all ranks by `tokens`, groups kept `together` or not.

    Groups get the numbers that they would have on one process, whose problems ranks take in turn.
    """
    ranks = module.trainer.world_size
    of_ranks = objects(module, (rollouts.to("cpu"), advantages.cpu(), tokens.cpu()))
    joined = join([one for one, _, _ in of_ranks])
    group = torch.cat([one.group * ranks + r for r, (one, _, _) in enumerate(of_ranks)])
    work = torch.cat([tokens for _, _, tokens in of_ranks])
    steps = max(a.shape[1] for _, a, _ in of_ranks)
    credit = torch.cat([pad(a, (0, steps - a.shape[1])) for _, a, _ in of_ranks])
    piece = group if together else torch.arange(len(group))
    per_piece = work.new_zeros(int(piece.max()) + 1).index_add(0, piece, work)
    owner = torch.tensor(even_shares(per_piece.tolist(), ranks))[piece]
    rows = (owner == module.trainer.global_rank).nonzero()[:, 0]
    rows = rows[group[rows].argsort(stable=True)]
    share = replace(joined, group=group).select(rows)
    return share.to(module.device), credit[rows, : share.steps].to(module.device)
