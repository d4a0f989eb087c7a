"""Does an arm learn faster? Systems trained on the same problems, seeds and rollouts.

Per setting: a search of each arm's learning rate, by final accuracy, on seeds of its own; then
fresh seeds at the best rate; then noisy verdicts. Finished runs are kept in --out and not repeated.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ssgrpo_lightning.bench.command import arguments, finish
from ssgrpo_lightning.bench.runs import Arm, Results, Run, Setting, execute, start_worker
from ssgrpo_lightning.bench.settings import ARMS, QUICK, SETTINGS
from ssgrpo_lightning.bench.summary import Outcome, best_rate, summarise
from ssgrpo_lightning.bench.summary_page import page
from ssgrpo_lightning.tiny_policy.build import RECIPES, load_or_build

SEARCH_SEEDS, NOISE_SEEDS = (100, 101), 2


class Campaign:
    """Carries out runs in worker processes, as far as the budget goes.

    Args:
        results: Where results are kept; what it holds is not done again.
        jobs: Runs at a time.
        deadline: Clock time in seconds after which no run should be in progress; None: no limit.
        total: Runs that are planned, for the bar.
    """

    def __init__(self, results: Results, jobs: int, deadline: float | None, total: int) -> None:
        self.results, self.jobs, self.deadline = results, jobs, deadline
        self.done: dict[Run, dict[str, Any]] = {}
        self.missing: list[str] = []
        self.bar = tqdm(total=total, desc="runs", unit="run", smoothing=0)
        self.pool = ProcessPoolExecutor(
            jobs,
            multiprocessing.get_context("spawn"),
            start_worker,
            (results.folder / "worker.log",),
        )

    def carry_out(self, runs: Sequence[Run]) -> None:
        """Do the runs that have no result, in order; those that the budget forbids are missing."""
        waiting = [run for run in runs if not self._known(run)]
        active: dict[Future[dict[str, Any]], Run] = {}
        while waiting or active:
            while waiting and len(active) < self.jobs and self._affordable(waiting[0]):
                run = waiting.pop(0)
                logs = self.results.folder / "logs" / run.name
                active[self.pool.submit(execute, run, self.results.configs, logs)] = run
            if not active:
                self.missing += [f"{run.name}: over the budget" for run in waiting]
                return
            for future in wait(active, return_when=FIRST_COMPLETED).done:
                self._take(active.pop(future), future)

    def _take(self, run: Run, future: "Future[dict[str, Any]]") -> None:
        error = future.exception()
        if isinstance(error, BrokenProcessPool):
            raise error  # a worker was killed: the command ends, and goes on when started again
        if error is None:
            self.done[run] = future.result()
            self.results.save(run, self.done[run])
        else:
            self.missing.append(f"{run.name}: {error!r}")
            self.bar.write(self.missing[-1])
        self.bar.update()

    def _known(self, run: Run) -> bool:
        try:
            found = self.results.load(run)
        except ValueError as damaged:
            self.bar.write(str(damaged))
            return False
        if found is not None:
            self.done[run] = found
            # Not part of the speed that the remaining time is told from.
            self.bar.initial += 1
            self.bar.update()
        return found is not None

    def _affordable(self, run: Run) -> bool:
        """Whether the run would end in time, going by the likest runs done so far."""
        if self.deadline is None:
            return True
        alike: list[Callable[[Run], bool]] = [
            lambda other: (other.setting, other.arm) == (run.setting, run.arm),
            lambda other: other.setting == run.setting,
            lambda other: True,
        ]
        found = ([r["wall_seconds"] for o, r in self.done.items() if same(o)] for same in alike)
        known = next((seconds for seconds in found if seconds), [0.0])
        return time.monotonic() + statistics.median(known) <= self.deadline


def search_runs(setting: Setting, arms: Sequence[Arm]) -> list[Run]:
    """Runs of the rate search; the seed changes slowest, so that half of it is of use."""
    if setting.rates_from or len(setting.rates) == 1:
        return []
    return [
        Run(setting, arm, rate, seed)
        for seed in SEARCH_SEEDS
        for rate in setting.rates
        for arm in arms
    ]


def final_runs(setting: Setting, arms: Sequence[Arm], rates: dict[str, float]) -> list[Run]:
    """Runs at the best rates; arms of one seed are neighbours, so that they run side by side."""
    return [
        Run(setting, arm, rates[arm.name], seed)
        for seed in range(max((arm.seeds for arm in arms), default=0))
        for arm in arms
        if seed < arm.seeds and arm.name in rates
    ]


def noisy_runs(setting: Setting, arms: Sequence[Arm], rates: dict[str, float]) -> list[Run]:
    """Runs under noisy verdicts."""
    return [
        Run(setting, arm, rates[arm.name], seed, flip)
        for seed in range(NOISE_SEEDS)
        for flip in setting.flips
        for arm in arms
        if arm.noisy and seed < arm.seeds and arm.name in rates
    ]


def taking_part(setting: Setting, arms: Sequence[Arm]) -> list[Arm]:
    """The arms that are run in a setting."""
    return [arm for arm in arms if not setting.arms or arm.name in setting.arms]


def planned(settings: Sequence[Setting], arms: Sequence[Arm]) -> int:
    """Runs of the whole comparison."""
    anything = {arm.name: 1.0 for arm in arms}
    return sum(
        len(search_runs(setting, there))
        + len(final_runs(setting, there, anything))
        + len(noisy_runs(setting, there, anything))
        for setting in settings
        for there in [taking_part(setting, arms)]
    )


def compare(settings: Sequence[Setting], every: Sequence[Arm], campaign: Campaign) -> list[Outcome]:
    """Do all runs, a setting after the other."""
    outcomes: dict[str, Outcome] = {}
    for setting in settings:
        outcome = outcomes[setting.name] = Outcome(setting)
        arms = taking_part(setting, every)
        search = search_runs(setting, arms)
        campaign.carry_out(search)
        for run in search:
            if run in campaign.done:
                by_rate = outcome.search.setdefault(run.arm.name, {})
                by_rate.setdefault(run.rate, []).append(campaign.done[run])
        outcome.rates = _rates(outcome, arms, outcomes)
        for arm in arms:
            if arm.name not in outcome.rates:
                campaign.missing.append(f"{setting.name}-{arm.name}: its rate was not found")
        final, noisy = (f(setting, arms, outcome.rates) for f in (final_runs, noisy_runs))
        campaign.carry_out(final)
        campaign.carry_out(noisy)
        for run in (run for run in final + noisy if run in campaign.done):
            table = outcome.noisy.setdefault(run.flip, {}) if run.flip else outcome.final
            table.setdefault(run.arm.name, {})[run.seed] = campaign.done[run]
    return list(outcomes.values())


def _rates(outcome: Outcome, arms: Sequence[Arm], earlier: dict[str, Outcome]) -> dict[str, float]:
    """Best rate of every arm whose search is complete."""
    setting = outcome.setting
    if setting.rates_from:
        return earlier[setting.rates_from].rates
    if len(setting.rates) == 1:
        return {arm.name: setting.rates[0] for arm in arms}
    return {
        name: best_rate(found)
        for name, found in outcome.search.items()
        if sum(map(len, found.values())) == len(SEARCH_SEEDS) * len(setting.rates)
    }


def chosen(options: argparse.Namespace) -> tuple[list[Setting], list[Arm]]:
    """The settings and arms that the options name.

    Raises:
        ValueError: One is unknown, or takes its rates from a setting that comes later or not at
            all.
    """
    settings = {setting.name: setting for setting in (*SETTINGS, QUICK)}
    arms = {arm.name: arm for arm in ARMS}
    default = [QUICK.name] if options.quick else [setting.name for setting in SETTINGS]
    wanted = options.settings or default, options.arms or list(arms)
    for field, names, known in zip(("settings", "arms"), wanted, (settings, arms), strict=True):
        for name in names:
            if name not in known:
                raise ValueError(f"--{field} has {name!r}, must be from {', '.join(known)}")
    for at, name in enumerate(wanted[0]):
        source = settings[name].rates_from
        if source and source not in wanted[0][:at]:
            raise ValueError(
                f"--settings has {name!r}, which takes its rates from {source!r}: name that first"
            )
    found = [settings[name] for name in wanted[0]], [arms[name] for name in wanted[1]]
    return _quick(*found) if options.quick else found


def _quick(settings: list[Setting], arms: list[Arm]) -> tuple[list[Setting], list[Arm]]:
    """One rate and one seed of everything."""
    return (
        [replace(s, rates=s.rates[len(s.rates) // 2 :][:1], rates_from="") for s in settings],
        [replace(arm, seeds=1) for arm in arms],
    )


def main(args: list[str] | None = None) -> None:
    """Command line."""
    parser = arguments(__doc__ or "", "folder of results; compare.json and compare.html go there")
    parser.set_defaults(out=Path("runs/compare"))

    def listed(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--settings", type=listed, help="names from bench/settings.py: a,b")
    parser.add_argument("--arms", type=listed, help="names from bench/settings.py: a,b")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--budget-minutes", type=float, help="start no run that would end later")
    parser.add_argument(
        "--policies", type=Path, default=Path("runs/policies"), help="folder of built policies"
    )
    parser.add_argument("--configs", type=Path, default=Path("configs"), help="folder of configs")
    options = parser.parse_args(args)
    start = time.monotonic()
    results = Results(options.out, options.configs)
    try:
        settings, arms = chosen(options)
        for arm in arms:
            Run(settings[0], arm, 0.0, 0).configs(options.configs)
    except ValueError as error:
        parser.error(str(error))
    for name in {setting.policy for setting in settings} & RECIPES.keys():
        load_or_build(name, options.policies / name)
    settings = [
        replace(s, policy=str(options.policies / s.policy)) if s.policy in RECIPES else s
        for s in settings
    ]
    minutes = options.budget_minutes
    deadline = None if minutes is None else start + 60 * minutes
    campaign = Campaign(results, options.jobs, deadline, planned(settings, arms))
    with campaign.pool, campaign.bar:
        outcomes = compare(settings, arms, campaign)
    result = summarise(outcomes, arms) | {"missing": campaign.missing}
    (options.out / "compare.html").write_text(page(result))
    for line in [*result["verdict"], *(f"missing: {name}" for name in campaign.missing)]:
        print(line)
    finish(result, "gain_over_grpo", options.out / "compare.json")


if __name__ == "__main__":
    main()
