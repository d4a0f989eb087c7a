r"""Completions that hang, crash or fool verifiers; none of them states an answer from 10 to 999."""

import random
from collections.abc import Callable

Make = Callable[[random.Random], str]


def _tower(rng: random.Random, left: str, right: str) -> str:
    height, base = rng.randint(4, 40), rng.randint(5, 9)
    return "".join(f"{base}^{left}" for _ in range(height)) + str(base) + right * height


def _nested(rng: random.Random, left: str, right: str, closed: bool = True) -> str:
    depth = rng.choice([100, 1000, 20_000])
    return left * depth + "5000" + (right * depth if closed else "")


FAMILIES: dict[str, Make] = {
    "power tower": lambda r: "So it is " + _tower(r, "(", ")"),
    "power tower in LaTeX": lambda r: rf"\boxed{{{_tower(r, '{', '}')}}}",
    "power tower in dollars": lambda r: f"The final answer is ${_tower(r, '{', '}')}$.",
    "factorials": lambda r: rf"\boxed{{{r.randint(10**6, 10**9)}!}}",
    "huge power": lambda r: rf"\boxed{{{r.randint(2, 9)}^{{{r.randint(10**8, 10**10)}}}+1}}",
    "huge sum": lambda r: (
        rf"\boxed{{\sum_{{k=1}}^{{{r.randint(10**7, 10**9)}}} \frac{{1}}{{k^3}}}}"
    ),
    "hard integral": lambda r: (
        rf"$\int_0^1 \sin(x^{{{r.randint(1009, 9999)}}})^{{x^x}} e^{{x^9}} dx$"
    ),
    "big matrix": lambda r: (
        r"$\det\begin{pmatrix}"
        + r"\\".join("&".join("xyz"[r.randrange(3)] for _ in range(12)) for _ in range(12))
        + r"\end{pmatrix}$"
    ),
    "long sum": lambda r: (
        r"\boxed{" + "+".join(f"x^{{{i}}}" for i in range(r.randint(300, 900))) + "}"
    ),
    "million digits": lambda r: (
        r.choice(["", "#### ", "\\boxed{"]) + str(r.randint(1, 9)) * 1_000_000
    ),
    "million decimals": lambda r: "0." + str(r.randint(1, 9)) * 1_000_000,
    "exponent": lambda r: f"\\boxed{{1e{r.randint(10**6, 10**12)}}}",
    "unbalanced LaTeX": lambda r: r"\boxed{\frac{1}{" * r.randint(1, 5000),
    "unbalanced dollars": lambda r: "$ " * r.randint(1001, 20_001) + "x",
    "nested braces": lambda r: r"\boxed" + _nested(r, "{", "}"),
    "nested fractions": lambda r: r"\boxed{" + r"\frac{1}{" * 200 + "x" + "}" * 201,
    "nested roots": lambda r: "$" + r"\sqrt{" * 300 + "x" + "}" * 300 + "$",
    "nested brackets": lambda r: _nested(r, "[", "]"),
    "open brackets": lambda r: _nested(r, "[", "", closed=False),
    "nested objects": lambda r: _nested(r, '{"a":', "}"),
    "nested parentheses": lambda r: f"answer: {_nested(r, '(', ')')}",
    "null bytes": lambda r: "\x00" * r.randint(1, 10_000),
    "null byte in a number": lambda r: (
        f"\\boxed{{{r.randint(1000, 9999)}\x00{r.randint(1000, 9999)}}}"
    ),
    "a megabyte of words": lambda r: " ".join(["the answer is"] * 80_000),
    "a megabyte of one letter": lambda r: r.choice("ab") * 1_000_000 + "!",
    "a megabyte of backslashes": lambda r: "\\" * 1_000_000,
    "a megabyte of spaces": lambda r: "answer" + " " * 1_000_000 + "x",
    "a megabyte of boxes": lambda r: r"\boxed{" * 140_000,
    "right-to-left": lambda r: f"\u202e#### {r.randint(1000, 9999)}\u202c\u200f\u2067",
    "zero width": lambda r: "\u200b\ufeff\u2060" * r.randint(1, 1000) + f"{r.randint(1000, 9999)}",
    "other digits": lambda r: "\\boxed{" + "".join(r.choices("٠١٢٣٤٥٦٧٨٩", k=6)) + "}",
    "combining marks": lambda r: "e" + "\u0301" * r.randint(1000, 100_000),
    "code": lambda r: f"__import__('os').system('kill -9 {r.randint(1000, 9999)}')",
    "code in LaTeX": lambda r: rf"\boxed{{__import__('os')._exit({r.randint(0, 9)})}}",
    "memory bomb as text": lambda r: f"[0] * {r.randint(10**10, 10**12)}",
    "fork bomb as text": lambda r: ":(){ :|:& };:" * r.randint(1, 100),
    "infinite loop as text": lambda r: "while True: pass\n" * r.randint(1, 1000),
    "not a number": lambda r: r.choice(["nan", "NaN", "\\boxed{nan}", "#### nan", "null", "None"]),
    "infinity": lambda r: r.choice(["inf", "-Infinity", r"$\infty$", r"\boxed{\tilde{\infty}}"]),
    "always true": lambda r: r.choice(["True", "x or True", r"$x=x$", r"\boxed{x=x}", "*"]),
    "every set": lambda r: r.choice([r"$\mathbb{R}$", r"\boxed{(-\infty,\infty)}", r"$\{x\}$"]),
    "many answers": lambda r: r"\boxed{" + ",".join(str(n) for n in range(1000, 3000)) + "}",
    "all choices": lambda r: "".join(r.sample(["A ", "B ", "C ", "D ", "E "], 5)),
    "format bomb": lambda r: r.choice(["%s" * 9999, "{0}" * 9999, "%n%x" * 999, "{{}}" * 999]),
    "line ends": lambda r: "\r\n\u2028\u2029\x85" * r.randint(1, 10_000),
    "emoji": lambda r: "👨\u200d👩\u200d👧" * r.randint(1, 10_000),
    "control characters": lambda r: "".join(map(chr, range(32))) * r.randint(1, 100),
    "empty": lambda r: r.choice(["", " ", "\n", "####", "\\boxed{}", "$$", "{}[", "answer:"]),
    "binomials": lambda r: (
        rf"\boxed{{\binom{{{r.randint(10**7, 10**9)}}}{{{r.randint(10**6, 10**7)}}}}}"
    ),
    "slow regular expression": lambda r: "#### " + "1," * r.randint(1000, 50_000) + "x",
}


def hostile_completions(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Pairs of a family's name and a completion; every family in turn.

    Args:
        count: How many.
        seed: Seed of what varies within a family.

    >>> len(hostile_completions(100)), hostile_completions(1) == hostile_completions(1)
    (100, True)
    """
    rng, names = random.Random(seed), list(FAMILIES)
    return [(name := names[i % len(names)], FAMILIES[name](rng)) for i in range(count)]
