"""What an update and a prediction leave behind: one row for the loggers, rows of JSON."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from ssgrpo_lightning.metrics import Sums, credit_sums, rollout_sums
from ssgrpo_lightning.parallel import global_max, global_sum, objects
from ssgrpo_lightning.records import Rollouts, StepScores
from ssgrpo_lightning.rollouts import step_texts
from ssgrpo_lightning.stored import to_rows

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
    if module.estimator is not None:
        calls, count = float(scores.calls), float(len(rollouts))
        sums["estimator/calls_per_rollout"] = torch.tensor(calls), torch.tensor(count)
    row = _means(module, sums)
    lengths = rollouts.completion_lengths.float()
    longest, shortest = global_max(module, torch.stack([lengths.max(), -lengths.min()])).tolist()
    row["completions/max_length"], row["completions/min_length"] = longest, -shortest
    module.num_tokens += int(global_sum(module, rollouts.attended.sum()))
    optimizers = module.optimizers_by_name()
    total = max(sum(module.seconds.values()), 1e-9)
    row |= {name: float(value) for name, value in learnt.items()}
    row |= {name: float(value) for name, value in module.datamodule.known.metrics().items()}
    row |= {f"timing/{name}": value for name, value in module.seconds.items()}
    row |= {
        "policy_step": module.policy_step,
        "num_tokens": module.num_tokens,
        "learning_rate": optimizers["policy"].param_groups[0]["lr"],
        "sampling/temperature": rollouts.temperature,
        "step/gate": module.rule.gate,
        "step/harm": float(bool(module.watch.harm)),
        "warmup": float(module.policy_step <= module.warmup_updates),
        "timing/update": total,
        "timing/estimator_frac": (module.seconds["score"] + module.seconds["estimator"]) / total,
    }
    if "estimator" in optimizers:
        row["estimator/learning_rate"] = optimizers["estimator"].param_groups[0]["lr"]
    return row


def _means(module: "SSGRPO", sums: Sums) -> dict[str, float]:
    """Quotient of the two sums of each name, over all ranks; a name need not be known to all."""
    table = [torch.stack([x.to(module.device).double() for x in pair]) for pair in sums.values()]
    totals: dict[str, tuple[float, float]] = {}
    for own in objects(module, dict(zip(sums, torch.stack(table).tolist()))):
        for name, (total, count) in own.items():
            known = totals.get(name, (0.0, 0.0))
            totals[name] = known[0] + total, known[1] + count
    return {name: total / count if count else 0.0 for name, (total, count) in totals.items()}


def log_row(module: "SSGRPO", row: dict[str, float]) -> None:
    """Send a row to the loggers as it is, and to the bar, checkpoints and early stopping.

    Lightning's own way repeats the last value of a metric that an update did not measure. People
    are told when the gate opened or closed.
    """
    _tell_gate(module, row["step/gate"] > 0)
    every: int = module.trainer.log_every_n_steps  # pyright: ignore[reportAttributeAccessIssue]
    if module.policy_step % every == 0:
        for logger in module.loggers:
            logger.log_metrics(row, step=module.policy_step)
    # `module.log` of each of them would take 4 % of a small model's update.
    module.trainer.callback_metrics.update({n: torch.tensor(float(v)) for n, v in row.items()})
    for name in ON_THE_BAR:
        module.log(name, float(row[name]), prog_bar=True, logger=False, batch_size=1)


def _tell_gate(module: "SSGRPO", is_open: bool) -> None:
    """One line where the gate is not where it was; a rule without a gate has nothing to tell."""
    if module.estimator is None or not module.credit.gate or is_open == module.was_open:
        return
    module.was_open = is_open
    if line := module.gate.line(module.estimator.mean_skill, module.watch):
        rank_zero_info(f"update {module.policy_step}: {line}")


def prediction_rows(
    module: "SSGRPO", rollouts: Rollouts, scores: StepScores
) -> list[dict[str, Any]]:
    """Rows of `to_rows` with every step's text, span of completion tokens, value and credit."""
    assert module.policy.policy is not None
    rows, ends = to_rows(rollouts), scores.lengths.cumsum(1)
    columns = {
        "value": scores.values,
        "weight": module.credit.weights(scores),
        "advantage": module.rule(scores),
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
