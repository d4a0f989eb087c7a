"""The audit of step credit on a handful of real groups."""

import torch

from ssgrpo_lightning.bench import audit
from ssgrpo_lightning.bench.credit import JUDGE, Setting, compare, page, prepare, systems
from ssgrpo_lightning.engines import Sampling
from ssgrpo_lightning.functional import mixed_groups
from ssgrpo_lightning.metrics import first_error
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
    first = first_error(truth, audit.tokens_per_step(rollouts) > 0)
    wrong = (first >= 0) & (rollouts.rewards == 0)
    at_error = gains[wrong].gather(1, first[wrong][:, None]).mean()
    later = torch.arange(gains.shape[1]) > first[:, None]
    assert at_error < gains[wrong][later[wrong]].mean() < 0.05


def test_the_exact_direction_has_more_signal_than_noise_has(policy, rollouts, task):
    gains = audit.exact_gains(policy, rollouts, JUDGE, Sampling(48), repeats=4)
    rows = mixed_groups(rollouts.rewards, rollouts.group).nonzero()[:, 0]
    noise = torch.randn(gains.shape, generator=torch.Generator().manual_seed(0))
    ratio = audit.gradient_snr(
        policy, rollouts.select(rows), gains[rows], {"twice": 2 * gains[rows], "noise": noise[rows]}
    )
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
