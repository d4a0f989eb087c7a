"""Bad configs fail in seconds, before a model loads, and say how to mend them."""

import pytest

from ssgrpo_lightning.cli import main
from ssgrpo_lightning.policy import Pretrained
from tests.conftest import QUICKSTART, small

CHAT = (
    "{class_path: TableTask, init_args: {train: FILE, validation: FILE, prompt_column: question}}"
)


@pytest.fixture(autouse=True)
def _no_weights_load(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise AssertionError("weights were loaded before the config was checked")

    monkeypatch.setattr(Pretrained, "load", refuse)
    monkeypatch.setattr(Pretrained, "load_trunk", refuse)


def refused(capsys, root, *args) -> str:
    """Run a bad config; returns what the user reads."""
    with pytest.raises(SystemExit) as stop:
        main(["fit", f"--config={QUICKSTART}", *small(root), *args])
    assert stop.value.code not in (0, None)
    message = stop.value.code if isinstance(stop.value.code, str) else ""
    return message + capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--data.group_size=1"], ["data.group_size is 1", "at least 2"]),
        (["--data.rollouts_per_update=18"], ["rollouts_per_update is 18", "multiple", "use 16"]),
        (["--data.rollouts_per_update=400"], ["400", "has 32 to train on", "lower"]),
        (["--model.policy.micro_batch_tokens=0"], ["micro_batch_tokens is 0", "at least 1"]),
        (
            ["--model.policy.model.attention=eager"],
            ["layout is SharedPrompt", "'eager'", "Padded or Packed"],
        ),
        (["--model.policy.model.quantize=nf4"], ["quantize is 'nf4'", "bitsandbytes"]),
        (["--model.policy.lora={rank: 0}"], ["policy.lora.rank is 0", "at least 1"]),
        (["--model.policy.beta=-1"], ["policy.beta is -1.0", "at least 0"]),
        (
            ["--model.policy.beta_control={class_path: AdaptiveBeta, init_args: {target: 0.1}}"],
            ["policy.beta is 0", "AdaptiveBeta", "0.01"],
        ),
        (
            ["--model.policy.beta=0.1", "--model.policy.reference=AdapterOff"],
            ["policy.reference is AdapterOff", "FrozenCopy"],
        ),
        (
            ["--model.policy.correction={class_path: TokenMasked, init_args: {cap: 1}}"],
            ["TokenMasked has floor 0.0 and cap 1", "0 <= floor < 1 < cap"],
        ),
        (["--model.policy.top_entropy=20"], ["policy.top_entropy is 20", "(0, 1]"]),
        (["--model.credit=Nonsense"], ["Nonsense"]),
        (["--model.muu=3"], ["muu"]),
        (["--model.inner_epochs=0"], ["model.inner_epochs is 0", "at least 1"]),
        (["--model.warmup_updates=-1"], ["model.warmup_updates is -1", "at least 0"]),
        (
            ["--model.warmup_updates=2", "--model.credit=Broadcast"],
            ["warmup_updates is 2", "Broadcast", "set it to 0"],
        ),
        (
            ["--model.credit={class_path: GAE, init_args: {lam: 2}}"],
            ["GAE has lam 2.0", "0 <= lam <= 1"],
        ),
        (["--model.estimator=null"], ["ValueGain", "needs step values", "Broadcast"]),
        (["--model.policy.sampling.top_p=0.9"], ["top_p 0.9", "null in training", "evaluation"]),
        (
            ["--model.engine=VllmEngine", "--model.policy.sampling.stop=['=']"],
            ["policy.sampling.stop is ('=',)", "VllmEngine samples token ids"],
        ),
        (["--model.policy.sampling.temperature=0"], ["temperature is 0.0", "greater than 0"]),
        (
            ["--model.policy.max_prompt_tokens=3"],
            ["prompt of train problem", "max_prompt_tokens (3)"],
        ),
        (["--model.policy.sampling.max_new_tokens=300"], ["reads 256", "lower"]),
        (["--model.policy.model.name=./nowhere"], ["./nowhere", "no folder"]),
        (["--model.policy.model.name=pkg://no_such_package/x"], ["no_such_package", "pip install"]),
        (["--model.policy.model.pad_token=<none>"], ["pad_token is '<none>'", "vocabulary"]),
        (
            ["--model.credit={class_path: ValueGain, init_args: {gate: 2}}"],
            ["gate is 2.0", "[0, 1]"],
        ),
        (
            ["--model.policy.surrogate={class_path: ClippedSurrogate, init_args: {clip_low: 2}}"],
            ["clip_low 2.0", "0 < clip_low < 1"],
        ),
        (
            ["--data.task={class_path: ChainArithmetic, init_args: {operations: 0}}"],
            ["operations is 0", "at least 1"],
        ),
        (["--model.gate=SkillGate"], ["gate is SkillGate", "probe.every is 0", "set it to"]),
        (["--model.probe.rollouts=0"], ["probe.rollouts is 0", "at least 1"]),
        (["--model.estimator_patience=1"], ["estimator_patience is 1", "estimator_epochs (1)"]),
        (["--adversarial.problems=1"], ["adversarial.problems is 1", "at least 2"]),
        (["--trainer.gradient_clip_val=1"], ["gradient_clip_val", "policy.max_grad_norm"]),
        (["--trainer.precision=bf16-true"], ["bf16-true", "policy.model.dtype bfloat16"]),
        (["--trainer.precision=16-mixed"], ["16-mixed", "bf16-mixed"]),
        (["--trainer.default_root_dir=/proc/nowhere"], ["default_root_dir", "cannot be written"]),
        (["--model.estimator.checkpoint=missing.ckpt"], ["missing.ckpt", "no file"]),
    ],
)
def test_bad_config(capsys, tmp_path, arguments, parts):
    text = " ".join(refused(capsys, tmp_path, *arguments).split())
    for part in parts:
        assert part in text, text
    assert "Traceback" not in text


def test_missing_column(capsys, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = f"--data.task={CHAT.replace('FILE', str(path))}"
    # The overrides of the small run name fields of the other task, so they stand before it.
    with pytest.raises(SystemExit) as stop:
        main(["fit", f"--config={QUICKSTART}", f"--trainer.default_root_dir={tmp_path}", task])
    text = str(stop.value.code) + capsys.readouterr().err
    assert "no column 'question'" in text and "set prompt_column" in text


def test_a_tokenizer_without_padding_token(capsys, tmp_path):
    import json
    import shutil

    from ssgrpo_lightning.policy import TINY_POLICY, Pretrained

    source = Pretrained(TINY_POLICY).source()["pretrained_model_name_or_path"]
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    text = refused(capsys, tmp_path, f"--model.policy.model.name={folder}")
    assert "has no padding token" in text and "set pad_token" in text and "<eos>" in text


def test_small_groups_are_warned_about(tmp_path):
    from ssgrpo_lightning.data import RolloutDataModule
    from ssgrpo_lightning.tasks import ChainArithmetic
    from ssgrpo_lightning.verifiers import FinalNumber

    with pytest.warns(UserWarning, match="below 4 most groups hold equal rewards"):
        RolloutDataModule(ChainArithmetic(), FinalNumber(), group_size=2)
