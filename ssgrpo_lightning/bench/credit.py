"""Does step credit point at the step that mattered? Every scorer and rule on groups held out.

All rollouts are sampled from a trained policy; the truth of a step is the task's, its exact
advantage comes from re-rollouts of every prefix.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssgrpo_lightning import tasks
from ssgrpo_lightning.baselines import ExactSteps, GroupStatistics, SharedState
from ssgrpo_lightning.bench import audit
from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.credit import (
    Broadcast,
    CreditRule,
    Hindsight,
    PublishedProduct,
    SignAware,
    ValueGain,
    outcome_scores,
)
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.estimators import CausalSteps, Estimator, GroupConfidence, PublishedEncoder
from ssgrpo_lightning.functional import mixed_groups
from ssgrpo_lightning.metrics import last_value, ranking_accuracy
from ssgrpo_lightning.objectives import NoisyAnd, Objective, PublishedMSE
from ssgrpo_lightning.policy import TINY_POLICY, Policy, Pretrained
from ssgrpo_lightning.records import Problem, Rollouts, StepScores
from ssgrpo_lightning.report import charts
from ssgrpo_lightning.rollouts import Judge, collect, whole_groups
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.verifiers import FinalNumber

JUDGE, GROUP, DEFAULT = Judge(FinalNumber("#"), ByLine()), 8, "SS-GRPO (quickstart)"
RESAMPLES = 200


@dataclass(frozen=True)
class System:
    """One compared system: what scores a step, and what makes credit of it."""

    rule: CreditRule
    estimator: Callable[[], Estimator] | None = None
    objective: Objective = NoisyAnd()
    lr: float = 1e-3


def systems(task: tasks.ChainArithmetic) -> dict[str, System]:
    """All that are compared, each with its weighting fully open."""
    return {
        "plain GRPO": System(Broadcast()),
        "exact steps, hindsight": System(Hindsight(), lambda: ExactSteps(task)),
        "published": System(PublishedProduct(), PublishedEncoder, PublishedMSE()),
        "published, sign-aware": System(SignAware(), PublishedEncoder, PublishedMSE()),
        "group statistics": System(SignAware(), GroupStatistics, PublishedMSE()),
        "shared state": System(ValueGain(), SharedState, PublishedMSE()),
        DEFAULT: System(ValueGain(), CausalSteps),
        "group confidence": System(Hindsight(), GroupConfidence, lr=1e-2),
    }


@dataclass(frozen=True)
class Setting:
    """Held-out groups with everything that is known about them."""

    policy: Policy
    train: Rollouts
    test: Rollouts
    truth: Tensor
    relevant: Tensor
    exact: Tensor


def prepare(task: tasks.ChainArithmetic, policy: Policy, train: int, test: int, n: int) -> Setting:
    """Sample groups to learn from and groups to measure on, and find out their truth."""
    problems = task.problems("train")
    sampling = Sampling(96)

    def groups(part: list[Problem]) -> Rollouts:
        return collect(policy, TransformersEngine(), JUDGE, part, GROUP, sampling, 0, 0)

    held_out = groups(problems[train : train + test])
    return Setting(
        policy,
        groups(problems[:train]),
        held_out,
        audit.step_labels(held_out, policy, task.step_truth),
        audit.step_labels(held_out, policy, task.relevant),
        audit.exact_gains(policy, held_out, JUDGE, sampling, n),
    )


def fit(system: System, rollouts: Rollouts) -> EstimatorModule | None:
    """The system's estimator after one pass over the groups, 32 of them a step."""
    if system.estimator is None:
        return None
    torch.manual_seed(0)
    module = EstimatorModule(torch.optim.AdamW, system.estimator(), system.objective)
    if module.learns:
        optimizer = torch.optim.AdamW(module.parameters(), lr=system.lr, weight_decay=0.01)
        for rows in whole_groups(rollouts, 32):
            part = rollouts.select(rows)
            learnable = module.learnable(part).sum().float()
            loss, _ = module.loss(module.scored(part), learnable.clamp(min=1))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return module


def measure(setting: Setting, scores: StepScores, credit: Tensor) -> dict[str, Any]:
    """Figures of one system on the failures of mixed groups."""
    test, mask = setting.test, scores.mask
    failed = mixed_groups(test.rewards, test.group) & (test.rewards == 0)
    seen = mask & failed[:, None]
    first = audit.first_error(setting.truth, mask)
    wrong = failed & (first >= 0)
    tokens = audit.tokens_per_step(test)
    blame = torch.where(mask, (-credit).clamp(min=0), 0.0)
    # Plain credit blames all alike: a random step stands for its choice.
    jitter = torch.rand(blame.shape, generator=torch.Generator().manual_seed(0)) * 1e-6
    hit = (torch.where(mask, blame + jitter, -1.0).argmax(1) == first).float()
    sound = mask & (torch.arange(mask.shape[1]) < first[:, None])
    mass = (blame * tokens).sum(1).clamp(min=1e-9)
    idle = seen & ~setting.relevant
    even = (torch.where(idle, tokens, 0.0).sum() / torch.where(seen, tokens, 0.0).sum()).item()
    spread = torch.where(idle, blame * tokens, 0.0).sum() / torch.where(
        seen, blame * tokens, 0.0
    ).sum().clamp(min=1e-9)
    right, pairs = ranking_accuracy(last_value(scores), test.rewards, test.group)

    def figures(weight: Tensor) -> tuple[float, float]:
        at_step = (weight[:, None] * tokens)[seen]
        return (
            float((hit * weight)[wrong].sum() / weight[wrong].sum().clamp(min=1e-9)),
            audit.correlation(credit[seen], setting.exact[seen], at_step),
        )

    ones = torch.ones(len(test))
    top1, corr = figures(ones)
    draws = torch.tensor([figures(w) for w in _resampled(test.group)])
    low, high = draws.nanquantile(0.025, 0).tolist(), draws.nanquantile(0.975, 0).tolist()
    return {
        "step_auc": audit.auc(scores.scores[seen], setting.truth[seen]),
        "first_error_top1": top1,
        "first_error_top1_interval": [low[0], high[0]],
        "corr_exact_failed": corr,
        "corr_exact_failed_interval": [low[1], high[1]],
        "false_blame": float(((blame * tokens * sound).sum(1) / mass)[wrong].mean()),
        "idle_credit_ratio": float(spread) / even if even else float("nan"),
        "outcome_auc": float(right / pairs),
    }


def _resampled(group: Tensor) -> list[Tensor]:
    """Weights of the rollouts in bootstrap resamples of their groups."""
    generator, count = torch.Generator().manual_seed(0), int(group.max()) + 1
    draws = torch.randint(count, (RESAMPLES, count), generator=generator)
    return [draw.bincount(minlength=count).float()[group] for draw in draws]


def compare(setting: Setting, task: tasks.ChainArithmetic) -> dict[str, dict[str, Any]]:
    """Every system's figures, by name."""
    test, found, credits = setting.test, {}, {}
    outcomes = outcome_scores(test)
    for name, system in systems(task).items():
        module = fit(system, setting.train)
        start = time.perf_counter()
        scores = outcomes if module is None else module.score(test, outcomes)
        credit = torch.where(scores.mask, system.rule(scores), 0.0)
        seconds = time.perf_counter() - start
        credits[name] = credit
        found[name] = measure(setting, scores, credit)
        found[name]["ms_per_rollout"] = 1000 * seconds / len(test)
    mixed = mixed_groups(test.rewards, test.group).nonzero()[:, 0]
    snr = audit.gradient_snr(
        setting.policy,
        test.select(mixed),
        setting.exact[mixed],
        {name: credit[mixed] for name, credit in credits.items()},
    )
    for name in found:
        ratio = torch.tensor(snr[name] / max(snr["plain GRPO"], 1e-20))
        found[name]["snr_gain_db"] = float(10 * ratio.clamp(min=1e-9).log10())
    return found


COLUMNS = {
    "step_auc": "step AUC",
    "first_error_top1": "first error",
    "corr_exact_failed": "correlation",
    "snr_gain_db": "SNR, dB",
    "false_blame": "false blame",
    "idle_credit_ratio": "idle credit",
    "outcome_auc": "outcome AUC",
    "ms_per_rollout": "ms",
}


def page(found: dict[str, dict[str, Any]], lead: str) -> str:
    """A page that one can read without the text."""

    def bars(key: str, title: str, reference: float | None, better: charts.Better = "high") -> str:
        intervals = {
            name: tuple(row[f"{key}_interval"])
            for name, row in found.items()
            if f"{key}_interval" in row
            and not any(x != x for x in row[f"{key}_interval"])  # NaN: nothing varies
        }
        values = {name: row[key] for name, row in found.items()}
        return charts.bars(title, values, intervals, reference, better=better, highlight=DEFAULT)

    rows = [{"system": n, **{c: row[k] for k, c in COLUMNS.items()}} for n, row in found.items()]
    best: dict[str, charts.Better] = {"step AUC": "high", "first error": "high"}
    best |= {"correlation": "high", "SNR, dB": "high", "false blame": "low"}
    return charts.page(
        "Step credit",
        lead,
        [
            (
                "Does blame follow the exact advantage?",
                "Correlation of credit with the exact advantage of steps, in failures; 1 is exact.",
                bars("corr_exact_failed", "correlation", 0.0),
            ),
            (
                "Does blame fall on the first error?",
                "Share of failures whose most blamed step is the first unsound one.",
                bars("first_error_top1", "share", None),
            ),
            (
                "Is the gradient less noisy?",
                "Signal-to-noise ratio of the policy gradient over that of plain GRPO, in dB.",
                bars("snr_gain_db", "dB", 0.0),
            ),
            (
                "Are sound steps before the error blamed?",
                "Share of a failure's blame on steps before its first error; less is better.",
                bars("false_blame", "share", None, "low"),
            ),
            (
                "All figures",
                "Bold: best of the column, oracle included.",
                charts.table(rows, best),
            ),
        ],
    )


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--task", default="ChainArithmetic", help="chain task with exact truth")
    parser.add_argument("--operations", type=int, default=3, help="length of its chains")
    parser.add_argument("--policy", default=TINY_POLICY, help="policy to sample from")
    parser.add_argument("--page", type=Path, help="HTML page of plots to write")
    options = parser.parse_args()

    task = getattr(tasks, options.task)(operations=options.operations)
    policy = Pretrained(options.policy).load()
    shape = (128, 96, 8) if options.quick else (256, 256, 32)
    setting = prepare(task, policy, *shape)
    found = compare(setting, task)
    print(f"{'':>24}" + "".join(f"{c:>13}" for c in COLUMNS.values()))
    for name, row in found.items():
        print(f"{name:>24}" + "".join(f"{row[key]:13.3f}" for key in COLUMNS))
    for name, row in found.items():
        low, high = row["corr_exact_failed_interval"]
        print(f"{name:>24} corr_exact_failed 95 % interval {low:.3f} to {high:.3f}")
    share = float(mixed_groups(setting.test.rewards, setting.test.group).float().mean())
    if options.page is not None:
        options.page.write_text(
            page(
                found,
                f"{options.task} with {options.operations} operations, {shape[1]} groups of "
                f"{GROUP} not trained on, {share:.0%} of them mixed.",
            )
        )
    result = {
        "default": found[DEFAULT],
        "systems": found,
        "task": options.task,
        "operations": options.operations,
        "policy": options.policy,
        "groups": shape[1],
        "re-rollouts": shape[2],
        "corr_exact_failed": found[DEFAULT]["corr_exact_failed"],
    }
    finish(result, "corr_exact_failed", options.out)


if __name__ == "__main__":
    main()
