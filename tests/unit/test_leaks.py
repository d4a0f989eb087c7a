"""Near-duplicates between splits are found, named, and nothing else is."""

import random
import time

import pytest
import torch

from ssgrpo_lightning.data import RolloutDataModule
from ssgrpo_lightning.functional import near_duplicates
from ssgrpo_lightning.functional.similarity import bands, jaccard, shingles
from ssgrpo_lightning.leaks import LeakCheck, asked
from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.tasks import ChainArithmetic, Task, WordProblems
from ssgrpo_lightning.verifiers import FinalNumber


def texts(count, seed=0, length=40):
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(800)]
    return [" ".join(rng.choices(words, k=length)) for _ in range(count)]


def test_a_changed_word_is_near_and_a_changed_order_is_not():
    text = texts(1)[0]
    words = text.split()
    changed = " ".join(["other", *words[1:]])  # one of 38 runs of three is another
    shuffled = " ".join(random.Random(1).sample(words, len(words)))
    found = near_duplicates([changed, shuffled, text.upper() + " "], [text, "else at all"])
    assert [(t.row, t.other) for t in found] == [(0, 0), (2, 0)]
    assert found[0].similarity == pytest.approx(37 / 39)
    assert found[1].similarity == 1


def test_planted_twins_are_found_among_many_and_nothing_else():
    train, held_out = texts(3000, 0), texts(300, 1)
    for i in range(50):
        words = train[7 * i].split()
        words[i % 40] = "changed"
        held_out[2 * i] = " ".join(words)
    found = near_duplicates(held_out, train)
    exact = [jaccard(shingles(held_out[t.row]), shingles(train[t.other])) for t in found]
    assert [(t.row, t.other) for t in found] == [(2 * i, 7 * i) for i in range(50)]
    assert [t.similarity for t in found] == pytest.approx(exact)


def test_instructions_that_all_share_do_not_count():
    instruction = " ".join(f"rule{'abcdefghij'[i]}" for i in range(10)) * 5
    short = [f"{t} {instruction}" for t in texts(40, length=6)]
    assert jaccard(shingles(short[0]), shingles(short[1])) > 0.3
    assert near_duplicates(short[:20], short[20:], threshold=0.5) == []


def test_bands_are_shared_as_often_as_their_similarity_says():
    rng, shared = random.Random(0), []
    for _ in range(300):
        members = [rng.randrange(1 << 32) for _ in range(100)]
        keys = bands([frozenset(members[:90]), frozenset(members[10:])])
        shared.append((keys[0] == keys[1]).float().mean().item())
    assert sum(shared) / len(shared) == pytest.approx(0.8**4, abs=0.03)
    keys = bands([frozenset(), frozenset(), frozenset(members)])
    assert torch.equal(keys[0], keys[1]) and not (keys[0] == keys[2]).any()


def test_empty_lists_and_empty_texts():
    assert near_duplicates([], ["a"]) == near_duplicates(["a"], []) == []
    assert near_duplicates([""], ["", "a b c"])[0].similarity == 1


def test_ten_thousand_problems_take_seconds():
    train, held_out = texts(9000), texts(1000, 1)
    start = time.process_time()
    near_duplicates(held_out, train)
    assert time.process_time() - start < 20  # 1.2 when measured


def problems(*prompts):
    return [Problem(i, p, "1") for i, p in enumerate(prompts)]


def test_the_check_says_warns_or_refuses():
    same, other = "How many apples has Ada?", "What is the time in Rome?"
    clean = LeakCheck()("validation", problems(other), problems(same))
    assert clean.startswith("leak check: 0 of 1 validation problems")
    assert "similarity at least 0.8" in clean
    with pytest.warns(UserWarning, match=r"1 of 2 validation .*'How many apples has Ada\?' and"):
        LeakCheck()("validation", problems(other, same), problems(same))
    with pytest.raises(ValueError, match=r"1 of 1 test problems.*set data\.leak_check\.action to"):
        LeakCheck("refuse")("test", problems(same), problems(same))
    with pytest.raises(ValueError, match=r"threshold is 0, must be above 0"):
        LeakCheck(threshold=0)


def test_of_a_chat_the_last_message_counts():
    chat = tuple({"role": r, "content": c} for r, c in (("system", "Be kind."), ("user", "Why?")))
    assert asked(Problem(0, chat, "1")) == "Why?"


class Leaky(Task):
    def problems(self, split):
        return problems("one and one is", "two and one is", f"this one is of {split}")


def test_the_data_module_checks_what_it_evaluates_on(capsys):
    def data(**fields):
        module = RolloutDataModule(
            Leaky(), FinalNumber(), group_size=4, rollouts_per_update=4, **fields
        )
        module.prepare_data()
        return module

    for stage, split in (("fit", "validation"), ("test", "test")):
        with pytest.warns(UserWarning, match=f"2 of 3 {split} problems are near-duplicates"):
            data().setup(stage)
    with pytest.raises(ValueError, match="2 of 3 validation"):
        data(leak_check=LeakCheck("refuse")).setup("fit")
    data(leak_check=LeakCheck("skip")).setup("fit")


@pytest.mark.parametrize("task", [ChainArithmetic(), WordProblems(held_out_problems=64)])
def test_generated_tasks_do_not_leak(task):
    LeakCheck("refuse")("validation", task.problems("validation"), task.problems("train"))
