"""What leaves the loss, what leaves the statistics, and what length costs."""

from dataclasses import replace

import pytest
import torch

from ssgrpo_lightning.advantages import GroupRelative, outcomes_of
from ssgrpo_lightning.metrics import rollout_sums
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.records import CreditedRollouts
from ssgrpo_lightning.shaping import MaskDead, MaskTruncated, SoftOverlong


@pytest.fixture
def module():
    return PolicyModule(torch.optim.SGD)


@pytest.fixture
def cut(make_rollouts):
    """Two groups; the last rollout of the first, a failure, was cut off by the budget."""
    rollouts = make_rollouts([1.0, 0.5, 0.0, 1.0, 1.0, 1.0])
    return replace(rollouts, truncated=torch.arange(6) == 2)


def advantages(rollouts):
    return GroupRelative("none")(outcomes_of(rollouts))


def test_overlong_costs_reward_and_not_the_estimators_target(make_rollouts):
    rollouts = make_rollouts([1.0, 1.0, 1.0, 0.0], [[16], [18], [20], [30]], group=[0] * 4)
    shaped = SoftOverlong(max_tokens=20, buffer=4, weight=0.5)(rollouts)
    assert shaped.returns.tolist() == [1.0, 0.75, 0.5, -0.5]
    assert shaped.rewards.tolist() == [1.0, 1.0, 1.0, 0.0]
    # Equal rewards of different lengths are no dead group any more.
    assert (advantages(shaped)[:3] != 0).any()


def test_truncated_rollouts_leave_numerator_and_denominator(module, cut):
    for shaping in (MaskTruncated(), MaskTruncated(in_statistics=False)):
        mask = module.learnt(shaping(cut))
        assert not mask[2].any() and torch.equal(mask[3:], cut.sampled[3:])
        # The divisor of every reduction counts the very tokens that may learn.
        assert float(module.reduction.count(mask)) == float(cut.sampled.sum() - 5)


def test_whether_truncated_rollouts_stay_in_the_statistics_is_a_choice(cut):
    stays = advantages(MaskTruncated()(cut))
    torch.testing.assert_close(stays[:3], torch.tensor([0.5, 0.0, -0.5]))
    leaves = advantages(MaskTruncated(in_statistics=False)(cut))
    torch.testing.assert_close(leaves[:3], torch.tensor([0.25, -0.25, 0.0]))


def test_a_masked_rollout_is_spared_the_forward_pass_with_an_advantage_of_its_own(module, cut):
    shaped = MaskTruncated()(cut)
    batch = CreditedRollouts(shaped, advantages(shaped)[:, None] * shaped.sampled)
    assert module.learns(batch).tolist() == [True, False, False, False, False, False]


def test_dead_groups_count_in_the_divisor_unless_masked(module, cut):
    assert module.learnt(cut)[3:].any()
    mask = module.learnt(MaskDead()(cut))
    assert not mask[3:].any() and torch.equal(mask[:3], cut.sampled[:3])


def test_masked_dead_groups_have_no_kl_either(cut):
    held = PolicyModule(torch.optim.SGD, beta=0.1)
    batch = CreditedRollouts(cut, torch.zeros(cut.tokens.shape))
    assert held.learns(batch).all()
    masked = CreditedRollouts(MaskDead()(cut), batch.advantages)
    assert held.learns(masked).tolist() == [True] * 3 + [False] * 3


def test_metrics_of_shapings_and_dead_groups(make_rollouts):
    rewards = [1.0, 1.0, 0.0, 0.0, 0.5, 0.5, 0.0, 1.0, None, None]
    rollouts = make_rollouts(rewards, group=[0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    shaped = MaskDead()(SoftOverlong(max_tokens=5, buffer=5)(rollouts))
    shares = {name: float(a / b) for name, (a, b) in rollout_sums(shaped).items() if float(b)}
    assert shares["group/all_one"] == pytest.approx(1 / 5)
    assert shares["group/all_zero"] == pytest.approx(1 / 5)
    assert shares["frac_reward_zero_std"] == pytest.approx(3 / 5)
    assert shares["shaping/penalty"] == 1.0
    assert shares["shaping/masked"] == pytest.approx(8 / 10)


@pytest.mark.parametrize("fields", [(4, 5, 1.0), (4, 0, 1.0), (4, 2, 0.0)])
def test_bad_overlong(fields):
    with pytest.raises(ValueError, match="SoftOverlong.* must be"):
        SoftOverlong(*fields)
