"""The only package that knows ranks and strategies."""

from ssgrpo_lightning.parallel.collectives import (
    everyones,
    gathered,
    global_max,
    global_min,
    global_sum,
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
    "everyones",
    "gathered",
    "global_max",
    "global_min",
    "global_sum",
    "optimiser_state_on",
    "optimiser_step",
    "pooled",
    "refuse_unsupported",
    "shard",
]
