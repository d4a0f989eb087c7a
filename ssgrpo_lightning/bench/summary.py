"""What the runs of a comparison amount to: figures pooled over settings, and a verdict in words."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ssgrpo_lightning.bench.runs import Arm, Setting
from ssgrpo_lightning.bench.settings import EXACT, GRPO, OURS, PROCESS, SHUFFLED
from ssgrpo_lightning.bench.statistics import (
    Estimate,
    band,
    bootstrap,
    crossing,
    estimate,
    final_accuracy,
    pooled,
    pooled_error,
    usable_range,
)

Result = dict[str, Any]
Point = tuple[float, float, float, float]  # x, mean, low, high
AXES = ("rollouts", "tokens", "seconds")


@dataclass
class Outcome:
    """All results of one setting."""

    setting: Setting
    """The setting."""
    search: dict[str, dict[float, list[Result]]] = field(default_factory=dict)
    """Results of the rate search by arm and rate."""
    rates: dict[str, float] = field(default_factory=dict)
    """Rate of each arm: the best of its search."""
    final: dict[str, dict[int, Result]] = field(default_factory=dict)
    """Results at that rate by arm and seed."""
    noisy: dict[float, dict[str, dict[int, Result]]] = field(default_factory=dict)
    """The same under noisy verdicts, by share of verdicts turned round."""


def accuracies(result: Result) -> list[float]:
    """Accuracy at each evaluation."""
    return [point["accuracy"] for point in result["curve"]]


def final(result: Result) -> float:
    """Final accuracy of a run."""
    return final_accuracy(accuracies(result))


def search_means(results: dict[float, list[Result]]) -> dict[float, float]:
    """Mean final accuracy of each rate."""
    return {rate: sum(map(final, runs)) / len(runs) for rate, runs in results.items()}


def best_rate(results: dict[float, list[Result]]) -> float:
    """Rate of the highest mean final accuracy; the lowest of equals."""
    means = search_means(results)
    return max(sorted(means), key=means.__getitem__)


def pairs(
    tables: Sequence[dict[str, dict[int, Result]]], first: str, second: str
) -> list[list[tuple[Result, Result]]]:
    """Results of two arms with the same seed, in strata of a table each; empty ones left out."""
    strata = []
    for table in tables:
        a, b = table.get(first, {}), table.get(second, {})
        strata.append([(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())])
    return [stratum for stratum in strata if stratum]


def gain(
    tables: Sequence[dict[str, dict[int, Result]]],
    first: str,
    second: str,
    value: Callable[[Result], float] = final,
) -> Estimate | None:
    """Difference of two arms, paired by seed, pooled over tables; None where nothing is shared."""
    found = pairs(tables, first, second)
    return estimate([[value(a) - value(b) for a, b in stratum] for stratum in found])


def reach_ratio(strata: list[list[tuple[Result, Result]]]) -> float:
    """Rollouts ours needs to reach GRPO's final accuracy, over those GRPO needs.

    Both from the mean curve of the seeds, as `crossing` reads it; geometric mean over settings.
    Infinity where ours never reaches it in some setting, NaN where GRPO began there.
    """
    logs = []
    for stratum in strata:
        xs = [point["rollouts"] for point in stratum[0][0]["curve"]]
        ours, grpo = (
            [sum(ys) / len(stratum) for ys in zip(*(accuracies(pair[i]) for pair in stratum))]
            for i in (0, 1)
        )
        needed, reference = (crossing(xs, ys, final_accuracy(grpo)) for ys in (ours, grpo))
        if reference == 0:
            return math.nan
        logs.append(math.log(needed / reference) if needed else -math.inf)
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def captured(
    tables: Sequence[dict[str, dict[int, Result]]],
) -> tuple[float, tuple[float, float] | None] | None:
    """Share of the gain of exact credit over GRPO that ours has, and its interval.

    None where that gain is below two standard errors: there is nothing to share.
    """
    exact = gain(tables, EXACT, GRPO)
    if exact is None or exact.error is None or exact.mean < 2 * exact.error:
        return None
    strata = []
    for table in tables:
        arms = [table.get(name, {}) for name in (OURS, EXACT, GRPO)]
        seeds = sorted(set(arms[0]) & set(arms[1]) & set(arms[2]))
        trios = [[final(arm[seed]) for arm in arms] for seed in seeds]
        strata.append([(ours - grpo, best - grpo) for ours, best, grpo in trios])
    strata = [stratum for stratum in strata if stratum]
    return (_share(strata), bootstrap(strata, _share)) if strata else None


def _share(strata: Sequence[Sequence[tuple[float, float]]]) -> float:
    ours, exact = (pooled([[pair[i] for pair in stratum] for stratum in strata]) for i in (0, 1))
    return ours / exact if exact else math.nan


def summarise(outcomes: Sequence[Outcome], arms: Sequence[Arm]) -> dict[str, Any]:
    """All figures, JSON-ready: of ours pooled over settings, then of every arm and setting."""
    tables = [outcome.final for outcome in outcomes]
    found = {name: gain(tables, OURS, name) for name in (GRPO, SHUFFLED, PROCESS)}
    exact, share = gain(tables, EXACT, GRPO), captured(tables)
    shared = pairs(tables, OURS, GRPO)
    ratios = [
        ours["seconds_per_update"] / grpo["seconds_per_update"]
        for stratum in shared
        for ours, grpo in stratum
    ]
    details = {arm.name: _pooled_arm(outcomes, arm) for arm in arms}
    ours = details.get(OURS, {})
    flat: dict[str, Any] = {}
    for name, value in found.items():
        flat[f"gain_over_{name}"] = value and value.mean
        flat[f"gain_over_{name}_interval"] = value and value.interval
    result = {
        "rollouts_ratio_to_grpo_final": reach_ratio(shared),
        "rollouts_ratio_to_grpo_final_interval": bootstrap(shared, reach_ratio),
        "exact_gain": exact and exact.mean,
        "exact_gain_error": exact and exact.error,
        "gain_captured": share and share[0],
        "gain_captured_interval": share and share[1],
        "seconds_ratio": statistics.median(ratios) if ratios else None,
        "usable_lr_range": ours.get("usable_lr_range"),
        **flat,
        "calls_per_rollout": ours.get("calls_per_rollout"),
        "verdict": [sentence(name, found[name]) for name in VERDICTS],
        "arms": details,
        "settings": {outcome.setting.name: _setting(outcome, arms) for outcome in outcomes},
    }
    return json_ready(result)


VERDICTS = {
    GRPO: "plain GRPO",
    SHUFFLED: "its own weights shuffled among rollouts",
    PROCESS: "the process reward of exact steps",
}


def sentence(other: str, difference: Estimate | None) -> str:
    """Whether ours beats another arm, in words that the interval allows."""
    name = VERDICTS[other]
    if difference is None:
        return f"SS-GRPO against {name}: not run."
    if difference.interval is None:
        return f"SS-GRPO against {name}: no difference that can be told from one seed."
    low, high = difference.interval
    known = f"95 % interval {low:+.3f} to {high:+.3f}, {difference.pairs} pairs of runs"
    if difference.sign == 0:
        mean = f"{difference.mean:+.3f}"
        return f"SS-GRPO against {name}: no difference that can be told ({mean}, {known})."
    verb = "beats" if difference.sign > 0 else "loses to"
    size = f"{abs(difference.mean):.3f}"
    return f"SS-GRPO {verb} {name} by {size} in final accuracy ({known})."


def _pooled_arm(outcomes: Sequence[Outcome], arm: Arm) -> dict[str, Any]:
    """Figures of an arm, each the mean over the settings that it was run in."""
    tables = [outcome.final for outcome in outcomes]
    strata = [list(t[arm.name].values()) for t in tables if t.get(arm.name)]
    means: dict[float, list[float]] = {}
    for outcome in outcomes:
        for rate, value in search_means(outcome.search.get(arm.name, {})).items():
            means.setdefault(rate, []).append(value)
    # A rate that was not tried in every setting cannot be compared with the others.
    most = max(map(len, means.values()), default=0)
    tried = {rate: sum(v) / len(v) for rate, v in means.items() if len(v) == most}
    return {
        "label": arm.label,
        **_figures(strata),
        "gain_over_grpo": _written(gain(tables, arm.name, GRPO)),
        "usable_lr_range": usable_range(tried) if tried else None,
    }


def _figures(strata: Sequence[Sequence[Result]]) -> dict[str, Any]:
    """What the table of methods shows."""
    names = ("training_seconds", "seconds_per_update", "calls_per_rollout")
    names += ("pass_at_8", "sampled_entropy")
    accuracy = [[final(result) for result in stratum] for stratum in strata]
    return {
        "runs": sum(map(len, strata)),
        "final_accuracy": pooled(accuracy) if strata else None,
        "final_accuracy_error": pooled_error(accuracy),
        **{
            name: pooled([[r[name] for r in stratum] for stratum in strata]) if strata else None
            for name in names
        },
    }


def _setting(outcome: Outcome, arms: Sequence[Arm]) -> dict[str, Any]:
    setting, found = outcome.setting, {}
    for arm in arms:
        runs = list(outcome.final.get(arm.name, {}).values())
        means = search_means(outcome.search.get(arm.name, {}))
        found[arm.name] = {
            "label": arm.label,
            "rate": outcome.rates.get(arm.name),
            **_figures([runs] if runs else []),
            "gain_over_grpo": _written(gain([outcome.final], arm.name, GRPO)),
            "curves": curves(runs) if runs else None,
            "curve_over_grpo": curve_over(outcome.final, arm.name, GRPO),
            "search": {f"{rate:g}": value for rate, value in means.items()},
            "usable_lr_range": usable_range(means) if means else None,
        }
    return {
        "task": type(setting.task).__name__,
        "operations": getattr(setting.task, "operations", None),
        "rollouts_per_update": setting.rollouts_per_update,
        "updates": setting.updates,
        "arms": found,
        "noise": _noise(outcome),
    }


def _noise(outcome: Outcome) -> list[dict[str, Any]]:
    """Final accuracy by share of verdicts turned round, on the same seeds."""
    noisy = outcome.noisy
    seeds = {arm: set(runs) for table in noisy.values() for arm, runs in table.items()}
    clean = {
        arm: {seed: run for seed, run in outcome.final.get(arm, {}).items() if seed in found}
        for arm, found in seeds.items()
    }
    return [
        {
            "flip": flip,
            "final_accuracy": {
                arm: sum(map(final, runs.values())) / len(runs)
                for arm, runs in table.items()
                if runs
            },
            "ours_over_grpo": _written(gain([table], OURS, GRPO)),
        }
        for flip, table in sorted({0.0: clean, **noisy}.items())
        if noisy
    ]


def curves(runs: Sequence[Result]) -> dict[str, list[Point]]:
    """Mean accuracy of runs with its interval at each evaluation, by the mean of each axis."""
    points, found = band([accuracies(run) for run in runs]), {}
    for axis in AXES:
        at = zip(*([point[axis] for point in run["curve"]] for run in runs), strict=True)
        found[axis] = [(sum(xs) / len(xs), *point) for xs, point in zip(at, points, strict=True)]
    return found


def curve_over(table: dict[str, dict[int, Result]], first: str, second: str) -> list[Point] | None:
    """Difference in accuracy of two arms, paired by seed, at each evaluation, by rollouts.

    That of GRPO to itself is 0, and drawn, so that an arm has one colour in all charts.
    """
    found = pairs([table], first, second)
    if not found:
        return None
    differences = [
        [x - y for x, y in zip(accuracies(a), accuracies(b), strict=True)] for a, b in found[0]
    ]
    xs = [point["rollouts"] for point in found[0][0][0]["curve"]]
    return [(x, *point) for x, point in zip(xs, band(differences))]


def _written(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else value._asdict()


def json_ready(value: Any) -> Any:
    """The value with None in place of infinity and NaN, which JSON does not know."""
    if isinstance(value, dict):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
