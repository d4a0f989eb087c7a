"""Problems are right, distinct, split without overlap, and their steps can be checked exactly."""

import json
import random
import re

import pytest

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.tasks import (
    CarelessChain,
    ChainArithmetic,
    DecisiveLine,
    DecoyChain,
    FillerChain,
    RepairChain,
    TableTask,
)
from ssgrpo_lightning.verifiers import FinalNumber


def test_answers_are_right_and_results_stay_in_range():
    for problem in ChainArithmetic(operations=4, train_problems=50).problems("train"):
        assert eval(problem.prompt.rstrip("=")) == int(problem.answer)


def test_splits_never_overlap_and_seeds_reproduce(task):
    splits = {s: {p.prompt for p in task.problems(s)} for s in ("train", "validation", "test")}
    assert not splits["train"] & splits["validation"]
    assert not splits["train"] & splits["test"]
    assert not splits["validation"] & splits["test"]
    assert [len(s) for s in splits.values()] == [64, 16, 16]
    again = ChainArithmetic(train_problems=64, held_out_problems=16)
    assert again.problems("train") == task.problems("train")


def test_every_step_of_a_solution_is_sound(task):
    for problem in task.problems("train"):
        steps = task.solution(problem).split("\n")
        assert task.step_truth(problem, steps) == [True] * 4


@pytest.mark.parametrize(
    ("steps", "truth"),
    [
        (["7+5=12", "12-3=9", "#9"], [True, True, True]),
        (["7+5=13", "13-3=10", "#10"], [False, True, True]),  # an error taken up rightly
        (["7+5=12", "12-3=8", "#9"], [True, False, False]),
        (["7+5=12", "12+3=15", "#15"], [True, False, True]),  # the wrong operator
        (["7+5=12", "13-3=10", "#10"], [True, False, True]),  # does not take up 12
        (["#9"], [False]),  # an answer before its reasons
        (["7+5=12", "nonsense"], [True, False]),
    ],
)
def test_step_truth(steps, truth):
    assert ChainArithmetic(operations=2).step_truth(Problem(0, "7+5-3=", "9"), steps) == truth


def test_too_few_distinct_problems_are_refused():
    with pytest.raises(ValueError, match="only .* distinct train problems"):
        ChainArithmetic(operations=1, highest_number=3, train_problems=100).problems("train")


PROBES = [FillerChain, CarelessChain, DecoyChain, RepairChain, DecisiveLine]
CHAIN = Problem(0, "7+5-3=", "9")
SUMS = Problem(0, "12+7,5+9,31-4@2=", "14")


@pytest.mark.parametrize("kind", PROBES)
def test_probes_are_solved_without_mistakes_by_their_characters(kind):
    task = kind(train_problems=50, held_out_problems=10)
    problems = task.problems("train")
    assert problems == kind(train_problems=50, held_out_problems=10).problems("train")
    for problem in problems:
        solution = task.solution(problem)
        steps = solution.split("\n")
        assert solution == task.solution(problem)
        assert FinalNumber("#")(solution, problem).reward == 1.0
        assert all(task.step_truth(problem, steps))
        assert task.relevant(problem, steps)[-1]
        assert set(problem.prompt + solution) <= set(task.characters)


@pytest.mark.parametrize("kind", PROBES)
def test_demonstrations_follow_their_generator(kind):
    task = kind(train_problems=50, held_out_problems=10)

    def written(seed):
        rng = random.Random(seed)
        return [task.solution(problem, rng) for problem in task.problems("train")]

    assert written(1) == written(1)
    # Fillers hang on the problem alone; only tasks with mistakes draw from the generator.
    assert (written(1) == written(2)) == (kind in (FillerChain, DecisiveLine))


@pytest.mark.parametrize(
    ("task", "problem", "steps", "truth", "relevant"),
    [
        (
            FillerChain(operations=2),
            CHAIN,
            ["so", "7+5=13", "hm", "ok", "13-3=10", "#10"],
            [True, False, True, True, True, True],
            [False, True, False, False, True, True],
        ),
        (
            FillerChain(operations=2),
            CHAIN,
            ["sos", "12-3=9"],  # neither filler nor computation: takes the place of a line
            [False, False],
            [True, True],
        ),
        (
            DecoyChain(operations=2),
            CHAIN,
            ["7+5=12", "12-3=8", "!", "#8"],
            [True, False, True, True],
            [True, True, False, True],
        ),
        (
            DecisiveLine(),
            SUMS,
            ["12+7=18", "5+9=14", "31+4=35", "#14"],  # wrong, but not where it matters
            [False, True, False, True],
            [False, True, False, True],
        ),
        (
            DecisiveLine(),
            SUMS,
            ["12+7=19", "5+9=15", "31-4=27", "#15"],  # an error answered with rightly
            [True, False, True, True],
            [False, True, False, True],
        ),
        (
            DecisiveLine(),
            SUMS,
            ["5+9=14", "#14", "31-4=27", "#14"],  # the second line states nothing
            [False, False, True, False],
            [False, True, False, True],
        ),
    ],
)
def test_probes_tell_truth_and_relevance(task, problem, steps, truth, relevant):
    assert task.step_truth(problem, steps) == truth
    assert task.relevant(problem, steps) == relevant


@pytest.mark.parametrize(
    ("steps", "truth"),
    [
        (["7+5=13", "~7+5=12", "12-3=9", "#9"], [False, True, True, True]),
        (["7+5=13", "~7+5=12", "13-3=10", "#10"], [False, True, False, True]),  # ignores the repair
        (["7+5=13", "13-3=10", "#10"], [False, True, True]),  # left unrepaired
        (["7+5=13", "~7+5=14", "14-3=11", "#11"], [False, False, True, True]),  # a wrong repair
        (["7+5=13", "~7+5=14", "~7+5=12"], [False, False, True]),
        (["7+5=13", "~13-3=10"], [False, False]),  # recomputes something else
        (["7+5=13", "13-3=10", "~7+5=12"], [False, True, False]),  # the line before the last
        (["7+5=12", "13-3=10", "~12-3=9", "#9"], [True, False, True, True]),
        (["~7+5=12", "7+5=12"], [False, True]),  # nothing to repair
        (["7+5=12", "12-3=9", "#9", "~#9"], [True, True, True, False]),
    ],
)
def test_a_repair_stands_in_the_place_of_the_line_before_it(steps, truth):
    assert RepairChain(operations=2).step_truth(CHAIN, steps) == truth


def demonstrated(task, count=2000):
    """Demonstrations of one problem as lines, drawn from one generator."""
    rng = random.Random(0)
    return [task.solution(CHAIN, rng).split("\n") for _ in range(count)]


def test_decoys_go_along_with_success():
    shown = demonstrated(DecoyChain(operations=2))
    calls = {True: [], False: []}
    for *_, decoy, answer in shown:
        calls[answer == "#9"].append(decoy == "!")
    # Both lines right: .75 * .75, and a few whose two mistakes cancel.
    assert 0.54 < len(calls[True]) / 2000 < 0.62
    assert sum(calls[True]) / len(calls[True]) == pytest.approx(0.85, abs=0.03)
    assert sum(calls[False]) / len(calls[False]) == pytest.approx(0.15, abs=0.03)


def test_mistakes_and_repairs_are_as_frequent_as_asked():
    task = RepairChain(operations=2, mistakes=0.4, repairs=0.25)
    shown = demonstrated(task)
    wrong, repaired = 0, 0
    for steps in shown:
        truth = task.step_truth(CHAIN, steps)
        # All but the mistakes is sound: repairs, what goes on from them, and the answer.
        assert all(sound or not step.startswith(("~", "#")) for step, sound in zip(steps, truth))
        wrong += truth.count(False)
        repaired += sum(step.startswith("~") for step in steps)
    assert wrong / (2 * len(shown)) == pytest.approx(0.4, abs=0.03)
    assert repaired / wrong == pytest.approx(0.25, abs=0.03)


def test_mistaken_chains_stay_in_range():
    task = DecoyChain(operations=3, mistakes=1.0, train_problems=200)
    rng = random.Random(0)
    for problem in task.problems("train"):
        *lines, _, answer = task.solution(problem, rng).split("\n")
        results = [int(line.split("=")[1]) for line in lines]
        assert len(results) == 3 and all(0 <= r <= 99 for r in results)
        assert answer == f"#{results[-1]}"
        assert task.step_truth(problem, lines) == [False] * 3


def test_shares_outside_nought_to_one_are_refused():
    with pytest.raises(ValueError, match=r"DecoyChain\.mistakes is 25.* write 0\.25"):
        DecoyChain(mistakes=25)
    with pytest.raises(ValueError, match=r"RepairChain\.repairs is -1"):
        RepairChain(repairs=-1)


@pytest.fixture
def table(tmp_path):
    def write(rows, **fields):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return TableTask(train=str(path), validation=str(path), **fields)

    return write


def test_table_reads_columns_and_renders_chats(table):
    rows = [{"q": "One and one?", "a": 2}]
    plain = table(rows, prompt_column="q", answer_column="a", suffix=" ->").problems("train")
    assert plain == [Problem(0, "One and one? ->", "2")]
    chat = table(rows, prompt_column="q", answer_column="a", chat=True, system="Be brief.")
    assert chat.problems("validation")[0].prompt == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One and one?"},
    )


def test_table_keeps_messages_as_they_are(table):
    messages = [{"role": "user", "content": "Hi"}]
    task = table([{"prompt": messages, "answer": "x"}])
    assert task.problems("test")[0].prompt == tuple(messages)


def test_table_errors_name_the_way_out(table):
    with pytest.raises(ValueError, match=r"no column 'prompt'.*\['q'\].*set prompt_column"):
        table([{"q": "x"}]).problems("train")
    with pytest.raises(ValueError, match="row 0 .* must be text or a list of messages"):
        table([{"prompt": 3, "answer": "x"}]).problems("train")
    with pytest.raises(ValueError, match="which is no file"):
        TableTask(train="missing.jsonl", validation="missing.jsonl").problems("train")
    with pytest.raises(ValueError, match=r"TableTask\.system .* would be ignored"):
        table([], system="x")


def test_careless_demonstrations_forget_carries_and_nothing_else():
    task = CarelessChain(operations=4, highest_number=9, mistakes=1.0, train_problems=200)
    rng, forgotten = random.Random(0), 0
    for problem in task.problems("train"):
        steps = task.solution(problem, rng).split("\n")
        for step, right in zip(steps, task.step_truth(problem, steps), strict=True):
            if right:
                continue
            forgotten += 1
            left, sign, term, result = re.fullmatch(r"(\d+)([+-])(\d+)=(\d+)", step).groups()
            exact = int(left) + (1 if sign == "+" else -1) * int(term)
            # The units are right, the tens are those of the first number.
            assert int(result) % 10 == exact % 10 and int(result) // 10 == int(left) // 10
    assert forgotten > 100
