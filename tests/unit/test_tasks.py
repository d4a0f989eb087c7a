"""Problems are right, distinct, split without overlap, and their steps can be checked exactly."""

import json

import pytest

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.tasks import ChainArithmetic, TableTask


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
