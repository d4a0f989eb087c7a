"""What ranks exchange: weights once for all rollouts of an update, gradients once per step."""

import json

import pytest

from ssgrpo_lightning.policy import Pretrained
from tests.distributed.conftest import Job, on_ranks
from tests.distributed.test_strategies import STRATEGIES

pytestmark = pytest.mark.distributed
BEFORE_LEARNING = ("lightning", "rollout", "score")


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """Collectives of every update, by phase and name: both strategies, two token budgets."""
    folder = tmp_path_factory.mktemp("collectives")
    jobs = {
        (name, budget): Job(
            folder / f"{name}{budget}",
            [
                f"--trainer.strategy={strategy}",
                f"--model.policy.sampling.max_new_tokens={budget}",
                "--trainer.callbacks+=CollectiveCount",
                f"--trainer.callbacks.path={folder / f'{name}{budget}.json'}",
            ],
            updates=3,
        )
        for name, strategy in STRATEGIES.items()
        for budget in (12, 40)
    }
    on_ranks(2, list(jobs.values()), folder)
    return {key: json.loads((folder / f"{key[0]}{key[1]}.json").read_text()) for key in jobs}


def weights_gathered(update) -> int:
    return sum(update.get(phase, {}).get("all_gather_weights", 0) for phase in BEFORE_LEARNING)


def test_fsdp2_gathers_weights_once_for_all_rollouts_however_long(counted):
    parts = len(Pretrained().load().layers()) + 1  # each layer, and what is in none
    for budget in (12, 40):
        assert [weights_gathered(update) for update in counted["fsdp2", budget]] == [parts] * 3
    assert all(weights_gathered(update) == 0 for update in counted["ddp", 40])


def test_the_number_of_collectives_does_not_grow_with_the_work(counted):
    for name in STRATEGIES:
        for update in counted[name, 40]:
            own = {phase: n for phase, n in update.items() if phase != "policy"}
            assert sum(sum(names.values()) for names in own.values()) < 40, (name, update)
