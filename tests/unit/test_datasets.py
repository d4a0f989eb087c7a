"""Tables of the field's forms: answers as their authors read them, examples, slices, streams."""

import json
import re

import pytest

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.stored import _problem
from ssgrpo_lightning.tasks import Gsm8k, Math, TableTask, ToolCalls
from ssgrpo_lightning.tasks.table import SAMPLES
from ssgrpo_lightning.verifiers import FinalNumber

GRADE, CONTEST = SAMPLES + "grade_school.jsonl", SAMPLES + "competition.jsonl"


def gsm8k(**fields):
    return Gsm8k(train=GRADE + "[:64]", validation=GRADE + "[64:]", test=None, **fields)


@pytest.fixture
def write(tmp_path):
    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_the_grade_school_sample_computes_what_it_says():
    problems = gsm8k().problems("train") + gsm8k().problems("validation")
    rows = [json.loads(line) for line in sample("grade_school.jsonl")]
    assert len(problems) == len(rows) == len({row["question"] for row in rows}) >= 60
    for problem, row in zip(problems, rows):
        computed = re.findall(r"<<([^=]*)=(\d+)>>(\d+)", row["answer"])
        assert all(eval(left) == int(right) == int(shown) for left, right, shown in computed)
        assert problem.answer == computed[-1][1]
        assert FinalNumber("####")(row["answer"], problem).reward == 1


def sample(name):
    from ssgrpo_lightning.tasks.table import _path

    return _path(SAMPLES + name).read_text().splitlines()


def test_examples_come_from_training_and_never_show_what_is_asked():
    task = gsm8k(shots=3)
    train = {p.prompt[-1]["content"] for p in gsm8k().problems("train")}
    for split in ("train", "validation"):
        for problem in task.problems(split):
            *shown, asked = problem.prompt
            assert [m["role"] for m in shown] == ["user", "assistant"] * 3
            questions = {m["content"] for m in shown[::2]}
            assert len(questions) == 3 and questions <= train
            assert asked["content"] not in questions
            assert all("<<" not in m["content"] and "####" in m["content"] for m in shown[1::2])
    first, other = (gsm8k(shots=3, seed=s).problems("validation")[0].prompt for s in (0, 1))
    assert first != other


def test_examples_as_text(write):
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(3)]
    path = write(rows)
    task = TableTask(train=path, validation=path, shots=2)
    for i, problem in enumerate(task.problems("train")):
        *examples, asked = problem.prompt.split("\n\n")
        assert asked == f"{i}+1="
        assert sorted(examples) == sorted(f"{k}+1={k + 1}" for k in range(3) if k != i)
    with pytest.raises(ValueError, match="shots is 3, which needs 4 different training questions"):
        TableTask(train=path, validation=path, shots=3).problems("validation")


def test_math_takes_the_levels_it_is_asked_for():
    fields = {"train": CONTEST, "validation": CONTEST, "test": None}
    assert len(Math(**fields).problems("train")) == 24
    easy = Math(levels=(1,), **fields).problems("train")
    levels = [json.loads(line)["level"] for line in sample("competition.jsonl")]
    assert len(easy) == levels.count("Level 1") < 24
    with pytest.raises(ValueError, match=r"Math.levels is \(7,\), must name some of 1 to 5"):
        Math(levels=(7,))


def test_solutions_without_an_answer_are_refused(write):
    path = write([{"question": "1+1?", "answer": "2"}])
    with pytest.raises(ValueError, match="row 0 of .* must end with '#### number'"):
        Gsm8k(train=path, validation=path).problems("train")
    path = write([{"problem": "1+1?", "solution": r"\boxed{2", "level": 1}])
    with pytest.raises(ValueError, match="row 0 of .* no .boxed"):
        Math(train=path, validation=path).problems("train")


def test_slices_and_formats_give_the_same_rows(write, tmp_path):
    import datasets

    rows = [{"prompt": f"q{i}", "answer": f"{i}"} for i in range(10)]
    path = write(rows)
    table = datasets.Dataset.from_list(rows)
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    expected = [Problem(i, f"q{i + 2}", f"{i + 2}") for i in range(5)]
    for name in (path, str(tmp_path / "rows.csv"), str(tmp_path / "rows.parquet")):
        for streaming in (False, True):
            task = TableTask(name + "[2:7]", name + "[8:]", streaming=streaming, limit=9)
            assert task.problems("train") == expected
            assert [p.answer for p in task.problems("validation")] == ["8", "9"]
    # What a slice or a limit leaves out is not there.
    assert len(TableTask(path, path, limit=3).problems("train")) == 3
    with pytest.raises(ValueError, match="has no row for this task"):
        TableTask(path + "[20:]", path).problems("train")


def test_streams_are_sized_shuffled_by_seed_and_held_out_rows_stay(write):
    path = write([{"prompt": f"{i}", "answer": f"{i}"} for i in range(50)])
    fields = {"streaming": True, "limit": 10, "shuffle_buffer": 20}

    def drawn(split, seed):
        task = TableTask(path + "[10:]", path + "[:10]", seed=seed, **fields)
        return [p.answer for p in task.problems(split)]

    assert len(drawn("train", 0)) == 10
    assert drawn("train", 0) == drawn("train", 0) != drawn("train", 1)
    assert min(map(int, drawn("train", 0))) >= 10
    assert drawn("validation", 0) == drawn("validation", 1) == [str(i) for i in range(10)]


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"streaming": True}, "streaming is true and TableTask.limit is null: a stream has no len"),
        ({"shuffle_buffer": 5}, "shuffle_buffer is 5 but .*streaming is false"),
        ({"shots": -1}, "shots is -1, must be at least 0"),
        ({"limit": 0}, "limit is 0, must be at least 1"),
    ],
)
def test_fields_that_cannot_be(fields, parts):
    with pytest.raises(ValueError, match=parts):
        TableTask(train="a.jsonl", validation="a.jsonl", **fields)


def test_sources_that_cannot_be():
    for source, parts in (
        ("pkg://no_such_package/a.jsonl", "'no_such_package', which is not installed"),
        ("gsm8k", r"give a .* hub-name:split such as openai/gsm8k#main:train"),
    ):
        with pytest.raises(ValueError, match=parts):
            TableTask(train=source, validation=source).problems("train")


def test_tool_calls_carry_their_tools_and_calls():
    problem = ToolCalls().problems("train")[0]
    tools = problem.metadata["tools"]
    assert {t["name"] for t in tools} >= {c["name"] for c in json.loads(problem.answer)}
    assert all(json.dumps(t) in problem.prompt[0]["content"] for t in tools)
    assert problem.prompt[0]["role"] == "system"


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"calls": '{"name": "f"}'}, r"row 0 of .* must have arguments and a name among \['f'\]"),
        ({"calls": '{"name": "g", "arguments": {}}'}, r"a name among \['f'\]"),
        ({"calls": "f()"}, "must be JSON text"),
        (
            {"calls": {"name": "f", "arguments": {}}},
            "must be JSON text .* write it with json.dumps",
        ),
        ({"tools": '{"name": "f"}'}, "must have a name and parameters that are a JSON schema"),
    ],
)
def test_tool_rows_that_cannot_be(write, change, parts):
    row = {"question": "q", "tools": '[{"name": "f", "parameters": {}}]', "calls": "[]"}
    path = write([row | change])
    with pytest.raises(ValueError, match=parts):
        ToolCalls(train=path, validation=path).problems("train")


def test_metadata_survives_storage():
    problem = ToolCalls().problems("train")[0]
    stored = json.loads(json.dumps(vars(problem)))
    assert _problem(stored) == problem
    del stored["metadata"]  # rows of an earlier version
    assert _problem(stored).metadata == {}
