"""The page of a comparison: the verdict in words, then tables and curves."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ssgrpo_lightning.bench.settings import EXACT, GRPO, OURS
from ssgrpo_lightning.report import charts

Section = tuple[str, str, str]
LINES = 7  # that a chart of curves can tell apart


def page(result: Mapping[str, Any]) -> str:
    """HTML of what `summarise` found.

    Args:
        result: The figures, with the names of missing runs under ``missing``.
    """
    settings = result["settings"]
    sections = [_verdict(result["verdict"])]
    sections += _gains(result["arms"])
    sections.append(
        (
            "All settings together",
            "Means over settings. Training time without evaluation; pass@8 and entropy (nats) at "
            "temperature 1. Error: standard error over seeds. Bold: best of the column.",
            _methods(result["arms"], list(settings)),
        )
    )
    if len(settings) > 1:
        sections.append(_lengths(settings))
    for name, setting in settings.items():
        sections += _curves(name, setting)
        sections += _details(name, setting)
    if result["missing"]:
        lines = "".join(f"<li>{escape(name)}</li>" for name in result["missing"])
        sections.append(("Missing", "Runs that were not done.", f"<ul>{lines}</ul>"))
    runs = sum(arm["runs"] for arm in result["arms"].values())
    lead = f"{runs} runs at the best rate of each arm; same problems, seeds and rollouts for all."
    return charts.page("Does step credit learn faster?", lead, sections)


def _verdict(sentences: Sequence[str]) -> Section:
    items = "".join(f"<li>{escape(s)}</li>" for s in sentences).replace(" -", " \u2212")
    how = "Differences in final accuracy, paired by seed; a verdict needs an interval without 0."
    return "Verdict", how, f"<ul>{items}</ul>"


def _gains(arms: Mapping[str, Any]) -> list[Section]:
    """Bars of every arm's gain over GRPO."""
    known = {a["label"]: a["gain_over_grpo"] for n, a in arms.items() if n != GRPO}
    known = {label: gain for label, gain in known.items() if gain}
    if not known:
        return []
    return [
        (
            "Gain over plain GRPO",
            "Final accuracy above that of GRPO, paired by seed, with 95 % intervals.",
            charts.bars(
                "gain in final accuracy, in points of 100",
                {label: 100 * gain["mean"] for label, gain in known.items()},
                {
                    label: (100 * gain["interval"][0], 100 * gain["interval"][1])
                    for label, gain in known.items()
                    if gain["interval"]
                },
                highlight=arms[OURS]["label"] if arms.get(OURS, {}).get("label") in known else None,
            ),
        )
    ]


def _methods(arms: Mapping[str, Any], settings: Sequence[str]) -> str:
    """The table of methods; with the rate where it is of one setting."""
    rows = []
    for arm in arms.values():
        row = {
            "method": arm["label"],
            "runs": arm["runs"],
            "final accuracy": arm["final_accuracy"],
            "error": arm["final_accuracy_error"],
            "training time, s": arm["training_seconds"],
            "s per update": arm["seconds_per_update"],
            "evaluation calls per rollout": arm["calls_per_rollout"],
            "pass@8": arm["pass_at_8"],
            "entropy": arm["sampled_entropy"],
        }
        if "rate" in arm:
            row["rate"] = "none" if arm["rate"] is None else f"{arm['rate']:g}"
        rows.append(row)
    return charts.table(rows, _best(rows, {"final accuracy": "high", "pass@8": "high"}))


def _best(
    rows: Sequence[Mapping[str, object]], wanted: Mapping[str, charts.Better]
) -> dict[str, charts.Better]:
    return {n: b for n, b in wanted.items() if any(row[n] is not None for row in rows)}


def _lengths(settings: Mapping[str, Any]) -> Section:
    """How the gain goes with the length of problems."""
    rows = []
    for name, setting in settings.items():
        arms = setting["arms"]
        row: dict[str, object] = {
            "setting": name,
            "operations": setting["operations"],
            "GRPO": arms.get(GRPO, {}).get("final_accuracy"),
        }
        for arm, label in ((OURS, "SS-GRPO"), (EXACT, "exact credit")):
            found = arms.get(arm, {}).get("gain_over_grpo")
            row[f"gain of {label}"] = found and found["mean"]
            row[f"95 % of {label}"] = _interval(found)
        rows.append(row)
    return (
        "By length of the problem",
        "Final accuracy of GRPO and what step credit adds to it.",
        charts.table(sorted(rows, key=lambda row: (row["operations"] or 0, row["setting"]))),
    )


def _interval(found: Mapping[str, Any] | None) -> str:
    if not found or not found["interval"]:
        return "none"
    low, high = found["interval"]
    return f"{low:+.3f} to {high:+.3f}".replace("-", "\u2212")


def _curves(name: str, setting: Mapping[str, Any]) -> list[Section]:
    arms = {n: arm for n, arm in setting["arms"].items() if arm["curves"]}
    if not arms:
        return []
    # Arms with the most seeds first; the others share charts with GRPO to compare with.
    order = sorted(arms, key=lambda n: -arms[n]["runs"])
    most = max(arm["runs"] for arm in arms.values())
    main = [n for n in order if arms[n]["runs"] == most][:LINES]
    others = [n for n in order if n not in main]
    step = LINES - 1

    def chart(names: Sequence[str], axis: str, label: str) -> str:
        lines = {arms[n]["label"]: [tuple(p) for p in arms[n]["curves"][axis]] for n in names}
        return charts.curves("held-out accuracy", lines, label, "accuracy")

    labels = {"rollouts": "rollouts", "tokens": "tokens", "seconds": "seconds of training"}
    see = "Mean over seeds with its 95 % bootstrap interval; one seed has none."
    sections = [
        (f"{name}: accuracy by {axis}", see, chart(main, axis, label))
        for axis, label in labels.items()
    ]
    over = {n: arms[n]["curve_over_grpo"] for n in main if arms[n]["curve_over_grpo"]}
    if len(over) > 1:
        lines = {arms[n]["label"]: [tuple(p) for p in points] for n, points in over.items()}
        chart_over = charts.curves("accuracy above GRPO", lines, "rollouts", "difference")
        sections.append((f"{name}: difference to GRPO", "Paired by seed.", chart_over))
    for start in range(0, len(others), step):
        part = [n for n in main if n == GRPO] + others[start : start + step]
        sections.append((f"{name}: other systems", see, chart(part, "rollouts", "rollouts")))
    return sections


def _details(name: str, setting: Mapping[str, Any]) -> list[Section]:
    """Tables of one setting: methods, rates, noise."""
    arms = setting["arms"]
    about = f"{setting['task']}, {setting['updates']} updates of {setting['rollouts_per_update']}"
    sections = [(f"{name}: methods", f"{about} rollouts.", _methods(arms, [name]))]
    searched = {arm["label"]: arm["search"] for arm in arms.values() if arm["search"]}
    if searched:
        rates = sorted({rate for found in searched.values() for rate in found}, key=float)
        rows = [
            {"method": label, **{rate: found.get(rate) for rate in rates}}
            for label, found in searched.items()
        ]
        see = "Mean final accuracy of each learning rate, on seeds used for nothing else."
        sections.append((f"{name}: search of the rate", see, charts.table(rows)))
    if setting["noise"]:
        names = {n: arms[n]["label"] for row in setting["noise"] for n in row["final_accuracy"]}
        rows = [
            {
                "verdicts turned round": f"{row['flip']:.0%}",
                **{label: row["final_accuracy"].get(n) for n, label in names.items()},
                "SS-GRPO over GRPO": row["ours_over_grpo"] and row["ours_over_grpo"]["mean"],
                "95 %": _interval(row["ours_over_grpo"]),
            }
            for row in setting["noise"]
        ]
        see = "Final accuracy, evaluated without noise, where verdicts err in training."
        sections.append((f"{name}: noisy verdicts", see, charts.table(rows)))
    return sections
