"""Re-rollouts from prefixes, and the values of steps that are made of them."""

from dataclasses import dataclass, replace

import pytest
import torch

from ssgrpo_lightning.engines import RolloutEngine, Samples, Sampling, TransformersEngine
from ssgrpo_lightning.functional import group_mean
from ssgrpo_lightning.monte_carlo import MonteCarlo
from ssgrpo_lightning.objectives import PublishedMSE
from ssgrpo_lightning.records import Problem, Verdict
from ssgrpo_lightning.rollouts import Judge, Prefix, Resampler, step_prefixes
from ssgrpo_lightning.segmenters import ByLine
from ssgrpo_lightning.verifiers import FinalNumber, Verifier

JUDGE = Judge(FinalNumber("#"), ByLine())


@pytest.fixture
def resampler(policy):
    return Resampler(policy, TransformersEngine(), JUDGE, Sampling(48))


@pytest.fixture
def prefixes(rollouts):
    return step_prefixes(rollouts, every_step(rollouts))


def every_step(rollouts):
    return torch.arange(rollouts.steps) <= rollouts.step.amax(1)[:, None]


def test_prefixes_are_what_was_written_before_each_step(policy, rollouts, prefixes):
    first = int(rollouts.step[0].max()) + 1
    lines = rollouts.texts[0].splitlines(keepends=True)
    for step, prefix in enumerate(prefixes[:first]):
        assert policy.codec.decode(prefix.completion) == "".join(lines[:step])
        assert list(prefix.prompt) == policy.codec.encode(prefix.problem)
        assert prefix.problem == rollouts.problems[0]


def test_neither_order_nor_company_changes_a_mean(resampler, prefixes):
    means = resampler(prefixes, 3, 5)
    assert len(means.unique()) > 2
    resampler.at_once = 3
    torch.testing.assert_close(resampler(prefixes[::-1], 3, 5).flip(0), means)
    torch.testing.assert_close(resampler(prefixes[7:9], 3, 5), means[7:9])


def test_update_seed_and_repeats_change_the_draws(policy, resampler, prefixes):
    means = resampler(prefixes, 3, 5)
    other = Resampler(policy, TransformersEngine(), JUDGE, Sampling(48), seed=1)
    assert not torch.equal(resampler(prefixes, 3, 6), means)
    assert not torch.equal(other(prefixes, 3, 5), means)


def test_equal_prefixes_are_re_rolled_once_and_counted(resampler, prefixes):
    means = resampler([*prefixes, *prefixes], 2, 0)
    assert torch.equal(means[: len(prefixes)], means[len(prefixes) :])
    assert resampler.calls == 2 * len(set(prefixes)) < 2 * len(prefixes)
    assert 0 < resampler.tokens <= 48 * resampler.calls
    assert resampler([], 2, 0).shape == (0,)


def test_the_same_prompt_with_another_answer_is_another_prefix():
    one, other = Problem(0, "1+2=", "3"), Problem(1, "1+2=", "4")
    assert len({Prefix(one, (1,), ()), Prefix(one, (1,), ()), Prefix(other, (1,), ())}) == 2


def test_prompts_of_messages_can_be_told_apart():
    chat = Problem(0, ({"role": "user", "content": "1+2="},), "3")
    assert len({Prefix(chat, (1,), ()), Prefix(chat, (1,), ())}) == 1


@dataclass(frozen=True)
class Recorder(Verifier):
    """Gives no verdict on texts with a 9; keeps all it sees."""

    seen: list

    def __call__(self, completion, problem):
        self.seen.append(completion)
        return Verdict(None if "9" in completion else float("1" in completion))


@dataclass(frozen=True)
class Script(RolloutEngine):
    """The first repeat of every prompt says "1" for ever, the others "9"."""

    one: int
    nine: int

    def generate(self, policy, prompts, repeats, sampling, noise):
        rows, new = len(prompts) * repeats, sampling.max_new_tokens
        said = torch.where(torch.arange(rows) % repeats == 0, self.one, self.nine)
        zero = torch.zeros(rows, new)
        return Samples(
            tokens=said[:, None].expand(rows, new).contiguous(),
            lengths=torch.full((rows,), new),
            logprobs=zero,
            entropy=zero,
            truncated=torch.ones(rows, dtype=torch.bool),
        )


def test_the_budget_is_that_of_the_whole_completion_and_no_verdict_leaves_the_mean(policy):
    one, two, nine = policy.codec.tokenizer.convert_tokens_to_ids(["1", "2", "9"])
    seen, problem = [], Problem(0, "1+2=", "3")
    judge = Judge(Recorder(seen), ByLine())
    resample = Resampler(policy, Script(one, nine), judge, Sampling(4))
    beginnings = [(), (two,), (two,) * 4, (two,) * 6, (nine,)]
    means = resample([Prefix(problem, (3,), b) for b in beginnings], 2, 0)
    assert {"1111", "2111", "2222", "222222"} <= set(seen)
    # The second repeat says 9, so that the mean is over the first alone, or over none.
    assert means[:2].tolist() == [1.0, 1.0] and means[2:4].tolist() == [0.0, 0.0]
    assert means[4].isnan()
    assert resample.calls == 10 and resample.tokens == 2 * (4 + 3 + 3)


def test_a_larger_budget_of_others_does_not_show(policy, prefixes):
    """A prefix near its budget is cut there, whatever it is batched with."""
    short = Resampler(policy, TransformersEngine(), JUDGE, Sampling(20))
    long = max(prefixes, key=lambda prefix: len(prefix.completion))
    alone = short([long], 4, 0)
    torch.testing.assert_close(short([*prefixes, long], 4, 0)[-1:], alone)


def test_a_prefix_is_continued_at_the_temperature_it_was_sampled_at(policy, rollouts, prefixes):
    assert {prefix.temperature for prefix in prefixes} == {1.0}
    cool = replace(rollouts, temperature=0.2)
    cooler = step_prefixes(cool, every_step(cool))

    def means(prefixes, usual=1.0):
        return Resampler(policy, TransformersEngine(), JUDGE, Sampling(48, usual))(prefixes, 3, 5)

    # Together, as one rule may ask for rollouts of several updates, and whatever is usual.
    both = means([*prefixes, *cooler], usual=0.7)
    assert torch.equal(both[: len(prefixes)], means(prefixes))
    assert torch.equal(both[len(prefixes) :], means(cooler))
    assert not torch.equal(means(cooler), means(prefixes))


# --- MonteCarlo ---------------------------------------------------------------------------------


def bound(resample, **arguments):
    estimator = MonteCarlo(**arguments)
    estimator.resample = resample  # what stands for a Resampler is none, and `bind` checks types
    return estimator


@dataclass
class Known:
    """Stands for a Resampler: the value of a prefix is a tenth of its length."""

    calls: int = 0

    def __call__(self, prefixes, repeats, policy_step):
        self.calls += repeats * len(prefixes)
        return torch.tensor([len(p.completion) / 10 for p in prefixes])


def values_of(estimator, rollouts):
    return PublishedMSE().values(estimator(rollouts), torch.zeros(len(rollouts)))


def test_values_are_those_of_the_prefixes_and_the_outcome_at_the_end(make_rollouts):
    lengths = [[2, 3, 1], [4, 2], [1, 1], [2]]
    rollouts = make_rollouts([1.0, 0.0, 1.0, 1.0], lengths)
    known = Known()
    values = values_of(bound(known, repeats=3), rollouts)
    mask = every_step(rollouts)
    expected = torch.tensor([[0.2, 0.5, 1.0], [0.4, 0.0, 0.0]])
    torch.testing.assert_close(values[:2][mask[:2]], expected[mask[:2]], atol=1e-6, rtol=0)
    # The second group is dead: nothing is asked, everything is worth the outcome.
    torch.testing.assert_close(values[2:][mask[2:]], torch.ones(3), atol=1e-6, rtol=0)
    assert known.calls == 3 * 3


def test_dead_groups_are_re_rolled_if_asked_for(make_rollouts):
    rollouts = make_rollouts([1.0, 1.0], [[2, 3], [4, 2]], group=[0, 0])
    values = values_of(bound(Known(), repeats=1, mixed_only=False), rollouts)
    expected = torch.tensor([[0.2, 1.0], [0.4, 1.0]])
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)


def test_without_any_verdict_a_prefix_is_worth_the_mean_of_its_group(make_rollouts):
    rollouts = make_rollouts([1.0, 0.0, 0.0, None], group=[0] * 4)

    def none(prefixes, repeats, policy_step):
        return torch.full((len(prefixes),), float("nan"))

    none.calls = 0
    values = values_of(bound(none), rollouts)
    third = group_mean(rollouts.rewards, rollouts.group)[0]
    expected = torch.tensor([[third, 1.0], [third, 0.0], [third, 0.0], [third, third]])
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=0)


def test_monte_carlo_falls_at_the_first_error(rollouts, resampler, task, policy):
    """On the shipped policy: after an error in a failure hardly any re-rollout succeeds."""
    estimator = MonteCarlo(repeats=8, mixed_only=False)
    estimator.bind(policy, resampler)
    values = values_of(estimator, rollouts)
    assert estimator.calls == resampler.calls > 0
    sound, unsound = [], []
    for row, (problem, text) in enumerate(zip(rollouts.problems, rollouts.texts)):
        truth = task.step_truth(problem, text.split("\n"))[: int(rollouts.step[row].max())]
        for step in range(len(truth)):
            (sound if all(truth[: step + 1]) else unsound).append(float(values[row, step]))
    assert sum(sound) / len(sound) > sum(unsound) / len(unsound) + 0.2


def test_monte_carlo_says_what_it_lacks(rollouts):
    with pytest.raises(ValueError, match="no policy to sample with"):
        MonteCarlo()(rollouts)
    with pytest.raises(ValueError, match=r"MonteCarlo\.repeats is 0"):
        MonteCarlo(repeats=0)
