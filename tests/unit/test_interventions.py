"""One step of a success is changed, and nothing else."""

from dataclasses import replace

import pytest
import torch

from ssgrpo_lightning.baselines import ExactSteps
from ssgrpo_lightning.credit import outcome_scores
from ssgrpo_lightning.estimators import GroupConfidence
from ssgrpo_lightning.functional import above_chance, falls_at, step_fingerprints, step_lengths
from ssgrpo_lightning.interventions import (
    Corruption,
    DeleteStep,
    Intervention,
    RepeatStep,
    SwapStep,
    SwapToken,
)
from ssgrpo_lightning.objectives import NoisyAnd
from ssgrpo_lightning.policy_module import PolicyModule
from tests.contracts.test_contracts import each


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tokens_of(rollouts, row):
    """Token ids of every step of one rollout."""
    return [
        rollouts.tokens[row][rollouts.step[row] == s].tolist()
        for s in range(int(rollouts.step[row].max()) + 1)
    ]


@pytest.fixture
def batch(make_rollouts):
    lengths = [[2, 3, 1, 2], [1, 4, 2], [3, 3, 2, 1], [2, 2], [5, 1, 3], [1, 1, 1], [4, 2, 2], [6]]
    return make_rollouts(
        [1.0, 0.0, 1.0, 1.0, 1.0, None, 1.0, 1.0], lengths, [0, 0, 1, 1, 2, 2, 3, 3]
    )


@each(Intervention)
@pytest.mark.parametrize("seed", range(4))
def test_only_one_step_of_one_success_of_each_group_changes(member, seed, batch):
    probe = member()(batch, 32, seeded(seed))
    before, after, shift = probe.original, probe.changed, member.shift
    assert len(probe.rows) and len(probe.rows) == len(probe.rows.unique())
    assert (before.rewards[probe.rows] == 1).all()
    groups = before.group[probe.rows]
    assert len(groups) == len(groups.unique())
    for row in range(len(before)):
        old, new = tokens_of(before, row), tokens_of(after, row)
        if row not in probe.rows.tolist():
            assert old == new
            continue
        at = int(probe.step[probe.rows == row])
        assert len(new) == len(old) + shift
        assert new[:at] == old[:at]
        if shift == 0:
            assert new[at] != old[at] and new[at + 1 :] == old[at + 1 :]
        elif shift < 0:
            assert new[at:] == old[at + 1 :] and new[at] != old[at]
        else:
            assert new[at] == new[at - 1] and new[at + 1 :] == old[at:]


@each(Intervention)
def test_masks_agree_with_lengths_and_prompts_stay(member, batch):
    probe = member()(batch, 32, seeded())
    before, after = probe.original, probe.changed
    assert ((after.step >= 0) == after.sampled).all()
    assert (after.sampled <= after.attended).all()
    assert torch.equal(
        (after.attended & ~after.sampled).sum(1), before.attended.sum(1) - before.sampled.sum(1)
    )
    assert torch.equal(step_lengths(after.step, after.steps).sum(1), after.sampled.sum(1))
    # Tokens of a rollout stand together: what is attended has no gaps.
    starts = (after.attended.int().diff(dim=1, prepend=torch.zeros(len(after), 1).int()) == 1).sum(
        1
    )
    assert (starts == 1).all()
    torch.testing.assert_close(after.rewards, before.rewards, equal_nan=True)
    assert torch.equal(after.group, before.group)


@each(Corruption)
def test_what_is_put_in_comes_from_another_group(member, batch):
    probe = member()(batch, 32, seeded(1))
    prints = step_fingerprints(probe.changed.tokens, probe.changed.step, probe.changed.steps)
    assert (prints[probe.rows, probe.step] != 0).all()
    if member is SwapStep:
        texts = step_fingerprints(batch.tokens, batch.step, batch.steps)
        for row, step in zip(probe.rows.tolist(), probe.step.tolist()):
            same = texts[:, step] == prints[row, step]
            assert same.any() and probe.original.group[row] not in batch.group[same]


@each(Intervention)
def test_nothing_to_change_is_no_error(member, make_rollouts):
    failures = make_rollouts([0.0, None], [[2, 2], [3]])
    single = make_rollouts([1.0, 1.0], [[2], [3]])
    for rollouts in (failures, single):
        probe = member()(rollouts, 8, seeded())
        assert len(probe.rows) == 0
        assert probe.skill(scorer(blank)) == probe.gain_share(scorer(blank)) == (0, 0)


def test_a_step_equal_to_the_next_is_not_deleted(make_rollouts):
    rollouts = make_rollouts([1.0, 1.0], [[2, 2, 1]] * 2)
    first = int(rollouts.sampled[0].int().argmax())
    tokens = rollouts.tokens.clone()
    tokens[:, first : first + 4] = torch.tensor([5, 6, 5, 6])
    rollouts = replace(rollouts, tokens=tokens)
    for seed in range(8):
        assert (DeleteStep()(rollouts, 8, seeded(seed)).step == 1).all()


def test_a_batch_alike_leaves_nothing_to_swap(make_rollouts):
    rollouts = make_rollouts([1.0, 1.0], [[2, 2]] * 2)
    rollouts = replace(rollouts, tokens=rollouts.tokens[:1].expand_as(rollouts.tokens))
    for member in (SwapToken, SwapStep):
        assert len(member()(rollouts, 8, seeded()).rows) == 0


def scorer(logits_of):
    """An estimator given as a function of rollouts, read as noisy-AND."""
    return lambda rollouts: NoisyAnd().read(logits_of(rollouts), outcome_scores(rollouts))


def blank(rollouts):
    return torch.zeros(len(rollouts), rollouts.steps)


def quotient(pair):
    return float(pair[0] / pair[1])


@each(Corruption)
def test_skill_of_an_oracle_is_one_and_of_a_constant_none(member, batch):
    probe = member()(batch, 32, seeded())

    def knows(rollouts):
        logits = blank(rollouts) + 3
        if rollouts is probe.changed:
            logits[probe.rows, probe.step] = -3
        return logits

    assert quotient(probe.skill(scorer(knows))) == 1
    assert quotient(probe.skill(scorer(blank))) < 0
    upside_down = scorer(lambda rollouts: -knows(rollouts))
    assert quotient(probe.skill(upside_down)) < 0


def test_a_value_that_knows_before_the_fault_has_no_skill(batch):
    probe = SwapToken()(batch, 32, seeded())
    later = probe.step > 0
    probe = replace(probe, rows=probe.rows[later], step=probe.step[later], was=probe.was[later])

    def looks_ahead(rollouts):
        logits = blank(rollouts) + 3
        if rollouts is probe.changed:
            logits[probe.rows, probe.step] = -3
            logits[probe.rows, probe.step - 1] = 1
        return logits

    assert quotient(probe.skill(scorer(looks_ahead))) < 0


def test_skill_of_noise_is_about_zero(make_rollouts):
    rollouts = make_rollouts([1.0] * 400, [[2, 2, 2]] * 400, group=list(range(400)))
    probe = SwapToken()(rollouts, 400, seeded())
    before, other = (2 * torch.randn(len(rollouts), 3, generator=seeded(s)) for s in (1, 2))
    causal = torch.where(torch.arange(3) < probe.step[probe.rows.argsort()][:, None], before, other)
    guess = scorer(lambda r: before if r is probe.original else causal)
    assert -0.3 < quotient(probe.skill(guess)) < 0.1
    # A preference for one step whatever it says, here the first, is no skill either.
    fixed = scorer(lambda r: blank(r) + torch.tensor([-2.0, 2.0, 2.0]))
    assert quotient(probe.skill(fixed)) <= 0


def test_falls_by_hand():
    before = torch.tensor([[0.5, 0.5, 0.4]] * 4)
    values = torch.tensor(
        [
            [0.5, 0.1, 0.1],  # falls at step 1, most there
            [0.5, 0.49, 0.1],  # falls, but not there
            [0.3, 0.0, 0.0],  # fell before
            [0.5, 0.48, 0.48],  # within the margin
        ]
    )
    at = torch.ones(4, dtype=torch.long)
    mask = torch.ones_like(values).bool()
    found = falls_at(values, before, torch.full((4,), 0.5), mask, at, at)
    assert found.tolist() == [True, False, False, False]


def test_chance_by_hand():
    right = torch.tensor([True, False])
    hits, most = above_chance(right, torch.tensor([0.5, 0.25]))
    assert (float(hits), float(most)) == (0.25, 1.25)


def test_share_of_a_decoy_by_hand(batch):
    probe = RepeatStep()(batch, 32, seeded())
    even = scorer(lambda r: blank(r))

    def none(rollouts):
        logits = blank(rollouts)
        if rollouts is probe.changed:
            logits[probe.rows, probe.step] = 40.0  # sound for sure: the value stays
        return logits

    assert quotient(probe.gain_share(scorer(none))) == pytest.approx(0, abs=1e-6)
    assert quotient(probe.gain_share(even)) > 0


@pytest.fixture(scope="module")
def module(policy):
    built = PolicyModule(torch.optim.AdamW)
    built.policy = policy
    return built


def test_reading_anew_what_the_policy_sampled_changes_nothing(module, rollouts):
    rows = torch.arange(0, len(rollouts), 3)
    read = module.reread(rollouts, rows)
    torch.testing.assert_close(read.logprobs, rollouts.logprobs, atol=1e-4, rtol=0)
    torch.testing.assert_close(read.entropy, rollouts.entropy, atol=1e-4, rtol=0)
    assert read.texts == rollouts.texts


@each(Corruption)
def test_the_exact_checker_finds_what_was_corrupted(member, module, rollouts, task):
    """On real rollouts, where a fault is one by the task's own rules."""
    probe = member()(rollouts, 32, seeded())
    stale = probe.changed
    probe = replace(probe, changed=module.reread(probe.changed, probe.rows))
    assert len(probe.rows) > 1
    changed = probe.changed.texts != probe.original.texts
    assert changed and stale.texts == probe.original.texts
    assert (probe.changed.logprobs != stale.logprobs).any()
    score = scorer(ExactSteps(task))
    # Not 1: a lucky success has a fault of its own, and the value falls there first.
    assert quotient(probe.skill(score)) > 0.5


def test_a_group_gives_no_hint_of_the_corrupted_step(module, rollouts):
    """Group evidence of other steps is what it was, and the corrupted step has none."""
    probe = SwapToken()(rollouts, 32, seeded())
    estimator = GroupConfidence()
    before, after = estimator(probe.original), estimator(probe.changed)
    width = min(before.shape[1], after.shape[1])
    earlier = torch.arange(width) < probe.step[:, None]
    difference = (before - after)[probe.rows, :width].abs()
    assert float(difference[earlier].detach().max()) < 1e-5
