"""A plan of a whole config: the policy in outline, its rollouts, its engine, its estimator."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.credit import outcome_scores
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.engines import VllmEngine, VllmServer
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.estimators import Estimator
from ssgrpo_lightning.plan.estimate import Assumptions, Plan, Work, estimate
from ssgrpo_lightning.plan.hardware import Hardware
from ssgrpo_lightning.plan.meter import Meter
from ssgrpo_lightning.plan.outline import Outline, outlined_rollouts
from ssgrpo_lightning.plan.ranks import Ranks
from ssgrpo_lightning.plan.rehearsal import rehearse, size
from ssgrpo_lightning.records import CreditedRollouts, ScoredRollouts


@dataclass(frozen=True)
class Question:
    """What a plan is asked for.

    Attributes:
        ranks: Processes, and how the policy is spread over them.
        device: The device of each.
        precision: The context in which updates run.
        compute: Precision of matrix products.
        architecture: Config of a model to plan instead of the policy's; None: the policy's.
        prompt: Tokens of a prompt; None: as many as are allowed.
        completion: Tokens of a completion; None: as many as are allowed.
    """

    ranks: Ranks
    device: Hardware
    precision: Callable[[], AbstractContextManager[Any]] = torch.enable_grad
    compute: torch.dtype = torch.float32
    architecture: Path | None = None
    prompt: int | None = None
    completion: int | None = None


def study(
    model: SSGRPO, data: RolloutDataModule, asked: Question, assumed: Assumptions
) -> Plan:
    """Rehearse one update of a config on one of its ranks, and say what it takes.

    The model it is given serves for nothing else afterwards.

    Raises:
        ValueError: The rollouts of an update cannot be shared out among the ranks.
    """
    policy = model.policy
    groups = _groups_of_a_rank(data, asked.ranks.count)
    prompt = asked.prompt or policy.max_prompt_tokens
    completion = asked.completion or policy.sampling.max_new_tokens
    policy.model = Outline.of(policy.model, asked.architecture)
    policy.configure_model()
    assert policy.policy is not None
    config = policy.policy.model.config.get_text_config()
    weights = sum(p.numel() for p in policy.policy.parameters())
    batch = outlined_rollouts(groups, data.group_size, prompt, completion, config.vocab_size)
    with asked.ranks.spread(policy):
        found = rehearse(
            policy, batch, model.minibatches, asked.precision, on_gpu=asked.ranks.on_gpu
        )
    steps = model.inner_epochs * model.minibatches
    heads = config.num_key_value_heads or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    stored = policy.policy.model.dtype
    work = Work(
        rollouts=groups * data.group_size,
        prompt=prompt,
        completion=completion,
        group_size=data.group_size,
        weights=weights,
        layers=config.num_hidden_layers,
        vocabulary=config.vocab_size,
        cache_per_token=config.num_hidden_layers * 2 * heads * width * asked.compute.itemsize,
        compute=asked.compute,
        # Autocast reads a weight, writes it in the other precision and reads that.
        read_per_weight=asked.compute.itemsize
        if stored == asked.compute or asked.ranks.spreads
        else stored.itemsize + 2 * asked.compute.itemsize,
        at_once=getattr(model.engine, "rows_at_once", groups * data.group_size),
        inference_copy=weights * asked.compute.itemsize if asked.ranks.spreads else 0,
        inner_epochs=model.inner_epochs,
        steps=steps,
        reads=(policy.anchor.beta > 0) + (steps > 1),
        buckets=asked.ranks.buckets(found.gradients),
        ranks=asked.ranks.count,
        hosts=asked.ranks.hosts,
        offload=policy.offload_optimizer,
    )
    notes = [
        f"every prompt has {prompt} tokens, every completion {completion}, and all rollouts train",
    ]
    work, about_engine = _with_engine(work, model, asked.device, stored)
    work, about_estimator = _with_estimator(work, model.estimator, batch)
    plan = estimate(found, work, asked.device, assumed)
    return replace(plan, notes=notes + about_engine + about_estimator)
