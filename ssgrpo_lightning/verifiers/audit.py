r"""What a verifier makes of a reference answer said otherwise, nearly, or with ill intent.

Pure functions: strings in, strings and counts out.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ssgrpo_lightning.extraction import after_hashes, last_boxed
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers.hostile import FAMILIES, hostile_completions

_NUMBER = re.compile(r"-?\d{1,30}(\.\d{1,30})?")
_FRACTION = re.compile(r"(-?)\\frac\{(\d+)\}\{(\d+)\}|(-?)(\d+)/(\d+)")
Strings = dict[str, str]


def paraphrases(answer: str) -> Strings:
    r"""The same answer in other dress, by the name of the change.

    >>> paraphrases("1234")["thousands separators"], paraphrases("1/2")["LaTeX fraction"]
    ('1,234', '\\frac{1}{2}')
    """
    found = {
        "as it is": answer,
        "space around": f"  {answer} \n",
        "boxed": rf"\boxed{{{answer}}}",
        "boxed in dollars": rf"$\boxed{{{answer}}}$",
        "in dollars": f"${answer}$",
        "full stop": f"{answer}.",
        "in a sentence": f"The final answer is {answer}.",
        "after hashes": f"#### {answer}",
        "bold": f"**{answer}**",
    }
    if _NUMBER.fullmatch(answer):
        whole, point, decimals = answer.partition(".")
        found |= {
            "trailing zeros": f"{answer}{'' if point else '.'}00",
            "plus sign": answer if answer.startswith("-") else f"+{answer}",
            "units": f"{answer} apples",
            "units in LaTeX": rf"${answer}\text{{ apples}}$",
            "currency": f"-${answer[1:]}" if answer.startswith("-") else f"${answer}",
        }
        if abs(int(whole or 0)) >= 1000:
            separated = f"{int(whole):,}" + point + decimals
            found |= {
                "thousands separators": separated,
                "thousands in LaTeX": f"${separated.replace(',', '{,}')}$",
            }
    if fraction := _FRACTION.fullmatch(answer):
        sign, above, below = (g for g in fraction.groups() if g is not None)
        found |= {
            "plain fraction": f"{sign}{above}/{below}",
            "LaTeX fraction": rf"{sign}\frac{{{above}}}{{{below}}}",
            "display fraction": rf"${sign}\dfrac{{{above}}}{{{below}}}$",
        }
    if answer.isalpha() and len(answer) > 1:
        found |= {"text in LaTeX": rf"$\text{{{answer}}}$", "other case": answer.swapcase()}
    return found


def near_misses(answer: str) -> Strings:
    """Wrong answers that look like it, by the name of the slip.

    >>> near_misses("27")["one more"], near_misses("27")["digits swapped"]
    ('28', '72')
    """
    found = {
        "nothing": "",
        "doubled": f"{answer}{answer}",
        "first character only": answer[:1],
        "last character lost": answer[:-1],
        "another digit": f"{answer}1",
        "negated": answer[1:] if answer.startswith("-") else f"-{answer}",
    }
    if _NUMBER.fullmatch(answer):
        whole, point, decimals = answer.partition(".")
        found |= {
            "one more": f"{int(whole) + 1}{point}{decimals}",
            "one less": f"{int(whole) - 1}{point}{decimals}",
            "ten times": f"{int(whole) * 10}{point}{decimals}",
            "inverse": f"1/{answer}",
            "power": f"{answer}^2",
            "exponent": f"{answer}e1",
            "interval": f"[{answer}, {int(whole) + 1}]",
            "two answers": f"{answer} or {int(whole) + 1}",
        }
        digits = whole.lstrip("-")
        if len(set(digits[-2:])) == 2:
            swapped = digits[:-2] + digits[-1] + digits[-2]
            found["digits swapped"] = f"{'-' * whole.startswith('-')}{swapped}{point}{decimals}"
    if fraction := _FRACTION.fullmatch(answer):
        sign, above, below = (g for g in fraction.groups() if g is not None)
        found["fraction upside down"] = rf"{sign}\frac{{{below}}}{{{above}}}"
    same = _value(answer)
    return {k: v for k, v in found.items() if v != answer and (same is None or _value(v) != same)}


def hostile(answer: str) -> Strings:
    """One completion of every hostile family; none of them is the answer, whatever it is."""
    return {name: text for name, text in hostile_completions(len(FAMILIES)) if text != answer}


def _value(answer: str) -> float | None:
    try:
        return float(answer)
    except ValueError:
        return None


@dataclass(frozen=True)
class Finding:
    """A verdict that should have been another.

    Attributes:
        kind: ``false reject``, ``false accept`` or ``no verdict``.
        change: What was done to the reference answer.
        problem: Number of the problem.
        answer: Its reference answer.
        completion: What was judged, cut short.
        reason: The verifier's reason.
    """

    kind: str
    change: str
    problem: int
    answer: str
    completion: str
    reason: str


SETS: dict[str, tuple[Callable[[str], Strings], bool]] = {
    "paraphrase": (paraphrases, True),
    "near miss": (near_misses, False),
    "hostile": (hostile, False),
}


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
        judged: Completions of each set and change.
        findings: The verdicts that should have been others.
        template: What stood around the answers.
    """

    judged: dict[tuple[str, str], int]
    findings: list[Finding]
    template: str

    def rows(self) -> list[tuple[str, str, int, int, int, int]]:
        """Set, change, completions judged, false accepts, false rejects and missing verdicts."""
        counts = Counter((f.change, f.kind) for f in self.findings)
        rows = []
        for (group, change), judged in self.judged.items():
            accepts, rejects, none = (
                counts[f"{group}: {change}", kind]
                for kind in ("false accept", "false reject", "no verdict")
            )
            rows.append((group, change, judged, accepts, rejects, none))
        return rows

    def table(self, examples: int = 1) -> str:
        """The rows with a mistake as text, worst first, each with examples, and the sums of all."""
        all_rows = self.rows()
        wrong_rows = [row for row in all_rows if any(row[3:])]
        rows = sorted(wrong_rows, key=lambda row: -(row[3] + row[4] + row[5]) / row[2])
        lines = [
            f"completions look like {self.template!r}",
            f"{'set':<11}{'change':<26}{'judged':>7}{'false +':>9}{'false -':>9}{'none':>6}",
        ]
        for group, change, n, accepts, rejects, none in rows:
            lines.append(f"{group:<11}{change:<26}{n:>7}{accepts:>9}{rejects:>9}{none:>6}")
            wrong = [f for f in self.findings if f.change == f"{group}: {change}"]
            for f in wrong[:examples]:
                lines.append(f"    {f.kind}: {f.completion!r} for {f.answer!r} ({f.reason[:60]})")
        totals = [sum(column) for column in zip(*(row[2:] for row in all_rows))]
        what = f"all {len(all_rows)} changes, {len(rows)} with a mistake"
        lines.append("{:<37}{:>7}{:>9}{:>9}{:>6}".format(what, *totals))
        return "\n".join(lines)

    def json(self) -> str:
        """Counts and every finding, as JSON."""
        names = ("set", "change", "judged", "false_accepts", "false_rejects", "no_verdict")
        rows = [dict(zip(names, row)) for row in self.rows()]
        return json.dumps(
            {"template": self.template, "rows": rows, "findings": [vars(f) for f in self.findings]},
            indent=1,
        )


# What completions look like around their answer.
TEMPLATES = ("{answer}", "#{answer}", "#### {answer}", r"\boxed{{answer}}", "Answer: {answer}")
Judge = Callable[[Sequence[str], Sequence[Problem]], Sequence[Verdict]]


def audit(judge: Judge, problems: Sequence[Problem], template: str | None = None) -> Report:
    """Judge every reference answer in other dress, nearly right and with ill intent.

    Args:
        judge: Verdicts on completions; rewards of at least .5 accept.
        problems: Whose reference answers to take.
        template: What a completion of this task looks like, ``{answer}`` in it; None: the first
            usual form in which most reference answers are accepted.
    """
    answers = {p.id: after_hashes(p.answer) or last_boxed(p.answer) or p.answer for p in problems}
    around = template or _usual_form(judge, problems[:16], answers)
    cases = [
        (group, change, text if group == "hostile" else around.replace("{answer}", text), p)
        for group, (strings, _) in SETS.items()
        # Hostile completions do not depend on the answer, and may each cost the whole time limit.
        for p in (problems[:1] if group == "hostile" else problems)
        for change, text in strings(answers[p.id]).items()
    ]
    verdicts = judge([text for _, _, text, _ in cases], [problem for *_, problem in cases])
    findings = []
    for (group, change, text, problem), verdict in zip(cases, verdicts, strict=True):
        if kind := _mistake(verdict.reward, SETS[group][1]):
            shown = text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"
            answer, what = answers[problem.id], f"{group}: {change}"
            findings.append(Finding(kind, what, problem.id, answer, shown, verdict.reason[:200]))
    return Report(dict(Counter((group, change) for group, change, *_ in cases)), findings, around)


def _usual_form(judge: Judge, problems: Sequence[Problem], answers: dict[int, str]) -> str:
    def accepted(form: str) -> int:
        texts = [form.replace("{answer}", answers[p.id]) for p in problems]
        return sum((verdict.reward or 0) >= 0.5 for verdict in judge(texts, problems))

    return max(TEMPLATES, key=accepted)


def _mistake(reward: float | None, right: bool) -> str | None:
    """What is wrong with a reward, if anything."""
    if reward is None:
        return "no verdict"
    if (reward >= 0.5) == right:
        return None
    return "false reject" if right else "false accept"
