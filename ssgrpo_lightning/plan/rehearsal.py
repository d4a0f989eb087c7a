"""One update of a policy in outline: what it holds, computes and sends on one rank."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ssgrpo_lightning.plan.meter import Meter
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.records import CreditedRollouts
from ssgrpo_lightning.sharding import whole


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in the policy phase of an update.

    Attributes:
        parameters: Bytes of the policy's parameters and buffers.
        trained: Parameters of this rank that have a gradient.
        gradients: Bytes of all gradients.
        optimizer: Bytes of the optimiser's state.
        reference: Bytes of the copy that a KL holds the policy to.
        passing: Most bytes beside these in a forward and backward pass that adds to gradients.
        reading: Most bytes beside these, but for gradients, in a pass without gradient; weights
            that are spread over ranks are held whole for it.
        stepping: Most bytes beside these in an optimiser step.
        parts: Micro-batches of one pass over the rollouts.
        tokens: Tokens that such a pass computes, padding included, shared prompts once.
        pass_flops: FLOPs of one forward and backward pass.
        read_flops: FLOPs of one forward pass.
        pass_gathered: Bytes gathered or scattered in one forward and backward pass.
        pass_averaged: Bytes averaged in one forward and backward pass.
        gathered_once: Bytes gathered to hold all weights whole.
    """

    parameters: int
    trained: int
    gradients: int
    optimizer: int
    reference: int
    passing: int
    reading: int
    stepping: int
    parts: int
    tokens: int
    pass_flops: int
    read_flops: int
    pass_gathered: int
    pass_averaged: int
    gathered_once: int


def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's part of every tensor."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's part of tensors; those that share a storage count once."""
    storages = {s._cdata: s for t in local(tensors) for s in [t.untyped_storage()]}
    return sum(s.nbytes() for s in storages.values())


def rehearse(
    module: PolicyModule,
    batch: CreditedRollouts,
    minibatches: int = 1,
    precision: Callable[[], AbstractContextManager[object]] = torch.enable_grad,
    on_gpu: bool = True,
    unsynced: Callable[[], AbstractContextManager[object]] | None = None,
) -> Rehearsal:
    """Go through one update: micro-batches as the module splits them, gradients, one step.

    Of micro-batches of one size one is gone through; where there are several, it finds gradients to
    add to, as all but the first do.

    Args:
        module: The policy module, with a policy in outline, spread over ranks where it is to be.
        batch: The rollouts of this rank.
        minibatches: Optimiser steps of one pass over them.
        precision: The context that updates run in.
        on_gpu: Whether the optimiser steps all parameters at a time, as torch does on a GPU.
        unsynced: The context of all but the last micro-batch of a step, where whole gradients are
            kept until then.
    """
    rollouts, optimizer = batch.rollouts, _optimizer(module, on_gpu)
    per_step = torch.arange(len(rollouts)).tensor_split(minibatches)
    split = [module.micro_batches(rollouts, rows) for rows in per_step]
    parts = [rows for part in split for rows in part]
    trained = [p for p in module.parameters() if p.requires_grad]
    count = module.reduction.count(module.learnt(rollouts)).clamp(min=1)

    def backward(rows: Tensor) -> None:
        loss, _ = module.loss(batch.select(rows), count)
        loss.backward()

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), module.max_grad_norm or float("inf"))
        optimizer.step()

    def full_gradients() -> None:
        for p in trained:
            p.grad = torch.zeros_like(p)

    meter = Meter()
    meter.hold([*module.parameters(), *module.buffers()])
    with meter, precision():
        full_gradients()
        step()  # from now on the optimiser has its state
        optimizer.zero_grad()
        held = meter.live
        if max(map(len, split)) > 1:
            full_gradients()
            if unsynced is not None:
                with unsynced():
                    backward(parts[0])
        meter.restart()
        backward(parts[0])
        passing, pass_flops = meter.peak - held, meter.flops
        gathered, averaged = meter.gathered, meter.averaged
        meter.restart()
        step()
        stepping = meter.peak - held
        optimizer.zero_grad()
        meter.restart()
        with torch.no_grad(), whole(module.policy):
            module.forward(rollouts.select(parts[0]))
        reading, read_flops, once = meter.peak - held, meter.flops, meter.gathered
        full_gradients()
        sizes = _sizes(module, optimizer)
    return Rehearsal(
        **sizes,
        passing=max(passing - sizes["gradients"], 0),
        reading=reading,
        stepping=max(stepping - sizes["gradients"], 0),
        parts=len(parts),
        tokens=sum(module.layout.tokens(rollouts, rows) for rows in parts),
        pass_flops=pass_flops,
        read_flops=read_flops,
        pass_gathered=gathered,
        pass_averaged=averaged,
        gathered_once=once,
    )


def _optimizer(module: PolicyModule, on_gpu: bool) -> torch.optim.Optimizer:
    """The module's optimiser as it steps on a GPU, or as on a CPU."""
    optimizer = module.configure_optimizers()["optimizer"]
    for group in optimizer.param_groups:
        if on_gpu and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


def _sizes(module: PolicyModule, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of what stays from update to update, while there are gradients."""
    copy, trained = module.anchor.copy, [p for p in module.parameters() if p.grad is not None]
    reference = 0 if copy is None else size([*copy.parameters(), *copy.buffers()])
    state = [x for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    return {
        "parameters": size([*module.parameters(), *module.buffers()]) - reference,
        "trained": sum(p.numel() for p in local(trained)),
        "gradients": size(p.grad for p in trained if p.grad is not None),
        # The count of steps of each parameter stays on the CPU.
        "optimizer": size(x for x in state if x.ndim),
        "reference": reference,
    }
