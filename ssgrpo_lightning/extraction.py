r"""Where worked solutions state their answer, as the authors of the data sets defined it."""

import re

_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_BOXES = ("\\boxed", "\\fbox")


def after_hashes(text: str) -> str | None:
    r"""The number after the first ``#### ``, without thousands separators.

    Source: GSM8K (Cobbe et al., 2110.14168), as their evaluation reads it.

    >>> after_hashes("2+2=4 #### 1,004 apples"), after_hashes("the answer is 4")
    ('1004', None)
    """
    found = _HASHES.search(text)
    return found.group(1).replace(",", "") if found else None


def last_boxed(solution: str) -> str | None:
    r"""What the last ``\boxed{…}`` or ``\fbox{…}`` of a solution of MATH holds.

    Source: Hendrycks et al. (2103.03874).

    Braces are counted; escaped ones are not, though the authors' own evaluation counts them.
    ``\boxed 7`` reaches to the end of the formula. None where there is no box, or its braces never
    close.

    >>> last_boxed(r"So \boxed{1}, no, $\boxed{\frac{1}{2}}$.")
    '\\frac{1}{2}'
    """
    start = max(solution.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    inside = solution[start:].removeprefix(_BOXES[0]).removeprefix(_BOXES[1])
    if inside.startswith(" ") and not inside.lstrip().startswith("{"):
        return inside.split("$")[0].strip()
    inside = inside.lstrip()
    depth = 0
    for found in re.finditer(r"\\.|[{}]", inside, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth <= 0:
            return inside[1 : found.start()] if found[0] == "}" else None
    return None
