"""Surrogates, corrections and KL, by numbers one can do by hand and against enumeration."""

import math
import re

import pytest
import torch

from ssgrpo_lightning import functional as f
from ssgrpo_lightning.losses import (
    K1,
    K2,
    K3,
    AdaptiveBeta,
    BetaControl,
    Cispo,
    ClippedSurrogate,
    Correction,
    Dppo,
    DualClip,
    Gmpo,
    Grpo,
    Gspo,
    GspoToken,
    KlEstimator,
    KlInLoss,
    KlInReward,
    KlTerm,
    Luspo,
    NoCorrection,
    OffPolicyMask,
    RatioCorrected,
    Reduction,
    Reinforce,
    Sapo,
    SequenceMasked,
    SequenceTruncated,
    StraightThroughK3,
    Surrogate,
    TokenMasked,
    TokenTruncated,
    Vespo,
)
from tests.contracts.test_contracts import build, each, members

NOW = [[0.3, -0.1, 0.4, 0.0], [0.2, 0.0, 0.0, 7.0]]
MASK = torch.tensor([[True] * 4, [True, True, True, False]])


def case(advantages):
    """Log-probabilities whose log-ratios are `NOW`, the old ones, advantages and mask."""
    old = torch.full((2, 4), -1.0)
    logprobs = (old + torch.tensor(NOW)).requires_grad_()
    return logprobs, old, torch.tensor(advantages), MASK


EQUAL = [[1.0] * 4, [-2.0] * 4]
UNEQUAL = [[1.0, 0.0, -1.0, 2.0], [-2.0, 3.0, 0.5, 0.0]]


def gradient(surrogate, seen, reduction=Grpo()):
    """Of the reduced loss, for the log-probabilities."""
    logprobs, mask = seen[0], seen[3]
    loss = (reduction.weigh(mask) * surrogate(*seen)).sum() / reduction.count(mask)
    return torch.autograd.grad(loss, logprobs)[0]


# --- surrogates ---------------------------------------------------------------------------------


def test_dual_clip_bounds_what_a_negative_advantage_multiplies():
    logprobs = torch.tensor([[math.log(5.0), math.log(2.0), math.log(5.0)]], requires_grad=True)
    seen = logprobs, torch.zeros(1, 3), torch.tensor([[-1.0, -1.0, 1.0]]), torch.ones(1, 3).bool()
    losses = DualClip(delta=3.0)(*seen)
    torch.testing.assert_close(losses, torch.tensor([[3.0, 2.0, -1.2]]))
    losses.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, 2.0, 0.0]]))


def test_gspo_has_one_ratio_for_a_rollout_and_leaves_padding_out():
    wide = Gspo(clip_low=0.9, clip_high=9.0)
    losses = wide(*case(EQUAL))
    ratios = torch.tensor([math.exp(0.6 / 4), math.exp(0.2 / 3)])
    torch.testing.assert_close(losses[:, 0], -ratios * torch.tensor([1.0, -2.0]))
    clipped = Gspo()(*case(EQUAL))
    torch.testing.assert_close(clipped[0], torch.full((4,), -(1 + 4e-4)))


@pytest.mark.parametrize("clip", [0.9, 3e-4])
def test_gspo_token_is_gspo_where_a_rollout_shares_its_advantage(clip):
    seen = case(EQUAL)
    whole, token = Gspo(clip, clip), GspoToken(clip, clip)
    torch.testing.assert_close(whole(*seen), token(*seen))
    torch.testing.assert_close(gradient(whole, seen), gradient(token, seen))


def test_gspo_token_keeps_the_credit_that_gspo_spreads_evenly():
    seen = case(UNEQUAL)
    token, whole = (gradient(kind(0.9, 9.0), seen) for kind in (GspoToken, Gspo))
    ratio = torch.tensor([[math.exp(0.6 / 4)] * 4, [math.exp(0.2 / 3)] * 4])
    # Grpo: each rollout's mean, then the mean of the two.
    share = MASK / MASK.sum(1, keepdim=True) / 2
    torch.testing.assert_close(token, -ratio * torch.tensor(UNEQUAL) * share)
    torch.testing.assert_close(whole[0], token[0].mean().expand(4))
    assert GspoToken().keeps_credit and not Gspo().keeps_credit
    assert not OffPolicyMask(Gspo()).keeps_credit


def test_gmpo_clips_each_ratio_first_and_has_the_gradient_of_the_mean():
    seen = case(EQUAL)
    losses = Gmpo(clip_low=0.1, clip_high=0.35)(*seen)
    # A > 0 is clipped above: .3 -.1 .35 0; A < 0 is clipped below, where nothing is.
    torch.testing.assert_close(losses[0], torch.full((4,), -math.exp(0.55 / 4)))
    torch.testing.assert_close(losses[1, 0].item(), 2 * math.exp(0.2 / 3), check_dtype=False)
    logprobs, old, advantages, _ = seen
    mean = (logprobs - old)[0].clamp(max=0.35).mean().exp()  # the paper's loss of rollout 0
    exact = torch.autograd.grad(-mean * advantages[0, 0] / 2, logprobs)[0][0]
    torch.testing.assert_close(gradient(Gmpo(0.1, 0.35), seen)[0], exact)
    assert exact.tolist()[2] == 0 and exact.tolist()[0] < 0


def test_cispo_keeps_the_gradient_of_tokens_beyond_its_cap():
    seen = case(EQUAL)
    losses = Cispo(cap=1.2)(*seen)
    torch.testing.assert_close(losses[0, 0].item(), 1.2 * 0.7, check_dtype=False)
    losses.sum().backward()
    expected = -torch.tensor(NOW).exp().clamp(max=1.2) * torch.tensor(EQUAL)
    torch.testing.assert_close(seen[0].grad, expected)
    watched = Cispo(cap=1.2).watch(*seen)["cispo_clip_ratio"]
    assert watched[0].tolist() == [True, False, True, False] and not watched[1].any()


def test_dppo_stops_by_probability_not_by_ratio():
    # A rare token may grow tenfold; a likely one that has moved by .3 stops.
    old = torch.tensor([[0.001, 0.6, 0.6, 0.6]]).log()
    logprobs = torch.tensor([[0.01, 0.9, 0.3, 0.9]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    Dppo()(logprobs, old, advantages, torch.ones(1, 4).bool()).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-10.0, 0.0, 0.0, 1.5]]))


def test_sapo_is_smooth_and_gentler_on_tokens_it_pushes_up():
    seen = case(EQUAL)
    ratio = torch.tensor(NOW).exp()
    gate = torch.sigmoid(ratio - 1)
    gradient_of = -ratio * 4 * gate * (1 - gate)
    Sapo(1.0, 1.05)(*seen).sum().backward()
    torch.testing.assert_close(seen[0].grad[0], gradient_of[0])
    assert Sapo(1.0, 4.0)(*case(EQUAL))[1, 0] < 2 * 4 * torch.sigmoid(ratio[1, 0] - 1)


def test_vespo_weighs_a_rollout_by_its_whole_ratio():
    seen = case(EQUAL)
    w = math.exp(0.6)
    phi = w**2 * math.exp(3 * (1 - w))
    Vespo()(*seen).sum().backward()
    torch.testing.assert_close(seen[0].grad[0], torch.full((4,), -phi))
    w = math.exp(0.2)  # the padding of rollout 1 does not count
    assert seen[0].grad[1, 0].item() == pytest.approx(2 * w**3 * math.exp(2 * (1 - w)))


def test_vespo_survives_ratios_that_no_float_holds():
    logprobs = torch.full((2, 400), -1.0, requires_grad=True)
    old = torch.tensor([[-3.0], [1.0]]).expand(2, 400)
    ones = torch.ones(2, 400)
    losses = Vespo()(logprobs, old, ones, ones.bool())
    assert losses.isfinite().all() and (losses == 0).all()


def test_reinforce_knows_no_ratio():
    seen = case(UNEQUAL)
    Reinforce()(*seen).sum().backward()
    torch.testing.assert_close(seen[0].grad, -torch.tensor(UNEQUAL))


def test_the_off_policy_mask_drops_failures_that_the_policy_has_left():
    seen = case([[-1.0, 1.0, -1.0, 1.0], [-1.0] * 4])
    logprobs, old, advantages, mask = seen
    far = logprobs - torch.tensor([[1.0], [0.1]])  # means of old - now: .85 and about .03
    losses = OffPolicyMask(Reinforce(), threshold=0.5)(far, old, advantages, mask)
    assert (losses[0] == 0).tolist() == [True, False, True, False]
    torch.testing.assert_close(losses[1], far[1])


@each(Surrogate)
def test_tokens_outside_the_mask_change_nothing(member):
    surrogate = build(member)
    logprobs, old, advantages, mask = case(UNEQUAL)
    other = torch.where(mask, logprobs, logprobs - 2)
    ours, theirs = (surrogate(x, old, advantages, mask) for x in (logprobs, other))
    assert torch.equal(ours[mask], theirs[mask])


@each(Surrogate)
def test_a_token_without_advantage_has_no_gradient_of_its_own(member):
    surrogate = build(member)
    seen = case(UNEQUAL)
    got = gradient(surrogate, seen)
    assert got.isfinite().all() and (got[~MASK] == 0).all()
    if surrogate.keeps_credit:
        assert (got[torch.tensor(UNEQUAL) == 0] == 0).all()


@pytest.mark.parametrize(
    ("build_it", "message"),
    [
        (lambda: ClippedSurrogate(clip_low=1.0), "ClippedSurrogate has clip_low 1.0"),
        (lambda: Gspo(clip_high=0.0), "Gspo has clip_low 0.0003 and clip_high 0.0"),
        (lambda: DualClip(delta=1.1), "DualClip.delta is 1.1, must be greater than 1 . clip_high"),
        (lambda: Gmpo(clip_low=0.0), "Gmpo has clip_low 0.0"),
        (lambda: Cispo(cap=0.5), "Cispo.cap is 0.5"),
        (lambda: Dppo(clip_high=1.0), "Dppo has clip_low 0.2, clip_high 1.0"),
        (lambda: Sapo(tau_negative=0.0), "Sapo has tau_positive 1.0 and tau_negative 0.0"),
        (lambda: Vespo(power_negative=-1.0), "Vespo has .*power_negative -1.0"),
        (lambda: OffPolicyMask(threshold=0.0), "OffPolicyMask.threshold is 0.0"),
        (lambda: TokenMasked(cap=0.5), "TokenMasked has floor 0.0 and cap 0.5"),
        (lambda: AdaptiveBeta(target=0.0), "AdaptiveBeta has target 0.0"),
    ],
)
def test_bad_numbers_are_refused(build_it, message):
    with pytest.raises(ValueError, match=message):
        build_it()


@pytest.mark.parametrize(
    "base", [Surrogate, Reduction, Correction, KlEstimator, KlTerm, BetaControl]
)
def test_every_member_names_its_source(base):
    for member in members(base):
        # A paper, the year of one, the library whose definition it is, or a member it builds on.
        assert re.search(r"\d{4}|TRL|policy\.beta|whole rollout", member.__doc__), member


def test_luspo_is_gspo_times_length():
    seen = case(EQUAL)
    losses, mask = Gspo()(*seen), seen[3]
    whole = (Luspo().weigh(mask) * losses).sum() / Luspo().count(mask)
    torch.testing.assert_close(whole, (4 * losses[0, 0] + 3 * losses[1, 0]) / 2)


# --- corrections --------------------------------------------------------------------------------

GAP = torch.tensor([[1.0, -0.5, 0.5, 0.0], [-3.0, -0.6, 0.0, 9.0]])


def weighed(correction):
    return correction.weigh(correction.ratio(GAP, MASK))


def test_token_corrections_by_hand():
    assert (weighed(NoCorrection()) == 1).all()
    ratio = GAP.exp()
    truncated = weighed(TokenTruncated(floor=0.1, cap=2.0))
    torch.testing.assert_close(truncated[0], torch.tensor([2.0, *ratio[0, 1:]]))
    torch.testing.assert_close(truncated[1, 0].item(), 0.1, check_dtype=False)
    masked = weighed(TokenMasked(floor=0.1, cap=2.0))
    torch.testing.assert_close(masked[0], torch.tensor([0.0, *ratio[0, 1:]]))
    assert masked[1, 0] == 0


@pytest.mark.parametrize(
    ("mean", "first", "second"), [("sum", 1.0, -3.6), ("geometric", 0.25, -1.2)]
)
def test_sequence_corrections_by_name(mean, first, second):
    raw = SequenceTruncated(mean=mean).ratio(GAP, MASK)
    torch.testing.assert_close(raw[:, 0].log(), torch.tensor([first, second]))
    assert (raw == raw[:, :1]).all()
    truncated = weighed(SequenceTruncated(floor=0.5, cap=1.2, mean=mean))
    torch.testing.assert_close(truncated[:, 0], torch.tensor([1.2, 0.5]))
    masked = weighed(SequenceMasked(floor=0.2, cap=3.0, mean=mean))
    kept = math.exp(second) if math.exp(second) >= 0.2 else 0.0
    torch.testing.assert_close(masked[:, 0], torch.tensor([math.exp(first), kept]))


@each(Correction)
def test_an_engine_that_agrees_is_not_corrected(member):
    correction = build(member)
    assert (correction.weigh(correction.ratio(torch.zeros(2, 4), MASK)) == 1).all()


# --- KL, against enumeration over a vocabulary of three -------------------------------------------

REFERENCE = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
LOGITS = torch.tensor([1.0, 0.2, -0.4], dtype=torch.float64)


def expected(estimator, sampler=None):
    """Mean value, and mean gradient for the logits, over tokens that `sampler` draws."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)[None]
    old = logprobs.detach() if sampler is None else sampler.log()[None]
    estimates = estimator(logprobs, old, REFERENCE.log()[None])[0]
    mean = (old.exp()[0] * estimates).sum()
    return mean.detach(), torch.autograd.grad(mean, logits)[0]


def exact(forward=False):
    """KL(policy || reference), or the other way round, and its gradient for the logits."""
    logits = LOGITS.clone().requires_grad_()
    policy = logits.softmax(0)
    p, q = (REFERENCE, policy) if forward else (policy, REFERENCE)
    kl = (p * (p / q).log()).sum()
    return kl.detach(), torch.autograd.grad(kl, logits)[0]


def test_values_of_k1_k2_and_k3():
    kl, _ = exact()
    torch.testing.assert_close(expected(K1())[0], kl)
    torch.testing.assert_close(expected(K3())[0], kl)
    policy = LOGITS.softmax(0)
    half_square = (policy * (policy / REFERENCE).log().square()).sum() / 2
    torch.testing.assert_close(expected(K2())[0], half_square)  # biased, and known
    assert (half_square - kl).abs() > 0.01


def test_gradients_of_k1_k2_and_k3():
    _, gradient_of_kl = exact()
    torch.testing.assert_close(expected(K2())[1], gradient_of_kl)
    torch.testing.assert_close(expected(K1())[1], torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected(K3())[1], exact(forward=True)[1])
    assert not torch.allclose(expected(K3())[1], gradient_of_kl, atol=1e-2)
    for estimator in (
        K1(),
        K2(),
        K3(),
        StraightThroughK3(),
        RatioCorrected(),
        RatioCorrected(K1()),
    ):
        right = torch.allclose(expected(estimator)[1], gradient_of_kl)
        assert right is estimator.unbiased_gradient, estimator


def test_straight_through_k3_is_k3_in_value_and_k2_in_gradient():
    value, slope = expected(StraightThroughK3())
    torch.testing.assert_close(value, expected(K3())[0])
    torch.testing.assert_close(slope, expected(K2())[1])


@pytest.mark.parametrize("inner", [K1(), K3()])
def test_the_ratio_corrects_value_and_gradient_also_off_policy(inner):
    sampler = torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64)
    kl, gradient_of_kl = exact()
    value, slope = expected(RatioCorrected(inner), sampler)
    torch.testing.assert_close(value, kl)
    torch.testing.assert_close(slope, gradient_of_kl)
    assert not torch.allclose(expected(inner, sampler)[0], kl, atol=1e-3)


def test_kl_in_the_reward_is_the_sum_over_a_rollout():
    kl = torch.tensor([[0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 9.0]])
    torch.testing.assert_close(KlInReward().in_reward(kl, MASK), torch.tensor([1.0, 3.0]))
    assert (KlInReward().in_loss(kl, torch.ones(2, 4)) == 0).all()
    assert (KlInLoss().in_reward(kl, MASK) == 0).all()


def test_kl_on_dead_groups_is_a_choice():
    kl, advantages = torch.ones(2, 4), torch.tensor([[0.0, 0.5, 0.0, 0.0], [0.0] * 4])
    assert (KlInLoss().in_loss(kl, advantages) == 1).all()
    held = KlInLoss(holds_dead=False).in_loss(kl, advantages)
    assert held.sum(1).tolist() == [4, 0]


def test_k1_in_the_loss_is_warned_about():
    with pytest.warns(UserWarning, match="gradient is 0 on average"):
        KlInLoss(estimator=K1())


def test_beta_follows_its_target_and_no_faster_than_it_may():
    control = AdaptiveBeta(target=0.1, horizon=10)
    assert control.follow(1.0, 0.11) == pytest.approx(1.01)
    assert control.follow(1.0, 5.0) == pytest.approx(1.02)
    assert control.follow(1.0, 0.0) == pytest.approx(0.98)


# --- entropy ------------------------------------------------------------------------------------


def test_the_threshold_keeps_a_share_of_the_greatest():
    values = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7])
    for share, kept in ((0.2, 1), (0.4, 2), (0.5, 3), (1.0, 5)):
        assert int((values >= f.top_threshold(values, share)).sum()) == kept
    assert f.top_threshold(torch.zeros(0), 0.2) == math.inf
