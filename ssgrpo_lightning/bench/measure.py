"""Held-out groups with their truth, and what is measured of one system's credit on them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ssgrpo_lightning.bench import audit, figures
from ssgrpo_lightning.bench.credit_page import PLAIN
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.functional import mixed_groups, others_mean
from ssgrpo_lightning.metrics import first_error, last_value
from ssgrpo_lightning.policy import Policy
from ssgrpo_lightning.records import Problem, Rollouts, StepScores
from ssgrpo_lightning.rollouts import Judge, collect, step_labels
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.verifiers import FinalNumber

JUDGE, SAMPLING, GROUP, DRAWS = Judge(FinalNumber("#"), ByLine()), Sampling(96), 8, 200


@dataclass(frozen=True)
class Setting:
    """Held-out groups with everything that is known about them."""

    policy: Policy
    train: Rollouts
    train_truth: Tensor
    test: Rollouts
    truth: Tensor
    relevant: Tensor
    exact: Tensor


def prepare(task: ChainArithmetic, policy: Policy, train: int, test: int, n: int) -> Setting:
    """Sample groups to learn from and groups to measure on, and find out their truth.

    Args:
        task: Where problems and the truth of steps come from.
        policy: Samples the rollouts.
        train: Groups to learn from.
        test: Groups to measure on.
        n: Re-rollouts of every prefix; with 0 the exact advantages are left at 0.
    """
    problems = task.problems("train")

    def groups(part: list[Problem]) -> Rollouts:
        return collect(policy, TransformersEngine(), JUDGE, part, GROUP, SAMPLING, 0, 0)

    learnt, held_out = groups(problems[:train]), groups(problems[train : train + test])
    truth = step_labels(held_out, policy, task.step_truth)
    exact = (
        audit.exact_gains(policy, held_out, JUDGE, SAMPLING, n) if n else torch.zeros(truth.shape)
    )
    return Setting(
        policy,
        learnt,
        step_labels(learnt, policy, task.step_truth),
        held_out,
        truth,
        step_labels(held_out, policy, task.relevant),
        exact,
    )


def measure(setting: Setting, scores: StepScores, credit: Tensor) -> dict[str, Tensor]:
    """Figures of one system: first as they are, then of each bootstrap draw of the groups.

    Those of credit are of the failures of mixed groups.
    """
    test, mask, exact = setting.test, scores.mask, setting.exact
    groups = figures.bootstrap(int(test.group.max()) + 1, DRAWS)
    weight = groups[:, test.group]
    mixed = mixed_groups(test.rewards, test.group)
    failed = mixed & (test.rewards == 0)
    seen, known = mask & failed[:, None], mask & mixed[:, None]
    first = first_error(setting.truth, mask)
    wrong = failed & (first >= 0)
    tokens = audit.tokens_per_step(test)
    share = audit.blame_shares(credit, tokens)
    step = torch.arange(mask.shape[1])
    hit = audit.blamed_most(share, mask).gather(1, first.clamp(min=0)[:, None])[:, 0]
    before = torch.where(step < first[:, None], share * tokens, 0.0).sum(1)
    tried = mask & wrong[:, None]
    right, pairs = figures.pairs_ranked(last_value(scores), test.rewards, test.group)

    def at(steps: Tensor) -> Tensor:
        return weight[:, steps.nonzero()[:, 0]]

    return {
        "step_auc": figures.auc(scores.scores[seen], setting.truth[seen], at(seen)),
        "calibration_error": figures.calibration_error(
            scores.scores[known], setting.truth[known], at(known)
        ),
        "first_error_top1": figures.mean(hit[wrong], weight[:, wrong]),
        "first_error_auprc": figures.average_precision(
            share[tried], (step == first[:, None])[tried], at(tried)
        ),
        "corr_exact_failed": figures.correlation(
            credit[seen], exact[seen], at(seen) * tokens[seen]
        ),
        "false_blame": figures.mean(before[wrong], weight[:, wrong]),
        "idle_credit_ratio": figures.credit_ratio(
            (credit.abs() * tokens)[seen], tokens[seen], ~setting.relevant[seen], at(seen)
        ),
        "outcome_auc": groups @ right / (groups @ pairs),
    }


def shortcuts(setting: Setting, last_step: Tensor) -> dict[str, Tensor]:
    """Outcome AUC within groups of what sees but one thing of a rollout, drawn as in `measure`.

    Length and position are looked up: the mean of what training rollouts of that length, or of that
    many steps, got above their groups. `last_step` is the default's score of the last step. What
    sees the prompt alone says the same of a whole group.
    """
    train, test = setting.train, setting.test
    above = train.rewards - others_mean(train.rewards, train.group)
    groups = figures.bootstrap(int(test.group.max()) + 1, DRAWS)

    def looked_up(of: Callable[[Rollouts], Tensor]) -> Tensor:
        return figures.learnt_by_key(of(train), above, of(test))

    says = {
        "prompt only": torch.zeros(len(test)),
        "number of steps only": looked_up(lambda rollouts: rollouts.step.amax(1) + 1),
        "length only": looked_up(lambda rollouts: rollouts.completion_lengths),
        "last step only": last_step,
    }
    found = {}
    for name, z in says.items():
        right, pairs = figures.pairs_ranked(z, test.rewards, test.group)
        found[name] = groups @ right / (groups @ pairs)
    return found


def snr_gains(setting: Setting, names: list[str], credits: list[Tensor]) -> list[Tensor]:
    """Gain in gradient signal-to-noise ratio over plain GRPO in dB, drawn over blocks of groups."""
    mixed = mixed_groups(setting.test.rewards, setting.test.group).nonzero()[:, 0]
    blocks = min(20, len(setting.test.group[mixed].unique()))
    found = audit.gradients(
        setting.policy,
        setting.test.select(mixed),
        setting.exact[mixed],
        [credit[mixed] for credit in credits],
        blocks,
    )
    halves = (blocks + 1) // 2, blocks // 2
    weight = torch.zeros(DRAWS + 1, blocks)
    for half, count in enumerate(halves):
        weight[:, half::2] = figures.bootstrap(count, DRAWS, seed=half)
    ratio = audit.snr(found, weight)[:, 1:].clamp(min=1e-20)
    plain = ratio[:, names.index(PLAIN)]
    return [10 * (ratio[:, i] / plain).log10() for i in range(len(names))]


def reliability(setting: Setting, scores: StepScores) -> list[tuple[float, float, int]]:
    """Mean score, share of sound steps and count of each bin of scores, in mixed groups."""
    test = setting.test
    known = scores.mask & mixed_groups(test.rewards, test.group)[:, None]
    said, true, often = figures.reliability(
        scores.scores[known], setting.truth[known], torch.ones(int(known.sum()))
    )
    bins = zip(said.tolist(), true.tolist(), often.long().tolist())
    return [(said, true, often) for said, true, often in bins if often]


def describe(setting: Setting, task: ChainArithmetic) -> str:
    """What the held-out groups are like."""
    test = setting.test
    mixed = float(mixed_groups(test.rewards, test.group).float().mean())
    text = f"{len(test) // GROUP} groups, {mixed:.0%} of them mixed, mean reward "
    text += f"{float(test.rewards.mean()):.2f}."
    won = test.rewards > 0
    for line in task.idle:
        holds = torch.tensor([line in text.split("\n") for text in test.texts]).float()
        text += f" P({line} | right) {float(holds[won].mean()):.2f},"
        text += f" P({line} | wrong) {float(holds[~won].mean()):.2f}."
    return text
