"""The command line as a user meets it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from ssgrpo_lightning.cli import main
from tests.conftest import QUICKSTART, metrics, run_folder, small


def test_fit_leaves_the_run_folder_a_user_expects(tmp_path):
    main(["fit", f"--config={QUICKSTART}", *small(tmp_path), "--rollout_log.every=1"])
    folder, rows = run_folder(tmp_path), metrics(tmp_path)
    assert float(rows[0]["policy_step"]) == 0 and rows[0]["val/accuracy"]
    for column in ("policy_step", "val/accuracy", "reward", "step/weight_entropy", "step/gate"):
        assert column in rows[0], column
    assert [r["policy_step"] for r in rows if r["reward"]] == ["1", "2"]
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["max_steps"] == 2
    shown = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {s["policy_step"] for s in shown} == {1, 2}
    assert "background:rgb" in (folder / "rollouts.html").read_text()
    assert list((folder / "checkpoints").glob("*.ckpt"))


def test_max_steps_checkpoints_and_loggers_count_policy_updates(tmp_path):
    cli = main(
        [
            "fit",
            f"--config={QUICKSTART}",
            *small(tmp_path),
            "--trainer.max_steps=5",
            "--checkpoint.every_n_train_steps=2",
            "--checkpoint.monitor=null",
            "--checkpoint.save_top_k=-1",
            "--checkpoint.filename=at{step}",
        ]
    )
    assert cli.trainer.global_step == cli.model.policy_step == 5
    names = {p.name for p in (run_folder(tmp_path) / "checkpoints").glob("at*")}
    assert names == {"at2.ckpt", "at4.ckpt"}


def test_a_metric_that_was_not_measured_is_not_repeated(tmp_path):
    main(
        [
            "fit",
            f"--config={QUICKSTART}",
            *small(tmp_path),
            "--trainer.max_steps=3",
            "--model.estimator_every=3",
        ]
    )
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert [r["estimator/grad_norm"] != "" for r in rows] == [True, False, False]


def test_printed_config_gives_the_same_run(tmp_path, capsys):
    first = ["fit", f"--config={QUICKSTART}", *small(tmp_path / "a")]
    with pytest.raises(SystemExit):
        main([*first, "--print_config"])
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)
    main(first)
    main(
        [
            "fit",
            f"--config={tmp_path / 'printed.yaml'}",
            f"--trainer.default_root_dir={tmp_path / 'b'}",
        ]
    )

    def untimed(root):
        return [{k: v for k, v in r.items() if not k.startswith("timing")} for r in metrics(root)]

    assert untimed(tmp_path / "a") == untimed(tmp_path / "b")


def test_optimiser_arguments_are_exactly_those_of_the_yaml(tmp_path):
    # A whole config rather than an overlay: an overlay keeps what the new class also knows.
    config = yaml.safe_load(Path(QUICKSTART).read_text())
    for child in ("policy", "estimator"):
        sgd = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
        config["model"]["init_args"][child]["optimizer"] = sgd
    (tmp_path / "sgd.yaml").write_text(yaml.safe_dump(config))
    cli = main(["fit", f"--config={tmp_path / 'sgd.yaml'}", *small(tmp_path)])
    policy, estimator = cli.trainer.optimizers
    for optimizer in (policy, estimator):
        (group,) = optimizer.param_groups
        assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.1, 0, 0)
    held = [id(p) for o in (policy, estimator) for p in o.param_groups[0]["params"]]
    trained = [id(p) for p in cli.model.parameters() if p.requires_grad]
    assert sorted(held) == sorted(trained) and len(set(held)) == len(held)


def test_learning_rate_schedules_step_once_per_update(tmp_path):
    linear = "{start_factor: 0.5, total_iters: 2}"
    schedule = f"{{class_path: torch.optim.lr_scheduler.LinearLR, init_args: {linear}}}"
    main(
        [
            "fit",
            f"--config={QUICKSTART}",
            *small(tmp_path),
            "--trainer.max_steps=3",
            "--model.policy.optimizer.init_args.lr=1e-4",
            f"--model.policy.lr_scheduler={schedule}",
        ]
    )
    rates = [float(r["learning_rate"]) for r in metrics(tmp_path) if r["reward"]]
    assert rates == pytest.approx([7.5e-5, 1e-4, 1e-4])


def test_resume_continues_and_the_command_line_beats_the_checkpoint(tmp_path):
    common = ["fit", f"--config={QUICKSTART}", *small(tmp_path)]
    main([*common, "--trainer.max_steps=2"])
    checkpoint = run_folder(tmp_path) / "checkpoints/last.ckpt"
    copy = shutil.copytree(run_folder(tmp_path), tmp_path / "kept") / "checkpoints/last.ckpt"
    assert "hyper_parameters" not in torch.load(checkpoint, weights_only=True)
    cli = main(
        [*common, "--trainer.max_steps=4", f"--ckpt_path={checkpoint}", "--model.inner_epochs=3"]
    )
    assert cli.model.inner_epochs == 3
    assert [r["policy_step"] for r in metrics(tmp_path) if r["reward"]] == ["1", "2", "3", "4"]
    # …and sees the batches that the uninterrupted run would have seen.
    main(["fit", f"--config={QUICKSTART}", *small(tmp_path / "whole"), "--trainer.max_steps=4"])
    main([*common, "--trainer.max_steps=4", f"--ckpt_path={copy}"])
    resumed, whole = (
        [r["reward"] for r in metrics(root) if r["reward"]]
        for root in (tmp_path, tmp_path / "whole")
    )
    assert resumed == whole


def test_validate_and_test(tmp_path, capsys):
    main(["validate", f"--config={QUICKSTART}", *small(tmp_path)])
    main(["test", f"--config={QUICKSTART}", *small(tmp_path)])
    (row,) = metrics(tmp_path)
    low, share, high = (float(row[f"test/accuracy{end}"]) for end in ("_low", "", "_high"))
    assert 0 <= low <= share <= high <= 1 and low < high


def test_predict_then_fit_the_estimator_alone(tmp_path):
    stored = tmp_path / "stored.jsonl"
    main(
        [
            "predict",
            f"--config={QUICKSTART}",
            *small(tmp_path),
            f"--predictions.path={stored}",
            "--data.predict_problems=16",
            "--data.validation_batch=8",
        ]
    )
    rows = [json.loads(line) for line in stored.read_text().splitlines()]
    assert len(rows) == 16 * 4
    assert [r["group"] for r in rows] == [g for g in range(16) for _ in range(4)]
    for row in rows:
        assert "".join(s["text"] for s in row["steps"]) == row["text"]
        spans = [(s["start"], s["end"]) for s in row["steps"]]
        assert [a for a, _ in spans] == [0, *[b for _, b in spans[:-1]]]
        assert spans[-1][1] == len(row["completion_ids"])
        assert {"value", "weight", "advantage"} <= set(row["steps"][0])
    estimator = QUICKSTART.replace("quickstart", "estimator")
    root = tmp_path / "alone"
    fit = [
        "fit",
        f"--config={estimator}",
        f"--data.path={stored}",
        f"--trainer.default_root_dir={root}",
        "--trainer.enable_progress_bar=false",
    ]
    main(fit)
    assert any(r["val/auc"] for r in metrics(root))
    checkpoint = next((run_folder(root) / "checkpoints").glob("estimator-*.ckpt"))
    cli = main(
        [
            "fit",
            f"--config={QUICKSTART}",
            f"--config={QUICKSTART.replace('quickstart', 'causal_steps')}",
            *small(tmp_path / "warm"),
            f"--model.estimator.checkpoint={checkpoint}",
            "--model.estimator.optimizer.init_args.lr=0",
        ]
    )
    trained = torch.load(checkpoint, weights_only=True)["state_dict"]
    assert torch.equal(
        cli.model.estimator.estimator.read_out.weight, trained["estimator.read_out.weight"]
    )


def test_help_lists_members_and_documents_fields(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--model.help=SSGRPO"])
    text = capsys.readouterr().out
    assert "Rollouts per problem" in text or "known subclasses" in text
    with pytest.raises(SystemExit):
        main(["fit", "--data.help=RolloutDataModule"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Rollouts per problem (K)" in text
    assert "ChainArithmetic" in text and "FinalNumber" in text and "ByLine" in text
