"""Advantages by hand, by enumeration, and against TRL's statistics."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from ssgrpo_lightning import functional as f
from ssgrpo_lightning.advantages import (
    BatchWhitened,
    GroupRelative,
    MaxRl,
    NormaliseThenSum,
    PassAtK,
    WeighDuplicates,
    outcomes_of,
)
from ssgrpo_lightning.parallel import collectives, everyones
from ssgrpo_lightning.records import Outcomes, Verdict
from ssgrpo_lightning.rollouts import assemble

NAN = float("nan")


def outcomes(rewards, size=None, penalties=None, parts=None, copies=None):
    rewards = torch.tensor(rewards)
    size = size or len(rewards)
    group = torch.arange(len(rewards)) // size
    returns = rewards if penalties is None else rewards - torch.tensor(penalties)
    copies = torch.ones_like(group) if copies is None else torch.tensor(copies)
    return Outcomes(returns, rewards, group, copies, parts)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_leave_one_out_of_one_success_is_finite_and_bounded(scale):
    advantages = GroupRelative(scale, leave_one_out=True)(outcomes([1.0, 0, 0, 0]))
    expected = torch.tensor([1.0, -1 / 3, -1 / 3, -1 / 3])
    torch.testing.assert_close(advantages, expected / (1 if scale == "none" else 0.5001))


@pytest.mark.parametrize("reward", [0.35, 0.40, 1 / 3])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_are_exactly_zero_in_single_precision(reward, leave_one_out):
    for size in (3, 7, 8, 16):
        given = outcomes([reward] * size)
        assert (GroupRelative(leave_one_out=leave_one_out)(given) == 0).all()
        assert (BatchWhitened()(given) == 0).all()


def test_leave_one_out_is_the_difference_to_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 0.25, NAN, 0.5, 0.0])
    advantages = GroupRelative("none", leave_one_out=True)(outcomes(rewards.tolist()))
    for i in (0, 1, 3, 4):
        others = torch.tensor([rewards[j] for j in range(5) if j != i])
        torch.testing.assert_close(advantages[i], rewards[i] - others.nanmean())


def test_max_rl_by_hand():
    two = outcomes([1.0, 0, 0, 0, 1.0, 1.0, 1.0, 0.0], size=4)
    expected = torch.tensor([3.0, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1])
    torch.testing.assert_close(MaxRl()(two), expected)
    # No success, no gradient of the log of its chance, whatever was taken off.
    assert (MaxRl()(outcomes([0.0, 0, 0], penalties=[0.5, 0.0, 0.0])) == 0).all()


@pytest.mark.parametrize("k", [2, 3, 5, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    rewards = [0.5, 1.0, 0.0, 0.5, 0.25, 0.0]
    advantages = PassAtK(k)(outcomes(rewards))
    for i in range(6):
        others = [rewards[j] for j in range(6) if j != i]
        gains = [max(0.0, rewards[i] - max(s)) for s in combinations(others, k - 1)]
        assert float(advantages[i]) == pytest.approx(sum(gains) / len(gains), abs=1e-6)


def test_pass_at_k_has_the_gradient_of_pass_at_k():
    """Enumerated: one parameter, success of chance p; the mean of A d log p is d pass@k / dp."""
    p, size, k = 0.3, 4, 3
    total = 0.0
    for bits in range(2**size):
        rewards = [float(bits >> i & 1) for i in range(size)]
        chance = torch.tensor([p if r else 1 - p for r in rewards]).prod()
        slope = torch.tensor([1 / p if r else -1 / (1 - p) for r in rewards])
        total += float(chance * (PassAtK(k)(outcomes(rewards)) * slope).mean())
    # A leaves out one attempt of k, so it has the whole gradient k (1 - p)^(k - 1), over k.
    assert total == pytest.approx((1 - p) ** (k - 1), abs=1e-6)


def test_max_rl_has_the_gradient_of_the_truncated_log_likelihood():
    """Enumerated, for one parameter: the chance p of success, whose log has the gradient 1 / p."""
    p, size = 0.3, 4
    total = 0.0
    for bits in range(2**size):
        rewards = [float(bits >> i & 1) for i in range(size)]
        chance = torch.tensor([p if r else 1 - p for r in rewards]).prod()
        slope = torch.tensor([1 / p if r else -1 / (1 - p) for r in rewards])
        total += float(chance * (MaxRl()(outcomes(rewards)) * slope).mean())
    # 1 / p is the sum of all (1 - p)^j; the baseline costs the last of the group's four terms.
    assert total == pytest.approx(sum((1 - p) ** (j - 1) for j in range(1, size)), abs=1e-5)


def test_pass_at_1_is_not_pass_at_k():
    with pytest.raises(ValueError, match="PassAtK.k is 1, must be at least 2: for pass@1"):
        PassAtK(1)


def test_batch_whitened_divides_by_what_is_left_within_groups():
    # Differences 1/2, -1/2, 0, 0: their unbiased deviation is sqrt(1/2 / 3).
    advantages = BatchWhitened()(outcomes([1.0, 0.0, 1.0, 1.0], size=2))
    scale = (0.5 / 3) ** 0.5 + 1e-4
    torch.testing.assert_close(advantages, torch.tensor([0.5, -0.5, 0, 0]) / scale)


def test_duplicates_count_once_together():
    given = outcomes([1.0, 0.0, 0.0, 1.0], copies=[1, 2, 2, 1])
    plain = GroupRelative()(given)
    weighed = WeighDuplicates()(given)
    assert torch.equal(weighed, plain / torch.tensor([1, 2, 2, 1]))


def test_copies_are_told_by_tokens_and_group(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0], [[2, 1], [2, 1], [2, 1], [2]])
    same = rollouts.tokens[:1].expand_as(rollouts.tokens)
    same = torch.where(rollouts.sampled, same, rollouts.tokens)
    # Rows 0 and 1 are one group; row 3 is shorter, its tokens those of row 2 as far as they go.
    assert outcomes_of(replace(rollouts, tokens=same)).copies.tolist() == [2, 2, 1, 1]


class Two(L.LightningModule):
    """One of two ranks that hold the same outcomes in two groups each."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    @property
    def trainer(self):
        return SimpleNamespace(world_size=2, global_rank=self.rank)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("advantage", [BatchWhitened(), GroupRelative("batch"), GroupRelative()])
def test_statistics_over_the_batch_are_those_of_all_ranks(rank, advantage, monkeypatch):
    monkeypatch.setattr(collectives, "objects", lambda _, own: [own, own])
    everyone, rows = everyones(Two(rank), outcomes([1.0, 0.0, 1.0, 1.0], size=2))
    assert rows == slice(4 * rank, 4 * rank + 4)
    whole = outcomes([1.0, 0.0, 1.0, 1.0] * 2, size=2)
    assert torch.equal(everyone.group, whole.group)
    assert torch.equal(advantage(everyone)[rows], advantage(whole)[rows])


# --- several rewards ------------------------------------------------------------------------------


def test_normalise_then_sum_by_hand():
    parts = torch.tensor([[1.0, 10.0], [0.0, 30.0], [1.0, 0.0], [1.0, 0.0]])
    advantages = NormaliseThenSum((1.0, 0.5))(outcomes([0.5, 0.5, 1.0, 1.0], 2, parts=parts))
    unit = 0.5 / (0.5**0.5 + 1e-4)
    half = 0.5 * 10 / (10 * 2**0.5 + 1e-4)
    first = unit - half
    expected = first / ((2 * first**2 / 3) ** 0.5 + 1e-4)
    torch.testing.assert_close(advantages, torch.tensor([expected, -expected, 0.0, 0.0]))


@pytest.mark.parametrize(("weights", "parts"), [(None, None), ((1.0,), torch.ones(2, 2))])
def test_normalise_then_sum_says_what_it_lacks(weights, parts):
    with pytest.raises(ValueError, match="NormaliseThenSum .* parts: use a verifier"):
        NormaliseThenSum(weights)(outcomes([1.0, 0.0], parts=parts))


def test_parts_of_a_verdict_reach_the_rollouts(make_rollouts):
    made = make_rollouts([1.0, 0.0])
    verdicts = [Verdict(0.75, parts=(1.0, 0.5)), Verdict(0.0, parts=(0.0, None))]
    rollouts = assemble(
        prompts=[[3]] * 2,
        samples=_samples(made),
        steps=[[0], [0]],
        verdicts=verdicts,
        group=[0, 0],
        problems=made.problems,
        texts=made.texts,
        pad_id=0,
        policy_step=0,
    )
    torch.testing.assert_close(
        rollouts.parts, torch.tensor([[1.0, 0.5], [0.0, NAN]]), equal_nan=True
    )
    assert rollouts.select(torch.tensor([1])).parts.shape == (1, 2)
    assert made.parts is None


def _samples(rollouts):
    from ssgrpo_lightning.engines import Samples

    one = torch.ones(2, 1)
    return Samples(one.long(), torch.tensor([1, 1]), -one, one, torch.zeros(2).bool())


# --- TRL ------------------------------------------------------------------------------------------


@pytest.fixture
def nanstd():
    return pytest.importorskip("trl.trainer.utils").nanstd


@pytest.fixture
def mixed():
    """Four groups of four, each with two different rewards and one rollout without verdict."""
    rewards = torch.rand(16, generator=torch.Generator().manual_seed(0))
    rewards[::4] = NAN
    return rewards


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_scaling_is_that_of_trl(nanstd, mixed, scale):
    grouped = mixed.view(4, 4)
    centred = (grouped - grouped.nanmean(1, keepdim=True)).flatten()
    of_group = nanstd(grouped, dim=1).repeat_interleave(4)
    deviation = {"group": of_group + 1e-4, "batch": nanstd(mixed) + 1e-4, "none": 1.0}[scale]
    ours = GroupRelative(scale)(outcomes(mixed.tolist(), 4))
    torch.testing.assert_close(ours, (centred / deviation).nan_to_num(), atol=1e-6, rtol=1e-6)


def test_normalise_then_sum_is_that_of_trl(nanstd, mixed):
    other = torch.rand(16, generator=torch.Generator().manual_seed(1)) * 50
    other[5] = NAN  # a part without a verdict adds nothing, the rollout still counts
    other[::4] = NAN
    parts = torch.stack([mixed, other], 1)
    grouped = parts.view(4, 4, 2)
    normal = (grouped - grouped.nanmean(1, keepdim=True)) / (
        nanstd(grouped, dim=1, keepdim=True) + 1e-4
    )
    summed = (normal.view(16, 2) * torch.tensor([1.0, 0.3])).nansum(1)
    summed[mixed.isnan()] = NAN
    theirs = ((summed - summed.nanmean()) / (nanstd(summed) + 1e-4)).nan_to_num()
    ours = NormaliseThenSum((1.0, 0.3))(outcomes(mixed.tolist(), 4, parts=parts))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_equal_rewards_move_nothing_where_trls_rounding_does(nanstd):
    moved = []
    for size in range(3, 17):
        rewards = torch.full((size,), 0.35)
        theirs = (rewards - rewards.mean()) / (nanstd(rewards) + 1e-4)
        moved.append(bool((theirs != 0).any()))
        assert (f.group_advantages(rewards, torch.zeros(size).long()) == 0).all()
    assert any(moved)
