"""The page of the throughput bench: ratios, phases, growth; and that of the learning curves."""

from collections.abc import Mapping, Sequence
from typing import Any

from ssgrpo_lightning.bench.throughput.arms import LABELS
from ssgrpo_lightning.report import charts

Section = tuple[str, str, str]
PHASES = {
    "generate": "generate",
    "rollout": "rest of rollouts",
    "score": "score",
    "policy": "train policy",
    "estimator": "train estimator",
    "other": "other",
}
BARS = {  # what should not be exceeded, from the bar of the project
    "ratio_vs_trl": 0.6,
    "ssgrpo_over_grpo": 1.05,
    "over_floor": 1.15,
    "memory_vs_trl": 1.0,
    "ssgrpo_memory_over_grpo": 1.10,
}


def page(result: Mapping[str, Any]) -> str:
    """HTML of a result of the bench."""
    sections = [_headline(result)]
    for name, found in result["models"].items():
        sections += _model(name, found)
    for axis, points in result["growth"].items():
        sections += _growth(axis, points)
    return charts.page("What does an update cost?", result["about"], sections)


def _headline(result: Mapping[str, Any]) -> Section:
    rows = [
        {"figure": key, **result[key], "bar": BARS.get(key)}
        for key in [*BARS, "estimator_ms_per_step"]
    ]
    see = "Medians of paired ratios of seconds per update, ratios of peak memory; less is better."
    return "In short", see, charts.table(rows)


def _model(name: str, found: Mapping[str, Any]) -> list[Section]:
    arms, ratios = found["arms"], found["ratios"]
    rows = [
        {
            "arm": LABELS[arm],
            "s/update": f["seconds"],
            "processor s": f["cpu_seconds"],
            "rollouts/s": f["rollouts_per_second"],
            "tokens/s": f["tokens_per_second"],
            "tokens": f["tokens"],
            "share trained": f["trained_share"],
            "peak MiB": f["memory_mib"],
        }
        for arm, f in arms.items()
    ]
    see = (
        f"Medians of {found['updates']} rounds. Share trained: rollouts that went through the "
        "training pass; ours leaves out groups of equal rewards. Peak: above the loaded model."
    )
    phases = [
        {"arm": LABELS[arm], **{PHASES[p]: 1000 * f["phases"].get(p, 0.0) for p in PHASES}}
        for arm, f in arms.items()
    ]
    values = {key.replace("_", " "): ratio["median"] for key, ratio in ratios.items()}
    ends = {k.replace("_", " "): tuple(r["interval"]) for k, r in ratios.items() if r["interval"]}
    return [
        (f"{name}: every arm", see, charts.table(rows)),
        (f"{name}: milliseconds by phase", "Medians of each.", charts.table(phases)),
        (
            f"{name}: paired ratios",
            "Seconds, processor seconds, seconds per token of a round; whiskers: 95 % intervals.",
            charts.bars(f"{name}: ratio of seconds", values, ends, 1.0, better="low"),
        ),
    ]


def _growth(axis: str, points: Sequence[Mapping[str, Any]]) -> list[Section]:
    def line(ys: Sequence[float]) -> list[charts.Point]:
        return [(float(p["at"]), y, y, y) for p, y in zip(points, ys, strict=True)]

    def curves(key: str) -> dict[str, list[charts.Point]]:
        arms = points[0]["arms"]
        return {LABELS[arm]: line([p["arms"][arm][key] for p in points]) for arm in arms}

    memory = curves("memory_mib")
    memory["gradients, optimiser"] = line([p["own_mib"] for p in points])
    return [
        (
            f"Seconds against {axis}",
            "A small policy of random weights whose completions all have full length.",
            charts.curves(f"seconds by {axis}", curves("seconds"), axis, "seconds per update"),
        ),
        (
            f"Memory against {axis}",
            "Peak above the loaded model; last line: what the weights need beside themselves.",
            charts.curves(f"memory by {axis}", memory, axis, "MiB"),
        ),
    ]


def learning_page(result: Mapping[str, Any]) -> str:
    """HTML of learning curves: mean reward of each update, with the spread over seeds."""
    series = {
        LABELS[arm]: [
            (float(i + 1), sum(at) / len(at), min(at), max(at))
            for i, at in enumerate(zip(*found["rewards"], strict=True))
        ]
        for arm, found in result["arms"].items()
    }
    drawn = charts.curves("mean reward", series, "update", "reward of training rollouts")
    rows = [
        {"arm": LABELS[arm], **{f"seed {i}": x for i, x in enumerate(found["final"])}}
        for arm, found in result["arms"].items()
    ]
    return charts.page(
        "Does ours learn as TRL does?",
        result["about"],
        [
            ("Learning curves", "Mean over seeds; the band is from the least to the most.", drawn),
            ("Final reward", "Mean of the last ten updates of each seed.", charts.table(rows)),
        ],
    )


def lines(name: str, found: Mapping[str, Any]) -> list[str]:
    """What the console shows of one model."""
    told = [f"{name}: {found['updates']} rounds"]
    for arm, f in found["arms"].items():
        phases = ", ".join(f"{p} {1000 * s:.0f}" for p, s in f["phases"].items())
        told.append(
            f"{LABELS[arm]:>14} {f['seconds']:8.3f} s/update ({f['cpu_seconds']:.3f} CPU) "
            f"{f['rollouts_per_second']:8.1f} rollouts/s "
            f"{f['tokens_per_second']:8.0f} tokens/s {f['tokens']:7.0f} tokens, "
            f"{f['trained_share']:.2f} trained, {f['memory_mib']:6.0f} MiB; ms: {phases}"
        )
    for key, ratio in found["ratios"].items():
        ends = "" if not ratio["interval"] else " ({:.3f} to {:.3f})".format(*ratio["interval"])
        told.append(f"{key:>30} {ratio['median']:.3f}{ends}")
    return told
