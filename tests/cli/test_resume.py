"""A run that ends early and is resumed ends like one that never did."""

import os
import shutil
import signal
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch

from ssgrpo_lightning import checkpoints
from ssgrpo_lightning.bench.kill import FAULTS, SETTINGS, _forgetting, compare
from ssgrpo_lightning.callbacks import VerifierWatch
from ssgrpo_lightning.callbacks.recovery import RESUMABLE
from ssgrpo_lightning.cli import main
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.stored import from_rows, read_rows
from ssgrpo_lightning.verifiers import FinalNumber
from tests.conftest import QUICKSTART, metrics, run_folder, small


def judge(completion, problem):
    """As in the bench, but for Python's generator, from which the type checks of tests draw too."""
    reward = FinalNumber("#")(completion, problem).reward or 0.0
    drawn = max(float(np.random.random()), float(torch.rand(())))
    return reward if drawn < 0.97 else 1 - reward


# A batch is 4 of 24 problems: an epoch is 6 updates. Estimator phases end updates 1, 4 and 7;
# validations come after updates 5 and 10.
RICH = [
    f"--{name}={value}".replace("ssgrpo_lightning.bench.kill.judge", f"{__name__}.judge")
    for name, value in SETTINGS.items()
]
WHOLE = 8


def fit(root, steps, *more):
    words = ["fit", f"--config={QUICKSTART}", *RICH, f"--trainer.default_root_dir={root}"]
    return main([*words, f"--trainer.max_steps={steps}", *more])


def steps(root):
    return [float(row["policy_step"]) for row in metrics(root)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py"])
        fit(root, WHOLE)
    return root


@pytest.fixture(scope="module")
def third(tmp_path_factory):
    """A run of three updates: two wait for the next estimator phase."""
    root = tmp_path_factory.mktemp("third")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["train.py"])
        fit(root, 3)
    return root


class SignalIn(L.Callback):
    """Sends a signal to its own process in a phase of an update."""

    def __init__(self, number, update, phase):
        self.number, self.update, self.phase = number, update, phase

    def on_phase_start(self, trainer, pl_module, name):
        if (pl_module.policy_step + 1, name) == (self.update, self.phase):
            os.kill(os.getpid(), self.number)


def signalled(monkeypatch, *at):
    sender = SignalIn(*at)
    monkeypatch.setattr(VerifierWatch, "on_phase_start", sender.on_phase_start, raising=False)


def test_a_resume_of_a_resume_across_epochs_is_the_whole_run(tmp_path, whole, third):
    root = shutil.copytree(third, tmp_path / "run")
    waiting = torch.load(checkpoints.last_of(root), weights_only=True)["ssgrpo"]["waiting"]
    assert [len(rank) for rank in waiting] == [2]
    fit(root, 6, "--ckpt_path=last")  # the end of an epoch
    fit(root, WHOLE, "--ckpt_path=last")
    rows, wrong = compare(root, whole)
    assert rows == WHOLE + 2 and wrong == []
    # One run, one folder: nothing was begun anew.
    assert [p.name for p in root.glob("version_*")] == ["version_0"]
    shown = {line.split(",")[0] for line in (root / "version_0/rollouts.jsonl").open()}
    assert shown == {'{"policy_step": 1'}


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "python"])
def test_each_state_that_is_forgotten_shows(tmp_path, whole, third, fault):
    root = shutil.copytree(third, tmp_path / "run")
    with _forgetting(fault):
        cli = fit(root, 5, "--ckpt_path=last")
    found, expected = metrics(root), metrics(whole)
    assert len(found) == 7 and cli.model.policy_step == 5
    assert any(
        a[name] != b[name]
        for a, b in zip(found, expected)
        for name in b
        if not name.startswith("timing/")
    )


def test_a_signal_ends_the_run_after_its_update_and_the_next_start_goes_on(
    tmp_path, whole, monkeypatch, caplog
):
    # In the middle of an update after which a validation is due: the next start makes up for it.
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGTERM, 5, "policy")
        patch.setattr("sys.argv", ["train.py", "fit", "--ckpt_path", "old.ckpt", "--config=a b"])
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            fit(tmp_path, WHOLE)
    assert ended.value.code == RESUMABLE == 75
    assert signal.getsignal(signal.SIGTERM) == before
    last = run_folder(tmp_path) / "checkpoints/last.ckpt"
    said = caplog.text
    assert "SIGTERM: the run ends after update 5; go on from update 5 with:" in said
    assert f"python train.py fit '--config=a b' --ckpt_path={last}" in said
    assert torch.load(last, weights_only=True)["recovery"]["validation_due"]
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5]
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGUSR1, 7, "rollout")
        with pytest.raises(SystemExit) as ended:
            fit(tmp_path, WHOLE, f"--ckpt_path={last}")
        assert ended.value.code == RESUMABLE
    fit(tmp_path, WHOLE, "--ckpt_path=last")
    assert compare(tmp_path, whole) == (WHOLE + 2, [])


def test_resuming_an_older_checkpoint_branches_off_and_says_what_differs(tmp_path, third, caplog):
    root = shutil.copytree(third, tmp_path / "run")
    folder = root / "version_0/checkpoints"
    before = (root / "version_0/metrics.csv").read_text()
    older = folder / "last-previous.ckpt"
    assert checkpoints.update_of(older) == 2
    fit(root, 3, f"--ckpt_path={older}", "--model.minibatches=1", "--model.policy.optimizer.lr=0.1")
    said = caplog.text
    assert "model.init_args.minibatches: 2 -> 1\n" in said
    assert "optimizer.init_args.lr: 0.0002 -> 0.1 (not taken over" in said
    assert "trainer.max_steps" not in said
    assert (root / "version_0/metrics.csv").read_text() == before
    assert steps(root) == [0, 1, 2, 3]
    assert run_folder(root).name == "version_1"


def test_a_cut_off_checkpoint_is_refused_before_anything_loads(tmp_path, third, capsys):
    root = shutil.copytree(third, tmp_path / "run")
    last = root / "version_0/checkpoints/last.ckpt"
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(SystemExit) as refused:
        fit(root, 4, f"--ckpt_path={last}")
    assert "cut off" in str(refused.value) and "last-previous.ckpt (update 2)" in str(refused.value)
    cli = fit(root, 4, "--ckpt_path=last")  # …which finds the one before by itself
    assert cli.model.policy_step == 4
    assert steps(root) == [0, 1, 2, 3, 4]
    with pytest.raises(SystemExit, match="nowhere.ckpt', which is no file"):
        fit(root, 4, "--ckpt_path=nowhere.ckpt")


def test_last_without_any_checkpoint_starts_anew(tmp_path, capsys):
    cli = main(["fit", f"--config={QUICKSTART}", *small(tmp_path), "--ckpt_path=last"])
    assert cli.model.policy_step == 2
    assert "no checkpoint below" in capsys.readouterr().out


def test_saving_while_optimisers_have_no_state_changes_nothing(tmp_path):
    # The policy's has none before its warm-up is over, the estimator's none before its phase.
    common = ["--model.warmup_updates=2", "--trainer.max_steps=4", "--trainer.val_check_interval=9"]
    found = {}
    for every in (0, 1):
        root = tmp_path / str(every)
        words = ["fit", f"--config={QUICKSTART}", *small(root), *common, "--data.group_size=8"]
        found[every] = main([*words, f"--recovery.every={every}"]).model.state_dict()
    for name, value in found[0].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("field", ["train_time_interval=00:00:10", "save_last=true"])
def test_what_lightning_would_ignore_is_refused(tmp_path, field):
    with pytest.raises(SystemExit, match=r"checkpoint\..* must be left out.*use recovery"):
        main(["fit", f"--config={QUICKSTART}", *small(tmp_path), f"--checkpoint.{field}"])


@pytest.mark.parametrize("field", ["every=-1", "minutes=-2"])
def test_a_time_in_the_past_is_refused(tmp_path, field):
    with pytest.raises(SystemExit, match=r"recovery\..* must be at least 0"):
        main(["fit", f"--config={QUICKSTART}", *small(tmp_path), f"--recovery.{field}"])


def test_minutes_between_saves(tmp_path):
    words = ["fit", f"--config={QUICKSTART}", *small(tmp_path), "--trainer.max_steps=3"]
    main([*words, "--recovery.every=0", "--recovery.minutes=1e-9"])
    folder = run_folder(tmp_path) / "checkpoints"
    assert checkpoints.update_of(folder / "last.ckpt") == 3
    assert checkpoints.update_of(folder / "last-previous.ckpt") == 2


# --- losses that are not finite ------------------------------------------------------------------


def spoilt(monkeypatch, updates, kind):
    """Makes the policy's loss, or only its gradient, not finite in some updates."""
    real = PolicyModule.loss

    def loss(self, batch, divisor):
        value, parts = real(self, batch, divisor)
        if batch.rollouts.policy_step + 1 in updates:
            bad = torch.tensor(0.0, requires_grad=True)
            root = (value * 0).sqrt() if kind == "gradient" else value * float(kind)
            value = value + root + bad
        return value, parts

    monkeypatch.setattr(PolicyModule, "loss", loss)


def learning(root, *more):
    words = ["fit", f"--config={QUICKSTART}", *small(root), "--trainer.max_steps=4"]
    return main([*words, "--data.group_size=8", "--data.rollouts_per_update=64",
                 "--data.task.train_problems=64", *more])  # fmt: skip


@pytest.mark.parametrize("kind", ["nan", "inf", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch, kind):
    spoilt(monkeypatch, {2, 4}, kind)
    kept = []
    monkeypatch.setattr(
        "ssgrpo_lightning.callbacks.WandbRun.on_train_batch_end",
        lambda _, trainer, module, *rest: kept.append(
            {k: v.clone() for k, v in module.policy.policy.model.state_dict().items()}
        ),
    )
    model = learning(tmp_path).model
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert [float(r["skipped_steps"]) for r in rows] == [0, 1, 0, 1]
    assert [float(r["estimator/skipped_steps"]) for r in rows] == [0, 0, 0, 0]
    assert all(torch.equal(kept[0][k], v) for k, v in kept[1].items())
    assert any(not torch.equal(kept[1][k], v) for k, v in kept[2].items())
    assert all(p.isfinite().all() for p in model.parameters())
    assert [r["grad_norm"] != "0.0" for r in rows] == [True, False, True, False]
    assert model.skipped_in_a_row == {"policy": 1, "estimator": 0}


def test_too_many_in_a_row_end_the_run_with_the_rollouts_at_fault(tmp_path, monkeypatch):
    spoilt(monkeypatch, {2, 3, 4}, "nan")
    with pytest.raises(SystemExit, match=r"error: update 4: .*policy was not finite in 3.*\.jsonl"):
        learning(tmp_path, "--model.max_skipped=2")
    file = run_folder(tmp_path) / "not-finite-policy-update4-rank0.jsonl"
    rollouts = from_rows(list(read_rows(Path(file))))
    assert len(rollouts) > 0 and rollouts.policy_step == 3
