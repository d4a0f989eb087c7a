"""What every member of a swap point must keep: a forker's class is tested the day it is written."""

import inspect
import json
import pickle
import random
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from ssgrpo_lightning.advantages import Advantage, PassAtK
from ssgrpo_lightning.baselines import ExactSteps, GroupStatistics
from ssgrpo_lightning.controls import RandomWeights, ShuffledWeights
from ssgrpo_lightning.credit import (
    Broadcast,
    CreditRule,
    Hindsight,
    StepAdvantage,
    Survival,
    ValueGain,
    Weighting,
    outcome_scores,
)
from ssgrpo_lightning.curriculum import Curriculum, PassRates
from ssgrpo_lightning.engines import Sampling, TransformersEngine
from ssgrpo_lightning.estimator_module import EstimatorModule
from ssgrpo_lightning.estimators import (
    CausalSteps,
    Estimator,
    GroupConfidence,
    PublishedEncoder,
    SharedState,
)
from ssgrpo_lightning.functional import step_lengths
from ssgrpo_lightning.losses import Bnpo, DrGrpo, Reduction, Surrogate
from ssgrpo_lightning.metrics import weight_entropy
from ssgrpo_lightning.monte_carlo import MonteCarlo
from ssgrpo_lightning.objectives import LeaveOneOut, NoisyAnd, Objective
from ssgrpo_lightning.outcome_rewards import OutcomeRewardModel
from ssgrpo_lightning.policy import TINY_POLICY, Pretrained
from ssgrpo_lightning.process_rewards import SeparatorPRM, TokenClassifierPRM
from ssgrpo_lightning.records import Outcomes, Problem, StepScores
from ssgrpo_lightning.rollouts import Judge, Resampler
from ssgrpo_lightning.segmenters import ByLine, ByPattern, Segmenter
from ssgrpo_lightning.shaping import Shaping, SoftOverlong
from ssgrpo_lightning.tasks import ChainArithmetic, Gsm8k, Math, ReasoningGym, TableTask, Task
from ssgrpo_lightning.tasks.table import SAMPLES
from ssgrpo_lightning.temperature import Temperature
from ssgrpo_lightning.tiny_policy.build import outcome_classifier
from ssgrpo_lightning.tiny_prm import classifier
from ssgrpo_lightning.verifiers import (
    Choice,
    FinalNumber,
    Isolated,
    JsonSchema,
    Matches,
    MathAnswer,
    Noisy,
    PatternCheck,
    PythonFunction,
    ReasoningGymScore,
    SchemaCheck,
    ToolCall,
    Verifier,
    Weighted,
)

# An untrained process reward model; the folder lives as long as the tests.
PRM = tempfile.TemporaryDirectory()
classifier(Pretrained(), Path(PRM.name))
ORM = tempfile.TemporaryDirectory()
outcome_classifier(Path(ORM.name))
NAN = float("nan")
GRADE, CONTEST = SAMPLES + "grade_school.jsonl", SAMPLES + "competition.jsonl"
ARGUMENTS = {
    ByPattern: {"pattern": ";"},
    DrGrpo: {"max_tokens": 8},
    CausalSteps: {"hidden": 32},
    PublishedEncoder: {"hidden": 32},
    ExactSteps: {"task": ChainArithmetic()},
    Choice: {"letters": "123"},
    Isolated: {"verifier": FinalNumber(), "workers": 1},
    JsonSchema: {"schema": {}, "equals_answer": True, "workers": 1},
    Matches: {"pattern": r"(?P<answer>\d+)", "workers": 1},
    MathAnswer: {"workers": 1},
    OutcomeRewardModel: {"name": ORM.name},
    PatternCheck: {"pattern": r"(?P<answer>\d+)"},
    PythonFunction: {"function": f"{__name__}.same"},
    SchemaCheck: {"schema": "{}", "equals_answer": True},
    Weighted: {"verifiers": [FinalNumber(), Choice("123")], "weights": [1.0, 3.0]},
    Noisy: {"verifier": FinalNumber(), "flip": 0.0},
    MonteCarlo: {"repeats": 2, "mixed_only": False},
    TokenClassifierPRM: {"name": PRM.name},
    PassAtK: {"k": 3},
    SoftOverlong: {"max_tokens": 6, "buffer": 4},
    SeparatorPRM: {"name": TINY_POLICY, "separator": "<eos>", "good": "+", "bad": "-"},
    TableTask: {"train": GRADE, "validation": GRADE, "prompt_column": "question"},
    Gsm8k: {"train": GRADE + "[:64]", "validation": GRADE + "[64:]", "test": None},
    Math: {"train": CONTEST + "[:16]", "validation": CONTEST + "[16:]", "test": None},
    ReasoningGym: {"train_problems": 8, "held_out_problems": 8},
}
# A completion that earns 1, with its problem; "1" for the answer 1 unless said here.
CALL = '{"name": "add", "arguments": {"left": 1}}'
GYM = ReasoningGym(train_problems=1, held_out_problems=1).problems("train")[0]
SOLVED = {
    ToolCall: (f"<tool_call>{CALL}</tool_call>", Problem(0, "p", CALL)),
    ReasoningGymScore: (f"<answer>{GYM.answer}</answer>", GYM),
}


def members(base):
    """Every concrete subclass in the package, however deep."""
    found = []
    for child in base.__subclasses__():
        found += members(child)
        if not inspect.isabstract(child) and child.__module__.startswith("ssgrpo_lightning"):
            found.append(child)
    return found


def each(base):
    return pytest.mark.parametrize("member", members(base), ids=lambda m: m.__name__)


def build(member):
    return member(**ARGUMENTS.get(member, {}))


def test_there_are_members_to_test():
    for base, least in ((CreditRule, 4), (Objective, 4), (Reduction, 4), (Segmenter, 3)):
        assert len(members(base)) >= least


# --- segmenters ---------------------------------------------------------------------------------


@each(Segmenter)
def test_segmenter_covers_every_token_once(member):
    segmenter, rng = build(member), random.Random(0)
    for _ in range(200):
        pieces = rng.choices(
            ["a", "1+1", "\n", ";", "", "b\nc", ";;", " ", "\n\n"], k=rng.randrange(90)
        )
        steps = segmenter(pieces)
        assert len(steps) == len(pieces)
        assert all(s - b in (0, 1) for b, s in zip([0, *steps], steps, strict=False))
        assert steps[:1] in ([], [0])


# --- advantages -----------------------------------------------------------------------------------


@pytest.fixture
def outcomes():
    """Mixed; without one verdict; all alike; all alike but for penalties; one verdict; none."""
    rewards = torch.tensor(
        [[1, 0, 0, 0.5], [1, NAN, 0, 1], [0.35] * 4, [1] * 4, [NAN, NAN, 1, NAN], [NAN] * 4]
    ).flatten()
    penalties = torch.zeros(24)
    penalties[13:16] = 0.25
    generator = torch.Generator().manual_seed(0)
    parts = rewards[:, None].expand(24, 2).clone()
    parts[4:8, 1] = torch.rand(4, generator=generator)
    parts[parts[:, 0].isnan()] = NAN
    group = torch.arange(6).repeat_interleave(4)
    return Outcomes(rewards - penalties, rewards, group, torch.tensor([1, 2, 2, 1] * 6), parts)


@each(Advantage)
def test_advantage_is_zero_without_a_verdict_and_in_dead_groups(member, outcomes):
    advantages = build(member)(outcomes)
    assert advantages.isfinite().all() and advantages.abs().max() < 10
    assert (advantages[outcomes.returns.isnan()] == 0).all()
    assert (advantages[8:12] == 0).all() and (advantages[16:] == 0).all()
    assert advantages[0] > 0 and advantages[0] > advantages[3] >= advantages[1]
    assert advantages[12] > advantages[13]  # the penalty


@each(Advantage)
def test_advantage_knows_groups_by_number_and_no_order(member, outcomes):
    advantage, order = build(member), torch.randperm(24, generator=torch.Generator().manual_seed(1))

    def changed(rows, group=outcomes.group):
        parts = outcomes.parts[rows]
        fields = (outcomes.returns, outcomes.rewards, group, outcomes.copies)
        return Outcomes(*(x[rows] for x in fields), parts)

    plain = advantage(outcomes)
    torch.testing.assert_close(advantage(changed(order)), plain[order])
    renamed = advantage(changed(order, torch.tensor([7, 3, 0, 1, 9, 4])[outcomes.group]))
    torch.testing.assert_close(renamed, plain[order])


@each(Advantage)
def test_a_rollout_without_a_return_leaves_the_statistics(member, outcomes):
    known = (~outcomes.returns.isnan()).nonzero()[:, 0]
    fields = (outcomes.returns, outcomes.rewards, outcomes.group, outcomes.copies)
    without = Outcomes(*(x[known] for x in fields), outcomes.parts[known])
    torch.testing.assert_close(build(member)(without), build(member)(outcomes)[known])


# --- what is sampled ------------------------------------------------------------------------------


@each(Shaping)
def test_shaping_adds_to_what_is_there_and_leaves_the_reward_alone(member, eight):
    shape = build(member)
    before = replace(
        eight,
        penalties=torch.full((8,), 0.25),
        masked=torch.arange(8) == 0,
        truncated=torch.arange(8) % 2 == 1,
    )
    after = shape(before)
    torch.testing.assert_close(after.rewards, before.rewards, equal_nan=True)
    assert after.masked[0] and (after.penalties.nan_to_num(9) >= 0.25).all()
    bare = shape(replace(before, penalties=None, masked=None))
    if bare.penalties is not None:
        torch.testing.assert_close(bare.penalties + 0.25, after.penalties, equal_nan=True)
    order = torch.tensor([2, 0, 3, 1, 7, 5, 4, 6])
    moved = shape(before.select(order))
    torch.testing.assert_close(moved.returns, after.returns[order], equal_nan=True)
    assert torch.equal(moved.masked, after.masked[order])


@each(Curriculum)
def test_curriculum_fills_the_batch_with_different_problems_whatever_is_known(member):
    curriculum, due = build(member), [7, 1, 4, 2]
    known = PassRates.unknown(9)
    for rates in ([NAN] * 9, [0.0] * 9, [1.0] * 9, [0.5] * 9, [0.1 * i for i in range(9)]):
        for _ in range(3):
            known = curriculum.follow(known, list(range(9)), rates)
        picks = [curriculum.pick(due, known, torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
        assert picks[0] == picks[1]
        assert all(len(set(p)) == len(p) == 4 and set(p) <= set(range(9)) for p in picks)


@each(Temperature)
def test_temperature_stays_positive_and_needs_no_past(member):
    temperature = build(member)
    now = temperature(1.0, 0)
    for update in range(1, 200):
        now = temperature(1.0, update, now, 1.0 if update % 3 else 0.0)
        assert 0 < now < 10


# --- credit rules -------------------------------------------------------------------------------


@pytest.fixture
def eight(make_rollouts):
    """Eight rollouts of up to four steps; the fourth has no verdict."""
    lengths = [[2, 3, 1], [4], [1, 1, 1, 2], [3, 2], [2, 2], [1, 4], [2], [1, 1, 1]]
    return make_rollouts([1.0, 0.0, 0.0, None, 0.5, 1.0, 1.0, 1.0], lengths)


@pytest.fixture
def scores(eight):
    torch.manual_seed(0)
    return NoisyAnd().read(torch.randn(8, 4), outcome_scores(eight))


@each(CreditRule)
def test_credit_keeps_the_sign_of_the_outcome_and_is_zero_without_one(member, scores):
    advantages = build(member)(scores)
    assert advantages.isfinite().all()
    if member.keeps_sign:
        assert (advantages * scores.advantages[:, None] >= 0)[scores.mask].all()
    assert (advantages[3] == 0).all()  # no verdict


@each(CreditRule)
def test_credit_ignores_padding_and_the_order_of_rollouts(member, scores):
    rule, order = build(member), torch.tensor([2, 0, 3, 1, 7, 5, 4, 6])
    plain = torch.where(scores.mask, rule(scores), 0.0)

    def changed(x, how):
        tensors = {k: how(v) for k, v in vars(x).items() if isinstance(v, torch.Tensor)}
        return replace(x, **tensors)

    if member.deterministic:  # what a rule draws, it draws by the place in the batch
        shuffled = rule(changed(scores, lambda x: x[order]))
        torch.testing.assert_close(torch.where(scores.mask[order], shuffled, 0.0), plain[order])
    pad = torch.nn.functional.pad
    wider = rule(changed(scores, lambda x: pad(x, (0, 2)) if x.ndim == 2 else x))
    torch.testing.assert_close(wider[:, :4][scores.mask], plain[scores.mask])


@each(Weighting)
def test_gate_zero_is_plain_grpo_bit_for_bit(member, scores):
    closed = replace(build(member), gate=0.0)
    assert torch.equal(closed(scores), Broadcast()(scores))


@pytest.mark.parametrize(
    "member", [m for m in members(Weighting) if m.__name__ != "PublishedProduct"]
)
def test_our_weights_have_mean_one_over_the_tokens_of_a_rollout(member, scores):
    weights = build(member).weights(scores)
    mean = (weights * scores.lengths).sum(1) / scores.lengths.sum(1)
    torch.testing.assert_close(mean, torch.ones(8))


def test_all_weights_of_a_rollout_vanishing_become_uniform(scores):
    from ssgrpo_lightning.credit import SignAware

    zero = replace(scores, scores=torch.zeros_like(scores.scores), advantages=torch.ones(8))
    assert (SignAware(floor=0.0).weights(zero) == 1).all()


# --- objectives ---------------------------------------------------------------------------------


@each(Objective)
def test_objective_skips_rollouts_that_teach_nothing(member, eight, scores):
    objective = build(member)
    loss = objective.loss(torch.randn(8, objective.view(eight).steps), scores)
    learnable = objective.learnable(scores.rewards, scores.group)
    assert not learnable[3]  # no verdict
    assert loss.isfinite().all()
    assert (loss[~learnable] == 0).all() and (loss[learnable] != 0).all()


@each(Objective)
def test_objective_values_are_probabilities_that_no_later_step_changes(member, scores):
    objective, logits = build(member), torch.randn(8, 4)
    values = objective.values(logits, scores.baseline)
    assert ((values >= 0) & (values <= 1)).all()
    later = logits.clone()
    later[:, 2] += 3
    changed = objective.values(later, scores.baseline)
    assert torch.equal(changed[:, :2], values[:, :2])
    assert not torch.equal(changed[:, 2], values[:, 2])


@each(Objective)
def test_objective_reads_a_value_for_every_step_of_its_view(member, eight, scores):
    objective = build(member)
    read = objective.read(torch.randn(8, objective.view(eight).steps), outcome_scores(eight))
    assert read.values.shape == read.scores.shape == scores.mask.shape
    assert ((read.baseline > 0) & (read.baseline < 1)).all()


@each(Objective)
def test_objective_puts_successes_above_failures(member, eight, scores):
    objective = build(member)
    view = objective.view(eight)
    logits = torch.zeros(8, view.steps, requires_grad=True)
    objective.loss(logits, scores).sum().backward()
    mask = step_lengths(view.step, view.steps) > 0
    assert (logits.grad[0][mask[0]] < 0).all()  # the success of its group rises
    assert (logits.grad[1][mask[1]] > 0).all()  # a failure falls
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[3] == 0).all()  # no verdict, no lesson


# --- estimators ---------------------------------------------------------------------------------


@pytest.fixture
def randomised(policy):
    """Builds estimators, bound to the shipped policy, whose every weight matters.

    (Read-outs start at zero.)
    """
    judge = Judge(FinalNumber("#"), ByLine())

    def randomise(member):
        torch.manual_seed(0)
        estimator = build(member)
        estimator.load()
        estimator.bind(policy, Resampler(policy, TransformersEngine(), judge, Sampling(24)))
        for parameter in estimator.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return estimator

    return randomise


@each(Estimator)
def test_estimator_does_not_take_the_policy_it_is_bound_to_for_its_own(member, randomised, policy):
    estimator = randomised(member)
    taken = {x.data_ptr() for x in policy.state_dict().values()}
    assert policy not in estimator.modules()
    assert not any(x.data_ptr() in taken for x in estimator.state_dict().values())


@each(Estimator)
def test_estimator_reads_a_step_from_its_prefix_only(member, make_rollouts, randomised):
    estimator = randomised(member)
    rollouts = make_rollouts([1.0, 0.0], [[2, 3, 2], [4, 1, 1]])
    before = estimator(rollouts)
    last = rollouts.step == 2
    changed = replace(
        rollouts,
        tokens=torch.where(last, 5, rollouts.tokens),
        logprobs=rollouts.logprobs - last.float(),
        entropy=rollouts.entropy + last.float(),
    )
    after = estimator(changed)
    torch.testing.assert_close(after[:, :2], before[:, :2])
    if list(estimator.parameters()) and not member.by_identity:  # the others read the text
        assert (after[:, 2] != before[:, 2]).all()


@each(Estimator)
def test_estimator_ignores_padding_and_other_groups(member, make_rollouts, randomised):
    estimator = randomised(member)
    rollouts = make_rollouts([1.0, 0.0, 1.0], [[2, 3], [4, 1, 2, 6], [1]], group=[0, 1, 2])
    together = estimator(rollouts)
    for row, steps in enumerate([2, 4, 1]):
        alone = estimator(rollouts.select(torch.tensor([row])))
        torch.testing.assert_close(alone[0], together[row, :steps])


@each(Estimator)
def test_estimator_survives_empty_completions(member, make_rollouts, randomised):
    rollouts = make_rollouts([1.0, 0.0], [[], [2]])
    logits = randomised(member)(rollouts)
    assert logits.shape == (2, 1) and logits.isfinite().all()


def test_ours_knows_the_order_of_tokens_and_the_published_does_not(make_rollouts, randomised):
    rollouts = make_rollouts([1.0, 0.0], [[3], [3]])
    first = rollouts.sampled.nonzero()[0, 1]
    tokens = rollouts.tokens.clone()
    tokens[:, first : first + 3] = tokens[:, first : first + 3].flip(1)
    flipped = replace(rollouts, tokens=tokens)
    ours, published = randomised(CausalSteps), randomised(PublishedEncoder)
    assert not torch.allclose(ours(rollouts), ours(flipped))
    torch.testing.assert_close(published(rollouts), published(flipped))


@pytest.mark.parametrize("member", [m for m in members(Estimator) if not m.sees_outcome])
def test_estimator_does_not_see_the_outcome_of_the_rollout_it_scores(
    member, make_rollouts, randomised
):
    estimator = randomised(member)
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0], [[2, 2]] * 4, group=[0] * 4)
    same = replace(rollouts, tokens=rollouts.tokens[:1].expand_as(rollouts.tokens))
    flipped = replace(same, rewards=torch.tensor([0.0, 0.0, 1.0, 0.0]))
    torch.testing.assert_close(estimator(flipped)[0], estimator(same)[0])


def test_an_estimator_without_weights_cannot_be_fitted_alone():
    with pytest.raises(ValueError, match="GroupStatistics, which has nothing to learn"):
        EstimatorModule(torch.optim.AdamW, GroupStatistics()).configure_optimizers()


def test_a_step_that_stands_in_a_success_is_acquitted(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0, 0.0], [[2, 2]] * 3, group=[0] * 3)
    tokens = rollouts.tokens.clone()
    tokens[1, 3:5] = tokens[0, 3:5]  # the failure in row 1 begins like the success
    first = tokens[0, 3]
    tokens[2, 3] = first - 1 if first > 2 else first + 1
    doubtful = replace(rollouts, tokens=tokens, logprobs=torch.full_like(rollouts.logprobs, -3.0))
    soundness = GroupConfidence(doubt=0.25)(doubtful).sigmoid()
    alone = torch.tensor(2.0 - 2.0 * 3.0).sigmoid()
    # One success and no failure beside row 1; row 0 has the failure of row 1 against it.
    torch.testing.assert_close(soundness[1, 0], alone + (1 - alone) * 1 / 1.25)
    torch.testing.assert_close(soundness[[0, 1, 2], [0, 1, 0]], alone.expand(3))


def test_shared_state_tells_equal_steps_after_different_beginnings_apart(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0, 0.0], [[1, 1]] * 3, group=[0] * 3)
    begin = rollouts.sampled[0].nonzero()[0, 0]
    tokens = rollouts.tokens.clone()
    tokens[:, begin : begin + 2] = torch.tensor([[5, 7], [5, 7], [6, 7]])
    values = SharedState(prior=1.0)(replace(rollouts, tokens=tokens)).sigmoid()
    # The others' mean is 1/6 for row 0 and 1/2 for the rest; row 1 shares its prefix with row 0.
    expected = [[1 / 12] * 2, [0.75] * 2, [0.5] * 2]
    torch.testing.assert_close(values, torch.tensor(expected))


def test_a_prefix_of_ones_own_moves_no_value(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0, 0.0], [[1, 1]] * 3, group=[0] * 3)
    begin = rollouts.sampled[0].nonzero()[0, 0]
    tokens = rollouts.tokens.clone()
    tokens[:, begin] = torch.tensor([5, 6, 7])
    alone = replace(rollouts, tokens=tokens)
    scores = LeaveOneOut().read(SharedState()(alone), outcome_scores(alone))
    torch.testing.assert_close(scores.values, scores.baseline[:, None].expand(3, 2))
    # So nothing bends the group advantage.
    torch.testing.assert_close(ValueGain()(scores), Broadcast()(scores))


def test_survival_blames_the_step_that_broke_the_chain_in_a_group_without_success(make_rollouts):
    rollouts = make_rollouts([0.0, 0.0, 0.0, None], [[1, 1, 1]] * 4, group=[0] * 4)
    logits = torch.tensor([[9.0, -9, 9], [9, 9, -9], [9, 9, 9], [-9, 9, 9]])
    credit = Survival()(NoisyAnd().read(logits, outcome_scores(rollouts)))
    assert credit.argmin(1)[:2].tolist() == [1, 2] and (credit[:2].amin(1) < 0).all()
    torch.testing.assert_close(credit.sum(0), torch.zeros(3))  # no place is worth more steps
    assert (credit[3] == 0).all()


def test_exact_steps_knows_the_first_error(make_rollouts):
    problem = Problem(0, "7+5-3=", "9")
    rollouts = replace(
        make_rollouts([1.0, 0.0], [[2, 2, 2]] * 2),
        problems=(problem,) * 2,
        texts=("7+5=12\n12-3=9\n#9", "7+5=13\n13-3=10\n#10"),
    )
    checker = ExactSteps(ChainArithmetic(operations=2))
    assert (checker(rollouts) > 0).tolist() == [[True] * 3, [False, True, True]]
    assert checker.calls == 6


def test_hindsight_by_hand():
    # Values 1/2 -> .45 -> .15: the falls are .05 and .30, the shares 1/7 and 6/7.
    scores = outcome_scores_of(values=[[0.45, 0.15], [0.45, 0.15]], rewards=[0.0, 1.0])
    weights = Hindsight(floor=0.3).weights(scores)
    expected = torch.tensor([[0.3 + 0.7 * 2 / 7, 0.3 + 0.7 * 12 / 7], [1.0, 1.0]])
    torch.testing.assert_close(weights, expected)
    assert Hindsight(floor=0.0, w_max=1.5).weights(scores)[0, 1] == 1.5


def test_step_advantages_by_hand_sum_to_the_group_advantage():
    # V_0 is the group's mean, 1/2; the last value is the outcome, whatever stands there.
    scores = outcome_scores_of(values=[[0.9, 0.4], [0.3, 0.4]], rewards=[1.0, 0.0])
    bare = torch.tensor([[0.4, 0.1], [-0.2, -0.3]])
    torch.testing.assert_close(StepAdvantage(scale=False)(scores), bare)
    deviation = 0.5**0.5 + 1e-4
    torch.testing.assert_close(StepAdvantage()(scores), bare / deviation)


def test_step_advantages_of_every_rollout_sum_to_its_group_advantage(scores):
    total = torch.where(scores.mask, StepAdvantage()(scores), 0.0).sum(1)
    torch.testing.assert_close(total, scores.advantages)


def test_step_advantages_of_a_dead_group_are_zero_if_scaled_and_finite_if_not():
    scores = outcome_scores_of(values=[[0.9, 0.4], [0.3, 0.4]], rewards=[0.0, 0.0])
    assert (StepAdvantage()(scores) == 0).all()
    bare = StepAdvantage(scale=False)(scores)
    torch.testing.assert_close(bare, torch.tensor([[0.9, -0.9], [0.3, -0.3]]))


# --- control arms -------------------------------------------------------------------------------


def test_random_weights_are_those_of_the_rollout_with_the_same_entropy(many):
    rule, mask = Hindsight(), many.mask
    random = RandomWeights(rule=rule).weights(many)
    torch.testing.assert_close(
        weight_entropy(random, mask), weight_entropy(rule.weights(many), mask), equal_nan=True
    )
    # Steps of one length keep their mean, so that the weights themselves are the same.
    even = replace(many, lengths=many.mask.long())
    moved, own = RandomWeights(rule=rule).weights(even), rule.weights(even)
    torch.testing.assert_close(in_order(moved, mask), in_order(own, mask))
    assert (moved != own)[mask].any()


def test_shuffled_weights_come_from_other_rollouts_of_the_same_sign(many):
    # The weight of a step says whose it is.
    owner = torch.arange(len(many.mask))[:, None].expand(many.mask.shape).float()
    moved = ShuffledWeights().moved(owner, many, torch.Generator().manual_seed(0)).long()
    assert (moved != owner)[many.mask].all()
    assert (many.advantages[moved].sign() == many.advantages[:, None].sign())[many.mask].all()
    taken = moved[many.mask].bincount(minlength=len(owner))
    assert torch.equal(taken, many.mask.sum(1))  # every weight is used once


@pytest.mark.parametrize("member", [RandomWeights, ShuffledWeights])
def test_controls_repeat_themselves_and_change_with_update_and_seed(member, many):
    weights = member().weights(many)
    assert torch.equal(member().weights(many), weights)
    assert not torch.equal(member().weights(replace(many, policy_step=1)), weights)
    assert not torch.equal(member(seed=1).weights(many), weights)


def test_a_rollout_alone_with_its_sign_keeps_its_own_weights(scores):
    alone = replace(scores, advantages=torch.tensor([1.0, -1, -1, 0, -1, -1, -1, -1]))
    moved = ShuffledWeights().moved(scores.values, alone, torch.Generator().manual_seed(0))
    assert set(moved[0, :3].tolist()) == set(scores.values[0, :3].tolist())


def in_order(weights, mask):
    return torch.where(mask, weights, 9.0).sort(1).values


@pytest.fixture
def many():
    """Sixteen rollouts of one group with one to five steps, eight of them successes."""
    torch.manual_seed(0)
    mask = torch.arange(5) < torch.randint(1, 6, (16, 1))
    rewards = (torch.arange(16) < 8).float()
    scores = outcome_scores_of(torch.rand(16, 5).tolist(), rewards.tolist())
    return replace(scores, mask=mask, lengths=torch.randint(1, 9, (16, 5)) * mask)


def outcome_scores_of(values, rewards):
    """Scores of one group of rollouts whose steps have one token each."""
    values, rewards = torch.tensor(values), torch.tensor(rewards)
    return StepScores(
        scores=values,
        values=values,
        mask=torch.ones_like(values).bool(),
        lengths=torch.ones_like(values).long(),
        rewards=rewards,
        baseline=torch.full_like(rewards, 0.5),
        advantages=rewards - 0.5,
        group=torch.zeros_like(rewards).long(),
    )


def test_untrained_ours_doubts_the_step_with_the_least_likely_token(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0], [[2, 3, 2], [4, 1, 1]])
    logits = CausalSteps()(rollouts)
    for row in range(2):
        least = rollouts.step[row][rollouts.logprobs[row].argmin()]
        assert logits[row].argmin() == least


# --- losses -------------------------------------------------------------------------------------


@each(Surrogate)
def test_surrogate_on_policy_pulls_with_the_advantage(member):
    logprobs = torch.randn(2, 5, requires_grad=True)
    advantages = torch.randn(2, 5)
    advantages[0, 0] = 0
    mask = torch.ones(2, 5, dtype=torch.bool)
    surrogate = build(member)
    surrogate(logprobs, logprobs.detach(), advantages, mask).sum().backward()
    even = advantages.mean(1, keepdim=True).expand(2, 5)
    pull = advantages if surrogate.keeps_credit else even
    torch.testing.assert_close(logprobs.grad, -pull)


@each(Reduction)
def test_reduction_is_the_same_for_every_split(member):
    torch.manual_seed(0)
    reduction, losses = build(member), torch.randn(6, 8)
    mask = torch.arange(8) < torch.tensor([8, 1, 5, 0, 3, 8])[:, None]
    results = []
    for size in (1, 2, 4, 6):
        parts = torch.arange(6).split(size)
        divisor = torch.stack([reduction.count(mask[p]) for p in parts]).sum()
        total = sum((reduction.weigh(mask[p]) * losses[p]).sum() / divisor for p in parts)
        results.append(total)
    same = all(torch.allclose(r, results[0]) for r in results)
    assert same is (member is not Bnpo)  # by definition a local mean


@each(Reduction)
def test_reduction_gives_masked_tokens_no_weight(member):
    mask = torch.tensor([[True, False], [False, False]])
    weights = build(member).weigh(mask)
    assert weights.isfinite().all() and (weights[~mask] == 0).all() and weights[0, 0] > 0


# --- tasks and verifiers ------------------------------------------------------------------------


def same(completion, problem):
    return completion == problem.answer


@each(Verifier)
def test_verifier_gives_a_verdict_on_anything(member):
    verifier = build(member)
    solution, problem = SOLVED.get(member, ("1", Problem(0, "p", "1")))
    texts = ["", "\n", "#", "🙂", "1" * 10_000, "\x00", "#-", "1,,2", "((((", "\u202e1", "2"]
    texts += [solution.replace(problem.answer, text) for text in texts] + [solution]
    verdicts = verifier.batch(texts, [problem] * len(texts))
    assert len(verdicts) == len(texts)
    for verdict in verdicts:
        assert verdict.reward is None or 0 <= verdict.reward <= 1
        assert verdict.reward is not None or verdict.reason
        assert verdict.seconds >= 0
    if member.accepts_reference:
        assert verdicts[-1].reward == 1 > (verdicts[-2].reward or 0)
    for text, verdict in zip(texts, verdicts):  # alone as in the batch, and as begun
        assert verifier.begin([text], [problem])()[0].reward == pytest.approx(
            verdict.reward, abs=1e-4
        )
    assert verifier(solution, problem).reward == pytest.approx(verdicts[-1].reward, abs=1e-4)


@each(Verifier)
def test_verifier_travels_to_a_worker(member):
    verifier = build(member)
    verifier("1", Problem(0, "p", "1"))
    assert pickle.loads(pickle.dumps(verifier)) == verifier


@each(Task)
def test_task_numbers_its_problems(member):
    task = build(member)
    for split in ("train", "validation", "test"):
        problems = task.problems(split)
        assert problems and len({p.id for p in problems}) == len(problems)
        assert task.problems(split) == problems
        json.dumps([asdict(p) for p in problems])  # `predict` stores them
