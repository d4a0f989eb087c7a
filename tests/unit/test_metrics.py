"""Metrics one can do by hand."""

import pytest
import torch

from ssgrpo_lightning.credit import Broadcast, outcome_scores
from ssgrpo_lightning.metrics import (
    Accuracy,
    credit_sums,
    ranking_accuracy,
    rollout_sums,
    variance_parts,
    weight_entropy,
    wilson_interval,
)

NAN = float("nan")


def test_entropy_of_weights():
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[2, 1:] = False
    weights = torch.tensor([[2.0] * 4, [1.0, 1.0, 0.0, 0.0], [1.0] * 4])
    entropy = weight_entropy(weights, mask)
    torch.testing.assert_close(entropy[:2], torch.tensor([1.0, 0.5]))
    assert entropy[2].isnan()  # one step has nothing to share


def test_variance_share_sees_the_collapse_that_entropy_does_not():
    mask = torch.ones(2, 2, dtype=torch.bool)
    collapsed = torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    assert (weight_entropy(collapsed, mask) == 1).all()
    assert variance_parts(collapsed, mask)[0] == 0


def value(pair):
    return float(pair[0] / pair[1])


def test_dead_groups_are_counted_per_group_whatever_the_scaling(make_rollouts):
    # Groups: mixed, all right, all without a verdict.
    rewards = [1.0, 0.0, 1.0, 1.0, None, None]
    sums = rollout_sums(make_rollouts(rewards, group=[0, 0, 1, 1, 2, 2]))
    assert value(sums["frac_reward_zero_std"]) == pytest.approx(1 / 3)
    assert value(sums["reward"]) == 0.75
    assert value(sums["verifier/none_frac"]) == pytest.approx(2 / 6)
    assert value(sums["reward_var_within_group"]) == pytest.approx(0.5 * 2 / 6)


def test_distinct_completions_per_group(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0])
    assert value(rollout_sums(rollouts)["group/distinct_completions"]) == 2.0
    same = rollouts.select(torch.tensor([0, 0, 2, 3]))
    assert value(rollout_sums(same)["group/distinct_completions"]) == 1.5


def test_credit_on_the_most_frequent_texts(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0])
    scores = outcome_scores(rollouts)
    rule = Broadcast()
    sums = credit_sums(rollouts, scores, rule.weights(scores), rule(scores))
    assert value(sums["step/top10_text_share"]) == pytest.approx(
        1
    )  # there are no more than ten texts
    assert value(sums["step/adv_mass_ratio"]) == pytest.approx(1)
    assert value(sums["step/effective_tokens"]) == 1
    quarters = [value(sums[f"step/advantage_quarter{q}"]) for q in (1, 2, 3, 4)]
    assert max(quarters) - min(quarters) < 1e-6  # plain GRPO knows no positions


def test_ranking_within_groups_only():
    rewards, group = torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([0, 0, 1, 1])
    right, pairs = ranking_accuracy(torch.tensor([2.0, 1.0, 0.0, 0.5]), rewards, group)
    assert (right, pairs) == (1, 2)
    right, pairs = ranking_accuracy(torch.zeros(4), rewards, group)
    assert (right, pairs) == (1, 2)  # ties count half


def test_accuracy_and_its_interval():
    accuracy = Accuracy()
    accuracy.update(torch.tensor([1.0, 0.0, NAN, 0.5]))
    result = accuracy.compute()
    assert result["accuracy"] == 0.25
    assert result["low"] < 0.25 < result["high"]
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(0, 10)
    assert low == 0 and 0.25 < high < 0.31
