r"""Where completions state their answer, as the authors of the data sets defined it."""

import re

_HASHES = re.compile(r"#### (-?[0-9.,]+)")


def after_hashes(text: str) -> str | None:
    r"""The number after the first ``#### ``, without thousands separators.

    Source: GSM8K (Cobbe et al., 2110.14168), as their evaluation reads it.

    >>> after_hashes("2+2=4 #### 1,004 apples"), after_hashes("the answer is 4")
    ('1004', None)
    """
    found = _HASHES.search(text)
    return found.group(1).replace(",", "") if found else None


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{…}`` or ``\fbox{…}``, or after ``\boxed`` and a space.

    Source: MATH (Hendrycks et al., 2103.03874), as their evaluation reads it.

    >>> last_boxed(r"\boxed{1}, so \boxed{\frac{1}{2}}."), last_boxed(r"\boxed{1")
    ('\\frac{1}{2}', None)
    """
    bare = text.rfind("\\boxed ")
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if bare > start:
        return text[bare + len("\\boxed ") :].split("$")[0]
    if start < 0:
        return None
    begin = text.index("{", start) + 1
    depth = 1
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    return None
