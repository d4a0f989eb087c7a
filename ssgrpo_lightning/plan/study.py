"""A plan of a whole config: the policy in outline, its rollouts, its engine, its estimator."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.credit import outcome_scores
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.engines import TransformersEngine, VllmEngine, VllmServer
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
        architecture: Config of a model to plan instead of the policy's; None: the policy's.
        prompt: Tokens of a prompt; None: as many as are allowed.
        completion: Tokens of a completion; None: as many as are allowed.
    """

    ranks: Ranks
    device: Hardware
    precision: Callable[[], AbstractContextManager[Any]] = nullcontext
    architecture: Path | None = None
    prompt: int | None = None
    completion: int | None = None


def study(model: SSGRPO, data: RolloutDataModule, asked: Question, assumed: Assumptions) -> Plan:
    """Rehearse one update of a config on one of its ranks, and say what it takes.

    The model is in outline afterwards, and of no other use.

    Raises:
        ValueError: The groups of an update cannot be shared out among the ranks.
    """
    policy, ranks = model.policy, asked.ranks
    groups = _groups_of_a_rank(data, ranks.count)
    policy.model = Outline.of(policy.model, asked.architecture)
    policy.configure_model()
    assert policy.policy is not None
    vocabulary = policy.policy.model.config.get_text_config().vocab_size
    prompt = asked.prompt or policy.max_prompt_tokens
    completion = asked.completion or policy.sampling.max_new_tokens
    batch = outlined_rollouts(groups, data.group_size, prompt, completion, vocabulary)
    work = _work(model, batch, asked, prompt, completion, data.group_size)
    with ranks.spread(policy):
        found = rehearse(
            policy, batch, model.minibatches, asked.precision, ranks.on_gpu, ranks.unsynced
        )
    work = replace(work, buckets=ranks.buckets(found.gradients))
    notes = [
        f"prompts of {prompt} tokens, completions of {completion}, all of them trained on",
        f"{ranks.count} processes on {ranks.hosts} hosts; rank 0 stands for all",
        f"compute in {work.compute}, attention that keeps no matrix of all pairs",
        "time of verifiers, callbacks and validation is left out",
        *_about(model),
        *(f"{name} = {value:g}" for name, value in asdict(assumed).items()),
    ]
    return replace(estimate(found, work, asked.device, assumed), notes=notes)


def _groups_of_a_rank(data: RolloutDataModule, ranks: int) -> int:
    groups = data.rollouts_per_update // data.group_size
    if groups % ranks:
        raise ValueError(
            f"data.rollouts_per_update is {data.rollouts_per_update}, which are {groups} groups of "
            f"{data.group_size}, and {ranks} ranks cannot take as many each: use a multiple of "
            f"{ranks * data.group_size}"
        )
    return groups // ranks


def _work(
    model: SSGRPO,
    batch: CreditedRollouts,
    asked: Question,
    prompt: int,
    completion: int,
    group_size: int,
) -> Work:
    """What an update is made of, before anything is spread over ranks."""
    policy, ranks = model.policy, asked.ranks
    assert policy.policy is not None
    bare = policy.policy.model
    config, compute = bare.config.get_text_config(), ranks.compute(bare.dtype)
    layers = config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    steps = model.inner_epochs * model.minibatches
    estimator, flops = _estimator(model.estimator, batch)
    work = Work(
        rollouts=len(batch.rollouts),
        prompt=prompt,
        completion=completion,
        group_size=group_size,
        weights=sum(p.numel() for p in bare.parameters()),
        layers=layers,
        vocabulary=config.vocab_size,
        cache_per_token=layers * 2 * heads * width * compute.itemsize,
        compute=compute,
        inner_epochs=model.inner_epochs,
        steps=steps,
        reads=(policy.anchor.beta > 0) + (steps > 1) + model.engine.keeps_copy,
        ranks=ranks.count,
        hosts=ranks.hosts,
        between_hosts=ranks.gathers_between_hosts,
        offload=policy.offload_optimizer,
        estimator=estimator,
        estimator_flops=flops,
        at_once=getattr(model.engine, "rows_at_once", len(batch.rollouts)),
        # Autocast reads a weight, writes it in the other precision and reads that.
        read_per_weight=compute.itemsize
        if bare.dtype == compute or ranks.fsdp2 is not None
        else bare.dtype.itemsize + 2 * compute.itemsize,
    )
    if isinstance(model.engine, VllmEngine):
        return _with_vllm(work, model.engine, asked.device, bare.dtype)
    if model.engine.keeps_copy:
        return replace(work, eager=False, at_once=len(batch.rollouts))
    if ranks.fsdp2 is not None:
        return replace(work, inference_copy=work.weights * compute.itemsize)
    return work


def _with_vllm(work: Work, engine: VllmEngine, device: Hardware, stored: torch.dtype) -> Work:
    """The work with an engine that has memory and a copy of the weights of its own.

    Raises:
        ValueError: Not one completion fits.
    """
    itemsize = getattr(torch, engine.dtype).itemsize if engine.dtype else stored.itemsize
    parallel, tokens = engine.tensor_parallel_size, work.prompt + work.completion
    room = engine.gpu_memory_utilization * device.memory
    cache = work.cache_per_token // work.compute.itemsize * itemsize
    fits = int((room * parallel - work.weights * itemsize) / (cache * tokens))
    if fits < 1:
        raise ValueError(
            f"VllmEngine.gpu_memory_utilization is {engine.gpu_memory_utilization}, which on "
            f"{device.name} leaves no room for one completion of {tokens} tokens beside vLLM's "
            "copy of the weights: raise it, or set VllmEngine.dtype to bfloat16"
        )
    return replace(
        work,
        engine_memory=int(room),
        engine_sleeps=engine.sleep,
        eager=bool(engine.options.get("enforce_eager")),
        at_once=min(fits, work.rollouts),
        read_per_weight=itemsize,
        cache_per_token=cache,
    )


def _estimator(module: EstimatorModule | None, batch: CreditedRollouts) -> tuple[int, float]:
    """Bytes of the estimator, gradients and optimiser; FLOPs of scoring and learning."""
    if module is None or not _stands_alone(module.estimator):
        return 0, 0.0
    rollouts = batch.rollouts
    groups = int(rollouts.group.max()) + 1
    one = rollouts.select((rollouts.group == 0).nonzero()[:, 0])
    with Meter() as meter:
        scores = module.score(one, outcome_scores(one, one.rewards - one.rewards.mean()))
        if module.learns:
            loss, _ = module.loss(ScoredRollouts(one, scores), torch.ones(()))
            loss.backward()
    # Weights, gradients, and the two means of Adam.
    return size(module.parameters()) * (4 if module.learns else 1), float(meter.flops * groups)


def _stands_alone(estimator: Estimator) -> bool:
    """Whether it neither loads a model nor reads the policy."""
    kind = type(estimator)
    return kind.load is Estimator.load and kind.bind is Estimator.bind


def _about(model: SSGRPO) -> list[str]:
    """What a plan of this model leaves out or guesses."""
    notes, policy = [], model.policy
    if model.estimator is not None and not _stands_alone(model.estimator.estimator):
        name = type(model.estimator.estimator).__name__
        notes.append(f"{name} reads a language model: its memory and time are left out")
    if isinstance(model.engine, VllmServer):
        notes.append("VllmServer runs elsewhere, on as many GPUs of the same kind")
    elif type(model.engine) not in (VllmEngine, TransformersEngine):
        notes.append(f"{type(model.engine).__name__} is taken for a TransformersEngine")
    if policy.compile_policy:
        notes.append("policy.compile saves memory and time that are not counted")
    return notes
