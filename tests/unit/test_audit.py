"""The audit of step credit on a handful of real groups."""

from dataclasses import replace

import torch

from ssgrpo_lightning.bench import audit
from ssgrpo_lightning.bench.credit import JUDGE, Setting, compare, page, prepare, systems
from ssgrpo_lightning.engines import Sampling
from ssgrpo_lightning.functional import mixed_groups
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
    truth = audit.step_labels(rollouts, policy, task.step_truth)
    first = audit.first_error(truth, audit.tokens_per_step(rollouts) > 0)
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
    credits = {"twice": 2 * (shared + noise / 10), "noise": noise}
    ratio = audit.gradient_snr(policy, six, shared + noise / 10, credits)
    torch.testing.assert_close(ratio["twice"], ratio["exact"])  # scale is no signal
    assert ratio["noise"] < ratio["exact"]


def test_the_table_holds_every_system_and_the_oracle_knows_every_first_error(policy):
    task = ChainArithmetic()
    setting = prepare(task, policy, train=4, test=6, n=2)
    assert isinstance(setting, Setting)
    found = compare(setting, task)
    assert found.keys() == systems(task).keys()
    assert found["exact steps, hindsight"]["step_auc"] == 1.0
    assert found["exact steps, hindsight"]["first_error_top1"] == 1.0
    assert found["plain GRPO"]["snr_gain_db"] == 0.0
    assert "group confidence" in page(found, "lead")
