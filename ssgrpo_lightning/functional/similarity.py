"""Texts that are nearly the same, told by the runs of words they share."""

import re
import zlib
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

_WORD = re.compile(r"\d+(?:\.\d+)?|[^\W\d_]+|[^\w\s]")
# A pair of similarity .8 shares none of the bands, and is overlooked, 2 times in 10,000.
_BANDS, _ROWS = 16, 4


class Twin(NamedTuple):
    """A text and the one of another list that is most like it.

    Attributes:
        row: Its place in its own list.
        other: Place of the other text in the other list.
        similarity: Share of their shingles that both have.
    """

    row: int
    other: int
    similarity: float


def words(text: str) -> list[str]:
    """Words, numbers and signs of a text, without regard to case and spacing.

    >>> words("It's  3.50 Euro!")
    ['it', "'", 's', '3.50', 'euro', '!']
    """
    return _WORD.findall(text.casefold())


def shingles(text: str, size: int = 3) -> frozenset[int]:
    """Hashes of all runs of `size` words of a text; a shorter text is one run.

    >>> len(shingles("a b c d")), shingles("A b,c") == shingles("a  B , c")
    (2, True)
    """
    found = words(text)
    runs = range(max(len(found) - size + 1, 1))
    return frozenset(zlib.crc32(" ".join(found[i : i + size]).encode()) for i in runs)


def jaccard(left: frozenset[int], right: frozenset[int]) -> float:
    """Shared members over all members of two sets; two empty ones are equal.

    >>> jaccard(frozenset({1, 2, 3}), frozenset({2, 3, 4}))
    0.5
    """
    union = len(left | right)
    return len(left & right) / union if union else 1.0


def bands(sets: Sequence[frozenset[int]]) -> Int[Tensor, "text band"]:
    """Keys that two sets share the more of, the more alike they are: MinHash in bands.

    A key is made of the least of a set under 4 random orders (Broder, 1997), so two sets of
    Jaccard similarity s share each with probability s**4. Empty sets share all.
    """
    generator = torch.Generator().manual_seed(0)
    size = (3, _BANDS * _ROWS)
    # Odd factors and a sum that wraps around at 64 bits: an order of the set, for no division.
    factors, offsets, mixers = torch.randint(1 << 62, size, generator=generator) * 2 + 1
    least = torch.zeros(len(sets), _BANDS * _ROWS, dtype=torch.long)
    for row, members in enumerate(sets):
        if members:
            hashes = torch.tensor(list(members))[:, None]
            least[row] = (hashes * factors + offsets).amin(0)
    return (least * mixers).view(len(sets), _BANDS, _ROWS).sum(-1)


def near_duplicates(
    texts: Sequence[str], others: Sequence[str], threshold: float = 0.8, candidates: int = 8
) -> list[Twin]:
    """Texts of which `others` has one that is nearly the same.

    Compared are the sets of shingles, without those that stand in more than half of all texts:
    instructions that every prompt repeats. Bands of MinHash find the `candidates` most like each
    text, and their exact Jaccard similarity decides, so none that is named is less alike than
    said. A pair of similarity s is found with probability 1 - (1 - s**4)**16: .9998 at .8, .988
    at .7, .89 at .6.

    Args:
        texts: Texts to look for, such as held-out problems.
        others: Texts to look among, such as training problems.
        threshold: Least similarity, above 0 and at most 1.
        candidates: Texts whose exact similarity is taken.

    >>> near_duplicates(["One and two is?"], ["Two and two is?", "one  and two is ?"])
    [Twin(row=0, other=1, similarity=1.0)]
    """
    both = [shingles(text) for text in (*texts, *others)]
    if not texts or not others:
        return []
    counts = Counter(chain.from_iterable(both))
    common = {m for m, count in counts.items() if count > max(len(both) / 2, candidates)}
    kept = [members - common for members in both]
    keys = bands(kept).T.contiguous()
    ours, theirs = keys[:, : len(texts)], keys[:, len(texts) :]
    found = []
    for row in range(len(texts)):
        alike = (theirs == ours[:, row, None]).sum(0, dtype=torch.uint8)
        best = alike.topk(min(candidates, len(others))).indices.tolist()
        exact = [(jaccard(kept[row], kept[len(texts) + other]), -other) for other in best]
        similarity, other = max(exact)
        if similarity >= threshold:
            found.append(Twin(row, -other, similarity))
    return found
