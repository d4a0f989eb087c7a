"""From one rehearsed update to memory by part and seconds by part, on named hardware."""

from dataclasses import dataclass, field

import torch

from ssgrpo_lightning.plan.hardware import GIB, Hardware
from ssgrpo_lightning.plan.rehearsal import Rehearsal

TRAINING, READING, GENERATION = "training", "reading", "generation"


@dataclass(frozen=True)
class Assumptions:
    """What cannot be derived from a config, and how a plan takes it."""

    utilisation: float = 0.4
    """Share of the peak FLOP/s that training and long forward passes reach."""
    bandwidth: float = 0.6
    """Share of the peak memory bandwidth that decoding reaches."""
    eager_layer: float = 1e-3
    """Least seconds of a decoder layer and token in eager PyTorch, which launches its kernels one
    by one from Python; an engine that replays graphs has no such floor."""
    host_link: float = 20e9
    """Bytes per second between a GPU and its host's memory."""
    between_hosts: float = 25e9
    """Bytes per second and GPU between hosts, in one direction: 200 Gbit/s."""
    reserve_gib: float = 2.0
    """Memory that CUDA, NCCL and the allocator's gaps take, in GiB."""


@dataclass(frozen=True)
class Work:
    """What an update is made of on one rank, beside what `Rehearsal` says.

    Attributes:
        rollouts: Rollouts of an update on this rank.
        prompt: Tokens of a prompt.
        completion: Tokens of a completion.
        group_size: Rollouts of a problem.
        weights: Parameters of the whole policy.
        layers: Its decoder layers.
        vocabulary: Its token ids.
        cache_per_token: Bytes of keys and values of one token.
        compute: Precision of matrix products.
        read_per_weight: Bytes that a decoding step moves per parameter.
        at_once: Most rollouts that are decoded together.
        inference_copy: Bytes of weights that exist for generation alone.
        engine_memory: Bytes that an engine takes for itself, cache and copy included; 0: none.
        engine_sleeps: Whether it gives them back while the policy is trained.
        eager: Whether decoding is eager PyTorch.
        inner_epochs: Passes over the rollouts that train.
        steps: Optimiser steps of an update.
        reads: Passes over them without gradient: entropies, reference, old log-probabilities.
        buckets: Bytes in which gradients are copied to be averaged.
        ranks: Processes.
        hosts: Hosts.
        between_hosts: Whether weights are gathered over the network.
        offload: Whether the optimiser's state is on the host while the policy is not trained.
        estimator: Bytes of the estimator, its gradients and its optimiser's state.
        estimator_flops: FLOPs of scoring and of learning from the rollouts.
    """

    rollouts: int
    prompt: int
    completion: int
    group_size: int
    weights: int
    layers: int
    vocabulary: int
    cache_per_token: int
    compute: torch.dtype
    read_per_weight: int
    at_once: int
    inference_copy: int = 0
    engine_memory: int = 0
    engine_sleeps: bool = True
    eager: bool = True
    inner_epochs: int = 1
    steps: int = 1
    reads: int = 0
    buckets: int = 0
    ranks: int = 1
    hosts: int = 1
    between_hosts: bool = False
    offload: bool = False
    estimator: int = 0
    estimator_flops: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What an update takes of one GPU.

    Attributes:
        memory: Bytes of every part, by phase.
        seconds: Seconds of every part of an update.
        work: Tokens, FLOPs and bytes of an update.
        capacity: Bytes of the GPU.
        notes: What was assumed, one sentence each.
    """

    memory: dict[str, dict[str, float]]
    seconds: dict[str, float]
    work: dict[str, float]
    capacity: float
    notes: list[str] = field(default_factory=list)

    @property
    def peaks(self) -> dict[str, float]:
        """Bytes of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.memory.items()}

    @property
    def peak(self) -> float:
        """Bytes of the phase that takes most."""
        return max(self.peaks.values())

    @property
    def fits(self) -> bool:
        """Whether that is no more than the GPU has."""
        return self.peak <= self.capacity


def estimate(found: Rehearsal, work: Work, device: Hardware, assumed: Assumptions) -> Plan:
    """Memory and time of one update."""
    tokens, passes = (
        work.rollouts * (work.prompt + work.completion),
        found.parts * work.inner_epochs,
    )
    return Plan(
        memory=_memory(found, work, assumed),
        seconds=_seconds(found, work, device, assumed),
        work={
            "sampled tokens, all GPUs": work.ranks * work.rollouts * work.completion,
            "trained tokens, all GPUs": work.ranks * tokens,
            "tokens through the decoder, per GPU": found.tokens,
            "micro-batches, per GPU": passes,
            "training FLOPs, per GPU": passes * found.pass_flops,
            "generation FLOPs, per GPU": _generation_flops(work),
            "bytes gathered and scattered, per GPU": passes * found.pass_gathered
            + found.gathered_once,
        },
        capacity=device.memory,
    )


def _memory(found: Rehearsal, work: Work, assumed: Assumptions) -> dict[str, dict[str, float]]:
    always = {
        "parameters": found.parameters,
        # They stay until the next update sets out.
        "gradients": found.gradients + work.buckets,
        "optimiser state": found.optimizer,
        "reference copy": found.reference,
        "estimator": work.estimator,
        "CUDA, NCCL, allocator": assumed.reserve_gib * GIB,
    }
    training = {"activations, gathered weights": max(found.passing, found.stepping)}
    reading = {"activations, gathered weights": found.reading}
    if work.engine_memory:
        generation = {"vLLM: copy, KV cache": work.engine_memory}
        if not work.engine_sleeps:
            training, reading = training | generation, reading | generation
    else:
        rows = min(work.at_once, work.rollouts)
        generation = {
            "inference copy": work.inference_copy,
            "KV cache": rows * (work.prompt + work.completion) * work.cache_per_token,
            # Logits, log-probabilities and probabilities in float32, two lines in float64.
            "sampling": rows * work.vocabulary * (3 * 4 + 2 * 8),
        }
    resting = {**always, "optimiser state": 0.0 if work.offload else found.optimizer}
    phases = {TRAINING: {**always, **training}, GENERATION: {**resting, **generation}}
    return phases | ({READING: {**resting, **reading}} if work.reads else {})


def _generation_flops(work: Work) -> float:
    """Two for every weight and token; each prompt is read once."""
    prompts = work.rollouts // work.group_size * work.prompt
    return 2.0 * work.weights * (prompts + work.rollouts * work.completion)


def _seconds(
    found: Rehearsal, work: Work, device: Hardware, assumed: Assumptions
) -> dict[str, float]:
    arithmetic = device.flops(work.compute) * assumed.utilisation
    memory = device.bandwidth * assumed.bandwidth
    link = assumed.between_hosts if work.between_hosts else device.link
    share = (work.ranks - 1) / work.ranks
    rows = min(work.at_once, work.rollouts)
    seen = work.prompt + work.completion / 2
    token = max(
        (work.weights * work.read_per_weight + rows * seen * work.cache_per_token) / memory,
        2.0 * work.weights * rows / arithmetic,
        work.layers * assumed.eager_layer if work.eager else 0.0,
    )
    prompts = work.rollouts // work.group_size * work.prompt
    generation = 2.0 * work.weights * prompts / arithmetic
    generation += -(-work.rollouts // rows) * work.completion * token
    passes = found.parts * work.inner_epochs
    states = found.optimizer + found.gradients + 2 * found.parameters
    averaged = passes * found.pass_averaged + work.steps * work.buckets
    moved = 2 * found.optimizer / assumed.host_link if work.offload else 0.0
    return {
        "generation": generation,
        "weights to the engine": work.weights * 2 / assumed.host_link
        if work.engine_memory
        else 0.0,
        "gathering weights for rollouts": found.gathered_once * share / link,
        "entropies, reference, old policy": found.parts
        * work.reads
        * found.read_flops
        / arithmetic,
        # Collectives run beside the arithmetic.
        "training": passes * max(found.pass_flops / arithmetic, found.pass_gathered * share / link),
        "averaging gradients": 2
        * averaged
        * share
        / (assumed.between_hosts if work.hosts > 1 else link),
        "optimiser": work.steps * (2 * states / memory + moved),
        "estimator": work.estimator_flops / (device.float32 * assumed.utilisation),
    }
