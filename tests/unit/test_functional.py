"""Numbers one can do by hand, and invariants of the maths."""

import math

import pytest
import torch

from ssgrpo_lightning import functional as f

NAN = float("nan")
ONE_GROUP = torch.zeros(4, dtype=torch.long)


def test_advantages_of_one_success_in_four_are_finite_and_bounded():
    # mean .25, deviations .75 and -.25, unbiased deviation .5
    advantages = f.group_advantages(torch.tensor([1.0, 0, 0, 0]), ONE_GROUP)
    torch.testing.assert_close(advantages, torch.tensor([0.75, -0.25, -0.25, -0.25]) / 0.5001)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.35, 0.4, 1 / 3])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_have_advantage_exactly_zero(reward, scale):
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    rewards = torch.tensor([reward] * 3 + [1.0, 0.0, 1.0])
    advantages = f.group_advantages(rewards, group, scale)
    assert (advantages[:3] == 0).all()
    assert (advantages[3:] != 0).all()


def test_nearly_equal_rewards_stay_bounded():
    rewards = torch.tensor([0.35, 0.35 + 1e-6, 0.35, 0.35])
    assert f.group_advantages(rewards, ONE_GROUP).abs().max() < 1


def test_a_rollout_without_verdict_has_no_advantage_and_leaves_the_statistics():
    with_none = f.group_advantages(torch.tensor([1.0, 0, 0, NAN]), ONE_GROUP)
    without = f.group_advantages(torch.tensor([1.0, 0, 0]), ONE_GROUP[:3])
    torch.testing.assert_close(with_none, torch.cat([without, torch.zeros(1)]))


@pytest.mark.parametrize("rewards", [[NAN] * 4, [1.0, NAN, NAN, NAN]])
def test_a_group_with_one_or_no_verdict_is_zero_and_not_nan(rewards):
    assert (f.group_advantages(torch.tensor(rewards), ONE_GROUP) == 0).all()
    assert f.clipped_baseline(torch.tensor(rewards), ONE_GROUP).isfinite().all()


def test_groups_are_told_by_number():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0])
    together = f.group_advantages(rewards, ONE_GROUP)
    apart = f.group_advantages(rewards, torch.tensor([0, 0, 1, 1]))
    assert (together != 0).all() and (apart == 0).all()


def test_advantages_ignore_scale_and_order():
    torch.manual_seed(0)
    rewards, group = torch.rand(12), torch.arange(3).repeat_interleave(4)
    order = torch.randperm(12)
    plain = f.group_advantages(rewards, group)
    torch.testing.assert_close(f.group_advantages(rewards[order], group[order]), plain[order])
    torch.testing.assert_close(
        f.group_advantages(rewards * 0.5 + 0.1, group), plain, atol=2e-3, rtol=2e-3
    )


def test_pool_then_spread_keeps_a_constant():
    step = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, -1, 0, 0, -1, -1]])
    pooled = f.pool_steps(torch.full((2, 6), 3.0), step, 3, "mean")
    assert pooled.tolist() == [[3, 3, 3], [3, 0, 0]]
    assert (f.spread_steps(pooled, step) == 3.0 * (step >= 0)).all()


def test_mean_one_keeps_the_mass_of_tokens():
    torch.manual_seed(0)
    weights, lengths = torch.rand(5, 4), torch.randint(0, 9, (5, 4))
    normal = f.mean_one(weights, lengths)
    torch.testing.assert_close((normal * lengths).sum(1), lengths.sum(1).float())


def test_sign_aware_blames_the_unsound_step_of_a_failure():
    scores = torch.tensor([[0.9, 0.2]])
    assert f.sign_aware(scores, torch.tensor([-1.0]))[0].argmax() == 1
    assert f.sign_aware(scores, torch.tensor([1.0]))[0].argmax() == 0


def test_value_gains_telescope():
    torch.manual_seed(0)
    values, baseline = torch.rand(3, 5), torch.rand(3)
    gains = f.value_gains(values, baseline, torch.ones(3, 5, dtype=torch.bool))
    torch.testing.assert_close(gains.sum(1), values[:, -1] - baseline)


def test_gate_zero_is_one_exactly_and_gate_one_is_the_weight():
    weights = torch.tensor([[0.1, 3.7, 1e-30, 1e30]])
    assert (f.gated(weights, 0.0) == 1).all()
    torch.testing.assert_close(f.gated(weights[:, :2], 1.0), weights[:, :2])


def test_windows_average_long_rollouts_only_and_keep_their_mass():
    weights = torch.tensor([[1.0, 2.0, 3.0, 6.0], [1.0, 2.0, 3.0, 6.0]])
    lengths = torch.tensor([[300, 300, 300, 4200], [300, 300, 300, 300]])
    result = f.window_mean(weights, lengths, window=512, longer_than=5000)
    # Steps start at 0, 300, 600, 900: windows 0, 0, 1, 1.
    heavy = (3 * 300 + 6 * 4200) / 4500
    torch.testing.assert_close(result[0], torch.tensor([1.5, 1.5, heavy, heavy]))
    assert (result[1] == weights[1]).all()
    torch.testing.assert_close((result * lengths).sum(1), (weights * lengths).sum(1))


def test_clipped_surrogate_stops_where_it_should():
    logprobs = torch.tensor([[0.5, -0.5, 0.5, -0.5]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    loss = f.clipped_surrogate(logprobs, advantages, 0.2, 0.2)
    loss.sum().backward()
    # Pushing further up at A > 0, or further down at A < 0, has no gradient left.
    assert (logprobs.grad[0] == 0).tolist() == [True, False, False, True]
    torch.testing.assert_close(loss[0, 0], torch.tensor(-1.2))
    torch.testing.assert_close(loss[0, 2], torch.tensor(math.exp(0.5)))


def test_noisy_and_is_a_product_of_soundness():
    logits = torch.tensor([[0.0, 1.0, -2.0]])
    mask = torch.tensor([[True, True, False]])
    expected = torch.sigmoid(torch.tensor([0.0, 1.0])).prod()
    torch.testing.assert_close(f.noisy_and_logprob(logits, mask).exp(), expected[None])


def test_outcome_loss_is_cross_entropy():
    p = torch.tensor([0.1, 0.5, 0.9])
    rewards = torch.tensor([1.0, 0.0, 0.5])
    expected = torch.nn.functional.binary_cross_entropy(p, rewards, reduction="none")
    torch.testing.assert_close(f.outcome_loss(p.log(), rewards), expected)


def test_pairwise_compares_only_within_groups():
    z, rewards = torch.tensor([1.0, 0.0, 100.0]), torch.tensor([1.0, 0.0, 0.0])
    loss = f.pairwise_loss(z, rewards, torch.tensor([0, 0, 1]), margin=0.0)
    pair = math.log1p(math.exp(-1.0))
    torch.testing.assert_close(loss, torch.tensor([pair, pair, 0.0]))
