"""The audit of step credit on a handful of real groups."""

import json
from dataclasses import replace

import pytest
import torch

from ssgrpo_lightning.bench import audit
from ssgrpo_lightning.bench.credit import compare, systems
from ssgrpo_lightning.bench.credit_page import page
from ssgrpo_lightning.bench.measure import JUDGE, Setting, describe, prepare
from ssgrpo_lightning.engines import Sampling
from ssgrpo_lightning.functional import mixed_groups
from ssgrpo_lightning.metrics import first_error
from ssgrpo_lightning.rollouts import step_labels
from ssgrpo_lightning.tasks import ChainArithmetic


def test_exact_gains_add_up_to_the_outcome(policy, rollouts):
    gains = audit.exact_gains(policy, rollouts, JUDGE, Sampling(48), repeats=2)
    # Before the first step the value is that of the prompt: one number in each group.
    start = rollouts.rewards - gains.sum(1)
    assert ((start >= 0) & (start <= 1)).all()
    for group in rollouts.group.unique():
        assert len(start[rollouts.group == group].unique()) == 1


def test_steps_without_a_future_change_nothing(policy, rollouts, task):
    """After an error hardly anything can be lost any more."""
    gains = audit.exact_gains(policy, rollouts, JUDGE, Sampling(48), repeats=4)
    truth = step_labels(rollouts, policy, task.step_truth)
    first = first_error(truth, audit.tokens_per_step(rollouts) > 0)
    wrong = (first >= 0) & (rollouts.rewards == 0)
    at_error = gains[wrong].gather(1, first[wrong][:, None]).mean()
    later = torch.arange(gains.shape[1]) > first[:, None]
    assert at_error < gains[wrong][later[wrong]].mean() < 0.05


def test_a_direction_that_all_groups_share_has_more_signal_than_noise_has(policy, rollouts):
    # One mixed group, six times: what its credit has in common is all signal.
    first = mixed_groups(rollouts.rewards, rollouts.group).nonzero()[0, 0]
    group = (rollouts.group == rollouts.group[first]).nonzero()[:, 0]
    six = replace(
        rollouts.select(group.repeat(6)), group=torch.arange(6).repeat_interleave(len(group))
    )
    shared = six.rewards[:, None].expand(len(six), six.steps) - 0.5
    noise = torch.randn(shared.shape, generator=torch.Generator().manual_seed(0))
    credit = shared + noise / 10
    found = audit.gradients(policy, six, credit, [2 * credit, noise], blocks=4)
    exact, twice, noisy = audit.snr(found, torch.ones(1, 4))[0]
    torch.testing.assert_close(twice, exact, rtol=1e-4, atol=0)  # scale is no signal
    assert noisy < exact
    # A block drawn twice is as good as each drawn twice; the blocks alone decide.
    torch.testing.assert_close(audit.snr(found, torch.full((1, 4), 2.0))[0, 0], exact)


def test_the_signal_to_noise_ratio_of_two_blocks_by_hand():
    """Gradients (3, 4) and (1, 0) of one group each: no variance, so two groups in the second."""
    sums = torch.tensor([[[3.0, 4.0], [2.0, 0.0]]])  # the second block: (2, 1) and (0, -1)
    found = audit.Gradients(
        own=sums @ sums.transpose(1, 2),
        exact=sums @ sums[0].T,
        squares=torch.tensor([[25.0 + 11.0, 6.0]]),
        groups=torch.tensor([1.0, 2.0]),
    )
    # First: along (1, 0) it is 3, noise 36 - 25. Second: (1, 0) along (.6, .8), noise 3 - 1.
    expected = (9 / 11 + 0.36 / 2) / 2
    assert audit.snr(found, torch.ones(1, 2)).item() == pytest.approx(expected)


def test_blame_is_shared_out_and_ties_share_the_choice():
    credit, tokens = torch.tensor([[-1.0, -1.0, 2.0], [0.0, 0.0, 0.0]]), torch.ones(2, 3)
    share = audit.blame_shares(credit, tokens)
    assert share.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    mask = torch.tensor([[True, True, True], [True, True, False]])
    assert audit.blamed_most(share, mask).tolist() == [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]


@pytest.fixture(scope="module")
def found(policy):
    task = ChainArithmetic()
    setting = prepare(task, policy, train=4, test=6, n=2)
    assert isinstance(setting, Setting)
    return {"about": describe(setting, task), **compare(setting, task, seeds=2)}


def test_the_table_holds_every_system_and_the_oracle_knows_every_first_error(found):
    rows = found["systems"]
    assert rows.keys() == systems(ChainArithmetic()).keys()
    oracle, plain = rows["exact steps, hindsight"], rows["plain GRPO"]
    for key in ("step_auc", "first_error_top1", "first_error_auprc"):
        assert oracle[key] == 1.0 and oracle[f"{key}_interval"] == (1.0, 1.0)
    assert oracle["calibration_error"] < 1e-4
    assert plain["snr_gain_db"] == 0.0 and plain["outcome_auc"] == 0.5
    # Nothing is idle in chain arithmetic, and JSON has no NaN.
    assert plain["idle_credit_ratio"] is None and json.dumps(found, allow_nan=False)


def test_what_learns_has_a_figure_a_seed_and_what_does_not_has_one(found):
    rows = found["systems"]
    seeds = rows["SS-GRPO (quickstart)"]["step_auc_seeds"]
    assert len(seeds) == 2 and len(rows["group statistics"]["step_auc_seeds"]) == 1
    assert rows["SS-GRPO (quickstart)"]["step_auc"] == pytest.approx(sum(seeds) / 2)


def test_what_each_system_buys_is_counted(found):
    calls = {name: row["calls_per_rollout"] for name, row in found["systems"].items()}
    assert calls["Monte Carlo"] > 1 and calls["process reward model"] >= 3
    assert calls["SS-GRPO (quickstart)"] == calls["critic"] == calls["plain GRPO"] == 0


def test_what_sees_the_prompt_alone_cannot_tell_rollouts_of_a_group_apart(found):
    assert found["shortcuts"]["prompt only"]["auc"] == 0.5
    assert found["shortcuts"].keys() >= {"length only", "number of steps only", "last step only"}


def test_the_page_shows_every_task(found):
    html = page({"One": found, "Two": found}, "lead")
    for text in ("Overview", "One: soundness", "Two: correlation", "group confidence", "last step"):
        assert text in html
    assert "Overview" not in page({"One": found}, "lead")
