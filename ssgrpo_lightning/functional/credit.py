"""Values of steps to weights of steps."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ssgrpo_lightning.functional.advantages import group_advantages
from ssgrpo_lightning.functional.shapes import Groups, PerRollout, PerStep, StepMask


def mean_one(weights: PerStep, lengths: Int[Tensor, "rollout step"]) -> PerStep:
    """Divide weights by their token-weighted mean over the rollout; all-zero weights become 1.

    Keeps the size of the update whatever the weights, so that the balance against KL and entropy
    terms does not drift with them.

    >>> mean_one(torch.tensor([[1., 3.], [0., 0.]]), torch.tensor([[1, 1], [2, 2]]))
    tensor([[0.5000, 1.5000],
            [1.0000, 1.0000]])
    """
    total = (weights * lengths).sum(1, keepdim=True)
    mean = total / lengths.sum(1, keepdim=True).clamp(min=1)
    return torch.where(total > 0, weights / mean.clamp(min=1e-12), 1.0)


def sign_aware(scores: PerStep, advantages: PerRollout) -> PerStep:
    """Blame the unsound steps of a failure: score where A > 0, 1 - score where A < 0.

    Source: OREAL (2502.06781) eq. 10.

    >>> sign_aware(torch.tensor([[.9, .2], [.9, .2]]), torch.tensor([1., -1.]))
    tensor([[0.9000, 0.2000],
            [0.1000, 0.8000]])
    """
    return torch.where(advantages[:, None] < 0, 1 - scores, scores)


def value_gains(values: PerStep, baseline: PerRollout, mask: StepMask) -> PerStep:
    """What each step did to the expected reward, ``D_t = V_t - V_{t-1}`` with ``V_0`` the baseline.

    Source: VinePPO (2410.01679) eq. 5 without the immediate reward; PAV (2410.08146).

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> value_gains(torch.tensor([[.75, .25]]), torch.tensor([.5]), m)
    tensor([[ 0.2500, -0.5000]])
    """
    before = torch.cat([baseline[:, None], values[:, :-1]], 1)
    return torch.where(mask, values - before, 0.0)


def step_advantages(
    values: PerStep, rewards: PerRollout, baseline: PerRollout, mask: StepMask
) -> PerStep:
    """Advantage of each step, ``A_t = V_t - V_{t-1}``, with the outcome for the last value.

    A rollout's sum is ``R - V_0`` whatever the values between. NaN in the last step of a rollout
    without a verdict. Source: VinePPO (2410.01679) eq. 5, the one reward at the end.

    >>> m = torch.ones(1, 2, dtype=torch.bool)
    >>> step_advantages(torch.tensor([[.75, .6]]), torch.tensor([0.]), torch.tensor([.5]), m)
    tensor([[ 0.2500, -0.7500]])
    """
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    return value_gains(torch.where(last, rewards[:, None], values), baseline, mask)


def gain_weights(
    gains: PerStep, advantages: PerRollout, k: float, floor: float, w_max: float
) -> PerStep:
    """Weight that grows with a gain in successes and a loss in failures, before the mean-1 step.

    ``w_t = clip(1 + k sign(A_i) D_t, floor, w_max)``; k = 0 is GRPO. Source: the recipe's own shape
    with OREAL's sign (2502.06781) and a difference for a level.

    >>> gain_weights(torch.tensor([[.25, -.5]]), torch.tensor([-1.]), k=4, floor=.1, w_max=4)
    tensor([[0.1000, 3.0000]])
    """
    return (1 + k * advantages.sign()[:, None] * gains).clamp(floor, w_max)


def gated(weights: PerStep, gate: float) -> PerStep:
    """Blend weights with 1: ``w <- 1 + g (w - 1)``; g = 0 gives exactly 1, plain GRPO.

    >>> gated(torch.tensor([[3., .5]]), .5)
    tensor([[2.0000, 0.7500]])
    """
    return 1 + gate * (weights - 1)


def window_mean(
    weights: PerStep, lengths: Int[Tensor, "rollout step"], window: int, longer_than: int
) -> PerStep:
    """In rollouts longer than `longer_than` tokens, average weights within windows of tokens.

    A step belongs to the window in which it starts; all steps of a window get their token-weighted
    mean. Shorter rollouts keep their weights. Source: the published recipe (windows of 512 over
    5,000 tokens).

    >>> w, n = torch.tensor([[1., 3., 5.]]), torch.tensor([[2, 2, 4]])
    >>> window_mean(w, n, window=4, longer_than=7)
    tensor([[2., 2., 5.]])
    """
    if not bool((lengths.sum(1) > longer_than).any()):
        return weights
    index = (lengths.cumsum(1) - lengths) // window
    shape = len(weights), int(index.max()) + 1
    tokens = weights.new_zeros(shape).scatter_add(1, index, lengths.to(weights.dtype))
    mass = weights.new_zeros(shape).scatter_add(1, index, weights * lengths)
    mean = (mass / tokens.clamp(min=1)).gather(1, index)
    long = lengths.sum(1, keepdim=True) > longer_than
    return torch.where(long & (lengths > 0), mean, weights)


def fall_shares(gains: PerStep) -> PerStep:
    """Share of each step in the falls of its rollout's value; 0 throughout where it never falls.

    Under a noisy-AND value ``V_t = V_0 prod_{u<=t} p_u`` this is Bayes' answer to which step was
    the first unsound one, given that one was: ``(1 - p_t) prod_{u<t} p_u`` over their sum.

    >>> fall_shares(torch.tensor([[.1, -.1, -.3], [.2, 0., 0.]]))
    tensor([[0.0000, 0.2500, 0.7500],
            [0.0000, 0.0000, 0.0000]])
    """
    falls = gains.clamp(max=0).abs()
    return falls / falls.sum(1, keepdim=True).clamp(min=1e-12)


def survival_gains(soundness: PerStep, mask: StepMask) -> PerStep:
    """What each step did to the chance of success: ``D_t = a_t F_{t+1} - a_{t-1} F_t``.

    ``a_t`` is the probability that all steps up to t are sound, ``F_t`` that of passing the places
    from t on, taken from the whole batch: a chain succeeds if no link breaks. Where no rollout
    succeeded it still tells the link that broke. Rates are drawn to 1/2 by one more rollout.

    >>> sound, m = torch.tensor([[1., 1.], [1., 0.], [0., 1.]]), torch.ones(3, 2, dtype=torch.bool)
    >>> survival_gains(sound, m)  # passed: 2.5 of 4 at the first place, 1.5 of 3 at the second
    tensor([[ 0.1875,  0.5000],
            [ 0.1875, -0.5000],
            [-0.3125,  0.0000]])
    """
    alive = torch.where(mask, soundness, 1.0).cumprod(1)
    before = torch.cat([torch.ones_like(alive[:, :1]), alive[:, :-1]], 1)
    passed = ((alive * mask).sum(0) + 0.5) / ((before * mask).sum(0) + 1)
    ahead = torch.cat([passed, passed.new_ones(1)]).flip(0).cumprod(0).flip(0)
    return torch.where(mask, alive * ahead[1:] - before * ahead[:-1], 0.0)


def whiten_by_place(x: PerStep, lengths: Int[Tensor, "rollout step"]) -> PerStep:
    """Subtract the mean of each place over the batch, divide by the deviation of all; by tokens.

    A place is the index of a step. Without the means, more steps would be a reward of their own.

    >>> whiten_by_place(torch.tensor([[1., 2.], [3., 2.]]), torch.tensor([[1, 1], [1, 1]]))
    tensor([[-1.4142,  0.0000],
            [ 1.4142,  0.0000]])
    """
    places = lengths.sum(0).clamp(min=1)
    centred = torch.where(lengths > 0, x - (x * lengths).sum(0) / places, 0.0)
    variance = (centred.square() * lengths).sum() / lengths.sum().clamp(min=1)
    return centred / variance.sqrt().clamp(min=1e-3)


def evidence_logit(confidence: PerStep, won: PerStep, lost: PerStep, doubt: Tensor) -> PerStep:
    """Logit of ``c + (1 - c) e``: a step is sound if it looks so or if it has proved so.

    ``c = sigmoid(confidence)``; ``e = won / (won + lost + doubt)`` is the share of successes among
    the other rollouts of the group with the same step, doubted by `doubt` failures. Without any
    the confidence stands.

    >>> x, won, lost = torch.tensor([[[0., 0.]], [[0., 2.]], [[0., 1.]]])
    >>> evidence_logit(x, won, lost, torch.tensor(1.)).sigmoid()
    tensor([[0.5000, 0.7500]])
    """
    odds = confidence.clamp(max=20).exp()
    return ((odds * (won + lost + doubt) + won) / (lost + doubt)).log()


def process_advantages(rewards: PerStep, mask: StepMask, group: Groups) -> PerStep:
    """Normalised rewards of a step and of all later ones, ``A_t = sum_{u>=t} (r_u - m) / s``.

    Mean m and deviation s are those of all steps of the group (`group_advantages` over steps);
    groups whose steps are all rewarded alike get 0. Source: DeepSeekMath (2402.03300) 4.1.3.

    Args:
        rewards: Reward of each step.
        mask: True where a step exists and counts.
        group: Group of each rollout.

    >>> r = torch.tensor([[1., 1.], [1., 0.]])  # m = .75, s = .5
    >>> process_advantages(r, torch.ones(2, 2).bool(), torch.tensor([0, 0]))
    tensor([[ 0.9998,  0.4999],
            [-0.9998, -1.4997]])
    """
    owner = group[:, None].expand(mask.shape)[mask]
    normal = group_advantages(rewards[mask], owner)
    placed = rewards.new_zeros(rewards.shape).masked_scatter(mask, normal)
    return torch.where(mask, placed.flip(1).cumsum(1).flip(1), 0.0)


def gae(
    values: PerStep,
    baseline: PerRollout,
    rewards: PerRollout,
    mask: StepMask,
    lam: float,
    gamma: float = 1.0,
) -> PerStep:
    """Generalised advantage ``A_t = sum_l (gamma lam)^l delta_{t+l}`` of each step.

    ``delta_t = r_t + gamma V_t - V_{t-1}``, with V_t the value after step t and V_0 the baseline.
    The reward R comes with the last step and nothing follows it: there ``delta = R - V_{t-1}``.
    Hence lam = 1 gives ``R - V_{t-1}`` (gamma 1) and lam = 0 gives delta_t. Rollouts without a
    verdict and steps that do not exist get 0. Source: GAE (1506.02438) eq. 16.

    >>> v, m, r = torch.tensor([[.5, .75]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([1.])
    >>> gae(v, torch.tensor([.25]), r, m, lam=0.)
    tensor([[0.2500, 0.5000]])
    >>> gae(v, torch.tensor([.25]), r, m, lam=.5)
    tensor([[0.5000, 0.5000]])
    """
    before = torch.cat([baseline[:, None], values[:, :-1]], 1)
    last = mask & ~F.pad(mask[:, 1:], (0, 1))
    after = torch.where(last, rewards[:, None], gamma * values)
    total = torch.where(mask & ~rewards.isnan()[:, None], after - before, 0.0)
    # Each pass doubles how far every sum reaches, so that the passes are logarithmic in the steps.
    reach, decay = 1, gamma * lam
    while reach < total.shape[1]:
        total = total + decay**reach * F.pad(total[:, reach:], (0, reach))
        reach *= 2
    return total


def lambda_returns(
    values: PerStep,
    baseline: PerRollout,
    rewards: PerRollout,
    mask: StepMask,
    lam: float,
    gamma: float = 1.0,
) -> Float[Tensor, "rollout prefix"]:
    """What the values of the prompt and of each prefix should have been, ``V_t + A_{t+1}``.

    One column more than there are steps: V_0 in front. After the last step it is the reward R;
    with lam = gamma = 1 it is R throughout. Rollouts without a verdict get NaN at the end.
    Source: the regression target of PPO (1707.06347) with `gae`.

    >>> v, m, r = torch.tensor([[.5, .75]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([1.])
    >>> lambda_returns(v, torch.tensor([.25]), r, m, lam=0.)
    tensor([[0.5000, 1.0000, 1.0000]])
    """
    before = torch.cat([baseline[:, None], values[:, :-1]], 1)
    returns = before + gae(values, baseline, rewards, mask, lam, gamma)
    return torch.where(F.pad(mask, (0, 1)), F.pad(returns, (0, 1)), rewards[:, None])


def whiten(x: PerStep, weights: PerStep) -> PerStep:
    """Shift and scale to a weighted mean of 0 and deviation of 1; 0 where the weight is 0.

    Source: the advantage normalisation of PPO implementations for language models.

    >>> whiten(torch.tensor([[1., 4., 9.]]), torch.tensor([[2., 1., 0.]]))
    tensor([[-0.7071,  1.4142,  0.0000]])
    """
    total = weights.sum().clamp(min=1e-12)
    centred = torch.where(weights > 0, x - (x * weights).sum() / total, 0.0)
    return centred * ((centred.square() * weights).sum() / total + 1e-8).rsqrt()
