"""A plan for people: bars in a terminal."""

from collections.abc import Callable

from ssgrpo_lightning.plan.estimate import Plan
from ssgrpo_lightning.plan.hardware import GIB

WIDTH = 40


def page(plan: Plan, title: str) -> str:
    """Memory and time as bars, then what was assumed; the last line says whether it fits."""
    lines = [title]
    for phase, parts in plan.memory.items():
        lines += ["", f"memory, {phase}"]
        parts = {**parts, "total": sum(parts.values())}
        lines += _bars(parts, plan.capacity, lambda x: f"{x / GIB:8.2f} GiB")
    seconds = sum(plan.seconds.values())
    lines += ["", f"time of an update: {seconds:.1f} s"]
    lines += _bars(plan.seconds, seconds, lambda x: f"{x:8.2f} s  ")
    lines += ["", "work of an update"]
    lines += [f"  {name:36}{value:12.3g}" for name, value in plan.work.items()]
    lines += ["", "assumed", *(f"  {note}" for note in plan.notes), ""]
    if not plan.fits:
        lines.append("It does not fit.")
    lines.append(f"peak per GPU: {plan.peak / GIB:.1f} GiB of {plan.capacity / GIB:g} GiB")
    return "\n".join(lines)


def _bars(parts: dict[str, float], whole: float, say: Callable[[float], str]) -> list[str]:
    """One bar for every part that is not nothing, as long as its share of the whole."""
    return [
        f"  {name:36}{say(value)}  {_bar(value / whole)}" for name, value in parts.items() if value
    ]


def _bar(share: float) -> str:
    eighths = round(min(share, 1.0) * WIDTH * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
