"""What `bench.compare` compares, and on what: two tables."""

from dataclasses import replace

from ssgrpo_lightning.bench.runs import Arm, Setting
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.tiny_policy.build import RECIPES

# The arms that the verdict speaks of.
OURS, GRPO, EXACT, SHUFFLED, PROCESS = "ours", "grpo", "exact_credit", "shuffled", "exact_steps"
CHECKER = "model.estimator.estimator.init_args.task"

ARMS = (
    Arm(GRPO, "plain GRPO", seeds=5, noisy=True),
    Arm(OURS, "SS-GRPO", overlay=False, seeds=5, noisy=True),
    Arm(EXACT, "exact credit", seeds=5, noisy=True, task_field=CHECKER),
    Arm(SHUFFLED, "shuffled weights", seeds=5),
    Arm("published", "published recipe", seeds=5),
    Arm("random_weights", "random weights"),
    Arm(PROCESS, "process reward, exact steps", task_field=CHECKER),
    Arm("group_statistics", "group statistics"),
    Arm("group_confidence", "group confidence"),
    Arm("causal_steps", "causal steps"),
    Arm("critic", "critic"),
    Arm("critic_shared", "critic on the policy"),
    Arm("skill_gate", "SS-GRPO, skill gate"),
    Arm("monte_carlo", "Monte Carlo"),
)

SETTINGS = (
    # Much to gain, few rollouts, long chains: what a policy decides badly it could decide well.
    Setting(
        "careless",
        replace(RECIPES["CarelessChain"].task, held_out_problems=512),
        policy="CarelessChain",
        rollouts_per_update=32,
        updates=60,
        evaluate_every=15,
        max_new_tokens=96,
        rates=(3e-5, 1e-4, 3e-4),
        flips=(0.1, 0.2),
    ),
    # The shipped policy, which has to learn arithmetic itself, at a quarter of the rollouts.
    Setting(
        "chain",
        ChainArithmetic(held_out_problems=512),
        updates=60,
        evaluate_every=15,
        rates=(5e-5, 1e-4, 2e-4),
        arms=(GRPO, OURS, EXACT),
    ),
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
