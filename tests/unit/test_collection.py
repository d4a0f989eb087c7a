"""Dynamic sampling and redraws, on scripted rewards."""

from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch

from ssgrpo_lightning import collection
from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.collection import DynamicSampling, OneBatch
from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.rollouts import join

MIXED, ZERO, ONE, NONE = (1.0, 0.0), (0.0, 0.0), (1.0, 1.0), (None, None)


class Scripted(SSGRPO):
    """Samples what a script says: rewards of the two rollouts of each problem."""

    trainer = SimpleNamespace(world_size=1)  # pyright: ignore
    datamodule = None  # pyright: ignore
    sampling = None  # pyright: ignore

    def __init__(self, make, rewards):
        L.LightningModule.__init__(self)
        self.make, self.rewards, self.calls, self.noted = make, rewards, [], []
        self.stream = iter(range(100, 200))
        self.policy_step = 4
        self.datamodule = SimpleNamespace(
            group_size=2,
            further=lambda n: [Problem(next(self.stream), "1+1=", "2") for _ in range(n)],
            note=lambda numbers, rewards: self.noted.extend(zip(numbers, rewards)),
        )

    def collect(self, problems, group_size, sampling, judge=None, replica=0):
        self.calls.append((len(problems), replica))
        rewards = [r for p in problems for r in self.rewards(p.id)]
        lengths = [[1 + len(self.calls)]] * len(rewards)  # another width for every call
        made = self.make(
            rewards, lengths, [g for g in range(len(problems)) for _ in range(2)], seed=replica
        )
        owners = tuple(p for p in problems for _ in range(2))
        return replace(made, problems=owners)


def problems(*numbers):
    return [Problem(n, "1+1=", "2") for n in numbers]


def numbers(metrics):
    return {name.removeprefix("sampling/"): float(x) for name, x in metrics.items()}


def test_one_batch_takes_what_comes(make_rollouts):
    module = Scripted(make_rollouts, lambda i: [MIXED, ZERO, ONE][i])
    rollouts, metrics = OneBatch()(module, problems(0, 1, 2))
    assert [p.id for p in rollouts.problems] == [0, 0, 1, 1, 2, 2]
    assert numbers(metrics) == {"tries": 1, "dead_dropped": 0, "mixed_dropped": 0, "reward": 0.5}
    assert module.noted == [(0, 0.5), (1, 0.0), (2, 1.0)]


def test_dead_groups_are_replaced_and_the_shape_is_kept(make_rollouts):
    # Of the further problems every second is mixed.
    module = Scripted(
        make_rollouts, lambda i: MIXED if i in (1, 3) or (i >= 100 and i % 2) else ONE
    )
    rollouts, metrics = DynamicSampling(max_tries=4)(module, problems(0, 1, 2, 3))
    assert [p.id for p in rollouts.problems[::2]] == [1, 3, 101, 103]
    assert rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rollouts.rewards.tolist() == [1.0, 0.0] * 4
    # Two missing at a share of a half: four more are drawn, in one further call.
    assert [n for n, _ in module.calls] == [4, 4]
    assert numbers(metrics) == {"tries": 2, "dead_dropped": 4, "mixed_dropped": 0, "reward": 0.75}
    assert len(module.noted) == 8  # dropped groups teach the curriculum too


def test_more_mixed_groups_than_needed_are_dropped_and_counted(make_rollouts):
    module = Scripted(make_rollouts, lambda i: MIXED if i else ZERO)
    rollouts, metrics = DynamicSampling()(module, problems(0, 1))
    assert [p.id for p in rollouts.problems[::2]] == [1, 100]
    assert numbers(metrics)["mixed_dropped"] == 1 and numbers(metrics)["dead_dropped"] == 1


def test_nothing_but_dead_prompts_ends_says_so_and_goes_on(make_rollouts, monkeypatch):
    said = []
    monkeypatch.setattr(collection, "rank_zero_info", said.append)
    module = Scripted(make_rollouts, lambda i: NONE if i == 1 else ZERO)
    rollouts, metrics = DynamicSampling(max_tries=3)(module, problems(0, 1))
    assert len(rollouts) == 4 and [p.id for p in rollouts.problems[::2]] == [0, 1]
    assert [n for n, _ in module.calls] == [2, 2, 2]
    assert numbers(metrics)["dead_dropped"] == 4
    assert said == [
        "update 5: after 3 tries 2 groups of equal rewards fill places that groups with different "
        "ones were sought for"
    ]


def test_every_call_of_an_update_has_noise_of_its_own(make_rollouts):
    module = Scripted(make_rollouts, lambda i: ZERO)
    DynamicSampling(max_tries=3, redraws=2)(module, problems(0))
    replicas = [replica for _, replica in module.calls]
    assert len(set(replicas)) == len(replicas) and max(replicas) < 1 << 31


def test_completions_that_stand_twice_are_drawn_again(make_rollouts):
    class Alike(Scripted):
        def collect(self, problems, group_size, sampling, judge=None, replica=0):
            if group_size == 2:  # at first all completions are the same
                made = super().collect(problems, group_size, sampling, judge, replica)
                same = made.tokens[:1].expand_as(made.tokens)
                return replace(made, tokens=same)
            self.calls.append((len(problems), replica))
            made = self.make([0.5] * len(problems), seed=len(self.calls))
            return replace(made, group=torch.arange(len(problems)), problems=tuple(problems))

    module = Alike(make_rollouts, lambda i: MIXED)
    rollouts, _ = OneBatch(redraws=3)(module, problems(0, 1))
    assert module.calls[1][0] == 2  # one of each group
    assert rollouts.group.tolist() == [0, 0, 1, 1]
    assert [p.id for p in rollouts.problems] == [0, 0, 1, 1]
    assert rollouts.rewards.tolist() == [1.0, 0.5, 1.0, 0.5]
    assert len(module.calls) == 2  # the new ones differ, so nobody is asked again


def test_joined_rollouts_keep_tokens_at_their_places(make_rollouts):
    a = make_rollouts([1.0, 0.0], [[2, 3], [1]], group=[0, 0], prompt=1)
    b = make_rollouts([0.0, 1.0], [[4, 4], [2]], group=[0, 1], prompt=3, seed=1)
    joined = join([a, b])
    assert joined.group.tolist() == [0, 0, 1, 2]
    for part, rows in ((a, [0, 1]), (b, [2, 3])):
        back = joined.select(torch.tensor(rows))
        for name in ("tokens", "attended", "sampled", "step", "logprobs", "entropy"):
            assert torch.equal(getattr(back, name), getattr(part, name)), name
    assert int(joined.sampled.any(0).nonzero()[0]) == 3


@pytest.mark.parametrize(("member", "fields"), [(OneBatch, (16,)), (DynamicSampling, (0, 0))])
def test_bad_collections(member, fields):
    with pytest.raises(ValueError, match=f"{member.__name__}.* must be from"):
        member(*fields)
