"""The overlay of every task builds it, and its verifier takes the references and nothing else."""

import json

import jsonargparse
import lightning as L
import pytest
import yaml

from ssgrpo_lightning import cli, verifiers  # noqa: F401  (short names of members)
from ssgrpo_lightning.tasks.table import SAMPLES
from tests.conftest import REPOSITORY

GRADE, CONTEST = SAMPLES + "grade_school.jsonl", SAMPLES + "competition.jsonl"
LOCAL = {
    "gsm8k.yaml": {"train": GRADE + "[:64]", "validation": GRADE + "[64:]", "test": None},
    "math.yaml": {"train": CONTEST + "[:14]", "validation": CONTEST + "[14:]", "test": None},
    "reasoning_gym.yaml": {"train_problems": 16, "held_out_problems": 8},
    "tool_calls.yaml": {},
    "table.yaml": {},
}


def module(name, **task):
    """The DataModule of smollm2_cpu.yaml under an overlay, with fields of the task changed."""
    base, overlay = (
        yaml.safe_load((REPOSITORY / "configs" / file).read_text())["data"]
        for file in ("smollm2_cpu.yaml", name)
    )
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    arguments = [f"--data={json.dumps(base)}", f"--data={json.dumps(overlay)}"]
    arguments += [
        f"--data.task.{field}={'null' if value is None else value}" for field, value in task.items()
    ]
    return parser.instantiate_classes(parser.parse_args(arguments)).data


def reference(name, problem):
    """A completion that states the answer of a problem as the overlay's prompt asks for."""
    if name == "tool_calls.yaml":
        calls = json.loads(problem.answer)
        return "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    forms = {
        "gsm8k.yaml": "So\n#### {}",
        "math.yaml": "So $\\boxed{{{}}}$.",
        "reasoning_gym.yaml": "<answer>{}</answer>",
        "table.yaml": "So {}",
    }
    return forms[name].format(problem.answer)


@pytest.mark.parametrize("name", LOCAL)
def test_overlay(name):
    data = module(name, **LOCAL[name])
    data.setup("fit")
    assert data.rollouts_per_update == 64 and data.group_size == 8
    for split in ("train", "validation"):
        problems = data.problems[split]
        assert len(problems) >= 8
        for problem, other in zip(problems, [*problems[1:], problems[0]]):
            verifier = data.evaluation_judge.verifier
            assert verifier(reference(name, problem), problem).reward == 1
            if other.answer.split()[-1] != problem.answer.split()[-1]:
                assert not verifier(reference(name, other), problem).reward
            assert not verifier("", problem).reward
