"""Weights that are spread over ranks, and how to read them. Knows FSDP2, but no trainer or rank."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class Shardable(nn.Module, ABC):
    """A model whose weights may be spread over ranks, and what a pass of it is."""

    passes: ClassVar[tuple[str, ...]] = ()
    """Methods beside ``forward`` that read weights: they, too, see them whole."""

    @abstractmethod
    def layers(self) -> list[nn.Module]:
        """Parts that are gathered one at a time; what is in none of them is gathered together."""

    @abstractmethod
    def idle(self) -> Tensor:
        """0, by way of every weight that learns: a pass of a rank that has nothing to learn.

        Ranks gather weights for each other, so that all have to make as many passes.
        """


# Models held whole at the moment: an inner context must not take them from an outer one.
_HELD: WeakSet[nn.Module] = WeakSet()


@contextmanager
def whole(*models: nn.Module | None) -> Iterator[None]:
    """Hold the weights of models whole, for passes without gradient: gathered once, not in each.

    While it lasts, no pass waits for other ranks, so that each may make as many as it likes. Every
    rank has to enter. Models that are not spread stay as they are, and so does what an outer
    context holds already.

    Args:
        models: Modules that are, or contain, models with spread weights; None: nothing.
    """
    spread = [m for model in models if model for m in model.modules() if isinstance(m, FSDPModule)]
    entered = [m for m in spread if m not in _HELD]
    # A root keeps its weights after a pass as it is.
    inner = [m for m in entered if not isinstance(m, Shardable)]
    for module in spread:
        module.unshard()
    for module in inner:
        module.set_reshard_after_forward(False, recurse=False)
    _HELD.update(entered)
    try:
        yield
    finally:
        _HELD.difference_update(entered)
        for module in inner:
            module.set_reshard_after_forward(True, recurse=False)
        for module in entered:
            if isinstance(module, Shardable):
                # Also forgets the order of the passes, by which the next backward would prefetch.
                module.reset_iter_state()
