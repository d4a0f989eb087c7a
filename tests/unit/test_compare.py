"""Statistics of a comparison by hand; its plan, its kept results and its page without training."""

import json
import random
from dataclasses import replace

import pytest

from ssgrpo_lightning.bench import compare, runs, settings, summary
from ssgrpo_lightning.bench import statistics as st
from ssgrpo_lightning.bench.runs import Arm, Results, Run, Setting
from ssgrpo_lightning.tasks import ChainArithmetic
from ssgrpo_lightning.verifiers import FinalNumber, Noisy
from tests.conftest import REPOSITORY

CONFIGS = REPOSITORY / "configs"
SETTING = Setting("s", ChainArithmetic(), updates=40, evaluate_every=10, flips=(0.1,))
ARM, OURS = Arm("grpo", "plain GRPO", noisy=True), Arm("ours", "SS-GRPO", overlay=False, noisy=True)


def result(accuracies, rollouts=100, seconds=1.0, calls=0.0):
    curve = [
        {"rollouts": i * rollouts, "tokens": i * 10, "seconds": i * seconds, "accuracy": a}
        for i, a in enumerate(accuracies)
    ]
    return {
        "curve": curve,
        "training_seconds": seconds * len(curve),
        "seconds_per_update": seconds,
        "calls_per_rollout": calls,
        "pass_at_8": 0.9,
        "sampled_entropy": 0.2,
        "wall_seconds": 60.0,
    }


def flat(final):
    """A run whose final accuracy is known and whose curve is a straight line."""
    return result([0.0, final / 2, final, final])


# --- statistics ---------------------------------------------------------------------------------


def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one():
    assert st.pass_at_k(16, 0, 8) == 0 and st.pass_at_k(16, 9, 8) == 1
    assert st.pass_at_k(16, 1, 8) == pytest.approx(0.5)  # the right one is in half of the draws
    assert st.pass_at_k(3, 1, 2) == pytest.approx(2 / 3)


def test_a_curve_always_reaches_its_own_final_accuracy():
    rng = random.Random(0)
    for _ in range(200):
        ys = [rng.random() for _ in range(8)]
        assert st.crossing(list(range(8)), ys, st.final_accuracy(ys)) <= 7


def test_a_curve_that_rises_and_collapses_did_not_reach_its_height():
    assert st.crossing([0, 1, 2], [0.1, 0.9, 0.1], 0.8) == float("inf")


def test_two_pairs_say_next_to_nothing():
    found = st.estimate([[0.1, 0.3]])
    assert found.mean == pytest.approx(0.2) and found.error == pytest.approx(0.1)
    half = 0.1 * st.student(1) / st.Z  # draws of one pair are .1 or .3, widened to Student's t
    assert found.interval == pytest.approx((0.2 - half, 0.2 + half))
    assert found.sign == 0 and found.pairs == 2


def test_one_pair_has_no_interval_and_none_no_estimate():
    assert st.estimate([[0.4]]) == st.Estimate(0.4, pairs=1) and st.estimate([[0.4]]).sign == 0
    assert st.estimate([[]]) is None and st.bootstrap([], st.pooled) is None


def test_settings_count_the_same_however_many_seeds():
    found = st.estimate([[1.0, 1.0, 1.0, 1.0], [3.0, 3.0]])
    assert found.mean == 2 and found.interval == pytest.approx((2, 2)) and found.sign == 1
    assert st.estimate([[-0.1, -0.11, -0.12, -0.09]]).sign == -1


def test_bootstrap_variance_is_that_of_the_mean():
    values = [0.0, 1.0, 2.0, 3.0, 4.0]
    means = [sum(values[i] for i in d[0]) / len(d[0]) for d in st.resamples((5,), 20_000)]
    variance = sum((m - 2) ** 2 for m in means) / len(means)
    assert variance == pytest.approx(st.standard_error(values) ** 2, rel=0.03)


@pytest.mark.parametrize("strata", [1, 3])
def test_no_difference_is_called_one_about_as_often_as_said(strata):
    rng = random.Random(1)
    noise = [[[rng.gauss(0, 1) for _ in range(5)] for _ in range(strata)] for _ in range(60)]
    wrong = sum(st.estimate(x).sign != 0 for x in noise) / len(noise)
    assert wrong < 0.12


def test_band_of_curves():
    (first, second) = st.band([[0.0, 0.2], [0.0, 0.4]])
    assert first == (0, 0, 0) and second == pytest.approx((0.3, 0.2, 0.4))
    assert st.band([[0.5]]) == [(0.5, 0.5, 0.5)]


def test_usable_rates_are_those_within_five_points_of_the_best():
    assert st.usable_range({1e-4: 0.7, 2e-4: 0.75, 4e-4: 0.6}) == (1e-4, 2e-4)


# --- figures ------------------------------------------------------------------------------------


def test_gain_is_paired_by_seed():
    table = {
        "ours": {0: flat(0.5), 1: flat(0.9), 7: flat(0.1)},
        "grpo": {0: flat(0.4), 1: flat(0.8)},
    }
    found = summary.gain([table, {}], "ours", "grpo")
    assert found.mean == pytest.approx(0.1) and found.pairs == 2
    assert summary.gain([table], "ours", "exact") is None


def test_twice_as_fast_needs_half_the_rollouts():
    grpo, ours = result([0.0, 0.2, 0.4, 0.6]), result([0.0, 0.4, 0.8, 0.8])
    # GRPO's final accuracy is .5: GRPO passes it at 250 rollouts, ours at 125.
    assert summary.reach_ratio([[(ours, grpo)]]) == pytest.approx(0.5)
    assert summary.reach_ratio([[(grpo, ours)]]) == float("inf")
    still = result([0.5, 0.5, 0.5])
    assert summary.reach_ratio([[(still, still)]]) != summary.reach_ratio([[(still, still)]])  # NaN


def test_share_of_the_exact_gain():
    def table(exact):
        ours, grpo = (0.62, 0.72, 0.66), (0.6, 0.7, 0.64)
        arms = {"ours": ours, "grpo": grpo, "exact": exact}
        return {n: {i: flat(v) for i, v in enumerate(values)} for n, values in arms.items()}

    share, (low, high) = summary.captured([table((0.7, 0.8, 0.74))])
    assert share == pytest.approx(0.2) and low == pytest.approx(0.2) == pytest.approx(high)
    assert summary.captured([table((0.7, 0.5, 0.7))]) is None  # within two standard errors of 0


def test_the_verdict_says_no_more_than_the_interval():
    clear, unclear = (
        st.Estimate(0.02, 0.005, (0.01, 0.03), 9),
        st.Estimate(0.02, 0.02, (-0.02, 0.06), 9),
    )
    assert "beats plain GRPO by 0.020" in summary.sentence("grpo", clear)
    assert "loses to" in summary.sentence("grpo", st.Estimate(-0.02, 0.005, (-0.03, -0.01), 9))
    assert "no difference that can be told" in summary.sentence("grpo", unclear)
    assert "not run" in summary.sentence("grpo", None)
    assert "from one seed" in summary.sentence("grpo", st.Estimate(0.2))


def test_measured_reads_the_metrics_of_a_run():
    rows = [
        {"policy_step": "0.0", "val/accuracy": "0.25", "reward": ""},
        *(
            {"policy_step": str(i), "reward": r, "entropy": "0.5", "num_tokens": f"{i}00",
             "timing/update": t, "val/accuracy": "", "estimator/calls_per_rollout": "3"}
            for i, r, t in ((1, "0.2", "1.0"), (2, "0.4", "3.0"))
        ),
        {"policy_step": "2.0", "val/accuracy": "0.5", "reward": ""},
    ]  # fmt: skip
    found = runs.measured(rows, 64)
    start, end = found["curve"]
    assert start["accuracy"] == 0.25 and start["rollouts"] == 0 and start["reward"] is None
    assert end["rollouts"] == 128 and end["tokens"] == 200 and end["seconds"] == 4
    assert end["reward"] == pytest.approx(0.3) and end["entropy"] == 0.5
    assert found["calls_per_rollout"] == 3 and found["training_seconds"] == 4


# --- plan and results ---------------------------------------------------------------------------


def test_a_run_trains_on_noise_and_is_evaluated_without():
    arguments = dict(a.split("=", 1) for a in Run(SETTING, ARM, 1e-4, 3, 0.2).arguments())
    noisy, clean = (
        json.loads(arguments[f"--data.{n}"]) for n in ("verifier", "evaluation_verifier")
    )
    assert noisy == runs.named(Noisy(FinalNumber("#"), 0.2, 3))
    assert noisy["init_args"]["verifier"] == clean == runs.named(FinalNumber("#"))
    assert json.loads(arguments["--data.task"])["init_args"]["operations"] == 3


def test_an_arm_that_knows_the_task_is_given_that_of_the_setting():
    arm = replace(ARM, task_field="model.estimator.estimator.init_args.task")
    assert any(a.startswith(f"--{arm.task_field}=") for a in Run(SETTING, arm, 1e-4, 0).arguments())


def test_seeds_of_the_search_are_used_for_nothing_else():
    search = compare.search_runs(SETTING, [ARM, OURS])
    later = compare.final_runs(SETTING, [ARM, OURS], {"grpo": 1e-4, "ours": 2e-4})
    later += compare.noisy_runs(SETTING, [ARM, OURS], {"grpo": 1e-4, "ours": 2e-4})
    assert len(search) == 12 and len(later) == 8
    assert not {r.seed for r in search} & {r.seed for r in later}
    assert {(r.arm.name, r.rate) for r in later} == {("grpo", 1e-4), ("ours", 2e-4)}
    assert compare.search_runs(replace(SETTING, rates=(1e-4,)), [ARM]) == []


def test_results_are_found_by_all_that_went_into_them(tmp_path):
    results, run = Results(tmp_path, CONFIGS), Run(SETTING, ARM, 1e-4, 0)
    assert results.load(run) is None
    results.save(run, flat(0.5))
    assert results.load(run) == flat(0.5)
    others = [replace(run, rate=2e-4), replace(run, seed=1), replace(run, flip=0.1)]
    others += [replace(run, arm=OURS), replace(run, setting=replace(SETTING, updates=80))]
    for other in others:
        assert results.load(other) is None
    results.path(run).write_text('{"curve": [')
    with pytest.raises(ValueError, match="s-grpo-rate0.0001-seed0-.*json is damaged"):
        results.load(run)
    results.path(run).write_text("{}")
    with pytest.raises(ValueError, match="lacks .*curve"):
        results.load(run)


def test_a_missing_overlay_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"arm nobody needs .*nobody\.yaml, which is no file"):
        Run(SETTING, Arm("nobody", "nobody"), 1e-4, 0).configs(CONFIGS)


def test_updates_that_would_not_be_evaluated_are_refused():
    with pytest.raises(ValueError, match="updates 41, must be a multiple of evaluate_every"):
        replace(SETTING, updates=41)


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A folder that holds a result of every planned run of two arms, ours the faster."""
    long = Setting("long", ChainArithmetic(operations=5), rates_from="s")
    arms = (replace(ARM, seeds=3), replace(OURS, seeds=3), Arm("published", "published recipe"))
    for name, value in (("SETTINGS", (SETTING, long)), ("ARMS", arms)):
        monkeypatch.setattr(compare, name, value)
    results, rng = Results(tmp_path, CONFIGS), random.Random(0)
    better = {"grpo": 0.0, "ours": 0.05, "published": -0.05}
    for setting in (SETTING, long):
        rates = {arm.name: 2e-4 for arm in arms}
        for run in (
            compare.search_runs(setting, arms)
            + compare.final_runs(setting, arms, rates)
            + compare.noisy_runs(setting, arms, rates)
        ):
            final = 0.6 + better[run.arm.name] - 0.1 * (run.rate != 2e-4) + rng.random() / 100
            results.save(run, flat(final))
    return tmp_path


def test_a_finished_comparison_is_read_and_not_run_again(stored, capsys):
    compare.main([f"--out={stored}", f"--configs={CONFIGS}"])
    found = json.loads((stored / "compare.json").read_text())
    assert found["missing"] == [] and not (stored / "logs").exists()
    assert found["gain_over_grpo"] == pytest.approx(0.05, abs=0.01)
    assert found["gain_over_grpo_interval"][0] > 0
    assert found["rollouts_ratio_to_grpo_final"] < 1 and found["seconds_ratio"] == 1
    assert found["usable_lr_range"] == [2e-4, 2e-4]
    assert found["exact_gain"] is found["gain_captured"] is found["gain_over_shuffled"] is None
    assert found["settings"]["s"]["arms"]["ours"]["rate"] == 2e-4
    assert found["settings"]["long"]["arms"]["ours"]["rate"] == 2e-4
    assert [row["flip"] for row in found["settings"]["s"]["noise"]] == [0.0, 0.1]
    page = (stored / "compare.html").read_text()
    assert "SS-GRPO beats plain GRPO" in page and "By length of the problem" in page
    assert "gain_over_grpo: 0.0" in capsys.readouterr().out


def test_a_damaged_result_is_named_and_a_budget_says_what_is_missing(stored, capsys):
    ours = next(arm for arm in compare.ARMS if arm.name == "ours")
    damaged = Results(stored, CONFIGS).path(Run(SETTING, ours, 2e-4, 1))
    damaged.write_text("{")
    compare.main([f"--out={stored}", f"--configs={CONFIGS}", "--budget-minutes=0"])
    said = "".join(capsys.readouterr())
    assert f"{damaged} is damaged" in said
    assert "missing: s-ours-rate0.0002-seed1: over the budget" in said
    found = json.loads((stored / "compare.json").read_text())
    assert found["settings"]["s"]["arms"]["ours"]["runs"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--settings=s,nowhere"], "--settings has 'nowhere', must be from s, long, quick"),
        (["--arms=nobody"], "--arms has 'nobody'"),
        (["--settings=long"], "takes its rates from 's': name that first"),
    ],
)
def test_unknown_names_are_refused(stored, capsys, options, message):
    with pytest.raises(SystemExit):
        compare.main([f"--out={stored}", f"--configs={CONFIGS}", *options])
    assert message in capsys.readouterr().err


def test_the_tables_name_overlays_that_exist():
    for arm in settings.ARMS:
        assert Run(settings.QUICK, arm, 1e-4, 0).configs(CONFIGS)
    assert len({s.name for s in (*settings.SETTINGS, settings.QUICK)}) == len(settings.SETTINGS) + 1
