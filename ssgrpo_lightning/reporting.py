"""What an update and a prediction leave behind: one row for the loggers, rows of JSON."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from ssgrpo_lightning.metrics import credit_sums, rollout_sums
from ssgrpo_lightning.parallel import global_max, global_sum
from ssgrpo_lightning.records import Rollouts, StepScores
from ssgrpo_lightning.rollouts import step_texts, to_rows

if TYPE_CHECKING:
    from ssgrpo_lightning.alternation import SSGRPO

ON_THE_BAR = ("reward", "entropy")


def update_row(
    module: "SSGRPO",
    rollouts: Rollouts,
    scores: StepScores,
    weights: Float[Tensor, "rollout step"],
    step_advantages: Float[Tensor, "rollout step"],
    learnt: dict[str, Tensor],
) -> dict[str, float]:
    """All metrics of one update; one stands in the row only if this update measured it."""
    sums = rollout_sums(rollouts) | credit_sums(rollouts, scores, weights, step_advantages)
    row = {}
    for name, pair in sums.items():
        total, count = global_sum(module, torch.stack([x.to(module.device) for x in pair])).tolist()
        row[name] = total / count if count else 0.0
    lengths = rollouts.completion_lengths.float()
    row["completions/max_length"] = float(global_max(module, lengths.max()))
    row["completions/min_length"] = -float(global_max(module, (-lengths).max()))
    module.num_tokens += int(global_sum(module, rollouts.attended.sum()))
    optimizers = module.optimizers_by_name()
    total = max(sum(module.seconds.values()), 1e-9)
    row |= {name: float(value) for name, value in learnt.items()}
    row |= {f"timing/{name}": value for name, value in module.seconds.items()}
    row |= {
        "policy_step": module.policy_step,
        "num_tokens": module.num_tokens,
        "learning_rate": optimizers["policy"].param_groups[0]["lr"],
        "step/gate": module.credit.gate,
        "warmup": float(module.policy_step <= module.warmup_updates),
        "timing/update": total,
        "timing/estimator_frac": (module.seconds["score"] + module.seconds["estimator"]) / total,
    }
    if module.estimator is not None:
        calls = torch.tensor(float(module.estimator.estimator.calls), device=module.device)
        if calls := float(global_sum(module, calls)):
            row["estimator/calls"] = calls
    if "estimator" in optimizers:
        row["estimator/learning_rate"] = optimizers["estimator"].param_groups[0]["lr"]
    return row


def log_row(module: "SSGRPO", row: dict[str, float]) -> None:
    """Send a row to the loggers as it is, and to the bar, checkpoints and early stopping.

    Lightning's own way repeats the last value of a metric that an update did not measure.
    """
    every: int = module.trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    if module.policy_step % every == 0:
        for logger in module.loggers:
            logger.log_metrics(row, step=module.policy_step)
    for name, value in row.items():
        module.log(name, float(value), prog_bar=name in ON_THE_BAR, logger=False, batch_size=1)


def prediction_rows(
    module: "SSGRPO", rollouts: Rollouts, scores: StepScores
) -> list[dict[str, Any]]:
    """Rows of `to_rows` with every step's text, span of completion tokens, value and credit."""
    assert module.policy.policy is not None
    rows, ends = to_rows(rollouts), scores.lengths.cumsum(1)
    columns = {
        "value": scores.values,
        "weight": module.credit.weights(scores),
        "advantage": module.credit(scores),
    }
    for i, row in enumerate(rows):
        row["advantage"] = float(scores.advantages[i])
        row["steps"] = [
            {
                "text": text,
                "start": int(ends[i, t] - scores.lengths[i, t]),
                "end": int(ends[i, t]),
                **{name: float(x[i, t]) for name, x in columns.items()},
            }
            for t, text in enumerate(step_texts(rollouts, module.policy.policy, i))
        ]
    return rows
