"""Pass rates by hand; what comes next; resuming in the middle."""

import pytest
import torch

from ssgrpo_lightning.curriculum import DifficultyBuckets, PassRates, SolvedRetirement, Uniform
from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.verifiers import FinalNumber

NAN = float("nan")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_running_pass_rate_by_hand():
    curriculum = SolvedRetirement(threshold=0.75, memory=0.5)
    known = PassRates.unknown(3)
    for rewards in ([1.0, NAN], [0.5, 0.75], [NAN, 1.0]):
        known = curriculum.follow(known, [0, 2], rewards)
    torch.testing.assert_close(known.rate, torch.tensor([0.75, NAN, 0.875]), equal_nan=True)
    assert known.streak.tolist() == [0, 0, 2]  # .5 broke that of the first
    shares = {name: round(float(x), 3) for name, x in known.metrics().items()}
    assert shares == {
        "curriculum/tried": 0.667,
        "curriculum/all_zero": 0.0,
        "curriculum/all_one": 0.0,
    }


def test_retired_problems_give_their_place_to_others():
    known = PassRates(torch.ones(6), torch.tensor([2, 0, 2, 1, 0, 5]))
    picked = SolvedRetirement(patience=2).pick([0, 1, 2], known, generator())
    assert picked[0] == 1 and set(picked[1:]) == {3, 4}
    # With one left, the retired fill the batch.
    nearly = PassRates(torch.ones(6), torch.tensor([2, 2, 2, 2, 0, 2]))
    assert SolvedRetirement(patience=2).pick([0, 1, 2], nearly, generator()) == [4, 0, 1]


def test_buckets_draw_their_share_from_the_band_by_its_variance():
    rate = torch.tensor([0.0, 1.0, 0.25, 0.5, NAN, 0.75, 0.1, 0.9])
    known = PassRates(rate, torch.zeros(8, dtype=torch.long))
    buckets = DifficultyBuckets(low=0.2, high=0.8, share=0.5)
    counts = torch.zeros(8)
    for seed in range(2000):
        picked = buckets.pick([0, 1, 4, 6], known, generator(seed))
        assert len(picked) == 4 and set(picked[2:]) == {0, 1}
        counts[picked[0]] += 1
    # The first draw is in proportion to p (1 - p): 3, 4 and 3 of 10 sixteenths.
    share = counts[[2, 3, 5]] / 2000
    torch.testing.assert_close(share, torch.tensor([0.3, 0.4, 0.3]), atol=0.04, rtol=0)
    nothing_known = PassRates.unknown(8)
    assert buckets.pick([0, 1, 4, 6], nothing_known, generator()) == [0, 1, 4, 6]


@pytest.mark.parametrize(
    ("member", "fields"),
    [
        (Uniform, {"memory": 1.0}),
        (SolvedRetirement, {"threshold": 0.0}),
        (SolvedRetirement, {"patience": 0}),
        (DifficultyBuckets, {"low": 0.9}),
        (DifficultyBuckets, {"share": 2.0}),
    ],
)
def test_bad_curricula(member, fields):
    with pytest.raises(ValueError, match=rf"{member.__name__}.* must be"):
        member(**fields)


# --- the DataModule -------------------------------------------------------------------------------


def datamodule(curriculum=Uniform(), problems=12):
    task = ChainArithmetic(train_problems=problems, held_out_problems=4)
    data = RolloutDataModule(
        task, FinalNumber("#"), group_size=4, rollouts_per_update=16, curriculum=curriculum
    )
    data.setup("fit")
    return data


def run(data, loader, updates):
    """Ids of the batches of some updates, the problems of even number always solved."""
    seen, batches = [], iter(loader)
    for _ in range(updates):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        further = data.further(2)
        tried = [p.id for p in (*batch, *further)]
        data.note(tried, [float(i % 2 == 0) for i in tried])
        seen.append(tried)
    return seen


@pytest.mark.parametrize(
    "curriculum", [Uniform(), SolvedRetirement(), DifficultyBuckets(low=0.01, high=0.99)]
)
@pytest.mark.parametrize("first", [1, 3, 4])
def test_resumed_order_is_that_of_an_uninterrupted_run(curriculum, first):
    whole = datamodule(curriculum)
    expected = run(whole, whole.train_dataloader(), 8)
    before = datamodule(curriculum)
    loader = before.train_dataloader()
    assert run(before, loader, first) == expected[:first]
    after = datamodule(curriculum)
    resumed = after.train_dataloader()
    after.load_state_dict(before.state_dict())
    resumed.load_state_dict(loader.state_dict())
    assert run(after, resumed, 8 - first) == expected[first:]


def test_solved_problems_stop_coming():
    data = datamodule(SolvedRetirement(patience=1))
    seen = run(data, data.train_dataloader(), 12)
    assert all(i % 2 for batch in seen[-4:] for i in batch)


def test_further_problems_go_through_all_of_them_in_another_order():
    data = datamodule()
    stream = [p.id for _ in range(4) for p in data.further(3)]
    assert sorted(stream) == sorted(p.id for p in data.problems["train"])
    batches = [p.id for batch in data.train_dataloader() for p in batch]
    assert sorted(batches) == sorted(stream) and batches != stream
    assert len(data.further(30)) == 30  # without end


def test_a_checkpoint_of_another_task_is_refused():
    with pytest.raises(ValueError, match="pass rates of 8 problems, but ChainArithmetic has 12"):
        datamodule().load_state_dict(datamodule(problems=8).state_dict())
