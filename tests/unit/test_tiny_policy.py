"""Policies for the variants start from the shipped one, and are built once."""

from dataclasses import replace

import pytest
import torch

from ssgrpo_lightning.records import Problem
from ssgrpo_lightning.tasks import FillerChain
from ssgrpo_lightning.tiny_policy import build


def test_the_shipped_weights_keep_their_characters(policy):
    grown = build.untrained(build.RECIPES["FillerChain"])
    problem = Problem(0, "7+5-3=", "9")
    ids = policy.codec.encode(problem)
    assert grown.codec.encode(problem) == ids
    tokens = torch.tensor([ids])
    attended = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        old = policy.head(policy.hidden(tokens, attended))
        new = grown.head(grown.hidden(tokens, attended))
    # 5 characters more, and before any training the others are as likely among themselves.
    assert new.shape[-1] == old.shape[-1] + 5
    torch.testing.assert_close(new[..., : old.shape[-1]], old)


@pytest.mark.parametrize("name", build.RECIPES)
def test_every_recipe_begins_with_the_shipped_characters(name, policy):
    ids = build.vocabulary(build.RECIPES[name].task)
    shipped = policy.codec.tokenizer.get_vocab()
    assert {token: ids[token] for token in shipped} == shipped


def test_a_policy_is_trained_once(tmp_path, monkeypatch):
    task = FillerChain(held_out_problems=4)
    recipe = replace(build.RECIPES["FillerChain"], task=task, updates=2, batch=2)
    monkeypatch.setitem(build.RECIPES, "FillerChain", recipe)
    first = build.load_or_build("FillerChain", tmp_path)
    monkeypatch.setattr(build, "train", None)
    again = build.load_or_build("FillerChain", tmp_path)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
