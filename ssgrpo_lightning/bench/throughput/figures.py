"""Replies of arms to medians, paired ratios and the keys of the result. Pure functions."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from ssgrpo_lightning.bench.statistics import bootstrap
from ssgrpo_lightning.bench.throughput.arms import FLOOR, GRPO, SSGRPO, TRL

Replies = Mapping[str, Sequence[Mapping[str, Any]]]
ESTIMATOR = ("score", "estimator")


def paired(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """Ratios of numbers of the same round: their median, its bootstrap interval, all of them.

    >>> paired([2.0, 3.0, 4.0], [4.0, 4.0, 4.0])["median"]
    0.75
    """
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {
        "median": median(ratios),
        "interval": bootstrap([ratios], lambda strata: median(strata[0])),
        "ratios": ratios,
    }


def arm_figures(replies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians over the updates of one arm; memory is the most of any of them.

    Phases are medians of each, in seconds, so that their sum is near `seconds` but not equal.
    """
    names = list(dict.fromkeys(name for reply in replies for name in reply["phases"]))
    return {
        "seconds": median(r["seconds"] for r in replies),
        "cpu_seconds": median(r["cpu_seconds"] for r in replies),
        "rollouts_per_second": median(r["rollouts"] / r["seconds"] for r in replies),
        "tokens_per_second": median(r["tokens"] / r["seconds"] for r in replies),
        "tokens": median(r["tokens"] for r in replies),
        "trained_share": sum(r["trained"] for r in replies) / sum(r["rollouts"] for r in replies),
        "memory_mib": max(r["memory"] for r in replies),
        "phases": {n: median(r["phases"].get(n, 0.0) for r in replies) for n in names},
    }


def summarise(replies: Replies, weighed: Replies | None = None) -> dict[str, Any]:
    """Figures of every arm, and the ratios between those that were run.

    Ratios are of seconds; of processor seconds (``_cpu``), which other work on the machine hardly
    disturbs and which say nothing of a GPU; and of seconds per sampled token (``_per_token``).

    Args:
        replies: Replies of the rounds that count for time.
        weighed: Those of rounds in which freed memory was given back at once, that count for
            memory; None: the same rounds.
    """
    arms = {arm: arm_figures(told) for arm, told in replies.items()}
    for arm, told in (weighed or {}).items():
        arms[arm]["resident_mib"] = arms[arm]["memory_mib"]
        arms[arm]["memory_mib"] = max(r["memory"] for r in told)
    seconds = {arm: [r["seconds"] for r in told] for arm, told in replies.items()}
    cpu = {arm: [r["cpu_seconds"] for r in told] for arm, told in replies.items()}
    per_token = {arm: [r["seconds"] / r["tokens"] for r in told] for arm, told in replies.items()}
    ratios = {
        f"{name}{unit}": paired(numbers[above], numbers[below])
        for name, above, below in (
            ("grpo_over_trl", GRPO, TRL),
            ("ssgrpo_over_trl", SSGRPO, TRL),
            ("ssgrpo_over_grpo", SSGRPO, GRPO),
            ("grpo_over_floor", GRPO, FLOOR),
            ("ssgrpo_over_floor", SSGRPO, FLOOR),
        )
        if above in arms and below in arms
        for unit, numbers in (("", seconds), ("_cpu", cpu), ("_per_token", per_token))
    }
    return {"updates": len(next(iter(seconds.values()))), "arms": arms, "ratios": ratios}


def estimator_ms(found: Mapping[str, Any]) -> float | None:
    """Milliseconds that scoring and the estimator take of an SS-GRPO update; None without one."""
    phases = found["arms"].get(SSGRPO, {}).get("phases")
    return None if phases is None else 1000 * sum(phases[name] for name in ESTIMATOR)


def keys(models: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, float | None]]:
    """The figures that the bar is about, by model; None where a model or an arm was not run."""

    def ratio(name: str) -> dict[str, float | None]:
        return {
            model: found["ratios"][name]["median"] if found and name in found["ratios"] else None
            for model, found in models.items()
        }

    def memory(above: str, below: str) -> dict[str, float | None]:
        return {
            model: found["arms"][above]["memory_mib"] / found["arms"][below]["memory_mib"]
            if found and {above, below} <= found["arms"].keys()
            else None
            for model, found in models.items()
        }

    return {
        "ratio_vs_trl": ratio("grpo_over_trl"),
        "ssgrpo_over_grpo": ratio("ssgrpo_over_grpo"),
        "over_floor": ratio("grpo_over_floor"),
        "memory_vs_trl": memory(GRPO, TRL),
        "ssgrpo_memory_over_grpo": memory(SSGRPO, GRPO),
        "estimator_ms_per_step": {m: estimator_ms(f) if f else None for m, f in models.items()},
    }


def final_reward(rewards: Sequence[float], last: int = 10) -> float:
    """Mean over the last updates of a run.

    >>> final_reward([0.0, 0.5, 1.0], last=2)
    0.75
    """
    return sum(rewards[-last:]) / len(rewards[-last:])
