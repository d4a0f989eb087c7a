"""Statistics of a comparison: few seeds, paired. Pure functions of numbers."""

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Z = 1.959964  # of a 95 % interval
DRAWS = 1000


class Estimate(NamedTuple):
    """A mean with what is known about its error; None where the seeds are too few to say."""

    mean: float
    error: float | None = None
    """Standard error."""
    interval: tuple[float, float] | None = None
    """95 % interval."""
    pairs: int = 0
    """Numbers it is the mean of."""

    @property
    def sign(self) -> int:
        """1 or -1 where the interval excludes 0, else 0."""
        if self.interval is None:
            return 0
        return int(self.interval[0] > 0) - int(self.interval[1] < 0)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Probability that one of k samples is right, without bias: 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. (2107.03374), equation 1.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def final_accuracy(accuracies: Sequence[float]) -> float:
    """Mean of the last two evaluations: one alone is noisy.

    >>> final_accuracy([0.1, 0.5, 0.7])
    0.6
    """
    last = accuracies[-2:]
    return sum(last) / len(last)


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest in squares (pool adjacent violators).

    Its end is at least the mean of any number of last values.

    >>> rising([1.0, 3.0, 2.0, 4.0])
    [1.0, 2.5, 2.5, 4.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, many = blocks.pop()
            mean = (mean * count + before * many) / (count + many)
            count += many
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def crossing(xs: Sequence[float], ys: Sequence[float], level: float) -> float:
    """Where the curve first reaches a level, as `rising` smooths it; infinity where it never does.

    Between two points the curve is straight.

    >>> crossing([0, 10, 20], [0.0, 0.4, 0.8], 0.6)
    15.0
    >>> crossing([0, 10, 20], [0.0, 0.4, 0.8], 0.9)
    inf
    """
    smooth = rising(ys)
    for i, (x, y) in enumerate(zip(xs, smooth, strict=True)):
        if y >= level - 1e-12:
            if i == 0:
                return float(x)
            share = (level - smooth[i - 1]) / (y - smooth[i - 1])
            return xs[i - 1] + share * (x - xs[i - 1])
    return math.inf


@cache
def resamples(sizes: tuple[int, ...], draws: int = DRAWS) -> list[list[list[int]]]:
    """Bootstrap draws within strata: indices into each of them.

    A draw has one index fewer than its stratum, which makes the variance of its mean that of the
    sample's mean even for few seeds (Rao and Wu, 1988). A stratum of one is drawn as it is.
    """
    rng = random.Random(0)
    return [[rng.choices(range(n), k=max(1, n - 1)) for n in sizes] for _ in range(draws)]


def bootstrap(
    strata: Sequence[Sequence[T]], statistic: Callable[[list[list[T]]], float]
) -> tuple[float, float] | None:
    """95 % percentile interval of a statistic of strata; None where a stratum has one member.

    An end may be infinite; draws where the statistic is NaN are left out.
    """
    if not strata or min(map(len, strata)) < 2:
        return None
    found = [
        statistic([[stratum[i] for i in rows] for stratum, rows in zip(strata, draw, strict=True)])
        for draw in resamples(tuple(map(len, strata)))
    ]
    found = sorted(value for value in found if not math.isnan(value))
    if not found:
        return None
    return found[int(0.025 * (len(found) - 1))], found[math.ceil(0.975 * (len(found) - 1))]


def pooled(strata: Sequence[Sequence[float]]) -> float:
    """Mean over strata of their means: a setting counts the same however many seeds it has.

    >>> pooled([[1.0, 3.0], [5.0]])
    3.5
    """
    return sum(sum(stratum) / len(stratum) for stratum in strata) / len(strata)


def estimate(strata: Sequence[Sequence[float]]) -> Estimate | None:
    """Pooled mean of numbers, such as paired differences, in strata; None where there are none.

    The interval is the bootstrap's over the numbers of each stratum, widened from the normal to
    Student's t, without which few seeds exclude 0 too often.
    """
    strata = [stratum for stratum in strata if stratum]
    if not strata:
        return None
    mean, pairs = pooled(strata), sum(map(len, strata))
    found = bootstrap(strata, pooled)
    if found is None:
        return Estimate(mean, pairs=pairs)
    wider = student(pairs - len(strata)) / Z
    interval = (mean + (found[0] - mean) * wider, mean + (found[1] - mean) * wider)
    return Estimate(mean, pooled_error(strata), interval, pairs)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of a mean.

    >>> standard_error([1.0, 3.0])
    1.0
    """
    mean, n = sum(values) / len(values), len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n)


def pooled_error(strata: Sequence[Sequence[float]]) -> float | None:
    """Standard error of `pooled`; None where a stratum has one member."""
    if not strata or min(map(len, strata)) < 2:
        return None
    return math.hypot(*map(standard_error, strata)) / len(strata)


def student(freedom: int) -> float:
    """Quantile .975 of Student's t (Fisher and Cornish, 1960), 1 % low at 3 degrees of freedom.

    >>> round(student(10), 2)
    2.23
    """
    powers = {k: Z**k for k in (1, 3, 5, 7)}
    first = (powers[3] + powers[1]) / 4
    second = (5 * powers[5] + 16 * powers[3] + 3 * powers[1]) / 96
    third = (3 * powers[7] + 19 * powers[5] + 17 * powers[3] - 15 * powers[1]) / 384
    return Z + first / freedom + second / freedom**2 + third / freedom**3


def band(curves: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """Mean of curves at each of their points, with the ends of its bootstrap interval.

    A single curve is its own interval.
    """
    points = []
    for values in zip(*curves, strict=True):
        mean = sum(values) / len(values)
        points.append((mean, *(bootstrap([values], pooled) or (mean, mean))))
    return points


def usable_range(finals: dict[float, float], margin: float = 0.05) -> tuple[float, float]:
    """Lowest and highest rate whose final accuracy is within a margin of the best.

    >>> usable_range({1e-4: 0.60, 2e-4: 0.70, 4e-4: 0.66})
    (0.0002, 0.0004)
    """
    usable = [r for r, value in finals.items() if value >= max(finals.values()) - margin - 1e-12]
    return min(usable), max(usable)
