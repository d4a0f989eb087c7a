"""The plan of a run against what a run really takes, and against counts by hand."""

import json
import random
from dataclasses import dataclass, replace
from functools import partial

import lightning as L
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.credit import Broadcast
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.engines import RolloutEngine, Samples
from ssgrpo_lightning.layout import Padded
from ssgrpo_lightning.lora import Lora
from ssgrpo_lightning.plan.estimate import Assumptions, Work, estimate
from ssgrpo_lightning.plan.hardware import HARDWARE, hardware_of
from ssgrpo_lightning.plan.meter import Meter
from ssgrpo_lightning.plan.outline import Outline, outlined_rollouts
from ssgrpo_lightning.plan.ranks import Ranks
from ssgrpo_lightning.plan.rehearsal import rehearse
from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.verifiers import FinalNumber

ADAM = partial(torch.optim.AdamW, lr=1e-4)


def outlined(**options) -> PolicyModule:
    module = PolicyModule(ADAM, **options)
    module.model = Outline.of(module.model, None)
    module.configure_model()
    return module


def real_peak(module: PolicyModule, batch, steps: int = 2) -> int:
    """Most bytes that torch's own allocator held at a time in real updates, weights included."""
    module.configure_model()
    optimizer = module.configure_optimizers()["optimizer"]
    count = batch.rollouts.sampled.sum().float()
    weights = sum(p.nbytes for p in {*module.parameters(), *module.buffers()})
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(steps):
            optimizer.zero_grad()
            for rows in module.micro_batches(batch.rollouts, torch.arange(len(batch.rollouts))):
                module.loss(batch.select(rows), count)[0].backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    results = profiler.profiler.kineto_results  # every allocation and every release
    held = peak = 0
    for event in sorted(results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return weights + peak


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch": 8},
        {"micro_batch": 4, "layout": Padded(), "gradient_checkpointing": True},
        {"micro_batch": 16, "lora": Lora(rank=4)},
        {"micro_batch": 8, "head_chunk": 64, "beta": 0.1},
    ],
    ids=["shared prompts", "padded, checkpoints", "adapter", "reference"],
)
def test_the_planned_peak_is_that_of_a_real_update(options):
    batch = outlined_rollouts(2, 8, 32, 200, 17)
    found = rehearse(outlined(**options), batch, on_gpu=False)
    planned = found.parameters + found.gradients + found.optimizer + found.reference
    planned += max(found.passing, found.stepping)
    real = real_peak(PolicyModule(ADAM, **options), batch)
    print(planned, real)
    assert planned == pytest.approx(real, rel=0.15)
