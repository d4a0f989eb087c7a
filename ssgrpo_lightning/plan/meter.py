"""Bytes that tensors hold, arithmetic and traffic, of code that runs on real or on fake tensors."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten, c10d = torch.ops.aten, torch.ops.c10d
# The CPU's attention has the arguments of the GPU's; the registry knows that only.
_FLOPS = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}
_MASKED = {aten.index.Tensor: 1, aten.index_put.default: 1, aten.index_put_.default: 1}
# Collectives, and the bytes of what all ranks of one send together.
_GATHERED: dict[Any, Callable[..., int]] = {
    c10d._allgather_base_.default: lambda args: args[0].nbytes,
    c10d._reduce_scatter_base_.default: lambda args: args[1].nbytes,
}
_AVERAGED = c10d.allreduce_.default


class Meter(TorchDispatchMode):
    """Counts, while it is active, live bytes and their peak, FLOPs, and bytes of collectives.

    Bytes are those of storages, each counted once however many tensors share it, from the operation
    that makes it until Python lets go of it. What a single kernel takes and gives back within
    itself is not seen.

    Attributes:
        live: Bytes held now.
        peak: Most bytes held at a time since `restart`.
        flops: Multiplications and additions of matrix products, each counted as one.
        gathered: Bytes of whole tensors in all-gathers and reduce-scatters.
        averaged: Bytes of tensors in all-reduces.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak, self.flops = 0, 0, 0
        self.gathered, self.averaged = 0, 0
        self._sizes: dict[int, int] = {}
        self._fake: AbstractContextManager[Any] = nullcontext()

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made before the mode was entered."""
        for tensor in tensors:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if isinstance(own, FakeTensor):
                self._fake = own.fake_mode
            self._note(own)
        self.restart()

    def restart(self) -> None:
        """Forget the peak, the FLOPs and the traffic so far."""
        self.peak, self.flops, self.gathered, self.averaged = self.live, 0, 0, 0

    def __enter__(self) -> "Meter":
        # FSDP2 frees and refills storages in place, with no operation that could be seen.
        self._resize = resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._note_storage(storage)

        torch.UntypedStorage.resize_ = counted  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as operations on the local parts
        # Room for numbers that are fake, such as FSDP2 makes, is fake.
        with self._fake if func is aten.empty.memory_format else nullcontext():
            out = func(*_located(func, args), **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._note(leaf)
        if (count := _FLOPS.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        if func in _GATHERED:
            self.gathered += _GATHERED[func](args)
        elif func is _AVERAGED:
            self.averaged += sum(x.nbytes for x in args[0])
        return out

    def _note(self, tensor: Tensor) -> None:
        self._note_storage(tensor.untyped_storage())

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._drop, key)
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def _located(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with real masks as real positions: how many there are shapes the fake result."""
    place = _MASKED.get(func)
    if place is None or not isinstance(args[0], FakeTensor):
        return args
    indices: list[Tensor | None] = []
    for index in args[place]:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            indices.append(index)
        else:
            indices += index.nonzero().unbind(1)
    return (*args[:place], indices, *args[place + 1 :])
