"""Temperatures by hand."""

import math

import pytest

from ssgrpo_lightning.temperature import CoolDown, FixedTemperature, FollowsDiversity


def test_fixed_is_what_the_config_says():
    assert FixedTemperature()(0.8, 7, 1.2, 0.1) == 0.8


def test_cool_down_by_hand():
    heat = [CoolDown(start=1.4, updates=4)(1.0, update) for update in (0, 1, 2, 4, 9)]
    assert heat == pytest.approx([1.4, 1.3, 1.2, 1.0, 1.0])


def test_diversity_is_followed_within_bounds():
    follow = FollowsDiversity(target=0.75, low=0.7, high=1.3, rate=0.2)
    assert follow(1.0, 0) == 1.0
    assert follow(1.0, 1, 1.0, 0.25) == pytest.approx(math.exp(0.1))  # too alike: hotter
    assert follow(1.0, 1, 1.0, 1.0) == pytest.approx(math.exp(-0.05))
    assert follow(1.0, 1, 1.1, 0.75) == 1.1
    assert follow(1.0, 1, 1.29, 0.1) == 1.3 and follow(1.0, 1, 0.7, 1.0) == 0.7
    assert follow(2.0, 0) == 1.3  # the bounds hold from the start


@pytest.mark.parametrize("fields", [{"low": 2.0}, {"target": 0.0}, {"rate": 0.0}])
def test_bad_diversity(fields):
    with pytest.raises(ValueError, match="FollowsDiversity has target"):
        FollowsDiversity(**fields)
