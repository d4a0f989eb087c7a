"""Medians, ratios, keys and pages by hand; TRL's settings beside ours; one small real run."""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import sleep

import pytest
import yaml

from ssgrpo_lightning.bench.throughput import __main__ as bench
from ssgrpo_lightning.bench.throughput import arms, figures, growth, learning, our_arms, trl_arm
from ssgrpo_lightning.bench.throughput.page import learning_page, lines, page
from ssgrpo_lightning.tasks import ChainArithmetic
from tests.conftest import QUICKSTART, REPOSITORY

KEYS = {
    "ratio_vs_trl",
    "ssgrpo_over_grpo",
    "over_floor",
    "memory_vs_trl",
    "ssgrpo_memory_over_grpo",
    "estimator_ms_per_step",
}


def reply(seconds, tokens=100, memory=10.0, trained=4, **phases):
    return {
        "seconds": seconds,
        "cpu_seconds": seconds / 4,
        "rollouts": 8,
        "tokens": tokens,
        "trained": trained,
        "memory": memory,
        "reward": 0.5,
        "problems": [1],
        "phases": phases or {"generate": seconds / 2, "policy": seconds / 2},
    }


REPLIES = {
    arms.TRL: [reply(4.0, memory=40.0), reply(2.0, memory=30.0), reply(4.0, tokens=200)],
    arms.GRPO: [reply(1.0, memory=20.0), reply(1.0), reply(1.0)],
    arms.SSGRPO: [reply(s, memory=22.0, score=0.01, estimator=0.02) for s in (1.0, 1.5, 1.25)],
    arms.FLOOR: [reply(0.5), reply(0.8), reply(0.8)],
}


def test_ratios_are_of_one_round_and_not_of_medians():
    found = figures.summarise(REPLIES)["ratios"]
    assert found["grpo_over_trl"]["ratios"] == [0.25, 0.5, 0.25]
    assert found["grpo_over_trl"]["median"] == 0.25
    low, high = found["grpo_over_trl"]["interval"]
    assert 0.25 <= low <= high <= 0.5
    assert found["grpo_over_trl_cpu"]["ratios"] == [0.25, 0.5, 0.25]
    # The third round of TRL sampled twice the tokens, so a token of it is half as dear.
    assert found["grpo_over_trl_per_token"]["ratios"] == [0.25, 0.5, 0.5]
    assert found["grpo_over_floor"]["median"] == 1.25


def test_one_round_has_no_interval():
    assert figures.paired([1.0], [2.0]) == {"median": 0.5, "interval": None, "ratios": [0.5]}


def test_figures_of_an_arm():
    found = figures.summarise(REPLIES)["arms"][arms.TRL]
    assert found["seconds"] == 4.0 and found["memory_mib"] == 40.0
    assert found["rollouts_per_second"] == 2.0 and found["tokens_per_second"] == 50.0
    assert found["trained_share"] == 0.5 and found["phases"] == {"generate": 2.0, "policy": 2.0}


def test_memory_is_that_of_rounds_that_give_it_back():
    weighed = {arms.TRL: [reply(9.0, memory=7.0), reply(9.0, memory=8.0)]}
    found = figures.summarise(REPLIES, weighed)["arms"]
    assert found[arms.TRL]["memory_mib"] == 8.0 and found[arms.TRL]["resident_mib"] == 40.0
    assert found[arms.TRL]["seconds"] == 4.0 and "resident_mib" not in found[arms.GRPO]


def test_a_phase_that_some_updates_lack_took_no_time_there():
    told = [reply(1.0, generate=1.0), reply(1.0, generate=0.4, policy=0.6)]
    assert figures.arm_figures(told)["phases"]["policy"] == pytest.approx(0.3)


def test_keys_are_those_agreed_and_none_where_nothing_was_run():
    found = figures.keys({"tiny": figures.summarise(REPLIES), "smollm2": None})
    assert found.keys() == KEYS and all(part["smollm2"] is None for part in found.values())
    assert {key: part["tiny"] for key, part in found.items()} == pytest.approx(
        {
            "ratio_vs_trl": 0.25,
            "ssgrpo_over_grpo": 1.25,
            "over_floor": 1.25,
            "memory_vs_trl": 0.5,
            "ssgrpo_memory_over_grpo": 1.1,
            "estimator_ms_per_step": 30.0,
        }
    )
    alone = figures.keys({"tiny": figures.summarise({arms.GRPO: REPLIES[arms.GRPO]})})
    assert all(part == {"tiny": None} for part in alone.values())


def test_the_page_renders_with_and_without_growth():
    models = {"tiny": figures.summarise(REPLIES)}
    point = {arm: {"seconds": 1.0, "memory_mib": 9.0, "tokens": 3} for arm in growth.ARMS}
    curve = [{"at": n, "own_mib": 3.0, "arms": point} for n in (1, 2)]
    result = {"about": "one & two", "models": models, "growth": {}} | figures.keys(models)
    assert "one &amp; two" in page(result) and "<svg" in page(result)
    assert page(result | {"growth": {"a": curve, "b": curve}}).count("<svg") == 5
    shown = "\n".join(lines("tiny", models["tiny"]))
    assert "grpo_over_trl 0.250 (0.250 to " in shown


# --- learning -----------------------------------------------------------------------------------


def test_the_difference_of_final_rewards_in_standard_errors():
    def run(trl, ours):
        return {arms.TRL: [0.0] * 5 + [trl] * 10, arms.GRPO: [1.0] * 5 + [ours] * 10}

    found = learning.compared({0: run(0.2, 0.6), 1: run(0.4, 0.6)})
    # Means .3 and .6; the standard error of TRL's is .1, that of ours 0.
    assert found["difference"] == pytest.approx(0.3)
    assert found["standard_error"] == pytest.approx(0.1)
    assert found["difference_in_errors"] == pytest.approx(3.0)
    assert learning_page({"about": "x", **found}).count("<svg") == 1
    assert learning.compared({0: run(0.2, 0.6)})["standard_error"] is None


def test_kept_curves_are_used_only_for_the_run_that_made_them(tmp_path, monkeypatch):
    asked = []

    class Fake:
        def __init__(self, arm, workload, updates, folder):
            self.arm = arm

        def receive(self):
            return {"reward": 0.25}

        def ask(self):
            asked.append(self.arm)

    monkeypatch.setattr(learning, "Worker", Fake)
    monkeypatch.setattr(learning, "end", lambda workers: None)
    first = learning.curves(arms.TINY, 3, 0, tmp_path, lambda: None)
    assert first == {arms.TRL: [0.25] * 3, arms.GRPO: [0.25] * 3} and len(asked) == 6
    assert learning.curves(arms.TINY, 3, 0, tmp_path, lambda: None) == first and len(asked) == 6
    learning.curves(replace(arms.TINY, lr=1.0), 3, 0, tmp_path, lambda: None)
    assert len(asked) == 12


# --- arms ---------------------------------------------------------------------------------------


def test_time_in_an_inner_phase_is_not_counted_twice():
    clock = arms.Clock("cpu")
    inner = clock.timed("inner", lambda: sleep(0.05))
    clock.timed("outer", lambda: (inner(), sleep(0.02)))()
    assert clock.seconds["inner"] >= 0.05
    assert 0.02 <= clock.seconds["outer"] < 0.05
    assert 0 <= clock.cpu_seconds < 0.05  # sleeping takes none


def test_batches_go_on_over_epochs_in_the_order_of_the_data_module():
    task = ChainArithmetic(train_problems=6)
    workload = replace(arms.TINY, task=task, rollouts=32, micro_batch=32, group_size=8)
    found = workload.batches(3)
    assert [len(batch) for batch in found] == [4, 4, 4]
    assert len({p.id for batch in found for p in batch}) > 4


def test_a_batch_that_trl_cannot_split_is_refused():
    with pytest.raises(ValueError, match="multiple of micro_batch"):
        replace(arms.TINY, rollouts=96)


def test_trl_gets_the_settings_of_the_quickstart():
    theirs, ours = trl_arm.settings(arms.TINY), yaml.safe_load(Path(QUICKSTART).read_text())
    policy = ours["model"]["init_args"]["policy"]
    optimizer, data = policy["optimizer"]["init_args"], ours["data"]["init_args"]
    assert [theirs["adam_beta1"], theirs["adam_beta2"]] == optimizer["betas"]
    assert theirs["weight_decay"] == optimizer["weight_decay"]
    assert optimizer["lr"] == learning.LR
    size = theirs["per_device_train_batch_size"] * theirs["gradient_accumulation_steps"]
    assert size == data["rollouts_per_update"] and theirs["num_generations"] == data["group_size"]
    assert theirs["per_device_train_batch_size"] == policy["micro_batch"]
    assert theirs["max_completion_length"] == policy["sampling"]["max_new_tokens"]
    assert f"--data.rollouts_per_update={size}" in our_arms.settings(arms.TINY)


def test_a_missing_trl_names_its_extra(monkeypatch):
    monkeypatch.setattr(trl_arm, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ssgrpo-lightning\[trl\]"):
        trl_arm.require()


@pytest.mark.parametrize(
    "wrong", ["--parts=huge", "--arms=verl", "--updates=-1", "--rollouts=12", "--device=tpu"]
)
def test_wrong_options_are_refused_before_anything_starts(wrong, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(SystemExit):
        bench.parse([wrong])


def test_a_policy_of_random_weights_has_the_vocabulary_asked_for(tmp_path):
    own = growth.random_policy(500, tmp_path)
    policy = bench.Pretrained(str(tmp_path)).load()
    assert policy.model.config.vocab_size == 500 == len(policy.codec.tokenizer)
    assert own == 12 * sum(p.numel() for p in policy.parameters())
    assert policy.codec.decode([17, 499]) == "word17 word499 "


def test_a_small_real_run(tmp_path):
    present = [arm for arm in arms.LABELS if arm != arms.TRL or find_spec("trl")]
    options = ["--parts=tiny", "--rollouts=16", "--updates=1", "--threads=1"]
    options += [f"--arms={','.join(present)}", f"--out={tmp_path}"]
    module = [sys.executable, "-m", "ssgrpo_lightning.bench.throughput"]
    subprocess.run([*module, *options], cwd=REPOSITORY, check=True, capture_output=True)
    result = json.loads((tmp_path / "throughput.json").read_text())
    assert result.keys() >= KEYS and result["ratio_vs_trl"]["smollm2"] is None
    found = result["models"]["tiny"]["arms"]
    assert list(found) == present
    # At learning rate 0 our arms draw the same tokens, and the floor trains on the same rows.
    assert len({found[arm]["tokens"] for arm in (arms.GRPO, arms.SSGRPO, arms.FLOOR)}) == 1
    assert found[arms.GRPO]["trained_share"] == found[arms.FLOOR]["trained_share"]
    for figure in found.values():
        assert figure["seconds"] > 0 and figure["memory_mib"] > 0
        assert figure["phases"]["generate"] > 0 and figure["phases"]["policy"] >= 0
    if arms.TRL in found:
        assert 0.7 < found[arms.TRL]["tokens"] / found[arms.GRPO]["tokens"] < 1.4
        assert found[arms.TRL]["trained_share"] == 1
