"""Critics, their objective and the advantages made of them."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from ssgrpo_lightning.credit import GAE, outcome_scores
from ssgrpo_lightning.critic import SharedTrunk, ValueModel, step_ends
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.estimators import CausalSteps
from ssgrpo_lightning.functional import gae, lambda_returns, mixed_groups, spread_steps, value_loss
from ssgrpo_lightning.objectives import NoisyAnd, ValueRegression
from ssgrpo_lightning.records import ScoredRollouts, StepScores
from ssgrpo_lightning.rollouts import Judge, Resampler
from ssgrpo_lightning.segmenters import ByLine, ByTokens
from ssgrpo_lightning.verifiers import FinalNumber

NAN = float("nan")


@pytest.fixture
def resample(policy):
    judge = Judge(FinalNumber("#"), ByLine())
    return Resampler(policy, TransformersEngine(), judge, Sampling(24))


def plain_gae(values, start, reward, lam, gamma):
    """The recursion of every PPO implementation, over the steps of one rollout."""
    advantage, result = 0.0, []
    before = [start, *values[:-1]]
    for t in reversed(range(len(values))):
        after = reward if t == len(values) - 1 else gamma * values[t]
        advantage = after - before[t] + gamma * lam * advantage
        result.append(advantage)
    return result[::-1]


@pytest.mark.parametrize(("lam", "gamma"), [(0.95, 1.0), (0.5, 0.9), (0.0, 1.0), (1.0, 1.0)])
def test_gae_is_the_usual_recursion_for_every_length(lam, gamma):
    torch.manual_seed(0)
    values, start = torch.rand(12, 11), torch.rand(12)
    lengths, rewards = torch.arange(12), (torch.arange(12) % 2).float()
    mask = torch.arange(11) < lengths[:, None]
    result = gae(values, start, rewards, mask, lam, gamma)
    for row in range(12):
        n = int(lengths[row])
        args = values[row, :n].tolist(), float(start[row]), float(rewards[row]), lam, gamma
        torch.testing.assert_close(result[row, :n], torch.tensor(plain_gae(*args)).float())
    assert (result[~mask] == 0).all()


def test_gae_by_hand():
    # Deltas .2, -.4, .9 for values .3 | .5, .1 and reward 1; gamma lam is 1/2.
    mask, values = torch.ones(1, 3).bool(), torch.tensor([[0.5, 0.1, 0.7]])
    args = values, torch.tensor([0.3]), torch.tensor([1.0]), mask
    expected = torch.tensor([[0.2 - 0.2 + 0.225, -0.4 + 0.45, 0.9]])
    torch.testing.assert_close(gae(*args, lam=0.5), expected)
    torch.testing.assert_close(gae(*args, lam=1.0), torch.tensor([[0.7, 0.5, 0.9]]))
    torch.testing.assert_close(gae(*args, lam=0.0), torch.tensor([[0.2, -0.4, 0.9]]))


def test_gae_of_a_rollout_without_a_verdict_is_zero_and_spoils_no_other():
    mask, values = torch.ones(2, 3).bool(), torch.rand(2, 3)
    result = gae(values, torch.rand(2), torch.tensor([NAN, 1.0]), mask, lam=0.9)
    assert (result[0] == 0).all() and (result[1] != 0).all()


def test_lambda_returns_are_the_outcome_at_one_and_the_next_value_at_zero():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    values, start = torch.rand(2, 3), torch.rand(2)
    args = values, start, torch.tensor([1.0, 0.0]), mask
    torch.testing.assert_close(
        lambda_returns(*args, lam=1.0), torch.tensor([[1.0] * 4, [0.0] * 4]), atol=1e-6, rtol=0
    )
    expected = torch.stack([values[0, 0], values[0, 1], torch.tensor(1.0), torch.tensor(1.0)])
    torch.testing.assert_close(lambda_returns(*args, lam=0.0)[0], expected)


# --- the rule -----------------------------------------------------------------------------------


def valued(rollouts, seed=0) -> StepScores:
    """Outcomes of rollouts with arbitrary values."""
    torch.manual_seed(seed)
    outcomes = outcome_scores(rollouts)
    return replace(outcomes, values=torch.rand(outcomes.mask.shape))


def test_whitened_advantages_have_mean_zero_and_deviation_one_over_tokens_with_a_verdict(
    make_rollouts,
):
    rollouts = make_rollouts([1.0, 0.0, None, 1.0], [[2, 3, 1], [4], [9], [1, 5]])
    per_token = spread_steps(GAE()(valued(rollouts)), rollouts.step)
    assert (per_token[2] == 0).all()
    seen = per_token[rollouts.sampled & ~rollouts.rewards.isnan()[:, None]]
    torch.testing.assert_close(seen.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(seen.square().mean(), torch.tensor(1.0))
    bare = GAE(whiten=False)(valued(rollouts))
    torch.testing.assert_close(bare[3, 1], 1 - valued(rollouts).values[3, 0])


def test_whitening_of_equal_advantages_and_of_no_verdict_at_all_gives_zero(make_rollouts):
    scores = valued(make_rollouts([0.0, 0.0], [[2], [3]]))
    assert (GAE()(scores).abs() < 1e-3).all()
    scores = valued(make_rollouts([None, None], [[2], [3]]))
    assert (GAE()(scores) == 0).all()


def test_with_steps_of_one_token_it_is_the_gae_of_ppo(make_rollouts):
    # Seven tokens as lines of 3 and 4, and cut anew into steps of one.
    rollouts = make_rollouts([1.0, 0.0], [[3, 4], [2, 5]])
    steps = torch.tensor(ByTokens(1)([""] * 7))
    cut = rollouts.step.masked_scatter(rollouts.sampled, steps.repeat(2))
    scores = valued(replace(rollouts, step=cut))
    per_token = spread_steps(GAE(lam=0.9, whiten=False)(scores), cut)
    for row in range(2):
        args = scores.values[row].tolist(), float(scores.baseline[row]), float(scores.rewards[row])
        expected = torch.tensor(plain_gae(*args, 0.9, 1.0)).float()
        torch.testing.assert_close(per_token[row][rollouts.sampled[row]], expected)


def test_a_dead_group_still_has_advantages(make_rollouts):
    scores = valued(make_rollouts([0.0, 0.0], group=[0, 0]))
    assert (scores.advantages == 0).all() and (GAE()(scores) != 0).all()


# --- the objective ------------------------------------------------------------------------------


def test_value_clipping_by_hand():
    values = torch.tensor([[0.9, 0.6, 0.9, 0.1]], requires_grad=True)
    targets = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    loss = value_loss(values, targets, torch.full((1, 4), 0.5), clip=0.2)
    # Too far towards the target: the error of .7. Near: its own. Away from it: its own, too.
    torch.testing.assert_close(loss, torch.tensor([[0.09, 0.16, 0.81, 0.81]]))
    loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.8, 1.8, -1.8]]))


def test_value_regression_by_hand(make_rollouts):
    # Values 1/2 of the prompt and of both steps; outcomes 1 and 0: every error is 1/4.
    scores = outcome_scores(make_rollouts([1.0, 0.0, None, 0.0], [[2, 3], [2], [1], [1, 1]]))
    loss = ValueRegression().loss(torch.zeros(4, 3), scores)
    torch.testing.assert_close(loss, torch.tensor([0.25, 0.25, 0.0, 0.25]))
    # The old values of 3/4 (the baseline of a group of 2) are farther off than clip allows.
    old = replace(scores, values=torch.full((4, 2), 0.75), baseline=torch.full((4,), 0.75))
    loss = ValueRegression(clip=0.1).loss(torch.zeros(4, 3), old)
    torch.testing.assert_close(loss, torch.tensor([0.25, 0.65**2, 0.0, 0.65**2]))


def test_a_critic_learns_from_dead_groups_and_the_others_do_not(make_rollouts):
    rewards, group = torch.tensor([1.0, 1.0, 0.0, NAN]), torch.tensor([0, 0, 1, 1])
    assert ValueRegression().learnable(rewards, group).tolist() == [True, True, True, False]
    assert not NoisyAnd().learnable(rewards, group).any()
    mixed = torch.tensor([1.0, 0.0, 0.0, NAN])
    assert torch.equal(NoisyAnd().learnable(mixed, group), mixed_groups(mixed, group))


def test_the_prompt_is_a_step_of_its_own_for_a_critic(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0], [[2, 3], [1]])
    view = rollouts.with_prompt_step()
    assert view.step[0].tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert view.step[1].tolist() == [0, 0, 0, 1, -1, -1, -1, -1]
    assert step_ends(view).tolist() == [[2, 4, 7], [2, 3, 3]]
    logits = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    read = ValueRegression().read(logits, outcome_scores(rollouts))
    assert torch.equal(read.baseline, logits[:, 0].sigmoid())
    assert torch.equal(read.values, logits[:, 1:].sigmoid())


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"lam": 1.5}, "lam 1.5"), ({"gamma": 0.0}, "gamma 0.0"), ({"clip": 0.0}, "clip is 0.0")],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ValueRegression(**fields)
    if "clip" not in fields:
        with pytest.raises(ValueError, match=message):
            GAE(**fields)


# --- the networks -------------------------------------------------------------------------------


@pytest.fixture
def critic(policy, resample, request):
    """A critic whose read-out is not zero, so that its values differ."""
    torch.manual_seed(0)
    estimator = request.param()
    estimator.load()
    estimator.bind(policy, resample)
    for layer in estimator.head.modules():
        if isinstance(layer, torch.nn.Linear):
            torch.nn.init.normal_(layer.weight, std=0.3)
    return estimator


both = pytest.mark.parametrize("critic", [ValueModel, SharedTrunk], indirect=True)


@both
def test_critic_reads_the_prefix_only(critic, rollouts):
    late = rollouts.step >= 1
    changed = replace(rollouts, tokens=torch.where(late, 5, rollouts.tokens))
    before, after = critic(rollouts), critic(changed)
    torch.testing.assert_close(after[:, 0], before[:, 0])
    assert not torch.allclose(after[:, 1], before[:, 1])


@both
def test_critic_does_not_depend_on_the_side_or_the_amount_of_padding(critic, rollouts):
    def wider(left, right, fills):
        sides = (left, right)
        return replace(
            rollouts,
            **{name: pad(getattr(rollouts, name), sides, value=v) for name, v in fills.items()},
        )

    fills = {"tokens": 3, "attended": False, "sampled": False, "step": -1}
    fills |= {"logprobs": 0.0, "entropy": 0.0}
    plain = critic(rollouts)
    for left, right in ((4, 0), (0, 4), (2, 3)):
        torch.testing.assert_close(critic(wider(left, right, fills)), plain, atol=1e-4, rtol=1e-4)


@both
def test_a_critic_starts_at_one_half_everywhere(critic, policy, resample, rollouts):
    fresh = type(critic)()
    fresh.load()
    fresh.bind(policy, resample)
    assert (fresh(rollouts) == 0).all()
    assert (critic(rollouts) != 0).any()


def test_shared_trunk_keeps_the_policy_to_itself(policy, resample, rollouts):
    estimator = SharedTrunk(hidden=8)
    estimator.bind(policy, resample)
    assert set(estimator.state_dict()) == {
        f"head.{i}.{x}" for i in (0, 2) for x in ("weight", "bias")
    }
    torch.nn.init.ones_(estimator.head[2].weight)
    estimator(rollouts).sum().backward()
    assert all(p.grad is not None for p in estimator.parameters())
    assert all(p.grad is None for p in policy.parameters())


def test_value_model_trains_its_whole_trunk(critic_of, rollouts):
    module = critic_of(ValueModel())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss, _ = module.fresh_loss(rollouts)
        optimizer.zero_grad()
        loss.backward()
        if losses:  # a read-out of zero passes no gradient on
            assert all(bool(p.grad.any()) for n, p in module.named_parameters() if "norm" in n)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(0.25) and losses[-1] < 0.23


@pytest.fixture
def critic_of(policy, resample):
    def make(estimator, **fields):
        fields = {"objective": ValueRegression(), **fields}
        module = EstimatorModule(torch.optim.AdamW, estimator, **fields)
        module.configure_model()
        module.estimator.bind(policy, resample)
        return module

    return make


@pytest.mark.parametrize("objective", [NoisyAnd(), ValueRegression()])
def test_scoring_in_portions_of_groups_changes_nothing(critic_of, rollouts, objective):
    module = critic_of(CausalSteps(), objective=objective)
    torch.nn.init.normal_(module.estimator.read_out.weight)
    whole = module.score(rollouts, outcome_scores(rollouts))
    module.micro_batch_groups = 3
    parts = module.score(rollouts, outcome_scores(rollouts))
    torch.testing.assert_close(parts.values[whole.mask], whole.values[whole.mask])
    torch.testing.assert_close(parts.baseline, whole.baseline)


def test_a_vocabulary_that_is_not_the_policys_is_refused(policy, resample):
    other = copy.copy(policy)
    other.codec = copy.copy(policy.codec)
    other.codec.tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0})
    with pytest.raises(ValueError, match="whose vocabulary is not the policy's"):
        ValueModel().bind(other, resample)


def test_what_is_stored_is_cut_with_its_rollouts(critic_of, make_rollouts):
    module = critic_of(CausalSteps())
    rollouts = make_rollouts([1.0, 0.0, 1.0], [[2, 3, 1], [4], [1, 1]], group=[0, 1, 2])
    batch = ScoredRollouts(rollouts, module.score(rollouts, outcome_scores(rollouts)))
    part = batch.select(torch.tensor([2, 1]))
    assert part.scores.values.shape == (2, part.rollouts.steps) == (2, 2)
    assert torch.equal(part.scores.values, batch.scores.values[[2, 1], :2])
    assert torch.equal(part.scores.baseline, batch.scores.baseline[[2, 1]])
