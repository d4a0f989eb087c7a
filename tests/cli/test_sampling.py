"""What an update is made of, as a user meets it: filters, curricula, temperatures, resuming."""

import pytest
import torch

from ssgrpo_lightning.cli import main
from tests.conftest import QUICKSTART, REPOSITORY, metrics, run_folder, small

FOLLOWS = "{class_path: FollowsDiversity, init_args: {target: 1.0, rate: 0.3}}"
DYNAMIC = "{class_path: DynamicSampling, init_args: {max_tries: 3, redraws: 1}}"
STATEFUL = [
    f"--config={REPOSITORY / 'configs/curriculum.yaml'}",
    f"--model.collection={DYNAMIC}",
    f"--model.temperature={FOLLOWS}",
]


def rows(root):
    return [r for r in metrics(root) if r["reward"]]


def test_a_resumed_run_is_the_uninterrupted_one_in_all_that_it_samples(tmp_path):
    def fit(name, steps, *more):
        config = [f"--config={QUICKSTART}", *STATEFUL, *small(tmp_path / name)]
        return main(["fit", *config, f"--trainer.max_steps={steps}", *more])

    whole = fit("whole", 4)
    fit("parts", 2)
    checkpoint = run_folder(tmp_path / "parts") / "checkpoints/last.ckpt"
    resumed = fit("parts", 4, f"--ckpt_path={checkpoint}")
    names = [n for n in rows(tmp_path / "whole")[0] if not n.startswith("timing/")]
    expected = [{n: row[n] for n in names} for row in rows(tmp_path / "whole")]
    assert [{n: row[n] for n in names} for row in rows(tmp_path / "parts")] == expected
    assert torch.equal(whole.datamodule.known.streak, resumed.datamodule.known.streak)
    assert whole.datamodule.further_taken == resumed.datamodule.further_taken > 0
    heat = [float(row["sampling/temperature"]) for row in rows(tmp_path / "whole")]
    assert heat[0] == 1.0 and heat == sorted(heat)
    # The training forward divides by the temperature that sampled.
    gaps = [float(r["sampling/sampling_logp_difference/mean"]) for r in rows(tmp_path / "whole")]
    assert heat[-1] > 1.0 and max(gaps) < 1e-4


def test_shaping_stop_strings_and_advantages_are_reached_from_yaml(tmp_path):
    main(
        [
            "fit",
            f"--config={QUICKSTART}",
            *small(tmp_path),
            "--model.policy.sampling.stop=['=']",
            "--model.shaping=[MaskTruncated, MaskDead]",
            "--model.advantage={class_path: WeighDuplicates, init_args: {advantage: MaxRl}}",
            "--model.temperature={class_path: CoolDown, init_args: {start: 1.5, updates: 2}}",
            "--data.curriculum={class_path: SolvedRetirement, init_args: {patience: 1}}",
        ]
    )
    first, second = rows(tmp_path)
    assert (first["sampling/temperature"], second["sampling/temperature"]) == ("1.5", "1.25")
    assert float(first["step/count_mean"]) == 1.0  # it ends within the first line
    assert float(first["completions/clipped_ratio"]) < 1
    # Nothing states the answer, so every group is dead and masked.
    assert float(first["group/all_zero"]) == float(first["shaping/masked"]) == 1.0


def test_dynamic_sampling_leaves_no_dead_group_where_there_are_others(tmp_path):
    main(
        [
            "fit",
            f"--config={QUICKSTART}",
            f"--config={REPOSITORY / 'configs/dapo.yaml'}",
            *small(tmp_path),
            "--trainer.max_steps=1",
            "--trainer.val_check_interval=1",
            "--model.collection.init_args.max_tries=12",
        ]
    )
    (row,) = rows(tmp_path)
    assert float(row["frac_reward_zero_std"]) == 0 and float(row["sampling/tries"]) > 1
    drawn = 4 + float(row["sampling/dead_dropped"]) + float(row["sampling/mixed_dropped"])
    assert drawn > 4 and float(row["sampling/reward"]) != float(row["reward"])


@pytest.mark.parametrize("advantage", ["BatchWhitened", "PassAtK"])
def test_several_advantages_train(tmp_path, advantage):
    main(
        [
            "fit",
            f"--config={QUICKSTART}",
            *small(tmp_path),
            "--trainer.max_steps=1",
            "--trainer.val_check_interval=1",
            f"--model.advantage={advantage}",
        ]
    )
    assert all(float(row["grad_norm"]) > 0 for row in rows(tmp_path))
