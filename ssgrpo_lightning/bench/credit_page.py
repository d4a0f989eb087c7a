"""The page of the credit bench: an overview, then the charts and the table of each task."""

from collections.abc import Mapping
from typing import Any

from ssgrpo_lightning.report import charts

PLAIN, DEFAULT = "plain GRPO", "SS-GRPO (quickstart)"
CALIBRATED = (DEFAULT, "group confidence", "published")
"""Systems whose reliability is drawn."""
COLUMNS = {
    "step_auc": "step AUC",
    "first_error_top1": "first error",
    "first_error_auprc": "AUPRC",
    "corr_exact_failed": "correlation",
    "snr_gain_db": "SNR, dB",
    "false_blame": "false blame",
    "idle_credit_ratio": "idle credit",
    "calibration_error": "calibration",
    "outcome_auc": "outcome AUC",
    "ms_per_rollout": "ms",
    "calls_per_rollout": "calls",
}
"""Figures of the table, and what they are called there."""
BEST: dict[str, charts.Better] = {
    "step AUC": "high",
    "first error": "high",
    "AUPRC": "high",
    "correlation": "high",
    "SNR, dB": "high",
    "false blame": "low",
    "calibration": "low",
    "outcome AUC": "high",
}
Section = tuple[str, str, str]
Row = Mapping[str, Any]


def page(tasks: Mapping[str, Row], lead: str) -> str:
    """A page that one can read without the text.

    Args:
        tasks: What `compare` found in each task, with a sentence `about` its groups.
        lead: How it was measured.
    """
    sections: list[Section] = []
    if len(tasks) > 1:
        see = "Correlation of credit with the exact advantage of steps in failures; 1 is exact."
        sections.append(_overview(tasks, "corr_exact_failed", see))
        see = "Share of failures whose most blamed step is the first unsound one."
        sections.append(_overview(tasks, "first_error_top1", see))
    for name, found in tasks.items():
        sections += _task(name, found)
    return charts.page("Does step credit point at the step that mattered?", lead, sections)


def _overview(tasks: Mapping[str, Row], key: str, see: str) -> Section:
    """One figure, systems against tasks."""
    rows = [
        {"system": name, **{task: found["systems"][name][key] for task, found in tasks.items()}}
        for name in next(iter(tasks.values()))["systems"]
    ]
    return f"Overview: {COLUMNS[key]}", see, charts.table(rows, dict.fromkeys(tasks, "high"))


def _task(name: str, found: Row) -> list[Section]:
    systems: Mapping[str, Row] = found["systems"]

    def bars(
        key: str, heading: str, see: str, reference: float | None, better: charts.Better
    ) -> Section:
        values = {system: row[key] for system, row in systems.items()}
        ends = {s: tuple(pair) for s, row in systems.items() if (pair := row[f"{key}_interval"])}
        title = f"{name}: {COLUMNS[key]}"
        drawn = charts.bars(title, values, ends, reference, better=better, highlight=DEFAULT)
        return heading, see, drawn

    see = f"{found['about']} Bold: best of the column, oracle included."
    sections = [
        (f"{name}: all figures", see, charts.table(_rows(systems), BEST)),
        bars(
            "corr_exact_failed",
            "Does blame follow the exact advantage?",
            "Correlation of credit with the exact advantage of steps, in failures; 1 is exact.",
            systems[PLAIN]["corr_exact_failed"],
            "high",
        ),
        bars(
            "first_error_top1",
            "Does blame fall on the first error?",
            "Share of failures whose most blamed step is the first unsound one.",
            systems[PLAIN]["first_error_top1"],
            "high",
        ),
        bars(
            "snr_gain_db",
            "Is the gradient less noisy?",
            "Signal-to-noise ratio of the policy gradient over that of plain GRPO, in dB.",
            0.0,
            "high",
        ),
        bars(
            "false_blame",
            "Are sound steps before the error blamed?",
            "Share of a failure's blame on steps before its first error; less is better.",
            systems[PLAIN]["false_blame"],
            "low",
        ),
    ]
    if any(row["idle_credit_ratio"] is not None for row in systems.values()):
        see = "Credit on lines that cannot matter, over their share of the tokens; 1 is uniform."
        sections.append(bars("idle_credit_ratio", "Do idle lines get credit?", see, 1.0, "low"))
    sections += [
        (
            "Do scores mean what they say?",
            "Soundness that the estimator gives a step against how often such steps are sound.",
            charts.calibration(f"{name}: soundness", found["reliability"]),
        ),
        _shortcuts(name, found),
    ]
    return sections


def _shortcuts(name: str, found: Row) -> Section:
    """Outcome AUC of the systems beside that of what sees but one thing."""
    rows = {
        system: (row["outcome_auc"], row["outcome_auc_interval"])
        for system, row in found["systems"].items()
        if system != PLAIN
    }
    rows |= {short: (row["auc"], row["auc_interval"]) for short, row in found["shortcuts"].items()}
    drawn = charts.bars(
        f"{name}: outcome AUC within groups",
        {system: value for system, (value, _) in rows.items()},
        {system: tuple(pair) for system, (_, pair) in rows.items() if pair},
        0.5,
        highlight=DEFAULT,
    )
    see = "Pairs of a success and a failure of a group ranked rightly; the last four see one thing."
    return "Is success told from failure by more than a shortcut?", see, drawn


def _rows(systems: Mapping[str, Row]) -> list[dict[str, object]]:
    def shown(row: Row, key: str) -> float | None:
        # An oracle's error of 7e-6 is none, and so are the microseconds of doing nothing.
        digits = 4 if f"{key}_interval" in row else 2
        return None if row[key] is None else round(row[key], digits)

    return [
        {"system": name, **{column: shown(row, key) for key, column in COLUMNS.items()}}
        for name, row in systems.items()
    ]
