"""What a run is in the middle of survives a file, and another number of ranks."""

import io
import random

import numpy as np
import torch

from ssgrpo_lightning.advantages import GroupRelative, outcomes_of
from ssgrpo_lightning.credit import outcome_scores
from ssgrpo_lightning.records import ScoredRollouts
from ssgrpo_lightning.run_state import from_plain, plain, random_state, restore_random, share


def scored(rollouts):
    return ScoredRollouts(
        rollouts, outcome_scores(rollouts, GroupRelative()(outcomes_of(rollouts)))
    )


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_equal(a, b):
    for one, two in ((a.rollouts, b.rollouts), (a.scores, b.scores)):
        for name, value in vars(one).items():
            other = getattr(two, name)
            if isinstance(value, torch.Tensor):
                if one is a.scores and value.ndim == 2:  # nothing reads where there is no step
                    value, other = value * a.scores.mask, other * a.scores.mask
                assert torch.equal(value.nan_to_num(-1), other.nan_to_num(-1)), name
                assert value.dtype == other.dtype, name
            else:
                assert value == other, name


def test_a_waiting_batch_survives_a_file_as_data_only(rollouts, task):
    batch, problems = scored(rollouts), task.problems("train")
    places = {problem.id: place for place, problem in enumerate(problems)}
    again = from_plain(through_a_file(plain(batch)), problems, places)
    assert_equal(batch, again)
    assert again.rollouts.verdicts[0].seconds == rollouts.verdicts[0].seconds > 0


def test_a_view_is_saved_without_the_memory_around_it(rollouts):
    state = plain(scored(rollouts.select(torch.arange(4))))
    for value in [*state["rollouts"].values(), *state["scores"].values()]:
        if isinstance(value, torch.Tensor):
            assert value.untyped_storage().nbytes() == value.nbytes


def test_groups_are_dealt_to_another_number_of_ranks_as_problems_are(rollouts):
    def of_rank(rank, ranks):
        rows = torch.cat([(rollouts.group == g).nonzero()[:, 0] for g in range(rank, 8, ranks)])
        part = scored(rollouts.select(rows))
        group = torch.arange(8 // ranks).repeat_interleave(4)
        return ScoredRollouts(
            part.rollouts.__class__(**{**vars(part.rollouts), "group": group}),
            part.scores.__class__(**{**vars(part.scores), "group": group}),
        )

    def dealt(ranks):
        return [of_rank(rank, ranks) for rank in range(ranks)]

    for before, after in ((1, 2), (2, 1), (2, 4), (4, 2), (4, 1), (2, 2)):
        parts = dealt(before)
        assert len({part.rollouts.tokens.shape[1] for part in dealt(4)}) > 1  # padding differs
        for rank, expected in enumerate(dealt(after)):
            found = share(parts, rank, after)
            assert_equal(found, expected)
            if before == after:
                assert found is parts[rank]


def test_the_global_generators_go_on_where_they_were():
    def draw():
        return random.random(), float(np.random.random()), float(torch.rand(()))

    random.gauss(0, 1), np.random.standard_normal()  # both keep half of a pair
    state = through_a_file(random_state())
    first = [draw() for _ in range(3)], random.gauss(0, 1), np.random.standard_normal()
    draw()
    restore_random(state)
    assert first == ([draw() for _ in range(3)], random.gauss(0, 1), np.random.standard_normal())
