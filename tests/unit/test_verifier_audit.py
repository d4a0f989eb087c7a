"""The audit of a verifier, and the warning of missing verdicts."""

import json
from dataclasses import replace

import lightning as L
import pytest
import torch

from ssgrpo_lightning.alternation import SSGRPO
from ssgrpo_lightning.callbacks import VerifierWatch
from ssgrpo_lightning.cli import main
from ssgrpo_lightning.credit import Broadcast
from ssgrpo_lightning.metrics import rollout_sums
from ssgrpo_lightning.policy_module import PolicyModule
from ssgrpo_lightning.problems import Problem, Verdict
from ssgrpo_lightning.verifiers import FinalNumber, Verifier
from ssgrpo_lightning.verifiers.audit import audit, near_misses, paraphrases
from ssgrpo_lightning.verifiers.hostile import FAMILIES, hostile_completions
from tests.conftest import QUICKSTART, REPOSITORY, metrics, small

PROBLEMS = [Problem(i, "p", a) for i, a in enumerate(["72", "-1234.5", "40"])]


class Anything(Verifier):
    def __call__(self, completion, problem):
        return Verdict(1.0)


class Nothing(Verifier):
    def __call__(self, completion, problem):
        return Verdict(None, "no idea")


class Careless(Verifier):
    """Takes every answer that begins as the reference does."""

    def __call__(self, completion, problem):
        return Verdict(float(completion.startswith("#" + problem.answer)))


def test_what_should_be_equal_is_and_what_should_not_is_not():
    assert paraphrases("-1234.5")["thousands separators"] == "-1,234.5"
    assert paraphrases(r"-\frac{1}{2}")["plain fraction"] == "-1/2"
    for answer in ("72", "0", "-3", "1.50", "1/2", r"\frac{3}{4}", "Monday", "x+1"):
        assert answer in paraphrases(answer).values()
        wrong = near_misses(answer)
        assert answer not in wrong.values() and len(wrong) >= 4
    assert "negated" not in near_misses("0")  # -0 is 0


def test_a_verifier_that_accepts_anything_has_only_false_accepts():
    found = audit(Anything().batch, PROBLEMS, "{answer}")
    assert {f.kind for f in found.findings} == {"false accept"}
    assert len(found.findings) == sum(
        n for (group, _), n in found.judged.items() if group != "paraphrase"
    )


def test_the_report_counts_and_shows_what_is_wrong():
    found = audit(FinalNumber("#").batch, PROBLEMS)
    assert found.template == "#{answer}"
    rows = {(r[0], r[1]): r[2:] for r in found.rows()}
    assert rows["near miss", "two answers"] == (3, 0, 0, 0)
    assert rows["near miss", "one more"] == (3, 0, 0, 0)
    assert rows["paraphrase", "units"] == (3, 0, 0, 0)
    assert rows["paraphrase", "as it is"] == (3, 0, 0, 0)
    careless = audit(Careless().batch, PROBLEMS, "#{answer}")
    assert {(r[0], r[1]): r[2:] for r in careless.rows()}["near miss", "two answers"] == (
        3,
        3,
        0,
        0,
    )
    assert "false accept: '#72 or 73' for '72'" in careless.table()
    assert len(json.loads(found.json())["findings"]) == len(found.findings)
    none = audit(Nothing().batch, PROBLEMS)
    assert {f.kind for f in none.findings} == {"no verdict"}


def test_hostile_completions_are_many_and_the_same_every_time():
    made = hostile_completions(150)
    assert made == hostile_completions(150) and {n for n, _ in made} == set(FAMILIES)
    assert max(len(text) for _, text in made) >= 1_000_000


def test_no_plain_verifier_accepts_a_hostile_completion():
    for _, text in hostile_completions(200, seed=1):
        assert FinalNumber()(text, Problem(0, "p", "72")).reward == 0


def test_the_command_reports_and_loads_no_model(tmp_path, capsys, monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("ssgrpo_lightning.policy.Pretrained.load", refuse)
    out = tmp_path / "audit.json"
    main(
        [
            "audit",
            f"--config={QUICKSTART}",
            f"--trainer.default_root_dir={tmp_path}",
            "--data.task.train_problems=32",
            "--problems=8",
            f"--out={out}",
        ]
    )
    shown = capsys.readouterr().out
    assert "completions look like '#{answer}'" in shown and "mistake" in shown
    rows = json.loads(out.read_text())["rows"]
    assert {r["set"] for r in rows} == {"paraphrase", "near miss", "hostile"}
    assert sum(r["false_rejects"] + r["no_verdict"] for r in rows) == 0


def test_the_command_refuses_a_template_without_an_answer(tmp_path):
    arguments = [f"--config={QUICKSTART}", f"--trainer.default_root_dir={tmp_path}"]
    with pytest.raises(SystemExit) as stop:
        main(["audit", *arguments, "--template=nothing"])
    assert "must hold {answer}" in str(stop.value.code)


def test_missing_verdicts_are_warned_of_once_in_ten_updates(make_rollouts):
    watch, rollouts = VerifierWatch(), make_rollouts([1.0, None])
    trainer = L.Trainer(accelerator="cpu", logger=False)
    module = SSGRPO(PolicyModule(torch.optim.AdamW), credit=Broadcast())

    def update(step, none):
        row = {"verifier/none_frac": none, "verifier/killed_frac": 0.0, "policy_step": step}
        outputs = {"metrics": row, "rollouts": rollouts}
        watch.on_train_batch_end(trainer, module, outputs, None, 0)

    with pytest.warns(UserWarning) as warned:
        for step in range(1, 24):
            update(step, 0.04 if step < 3 else 0.5)
    assert [str(w.message).split(":")[0] for w in warned] == ["update 3", "update 13", "update 23"]


def test_verdicts_reach_the_metrics(make_rollouts):
    verdicts = (Verdict(1.0, "", 0.2), Verdict(None, "slow", 5.0, killed=True))
    sums = rollout_sums(replace(make_rollouts([1.0, None]), verdicts=verdicts))
    assert sums["verifier/killed_frac"] == (torch.tensor(1.0), torch.tensor(2.0))
    total, count = sums["timing/verdict"]
    assert float(total / count) == pytest.approx(2.6)


def test_the_overlay_of_the_math_verifier_runs(tmp_path):
    overlay = REPOSITORY / "configs/math_verifier.yaml"
    main(["fit", f"--config={QUICKSTART}", f"--config={overlay}", *small(tmp_path)])
    rows = [r for r in metrics(tmp_path) if r["reward"]]
    assert [r["policy_step"] for r in rows] == ["1", "2"]
    assert all(float(r["verifier/none_frac"]) == 0 for r in rows)
    assert all(float(r["timing/verdict"]) > 0 for r in rows)
