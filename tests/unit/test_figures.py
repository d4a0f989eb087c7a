"""Figures of step credit, by hand."""

import pytest
import torch

from ssgrpo_lightning.bench import figures

SCORES = torch.tensor([0.9, 0.8, 0.7, 0.7, 0.1])
TRUE = torch.tensor([True, False, True, False, False])


def test_average_precision_by_hand():
    # The first is found at precision 1; the second together with one of equal score, at 2 / 4.
    found = figures.average_precision(SCORES, TRUE, torch.ones(5))
    assert found.item() == pytest.approx((1 + 2 / 4) / 2)


def test_a_detector_that_knows_nothing_has_the_share_of_positives():
    same = torch.zeros(5)
    assert figures.average_precision(same, TRUE, torch.ones(5)).item() == pytest.approx(2 / 5)
    assert figures.auc(same, TRUE, torch.ones(5)).item() == 0.5


@pytest.mark.parametrize(
    "figure",
    [
        lambda w, x, y: figures.auc(x, y, w),
        lambda w, x, y: figures.average_precision(x, y, w),
        lambda w, x, y: figures.calibration_error(x, y, w),
        lambda w, x, y: figures.correlation(x, y.float(), w),
        lambda w, x, y: figures.mean(x, w),
        lambda w, x, y: figures.credit_ratio(x, torch.ones_like(x), y, w),
    ],
)
def test_a_weight_is_a_number_of_copies_and_draws_stand_side_by_side(figure):
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0], [2.0, 0.0, 1.0, 3.0, 1.0]])
    copies = weight[1].long()
    x, y = SCORES.repeat_interleave(copies), TRUE.repeat_interleave(copies)
    plain, drawn = figure(weight, SCORES, TRUE)
    torch.testing.assert_close(plain, figure(torch.ones(5), SCORES, TRUE))
    torch.testing.assert_close(drawn, figure(torch.ones(len(x)), x, y))


@pytest.mark.parametrize("figure", [figures.auc, figures.average_precision])
def test_without_positives_there_is_no_figure(figure):
    assert figure(SCORES, torch.zeros(5, dtype=torch.bool), torch.ones(5)).isnan()
    assert figures.interval(torch.full((3,), torch.nan)) is None


def test_certain_and_right_is_calibrated_and_the_last_bin_holds_one():
    truth = torch.tensor([True, False])
    assert figures.calibration_error(truth.float(), truth, torch.ones(2)).item() == 0.0
    assert figures.calibration_error(truth.float(), ~truth, torch.ones(2)).item() == 1.0


def test_uniform_credit_has_ratio_one_and_no_idle_line_has_no_ratio():
    tokens, on = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([True, False, False])
    assert figures.credit_ratio(2 * tokens, tokens, on, torch.ones(3)).item() == 1.0
    assert figures.credit_ratio(tokens, tokens, on & False, torch.ones(3)).isnan()


def test_an_interval_over_groups_widens_as_groups_get_fewer():
    def width(groups):
        weight = figures.bootstrap(groups, 200)[1:]
        low, high = figures.interval(figures.mean(torch.arange(groups) % 2.0, weight))
        return high - low

    # Of a share of a half: 4 standard errors, .5 / sqrt(groups) each.
    assert width(16) == pytest.approx(0.49, abs=0.1)
    assert width(400) == pytest.approx(0.098, abs=0.02)


def test_keys_never_seen_get_the_mean():
    found = figures.learnt_by_key(
        torch.tensor([1, 1, 2]), torch.tensor([1.0, 0.0, 1.0]), torch.tensor([7, 1])
    )
    assert found.tolist() == pytest.approx([2 / 3, 0.5])
