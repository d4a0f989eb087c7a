"""The only package that knows ranks and strategies."""

from ssgrpo_lightning.parallel.balance import credited, even_shares
from ssgrpo_lightning.parallel.collectives import (
    everyones,
    gathered,
    global_max,
    global_sum,
    objects,
    pooled,
)
from ssgrpo_lightning.parallel.strategies import FSDP2, refuse_unsupported, shard
from ssgrpo_lightning.parallel.updates import (
    Tally,
    count_update,
    optimiser_state_on,
    optimiser_step,
)

__all__ = [
    "FSDP2",
    "Tally",
    "count_update",
    "credited",
    "even_shares",
    "everyones",
    "gathered",
    "global_max",
    "global_sum",
    "objects",
    "optimiser_state_on",
    "optimiser_step",
    "pooled",
    "refuse_unsupported",
    "shard",
]
