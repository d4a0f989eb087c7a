"""Does step credit point at the step that mattered? Every scorer and rule on groups held out.

All rollouts are sampled from a trained policy; the truth of a step is the task's, its exact
advantage comes from re-rollouts of every prefix.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssgrpo_lightning.baselines import ExactSteps, GroupStatistics
from ssgrpo_lightning.bench import figures
from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.bench.credit_page import CALIBRATED, COLUMNS, DEFAULT, PLAIN, page
from ssgrpo_lightning.bench.measure import (
    DRAWS,
    GROUP,
    JUDGE,
    SAMPLING,
    Setting,
    describe,
    measure,
    prepare,
    reliability,
    shortcuts,
    snr_gains,
)
from ssgrpo_lightning.controls import ShuffledWeights
from ssgrpo_lightning.credit import (
    GAE,
    Broadcast,
    CreditRule,
    Hindsight,
    ProcessAdvantage,
    PublishedProduct,
    SignAware,
    StepAdvantage,
    Survival,
    ValueGain,
    outcome_scores,
)
from ssgrpo_lightning.critic import SharedTrunk
from ssgrpo_lightning.engines import TransformersEngine
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.estimators import (
    CausalSteps,
    Estimator,
    GroupConfidence,
    PublishedEncoder,
    SharedState,
)
from ssgrpo_lightning.monte_carlo import MonteCarlo
from ssgrpo_lightning.objectives import (
    LeaveOneOut,
    NoisyAnd,
    Objective,
    PublishedMSE,
    ValueRegression,
)
from ssgrpo_lightning.policy import TINY_POLICY, Pretrained
from ssgrpo_lightning.process_rewards import ProcessRewardModel
from ssgrpo_lightning.records import StepScores
from ssgrpo_lightning.rollouts import Resampler, whole_groups
from ssgrpo_lightning.tasks import ChainArithmetic, DecoyChain, FillerChain
from ssgrpo_lightning.tiny_policy.build import RECIPES, load_or_build
from ssgrpo_lightning.tiny_prm import classifier, train

SHIPPED = "ChainArithmetic"
# Groups measured and re-rollouts of every prefix; fewer (128, 8) of the variants, so that all of
# them take less than half an hour.
EFFORT = {SHIPPED: (256, 32)}


@dataclass(frozen=True)
class System:
    """One compared system: what scores a step, and what makes credit of it."""

    rule: CreditRule
    estimator: Callable[[Setting], Estimator] | None = None
    objective: Objective = NoisyAnd()
    lr: float = 1e-3
    epochs: int = 1
    """Passes over the training groups."""


def systems(task: ChainArithmetic) -> dict[str, System]:
    """All that are compared, each with its weighting fully open."""

    def exact(setting: Setting) -> Estimator:
        return ExactSteps(task)

    def shared(setting: Setting) -> Estimator:
        return SharedState()

    return {
        PLAIN: System(Broadcast()),
        "exact steps, survival": System(Survival(), exact),
        "exact steps, hindsight": System(Hindsight(), exact),
        "exact steps, process reward": System(ProcessAdvantage(), exact, PublishedMSE()),
        "process reward model": System(ProcessAdvantage(), process_reward_model, PublishedMSE()),
        "Monte Carlo": System(StepAdvantage(), lambda _: MonteCarlo(4), PublishedMSE()),
        "critic": System(GAE(), lambda _: SharedTrunk(), ValueRegression(clip=0.2), epochs=4),
        "published": System(PublishedProduct(), lambda _: PublishedEncoder(), PublishedMSE()),
        "published, sign-aware": System(SignAware(), lambda _: PublishedEncoder(), PublishedMSE()),
        "group statistics": System(SignAware(), lambda _: GroupStatistics(), LeaveOneOut()),
        DEFAULT: System(ValueGain(), shared, LeaveOneOut(), lr=1e-2),
        "shuffled": System(ShuffledWeights(), shared, LeaveOneOut(), lr=1e-2),
        "causal steps": System(ValueGain(), lambda _: CausalSteps()),
        "group confidence": System(Hindsight(), lambda _: GroupConfidence(), lr=1e-2),
    }


def process_reward_model(setting: Setting) -> ProcessRewardModel:
    """A token classifier that starts from the policy, trained on exact labels of the groups."""
    with tempfile.TemporaryDirectory() as folder:
        setting.policy.save(Path(folder, "policy"))
        prm = classifier(Pretrained(str(Path(folder, "policy"))), Path(folder, "prm"))
        train(prm, [(setting.train, setting.train_truth)], epochs=4)
    return prm


def fit(system: System, setting: Setting, seed: int) -> EstimatorModule | None:
    """The system's estimator once it has learnt from the training groups, 32 of them a step."""
    if system.estimator is None:
        return None
    torch.manual_seed(seed)
    policy, rollouts = setting.policy, setting.train
    module = EstimatorModule(torch.optim.AdamW, system.estimator(setting), system.objective)
    engine = TransformersEngine()
    module.estimator.bind(policy, Resampler(policy, engine, JUDGE, SAMPLING, seed=2))
    if module.learns:
        optimizer = torch.optim.AdamW(module.parameters(), lr=system.lr, weight_decay=0.01)
        for rows in list(whole_groups(rollouts, 32)) * system.epochs:
            loss, _ = module.fresh_loss(rollouts.select(rows))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    return module


@dataclass(frozen=True)
class Run:
    """What one system, with one seed of its estimator, says about the held-out groups."""

    scores: StepScores
    credit: Tensor
    ms_per_rollout: float
    learns: bool


def run(system: System, setting: Setting, seed: int) -> Run:
    """Fit on the training groups, then score the held-out ones and make credit."""
    module = fit(system, setting, seed)
    outcomes = outcome_scores(setting.test)
    start = time.perf_counter()
    scores = outcomes if module is None else module.score(setting.test, outcomes)
    credit = torch.where(scores.mask, system.rule(scores), 0.0)
    ms = 1000 * (time.perf_counter() - start) / len(setting.test)
    return Run(scores, credit, ms, module is not None and module.learns)


def summary(draws: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Mean over seeds and the middle 95 % of the bootstrap draws of every figure; None for none."""
    found: dict[str, Any] = {}
    for name, seeds in draws.items():
        mean, ends = torch.stack(seeds).mean(0), None
        if bool(mean[0].isfinite()):
            ends = figures.interval(mean[1:])
        found[name] = float(mean[0]) if ends else None
        found[f"{name}_interval"] = ends
        found[f"{name}_seeds"] = [float(seed[0]) for seed in seeds] if ends else None
    return found


def compare(setting: Setting, task: ChainArithmetic, seeds: int = 1) -> dict[str, Any]:
    """Every system's figures by name, the shortcuts', and reliability of the default's scores."""
    runs: dict[str, list[Run]] = {}
    for name, system in systems(task).items():
        runs[name] = [run(system, setting, 0)]
        if runs[name][0].learns:
            runs[name] += [run(system, setting, seed) for seed in range(1, seeds)]
    every = [(name, one) for name, of in runs.items() for one in of]
    gains = snr_gains(setting, [name for name, _ in every], [one.credit for _, one in every])
    draws: dict[str, dict[str, list[Tensor]]] = {name: {} for name in runs}
    for (name, one), gain in zip(every, gains, strict=True):
        measured = {**measure(setting, one.scores, one.credit), "snr_gain_db": gain}
        for key, value in measured.items():
            draws[name].setdefault(key, []).append(value)
    found = {name: summary(of) for name, of in draws.items()}
    for name, of in runs.items():
        found[name]["ms_per_rollout"] = sum(one.ms_per_rollout for one in of) / len(of)
        found[name]["calls_per_rollout"] = of[0].scores.calls / len(setting.test)
    last = runs[DEFAULT][0].scores
    only = last.scores.gather(1, (last.mask.sum(1) - 1).clamp(min=0)[:, None])[:, 0]
    return {
        "systems": found,
        "shortcuts": {k: summary({"auc": [v]}) for k, v in shortcuts(setting, only).items()},
        "reliability": {name: reliability(setting, runs[name][0].scores) for name in CALIBRATED},
    }


def idle_ratio(name: str, policies: Path) -> float | None:
    """Credit of the default on idle lines, from a policy that is there already; None without."""
    folder = policies / name
    if not (folder / "model.safetensors").is_file():
        print(f"no credit on the idle lines of {name}: {folder} holds no policy; build it with")
        print(f"  python -m ssgrpo_lightning.tiny_policy --probes {policies}")
        return None
    task = RECIPES[name].task
    setting = prepare(task, load_or_build(name, folder), 128, 96, 0)
    one = run(systems(task)[DEFAULT], setting, 0)
    print(f"{name}: {describe(setting, task)}")
    return float(measure(setting, one.scores, one.credit)["idle_credit_ratio"][0])


def print_table(found: dict[str, Any]) -> None:
    """Every figure with its interval below it."""
    print(f"{'':>24}" + "".join(f"{c:>15}" for c in COLUMNS.values()))
    for name, row in found["systems"].items():
        cells, ends = "", ""
        for key in COLUMNS:
            value, pair = row[key], row.get(f"{key}_interval")
            cells += f"{'-':>15}" if value is None else f"{value:15.3f}"
            ends += f"{f'{pair[0]:.2f} to {pair[1]:.2f}' if pair else '':>15}"
        print(f"{name:>24}{cells}\n{'':>24}{ends}")
    for name, row in found["shortcuts"].items():
        low, high = row["auc_interval"]
        print(f"{f'outcome AUC, {name}':>34} {row['auc']:.3f} ({low:.2f} to {high:.2f})")


@dataclass(frozen=True)
class Study:
    """All that is asked of one task."""

    task: str
    operations: int
    policy: str | None
    """What to sample from; None: the task's own, built where it is missing."""
    policies: Path
    effort: tuple[int, int, int]
    """Groups trained on, groups measured, re-rollouts of every prefix."""
    seeds: int

    def __call__(self) -> dict[str, Any]:
        """Its figures, and a line about its rollouts."""
        task = replace(RECIPES[self.task].task, operations=self.operations)
        if self.policy is None:
            policy = load_or_build(self.task, self.policies / self.task)
        else:
            policy = Pretrained(self.policy).load()
        setting = prepare(task, policy, *self.effort)
        return {"about": describe(setting, task), **compare(setting, task, self.seeds)}


def carried_out(studies: Sequence[Study], jobs: int) -> Iterator[dict[str, Any]]:
    """Results in the order of the studies, several at a time, of one thread each."""
    if len(studies) == 1 or jobs == 1:
        yield from (study() for study in studies)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(Study.__call__, studies)


def main() -> None:
    """Command line."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--task", choices=RECIPES, help="only this task; default: all, quick: one")
    parser.add_argument("--operations", type=int, default=3, help="length of its chains")
    parser.add_argument("--policy", help="policy to sample from, in place of the task's own")
    parser.add_argument("--policies", type=Path, default=Path("runs/policies"), help="their folder")
    parser.add_argument("--seeds", type=int, help="seeds of the estimators; default 3, quick 1")
    parser.add_argument("--jobs", type=int, default=2, help="tasks at a time, one thread each")
    parser.add_argument("--page", type=Path, help="HTML page of plots to write")
    options = parser.parse_args()

    train = 128 if options.quick else 256
    seeds = options.seeds or (1 if options.quick else 3)
    names = [options.task] if options.task else [SHIPPED] if options.quick else list(RECIPES)
    found: dict[str, Any] = {}
    repeats: dict[str, int] = {}
    studies = []
    for name in names:
        test, repeats[name] = (96, 8) if options.quick else EFFORT.get(name, (128, 8))
        shipped = TINY_POLICY if name == SHIPPED else None
        studies.append(
            Study(
                name,
                options.operations,
                options.policy or shipped,
                options.policies,
                (train, test, repeats[name]),
                seeds,
            )
        )
    for name, result in zip(names, carried_out(studies, options.jobs)):
        found[name] = result
        print(f"\n{name}, {options.operations} operations. {found[name]['about']}")
        print_table(found[name])
    default = dict(found[names[0]]["systems"][DEFAULT])
    for probe, key in ((FillerChain, "filler_credit_ratio"), (DecoyChain, "decoy_credit_ratio")):
        name = probe.__name__
        default[key] = (
            found[name]["systems"][DEFAULT]["idle_credit_ratio"]
            if name in found
            else idle_ratio(name, options.policies)
        )
    counts = " or ".join(str(n) for n in sorted(set(repeats.values())))
    lead = f"Groups of {GROUP} rollouts, not trained on; estimators from {train} others, {seeds} "
    lead += f"seed{'s' * (seeds > 1)}; exact advantages from {counts} re-rollouts of a prefix; "
    lead += f"whiskers are 95 % intervals over groups, drawn {DRAWS} times."
    if options.page is not None:
        options.page.write_text(page(found, lead))
    result = {
        "default": default,
        "tasks": found,
        "operations": options.operations,
        "re-rollouts": repeats,
        "seeds": seeds,
        "corr_exact_failed": default["corr_exact_failed"],
    }
    finish(result, "corr_exact_failed", options.out)


if __name__ == "__main__":
    main()
