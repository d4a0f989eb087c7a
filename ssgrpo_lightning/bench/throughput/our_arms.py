"""Our arms: the quickstart with and without its overlay, and the bare cost of the same tokens."""

import json
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning as L
import torch

from ssgrpo_lightning.alternation import SSGRPO as Module
from ssgrpo_lightning.bench.runs import named
from ssgrpo_lightning.bench.throughput.arms import FLOOR, GRPO, Gate, Workload
from ssgrpo_lightning.cli import main
from ssgrpo_lightning.credit import outcome_scores
from ssgrpo_lightning.engines import RolloutEngine, Samples, Sampling, TransformersEngine
from ssgrpo_lightning.layout import micro_batches
from ssgrpo_lightning.policy import Policy, Pretrained
from ssgrpo_lightning.records import Rollouts
from ssgrpo_lightning.rollouts import collect

CONFIGS = Path("configs")


def run(arm: str, gate: Gate, workload: Workload, updates: int) -> None:
    """Do updates as they are asked for, until told to end."""
    if arm == FLOOR:
        floor(gate, workload, updates)
        return
    configs = ["quickstart", *(["grpo"] if arm == GRPO else [])]
    paths = [f"--config={CONFIGS / name}.yaml" for name in configs]
    given = {"handle": os.dup(gate.connection.fileno()), "device": workload.device}
    callback = {"class_path": f"{__name__}.UpdateGate", "init_args": given}
    main(["fit", *paths, *settings(workload), f"--trainer.callbacks={json.dumps([callback])}"])


def settings(workload: Workload) -> list[str]:
    """Command-line arguments that make the quickstart do a workload, and write nothing."""
    values: dict[str, Any] = {
        "seed_everything": workload.seed,
        "trainer.accelerator": "gpu" if workload.device == "cuda" else "cpu",
        "trainer.devices": 1,
        "trainer.max_steps": 1_000_000,
        "trainer.limit_val_batches": 0,
        "trainer.logger": False,
        "trainer.enable_checkpointing": False,
        "trainer.enable_progress_bar": False,
        "rollout_log.every": 0,
        "model.policy.model.name": workload.model,
        "model.policy.optimizer.init_args.lr": workload.lr,
        "model.policy.sampling.max_new_tokens": workload.max_new_tokens,
        "model.policy.sampling.temperature": workload.temperature,
        "model.policy.micro_batch": workload.micro_batch,
        "data.task": named(workload.task),
        "data.verifier": named(workload.verifier),
        "data.group_size": workload.group_size,
        "data.rollouts_per_update": workload.rollouts,
    }
    text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items()}
    return [f"--{key}={value}" for key, value in text.items()]


def facts(rollouts: Rollouts, trained: int) -> dict[str, Any]:
    """What a reply tells of the rollouts of an update."""
    every = len(rollouts) // (int(rollouts.group.max()) + 1)
    return {
        "rollouts": len(rollouts),
        "tokens": int(rollouts.sampled.sum()),
        "trained": trained,
        "reward": float(rollouts.rewards.nanmean()),
        "problems": [problem.id for problem in rollouts.problems[::every]],
    }


class UpdateGate(L.Callback):
    """Stops a run in front of every update.

    Args:
        handle: File descriptor of the connection to the process that asks.
        device: cpu or cuda.
    """

    def __init__(self, handle: int, device: str) -> None:
        self.gate = Gate(Connection(handle), device)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Time the engine apart from the rest of its phase."""
        assert isinstance(pl_module, Module)
        pl_module.engine = TimedEngine(self.gate, pl_module.engine)

    def on_train_batch_start(self, *args: Any) -> None:
        """Wait for a request."""
        self.gate()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *args: Any
    ) -> None:
        """Note what the update was."""
        assert isinstance(pl_module, Module)
        rollouts, clock = outputs["rollouts"], self.gate.clock
        clock.seconds |= pl_module.seconds
        clock.seconds["rollout"] -= clock.seconds["generate"]
        live = (outputs["step_advantages"] != 0).any(1)
        self.gate.report = facts(rollouts, int(live.sum()))


class TimedEngine(RolloutEngine):
    """Another engine, whose sampling counts as a phase of its own."""

    def __init__(self, gate: Gate, engine: RolloutEngine) -> None:
        self.engine = engine
        self.timed = gate.clock.timed("generate", lambda *args: list(engine.stream(*args)))

    def generate(self, *arguments: Any) -> Samples:
        return self.engine.generate(*arguments)

    def stream(self, *arguments: Any) -> Iterator[Samples]:
        return iter(self.timed(*arguments))

    def close(self, policy: Policy) -> None:
        self.engine.close(policy)


def floor(gate: Gate, workload: Workload, updates: int) -> None:
    """The least an update can cost: decoding, one forward and backward pass, an optimiser step.

    The policy stays, so the tokens are those of the GRPO arm, drawn from the same noise, and the
    rows that are trained on are its rows. What lies between (verdicts, padding, advantages) is
    done and not counted.
    """
    policy = Pretrained(workload.model).load().to(workload.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=workload.lr, weight_decay=0.0)
    sampling = Sampling(workload.max_new_tokens, workload.temperature)
    arguments = (policy, TimedEngine(gate, TransformersEngine()), workload.judge)

    def train(rollouts: Rollouts) -> int:
        advantages = outcome_scores(rollouts).advantages
        live, divisor = advantages.nonzero()[:, 0], rollouts.sampled.sum()
        optimizer.zero_grad()
        for rows in micro_batches(rollouts, live, policy.layout, workload.micro_batch):
            part = rollouts.select(rows)
            logprobs, _ = policy(part.tokens, part.attended, part.sampled, workload.temperature)
            ratio = (logprobs - logprobs.detach()).exp()
            (-(ratio * advantages[rows, None]).sum() / divisor).backward()
        optimizer.step()
        return len(live)

    timed = gate.clock.timed("policy", train)
    for step, problems in enumerate(workload.batches(updates)):
        gate()
        size = workload.group_size
        rollouts = collect(*arguments, problems, size, sampling, workload.seed, step)
        gate.report = facts(rollouts, timed(rollouts)) | {
            "seconds": sum(gate.clock.seconds.values()),
            "cpu_seconds": gate.clock.cpu_seconds,
        }
