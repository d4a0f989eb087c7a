"""TRL's arm: its `GRPOTrainer` at its best usual settings, on the same work."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from datasets import Dataset
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ssgrpo_lightning.bench.throughput.arms import Gate, Workload
from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.records import Problem


def require() -> None:
    """Check that TRL is there, without the seconds that it takes to import.

    Raises:
        ValueError: It is not installed.
    """
    if find_spec("trl") is None:
        raise ValueError(
            "the arm trl needs the package trl, which is not installed: "
            "pip install 'ssgrpo-lightning[trl]', or leave it out of --arms"
        )


def run(arm: str, gate: Gate, workload: Workload, updates: int) -> None:
    """Do updates as they are asked for, until told to end."""
    trl, pretrained = import_module("trl"), Pretrained(workload.model)
    problems = [problem for batch in workload.batches(updates) for problem in batch]
    rows = [{"prompt": prompt(problem), "number": i} for i, problem in enumerate(problems)]
    trainer = trl.GRPOTrainer(
        model=pretrained.weights(),
        reward_funcs=reward(gate, workload, problems),
        args=trl.GRPOConfig(**settings(workload), max_steps=updates),
        train_dataset=Dataset.from_list(rows),
        processing_class=pretrained.tokenizer().tokenizer,
    )
    watch(trainer, gate)
    trainer.train()


def settings(workload: Workload) -> dict[str, Any]:
    """Arguments of `GRPOConfig`: ours where both have them, off what only TRL would do."""
    return {
        "num_generations": workload.group_size,
        "per_device_train_batch_size": workload.micro_batch,
        "gradient_accumulation_steps": workload.rollouts // workload.micro_batch,
        "max_completion_length": workload.max_new_tokens,
        "temperature": workload.temperature,
        "learning_rate": workload.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "beta": 0.0,
        "epsilon": 0.2,
        "num_iterations": 1,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": workload.device == "cpu",
        "seed": workload.seed,
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def prompt(problem: Problem) -> Any:
    """A prompt in TRL's form: text or a list of messages."""
    return problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)


def reward(gate: Gate, workload: Workload, problems: Sequence[Problem]) -> Any:
    """The reward function: the workload's own judge, which also notes what was sampled."""
    judge, size = workload.judge, workload.group_size

    def judged(completions: list[Any], number: list[int], **others: Any) -> list[Any]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        pairs = zip(texts, number, strict=True)
        rewards = [judge.verdict(text, problems[i]).reward for text, i in pairs]
        known = [r for r in rewards if r is not None]
        gate.report = {
            "rollouts": len(texts),
            "tokens": sum(map(len, others["completion_ids"])),
            "trained": len(texts),
            "reward": sum(known) / max(len(known), 1),
            "problems": [problems[i].id for i in number[::size]],
        }
        return rewards

    return judged


def watch(trainer: Any, gate: Gate) -> None:
    """Stop in front of every update, and time its phases by our names."""
    clock, fetch, started = gate.clock, trainer.get_batch_samples, []

    def gated(*args: Any, **kwargs: Any) -> Any:
        gate()
        return fetch(*args, **kwargs)

    trainer.get_batch_samples = gated
    phases = {
        "_generate_single_turn": "generate",
        "_generate_and_score_completions": "rollout",
        "training_step": "policy",
    }
    for method, phase in phases.items():
        setattr(trainer, method, clock.timed(phase, getattr(trainer, method)))
    clip = trainer.accelerator.clip_grad_norm_
    trainer.accelerator.clip_grad_norm_ = clock.timed("policy", clip)

    def after(*_: Any) -> None:
        spent = clock.now() - started.pop()
        clock.seconds["policy"] = clock.seconds.get("policy", 0.0) + spent

    register_optimizer_step_pre_hook(lambda *_: started.append(clock.now()))
    register_optimizer_step_post_hook(after)
