"""Rollouts with their steps coloured by credit, for a terminal and for a browser.

Green steps of a success are praised, red steps of a failure blamed; the stronger the colour, the
larger the share of the advantage that the step carries.
"""

from dataclasses import dataclass
from html import escape

GREEN, RED = (46, 160, 67), (218, 54, 51)
FULL_COLOUR = 2.0  # the weight at which a colour is at its strongest


@dataclass(frozen=True)
class ColouredRollout:
    """One rollout as people see it.

    Attributes:
        prompt: Text of the problem.
        steps: Text of each step.
        values: Value of each step's prefix.
        weights: Weight of each step; 1 is its plain share.
        advantage: Group advantage of the rollout.
        reward: Outcome reward; None without a verdict.
        reason: Why the verifier said so.
    """

    prompt: str
    steps: tuple[str, ...]
    values: tuple[float, ...]
    weights: tuple[float, ...]
    advantage: float
    reward: float | None
    reason: str

    @property
    def title(self) -> str:
        """One line that says what became of the rollout."""
        reward = "no verdict" if self.reward is None else f"reward {self.reward:g}"
        return f"{reward}, advantage {self.advantage:+.2f} ({self.reason})"


def shade(weight: float, advantage: float) -> tuple[int, int, int] | None:
    """Background of a step; None where the rollout teaches nothing.

    >>> shade(0.0, 1.0)
    (255, 255, 255)
    >>> shade(2.0, -1.0) == RED
    True
    """
    if advantage == 0:
        return None
    strength = min(max(weight / FULL_COLOUR, 0.0), 1.0)
    red, green, blue = (
        round(255 + (channel - 255) * strength) for channel in (GREEN if advantage > 0 else RED)
    )
    return red, green, blue


def to_ansi(rollout: ColouredRollout) -> str:
    """The rollout for a terminal that knows 24-bit colours: a line a step, its weight beside it."""
    lines = [f"\033[1m{rollout.prompt.strip()}\033[0m  {rollout.title}"]
    for step, weight, value in zip(rollout.steps, rollout.weights, rollout.values, strict=True):
        text = step.strip("\n").replace("\n", "⏎ ")
        colour = shade(weight, rollout.advantage)
        # Black on pastel: readable on dark and light terminals alike.
        start = "" if colour is None else "\033[38;2;0;0;0;48;2;{};{};{}m".format(*colour)
        lines.append(f"  w {weight:4.2f}  V {value:4.2f}  {start}{text}\033[0m")
    return "\n".join(lines)


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Rollouts</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1f2328}}
article{{border:1px solid #d0d7de;border-radius:8px;padding:.8rem 1rem;margin:1rem 0}}
h1{{font-size:1.3rem}} h2{{font:600 1rem ui-monospace,monospace;margin:0;white-space:pre-wrap}}
p{{margin:.2rem 0 .6rem;color:#57606a}} .step{{display:flex;gap:1rem;align-items:baseline}}
.text{{font-family:ui-monospace,monospace;white-space:pre-wrap;border-radius:4px;
padding:0 .4rem;flex:1;color:#000}}
.num{{font-family:ui-monospace,monospace;color:#57606a;white-space:nowrap}}
</style><h1>{title}</h1><p>Green steps are praised, red steps are blamed; the stronger the colour,
the more of the rollout's advantage the step carries. w is the step's weight (1: its plain share),
V the expected reward after it.</p>{body}</html>
"""


def to_html(rollouts: list[ColouredRollout], title: str) -> str:
    """A self-contained page of rollouts."""
    return _PAGE.format(title=escape(title), body="".join(map(_article, rollouts)))


def _article(rollout: ColouredRollout) -> str:
    steps = []
    for step, weight, value in zip(rollout.steps, rollout.weights, rollout.values, strict=True):
        colour = shade(weight, rollout.advantage)
        style = "" if colour is None else "background:rgb({},{},{})".format(*colour)
        steps.append(
            f'<div class="step"><span class="num">w {weight:.2f} &nbsp; V {value:.2f}</span>'
            f'<span class="text" style="{style}">{escape(step.strip(chr(10)))}</span></div>'
        )
    return (
        f"<article><h2>{escape(rollout.prompt)}</h2><p>{escape(rollout.title)}</p>"
        f"{''.join(steps)}</article>"
    )
