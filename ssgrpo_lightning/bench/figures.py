"""Figures of step credit: detection, calibration, correlation, all under weights.

A weight counts how often an entry was drawn. Its leading axis, if it has one, holds bootstrap
draws, and the result then has one figure a draw. NaN stands where a figure is not defined.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Weight = Float[Tensor, "*draw n"]
Figure = Float[Tensor, "*draw"]
Scores = Float[Tensor, " n"]
Labels = Bool[Tensor, " n"]
BINS = 10


def _summed(weight: Tensor, kind: Int[Tensor, " n"], kinds: int) -> Tensor:
    """Weight of each kind of entry."""
    return weight.new_zeros(*weight.shape[:-1], kinds).index_add(-1, kind, weight)


def _by_score(scores: Scores, positive: Labels, weight: Weight) -> tuple[Tensor, Tensor]:
    """Weight of the positives and of the negatives at each distinct score, lowest first."""
    distinct, kind = scores.unique(return_inverse=True)
    parts = (weight * positive, weight * ~positive)
    first, second = (_summed(part, kind, len(distinct)) for part in parts)
    return first, second


def auc(scores: Scores, positive: Labels, weight: Weight) -> Figure:
    """Share of (positive, negative) pairs that the scores rank rightly; ties count half.

    >>> scores, positive = torch.tensor([.9, .2, .5, .2]), torch.tensor([True, False, False, True])
    >>> auc(scores, positive, torch.ones(4))
    tensor(0.6250)
    """
    won, lost = _by_score(scores, positive, weight)
    below = lost.cumsum(-1) - lost / 2
    return (won * below).sum(-1) / (won.sum(-1) * lost.sum(-1))


def average_precision(scores: Scores, positive: Labels, weight: Weight) -> Figure:
    """Area under the steps of precision over recall: mean precision at each positive.

    Entries of equal score are found together. A detector that knows nothing has the share of
    positives.

    >>> scores, positive = torch.tensor([.9, .8, .7, .1]), torch.tensor([True, False, True, False])
    >>> average_precision(scores, positive, torch.ones(4))  # (1/1 + 2/3) / 2
    tensor(0.8333)
    """
    right, wrong = (part.flip(-1) for part in _by_score(scores, positive, weight))
    found = right.cumsum(-1)
    precision = found / (found + wrong.cumsum(-1)).clamp(min=1e-9)
    return (right * precision).sum(-1) / right.sum(-1)


def reliability(
    scores: Scores, truth: Labels, weight: Weight
) -> tuple[Float[Tensor, "*draw bin"], Float[Tensor, "*draw bin"], Float[Tensor, "*draw bin"]]:
    """Mean score, share that is true, and weight, in ten bins of equal width over [0, 1].

    >>> said, true, often = reliability(torch.tensor([.92, .98, .11]),
    ...     torch.tensor([True, False, False]), torch.ones(3))
    >>> said[[1, 9]], true[[1, 9]], often[[1, 9]]
    (tensor([0.1100, 0.9500]), tensor([0.0000, 0.5000]), tensor([1., 2.]))
    """
    kind = (scores * BINS).long().clamp(0, BINS - 1)
    often = _summed(weight, kind, BINS)
    said, true = (_summed(weight * x, kind, BINS) / often for x in (scores, truth.float()))
    return said, true, often


def calibration_error(scores: Scores, truth: Labels, weight: Weight) -> Figure:
    """Mean distance of score and truth over the bins, by weight: expected calibration error.

    Source: Guo et al. (1706.04599) eq. 3.

    >>> calibration_error(torch.tensor([.9, .9, .2]), torch.tensor([True, False, False]),
    ...     torch.ones(3))  # 2/3 of |.9 - .5| and 1/3 of |.2 - 0|
    tensor(0.3333)
    """
    said, true, often = reliability(scores, truth, weight)
    return ((said - true).abs().nan_to_num() * often).sum(-1) / often.sum(-1)


def correlation(x: Scores, y: Scores, weight: Weight) -> Figure:
    """Correlation under weights; NaN where one of them does not vary.

    >>> w = torch.tensor([1., 1., 2.])
    >>> correlation(torch.tensor([0., 1., 1.]), torch.tensor([0., 2., 2.]), w)
    tensor(1.)
    """
    total = weight.sum(-1, keepdim=True)
    x, y = (v - (weight * v).sum(-1, keepdim=True) / total for v in (x, y))
    norm = ((weight * x * x).sum(-1) * (weight * y * y).sum(-1)).sqrt()
    return torch.where(norm > 1e-9, (weight * x * y).sum(-1) / norm, torch.nan)


def mean(x: Scores, weight: Weight) -> Figure:
    """Mean under weights.

    >>> mean(torch.tensor([1., 4.]), torch.tensor([2., 1.]))
    tensor(2.)
    """
    return (weight * x).sum(-1) / weight.sum(-1)


def credit_ratio(mass: Scores, tokens: Scores, on: Labels, weight: Weight) -> Figure:
    """Share of the credit that lies on some entries, over their share of the tokens: 1 is uniform.

    >>> mass, tokens = torch.tensor([1., 3., 0.]), torch.tensor([1., 1., 2.])
    >>> credit_ratio(mass, tokens, torch.tensor([False, True, False]), torch.ones(3))
    tensor(3.)
    """
    shares = [(weight * x * on).sum(-1) / (weight * x).sum(-1) for x in (mass, tokens)]
    return shares[0] / shares[1]


def pairs_ranked(
    z: Float[Tensor, " rollout"], rewards: Float[Tensor, " rollout"], group: Int[Tensor, " rollout"]
) -> tuple[Float[Tensor, " group"], Float[Tensor, " group"]]:
    """Pairs of a better and a worse rollout that `z` ranks rightly, and all, of each group.

    The quotient of their sums is the AUC within groups; ties count half.

    >>> r, g = torch.tensor([1., 0., 0., 1.]), torch.tensor([0, 0, 0, 1])
    >>> pairs_ranked(torch.tensor([2., 1., 3., 0.]), r, g)
    (tensor([1., 0.]), tensor([2., 0.]))
    """
    better = (group[:, None] == group) & (rewards[:, None] > rewards)
    right = (z[:, None] > z).float() + 0.5 * (z[:, None] == z).float()
    count = int(group.max()) + 1
    return (
        _summed((right * better).sum(1), group, count),
        _summed(better.sum(1).float(), group, count),
    )


def learnt_by_key(
    seen: Int[Tensor, " n"], reward: Scores, asked: Int[Tensor, " rollout"]
) -> Float[Tensor, " rollout"]:
    """Mean reward of what was seen with the same key; that of all where none was.

    A detector of one feature, such as the number of steps, without a network.

    >>> learnt_by_key(torch.tensor([3, 3, 4]), torch.tensor([1., 0., 1.]), torch.tensor([4, 3]))
    tensor([1.0000, 0.5000])
    """
    kinds = int(max(seen.max(), asked.max())) + 1
    often, total = (_summed(x, seen, kinds) for x in (torch.ones_like(reward), reward))
    return torch.where(often > 0, total / often, reward.mean())[asked]


def bootstrap(groups: int, draws: int, seed: int = 0) -> Float[Tensor, "draw group"]:
    """How often each group is drawn: once in the first row, then with replacement.

    >>> bootstrap(3, 2).shape, bootstrap(3, 2)[0], bootstrap(3, 2).sum(1)
    (torch.Size([3, 3]), tensor([1., 1., 1.]), tensor([3., 3., 3.]))
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(groups, (draws, groups), generator=generator)
    counts = torch.zeros(draws, groups).scatter_add(1, drawn, torch.ones(draws, groups))
    return torch.cat([torch.ones(1, groups), counts])


def interval(draws: Sequence[float] | Float[Tensor, " draw"]) -> tuple[float, float] | None:
    """The middle 95 % of the draws; None where they are not numbers.

    >>> interval(torch.arange(101.))
    (2.5, 97.5)
    """
    known = torch.as_tensor(draws)
    known = known[known.isfinite()].double()
    if not len(known):
        return None
    low, high = known.quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
    return low, high
