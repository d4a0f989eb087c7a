"""What `bench.compare` compares, and on what: two tables."""

from ssgrpo_lightning.bench.runs import Arm, Setting
from ssgrpo_lightning.tasks import ChainArithmetic

# The arms that the verdict speaks of.
OURS, GRPO, EXACT, SHUFFLED, PROCESS = "ours", "grpo", "exact", "shuffled", "process_reward"

ARMS = (
    Arm(GRPO, "plain GRPO", seeds=5, noisy=True),
    Arm(OURS, "SS-GRPO", overlay=False, seeds=5, noisy=True),
    Arm("published", "published recipe", seeds=5),
    Arm("group_confidence", "group confidence"),
)

SETTINGS = (
    Setting("chain3", ChainArithmetic(operations=3), flips=(0.1, 0.2)),
    Setting("chain5", ChainArithmetic(operations=5), max_new_tokens=96),
)

# Shows that everything runs, and nothing else.
QUICK = Setting(
    "quick",
    ChainArithmetic(train_problems=64, held_out_problems=16),
    rollouts_per_update=16,
    group_size=4,
    updates=2,
    evaluate_every=1,
    rates=(2e-4,),
    flips=(0.1,),
)
