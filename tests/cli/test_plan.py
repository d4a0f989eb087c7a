"""``plan`` on the configs of large models, which then run: shrunk, with the same flags."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ssgrpo_lightning.cli import main
from ssgrpo_lightning.policy import Pretrained
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers import Verifier
from tests.conftest import QUICKSTART, REPOSITORY, metrics, small

ARCHITECTURES = REPOSITORY / "tests/architectures"
SMALL, LORA, LARGE, HOSTS = (
    str(REPOSITORY / f"configs/gsm8k_qwen2.5_{name}.yaml")
    for name in ("0.5b", "1.5b_lora", "7b_8xa100", "7b_2nodes")
)


@dataclass(frozen=True)
class ByLot(Verifier):
    """A verdict that hardly any group agrees on."""

    def __call__(self, completion: str, problem: Problem) -> Verdict:
        return Verdict(float(sum(map(ord, completion)) % 2))


def plan(capsys, configs, size, *more) -> list[str]:
    architecture = f"--architecture={ARCHITECTURES / f'qwen2.5-{size}.json'}"
    main(["plan", *(f"--config={c}" for c in configs), architecture, *more])
    return capsys.readouterr().out.splitlines()


def peak(lines) -> tuple[float, float]:
    words = lines[-1].split()
    assert words[:3] + words[4::3] == ["peak", "per", "GPU:", "GiB", "GiB"]
    return float(words[3]), float(words[6])


def test_half_a_billion_on_one_gpu(capsys, tmp_path):
    lines = plan(capsys, [SMALL], "0.5b", f"--out={tmp_path / 'plan.json'}")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["fits"] and peak(lines)[1] == 80
    # 494 million weights in float32, and two means of each.
    assert found["memory"]["training"]["parameters"] == pytest.approx(494.0e6 * 4, rel=0.01)
    assert found["memory"]["training"]["optimiser state"] == pytest.approx(494.0e6 * 8, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("configs", "size"), [([LORA], "1.5b"), ([LARGE], "7b"), ([LARGE, HOSTS], "7b")]
)
def test_the_larger_ones_fit(configs, size, capsys):
    needed, there = peak(plan(capsys, configs, size))
    assert needed <= 74 and there == 80


def test_what_does_not_fit_exits_with_one(capsys):
    arguments = ["--hardware=L4", "--assumptions.reserve_gib=30", "--prompt_tokens=8"]
    with pytest.raises(SystemExit) as stop:
        main(["plan", f"--config={QUICKSTART}", *arguments])
    assert stop.value.code == 1
    assert capsys.readouterr().out.splitlines()[-2] == "It does not fit."


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory) -> str:
    """Qwen2.5 with two narrow layers, random weights, and the tokenizer of the shipped policy."""
    folder = tmp_path_factory.mktemp("shrunk")
    tokenizer = Pretrained().tokenizer().tokenizer
    config = AutoConfig.from_pretrained(ARCHITECTURES / "qwen2.5-7b.json")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config.update({**sizes, **heads, "vocab_size": len(tokenizer), "layer_types": None})
    config.eos_token_id = tokenizer.eos_token_id
    torch.manual_seed(0)
    config = type(config)(**config.to_diff_dict())
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def flags(root, shrunk) -> list[str]:
    """What a machine without GPU, vLLM and hub makes of these configs."""
    return [
        *[flag for flag in small(root) if ".task." not in flag],
        f"--model.policy.model.name={shrunk}",
        "--model.engine=TransformersEngine",
        "--trainer.accelerator=cpu",
        "--data.task=ChainArithmetic",
        "--data.task.train_problems=32",
        "--data.task.held_out_problems=8",
        "--data.verifier=tests.cli.test_plan.ByLot",  # random weights solve nothing
    ]


@pytest.mark.parametrize("config", [SMALL, LORA], ids=["0.5b", "1.5b_lora"])
def test_two_updates_of_a_shrunk_copy(config, tmp_path, shrunk):
    main(["fit", f"--config={config}", *flags(tmp_path, shrunk)])
    rows = [row for row in metrics(tmp_path) if row["reward"]]
    assert len(rows) == 2 and all(float(row["grad_norm"]) > 0 for row in rows)


@pytest.mark.distributed
def test_two_updates_of_a_shrunk_copy_on_two_ranks(tmp_path, shrunk):
    arguments = [f"--config={LARGE}", *flags(tmp_path, shrunk), "--trainer.devices=2"]
    command = [sys.executable, "train.py", "fit", *arguments]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=300)
    rows = [row for row in metrics(tmp_path) if row["reward"]]
    assert len(rows) == 2 and all(float(row["grad_norm"]) > 0 for row in rows)
