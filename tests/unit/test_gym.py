"""reasoning-gym: fresh problems by seed, its own scores, and answers that never run."""

import os
import pickle
import re
import time
from dataclasses import replace

import pytest
import reasoning_gym

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.tasks import ReasoningGym
from ssgrpo_lightning.verifiers import Isolated, Noisy, ReasoningGymScore, Weighted
from ssgrpo_lightning.verifiers.gym import _scorer, harmless

SMALL = {"train_problems": 3, "held_out_problems": 2}
# Tasks that take longer than a second for a problem, or to load their words.
QUICK = sorted(
    set(reasoning_gym.factory.DATASETS)
    - {
        "composite",
        "knight_swap",
        "futoshiki",
        "zebra_puzzles",
        "sudoku",
        "intermediate_integration",
    }
    - {"rearc", "arc_agi", "figlet_font", "group_anagrams", "codeio", "word_ladder", "puzzle24"}
)
SPLITS = ("train", "validation", "test")


def first(name, **config):
    return ReasoningGym(name, config, **SMALL).problems("train")[0]


def tagged(text):
    return f"So it is <answer>{text}</answer>"


def test_every_quick_task_scores_its_references_as_the_library_does():
    judge, wrong = ReasoningGymScore(threshold=None), []
    for name in QUICK:
        problem = first(name)
        own = reasoning_gym.get_score_answer_fn(name)(problem.answer, problem.metadata["entry"])
        verdict = judge(tagged(problem.answer), problem)
        # A problem whose scorer takes nonsense has no verdict; see below.
        if verdict.reward != pytest.approx(own) and "takes any answer" not in verdict.reason:
            wrong.append((name, verdict, own))
        assert judge("no tags at all", problem).reward == 0
    assert not wrong and len(QUICK) > 85


def test_it_judges_in_a_worker_whose_first_verdict_does_not_wait_for_the_library():
    scorer = Weighted([Noisy(ReasoningGymScore(), flip=0.0)], [1.0])
    judge = Isolated(scorer, workers=1, seconds=1.0)  # less than it takes to import
    right = first("chain_sum")
    said = [tagged(right.answer), tagged("0.123"), tagged(right.answer)]
    verdicts = judge.batch(said, [right] * 3)
    assert [v.reward for v in verdicts] == [1, 0, 1]


def test_splits_and_seeds_share_no_question_even_in_a_small_task():
    # About 200 different questions; the splits' own seeds would meet.
    fields = {"config": {"min_n": 1, "max_n": 200}, "train_problems": 120, "held_out_problems": 30}
    task = ReasoningGym("count_bits", **fields)
    asked = {s: [p.prompt[-1]["content"] for p in task.problems(s)] for s in SPLITS}
    everything = [text for texts in asked.values() for text in texts]
    assert len(everything) == len(set(everything)) == 180
    # What is held out does not depend on how much is trained on.
    fewer = replace(task, train_problems=10)
    assert fewer.problems("test") == task.problems("test")
    with pytest.raises(ValueError, match=r"train_problems is 190, but count_bits .* gave only"):
        replace(task, train_problems=190).problems("train")


def test_fresh_problems_by_seed():
    drawn = [ReasoningGym(seed=s, train_problems=50).problems("train") for s in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert not {p.prompt[0]["content"] for p in drawn[0]} & {
        p.prompt[0]["content"] for p in drawn[2]
    }


def test_prompts():
    chat = ReasoningGym(system="Be brief.", instruction="Say it.", **SMALL).problems("train")[0]
    plain = ReasoningGym(chat=False, instruction="", **SMALL).problems("train")[0]
    assert [m["role"] for m in chat.prompt] == ["system", "user"]
    assert chat.prompt[1]["content"] == f"{plain.prompt}\nSay it."
    assert plain.prompt == plain.metadata["entry"]["question"]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"name": "chain"}, r"name is 'chain', which is no task of reasoning-gym: use one of ab, "),
        ({"config": {"terms": 3}}, r"config has terms, but chain_sum knows .*max_terms"),
        ({"config": {"seed": 3}}, r"config has seed, .* seed and number are fields of the task"),
        ({"config": {"min_terms": 9}}, r'\{"min_terms": 9\}, which chain_sum refuses'),
        ({"train_problems": 0}, "train_problems is 0, must be from 1 to"),
        ({"chat": False, "system": "x"}, "would be ignored"),
    ],
)
def test_fields_that_cannot_be(fields, parts):
    with pytest.raises(ValueError, match=parts):
        ReasoningGym(**fields)


def test_partial_scores_are_cut_or_kept():
    problem = first("letter_counting")
    nearly = tagged(f"{problem.answer} letters")
    kept = ReasoningGymScore(threshold=None)(nearly, problem).reward
    assert 0 < kept < 1
    assert ReasoningGymScore()(nearly, problem).reward == 0
    assert ReasoningGymScore(threshold=kept)(nearly, problem).reward == 1
    with pytest.raises(ValueError, match="threshold is 0, must be above 0"):
        ReasoningGymScore(threshold=0)


def test_the_last_closed_pair_of_tags_counts():
    problem = first("chain_sum")
    right, judge = problem.answer, ReasoningGymScore()
    assert judge(f"<answer>no</answer> or <answer> {right}\n</answer> done", problem).reward == 1
    assert judge(f"<answer>{right}</answer> or <answer>no</answer>", problem).reward == 0
    assert judge(f"<answer>{right}", problem).reward == 0
    assert judge(f"{right}</answer>", problem).reward == 0
    assert ReasoningGymScore(opening="", closing="")(right, problem).reward == 1
    other = judge(tagged("1"), Problem(0, "p", "1"))
    assert other.reward is None and "no problem of the task ReasoningGym" in other.reason


def test_a_scorer_sees_the_config_of_its_task():
    problem = replace(first("puzzle24"), answer="")
    # Its scorer takes no number above the config's largest value.
    answers = {10: "(10-4)*(7-3)", 3: "3*3*3-3"}
    for largest, numbers in ((10, answers[10]), (3, answers[3])):
        problem = replace(problem, metadata={**problem.metadata, "config": {"max_value": largest}})
        assert ReasoningGymScore()(tagged(numbers), problem).reward == 1
        assert ReasoningGymScore()(tagged(answers[10]), problem).reward == (largest == 10)


def test_a_scorer_that_takes_anything_gives_no_verdict():
    problem = first("game_of_life_halting")
    for text in ("True", "False", "nonsense"):
        verdict = ReasoningGymScore()(tagged(text), problem)
        assert verdict.reward is None and "takes any answer" in verdict.reason


def test_a_scorer_that_fails_gives_no_verdict_and_says_why():
    problem = first("prime_factorization")
    assert ReasoningGymScore()(tagged(problem.answer), problem).reward == 1
    verdict = ReasoningGymScore()(tagged("two times two"), problem)
    assert verdict.reward is None and "prime_factorization failed: ValueError" in verdict.reason


EVALUATED = {
    "literal": "basic_arithmetic binary_matrix bitwise_arithmetic n_queens number_sorting "
    "spiral_matrix string_insertion",
    "formula": "countdown intermediate_integration polynomial_multiplication puzzle24 "
    "simple_integration",
}
HOSTILE = [
    "open('{0}', 'w')",
    "__import__('os').system('touch {0}')",
    "[open('{0}', 'w')]",
    "[].__class__.__mro__[1].__subclasses__()",
    'f\'{{open("{0}", "w")}}\'',
    "(lambda: open('{0}', 'w'))()",
    "[open('{0}', 'w') for _ in [1]]",
    "\uff4fpen('{0}', 'w')",
    "open\n('{0}', 'w')",
    "open('{0}', 'w') if 5! else 1",
    "oracle_answer",
    "entry['answer']",
    "valid_solutions[0]",
    "9**9**9**9",
    "(9**32)**32",
    "((x+1)**32+1)**32",
    "exp(exp(exp(9)))",
    "factorial(10**9)",
    "Integral(x, x)",
    "[0]*10**9",
    "'a'*10**10",
    "sqrt(" * 20 + "2" + ")" * 20,
    "(" * 4000,
    "[" * 4000,
    "-" * 4000 + "1",
    "9" * 4000,
    "1+" * 2000 + "1",
    "\x00",
    "‮1",
    "x" * 1_000_000,
    "1/0",
    "exit()",
    "exit(5!)",
    "",
]


def test_the_tasks_whose_scorers_evaluate_are_known():
    for kind, names in EVALUATED.items():
        assert all(_scorer(name, "{}")[1] == kind for name in names.split())
    # Its parser of formulas of logic is its own, and evaluates nothing.
    assert _scorer("propositional_logic", "{}")[1] is None


@pytest.mark.parametrize("kind", EVALUATED)
def test_hostile_answers_neither_run_nor_hang_nor_pass(kind, tmp_path):
    trace, judge = tmp_path / "was-here", ReasoningGymScore()
    for name in EVALUATED[kind].split():
        problem = first(name)
        for text in HOSTILE:
            start = time.process_time()
            verdict = judge(tagged(text.replace("{0}", str(trace)).replace("{{", "{")), problem)
            assert not verdict.reward, (name, text[:40])
            assert time.process_time() - start < 2, (name, text[:40])
    assert not os.path.exists(trace)


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("[['_', 'Q'], ['Q', '_']]", "literal", True),
        ("-1.5e3", "literal", True),
        ("_ Q\nQ _", "literal", True),  # no Python: evaluating it fails
        ("answer", "literal", False),
        ("['a'] * 3", "literal", False),
        ("(3 + 5) * (7 - 2) / 4", "formula", True),
        ("-2*x**3 + exp(2*x)/3 + log(Abs(x)) + C", "formula", True),
        ("x**(1/2) + E**x + x**-2", "formula", True),
        ("(1, 2/3)", "formula", True),
        ("2x", "formula", False),
        ("x.is_real", "formula", False),
        ("eval(x)", "formula", False),
        ("x**999", "formula", False),
        ("[1]*9", "formula", False),
        ("'x'", "formula", False),
    ],
)
def test_harmless(text, kind, expected):
    assert harmless(text, kind) is expected


def test_the_verifier_travels_to_another_process():
    problem = first("chain_sum")
    judge, problem = pickle.loads(pickle.dumps((ReasoningGymScore(), problem)))
    assert judge(tagged(problem.answer), problem).reward == 1


def test_reasons_are_short():
    problem = first("chain_sum")
    assert len(ReasoningGymScore()(tagged("1" * 4000), problem).reason) < 200
    assert re.search("has 5000 char", ReasoningGymScore()(tagged("1" * 5000), problem).reason)
