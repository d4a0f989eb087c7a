"""Charts whose lengths one can measure by hand."""

import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from ssgrpo_lightning.report.charts import COLOURS, GAP, bars, calibration, curves, page, table

NAN = float("nan")


def find(markup: str, class_: str, tag: str = "") -> list[ET.Element]:
    """Elements of a class, and of a tag if one is named."""
    return [
        element
        for element in ET.fromstring(markup).iter()
        if class_ in element.get("class", "").split() and element.tag.endswith(tag)
    ]


def of(element: ET.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


def points(element: ET.Element) -> list[list[float]]:
    return [[float(number) for number in pair.split(",")] for pair in element.get("points").split()]


def texts(markup: str, class_: str) -> list[str | None]:
    return [element.text for element in find(markup, class_, "text")]


def test_bars_are_as_long_as_their_values_and_start_at_zero():
    chart = bars("t", {"a": 1.0, "b": 2.0, "c": -0.5})
    (zero,) = of(find(chart, "zero")[0], "x1")
    (a, width_a), (b, width_b), (c, width_c) = (of(x, "x", "width") for x in find(chart, "bar"))
    assert width_b == pytest.approx(2 * width_a, abs=0.02)
    assert width_c == pytest.approx(width_a / 2, abs=0.02)
    assert a == b == zero and c + width_c == pytest.approx(zero, abs=0.02)
    assert texts(chart, "value") == ["1.00", "2.00", "\u22120.500"]
    assert find(chart, "value")[2].get("class") == "value end"  # its number is left of the bar


def test_whiskers_end_at_the_interval_and_the_reference_stands_at_its_value():
    chart = bars("t", {"a": 1.0, "b": 2.0}, {"a": (0.5, 1.5)}, reference=0.5, unit="s")
    zero, whisker = of(find(chart, "zero")[0], "x1")[0], find(chart, "whisker", "line")
    (width,) = of(find(chart, "bar")[0], "width")
    assert len(whisker) == 1  # b has none
    ends = [(x - zero) / width for x in of(whisker[0], "x1", "x2")]
    assert ends == pytest.approx([0.5, 1.5], abs=1e-3)
    (line,) = find(chart, "reference", "line")
    assert of(line, "x1") == of(line, "x2") == of(whisker[0], "x1")
    assert texts(chart, "reference") == ["reference 0.500 s"]
    number_a, number_b = find(chart, "value")
    assert of(number_a, "x")[0] > of(whisker[0], "x2")[0]  # the number is clear of its whisker
    assert number_b.text == "2.00 s"


def test_a_missing_bar_says_none_and_stays_in_its_row():
    chart = bars("t", {"a": 1, "b": None, "c": NAN}, unit="%", reference=NAN)
    assert texts(chart, "value") == ["1%", "none", "none"] and len(find(chart, "bar")) == 1
    rows = [of(element, "y")[0] for element in find(chart, "value")]
    assert rows[1] - rows[0] == rows[2] - rows[1] > GAP
    assert not find(chart, "reference")
    assert texts(bars("t", {"a": None}), "value") == ["none"]


@pytest.mark.parametrize("better, best", [("high", "2.00"), ("low", "1.00")])
def test_the_best_number_is_bold_and_ours_has_the_colour(better, best):
    chart = bars("t", {"a": 1.0, "b": 2.0, "ours": 1.5}, better=better, highlight="ours")
    bold = find(chart, "bold")
    assert [x.text for x in bold if "value" in x.get("class", "")] == [best]
    assert [x.text for x in bold if "value" not in x.get("class", "")] == ["ours"]
    coloured = [x for x in ET.fromstring(chart) if x.get("color") == COLOURS[0]]
    assert [x[0].text for x in coloured] == ["ours"]
    assert f"{better}er is better" in texts(chart, "muted")


def test_curves_pass_through_their_points_inside_their_bands():
    chart = curves(
        "t", {"a": [(0, 0.0, 0.0, 2.0), (1, 4.0, 2.0, 4.0), (2, 8.0, 6.0, 10.0)]}, "x", "y"
    )
    (x0, y0), (x1, y1), (x2, y2) = points(find(chart, "curve")[0])
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.02) and y0 > y1  # up is small y
    one = (y0 - y1) / 4
    low, high = points(find(chart, "band")[0])[:3], points(find(chart, "band")[0])[:2:-1]
    assert [(y0 - y) / one for _, y in low] == pytest.approx([0, 2, 6], abs=0.01)
    assert [(y0 - y) / one for _, y in high] == pytest.approx([2, 4, 10], abs=0.01)
    assert {"0", "2", "4", "6", "8", "10", "0.0", "0.5", "2.0"} <= set(texts(chart, "tick"))


@pytest.mark.parametrize("height", [0.0, 0.5, 1.0])
def test_labels_of_lines_that_end_together_do_not_overlap(height):
    series = {f"method {i}": [(0, 0.5, 0.0, 1.0), (1, height, 0.0, 1.0)] for i in range(7)}
    chart = curves("t", series, "x", "y")
    places = sorted(of(label, "y")[0] for label in find(chart, "label"))
    assert len(places) == 7 and all(b - a >= GAP - 0.02 for a, b in pairwise(places))
    grid = [y for line in find(chart, "grid") for y in of(line, "y1", "y2")]
    assert min(grid) <= places[0] and places[-1] <= max(grid) + GAP / 2
    assert texts(chart, "legend") == list(series)
    assert len({x.get("color") for x in ET.fromstring(chart) if x.get("color")}) == 7


def test_labels_that_have_room_stay_at_the_ends_of_their_lines():
    series = {name: [(0, y, y, y), (1, y, y, y)] for name, y in (("a", 0.0), ("b", 1.0))}
    chart = curves("t", series, "x", "y")
    ends = [points(line)[-1][1] for line in find(chart, "curve")]
    assert [of(label, "y")[0] - 4 for label in find(chart, "label")] == ends


def test_one_point_and_equal_values_can_be_drawn():
    assert len(points(find(curves("t", {"a": [(3, 0, 0, 0)]}, "x", "y"), "curve")[0])) == 1


def test_calibration_has_a_diagonal_and_areas_in_proportion_to_counts():
    chart = calibration("t", {"a": [(0.0, 0.0, 100), (1.0, 0.5, 25)]})
    (diagonal,) = find(chart, "reference")
    x0, y0, x1, y1 = of(diagonal, "x1", "y1", "x2", "y2")
    assert x1 - x0 == y0 - y1 > 0
    first, second = find(chart, "marker")
    assert of(first, "cx", "cy") == [x0, y0]
    assert of(second, "cx", "cy") == [x1, (y0 + y1) / 2]
    assert of(first, "r")[0] == 2 * of(second, "r")[0]


def test_tables_align_round_and_mark_the_best():
    rows = [
        {"name": "a", "accuracy": 0.61234, "steps": 12345, "time": None},
        {"name": "b", "accuracy": 0.5, "steps": 10, "time": 1234.5},
        {"name": "c", "accuracy": 0.61234, "steps": 11, "time": NAN},
    ]
    root = ET.fromstring(table(rows, {"accuracy": "high", "steps": "low", "time": "low"}))
    cells = [["".join(cell.itertext()) for cell in row] for row in root]
    assert cells[0] == ["name", "accuracy", "steps", "time"]
    assert cells[1] == ["a", "0.612", "12,345", "none"]
    assert cells[2] == ["b", "0.500", "10", "1,230"]
    bold = [[cell.find("b") is not None for cell in row] for row in root]
    assert bold[1:] == [[0, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0]]
    assert [cell.get("class") for cell in root[1]] == ["", "num", "num", "num"]
    assert "<b>" not in table([{"a": None}], {"a": "low"})


@pytest.mark.parametrize(
    "value, shown",
    [(0.05, "0.0500"), (99.95, "100"), (9.996, "10.0"), (1e-7, "1.00e\u221207"), (-2, "\u22122")],
)
def test_numbers_have_three_significant_digits(value, shown):
    assert f">{shown}<" in table([{"a": value}])


def test_all_text_is_escaped():
    evil, line = "<script>&\"'", [(0, 0.5, 0.0, 1.0)]
    charts = [
        bars(evil, {evil: 1.0}, unit=evil, reference=1.0),
        curves(evil, {evil: line}, evil, evil),
        calibration(evil, {evil: [(0.5, 0.5, 1)]}),
        table([{evil: evil}]),
    ]
    for chart in charts:
        assert "<script" not in chart and evil in "".join(ET.fromstring(chart).itertext())
    whole = page(evil, evil, [(evil, evil, "<i>kept</i>")])
    assert "<script" not in whole and "<i>kept</i>" in whole and "http" not in whole
    assert whole.startswith("<!doctype html>") and whole.rstrip().endswith("</html>")


POINT = (0.0, 0.5, 0.0, 1.0)
BAD = {
    "values is {}, must": lambda: bars("t", {}),
    "value of 'a' is inf": lambda: bars("t", {"a": float("inf")}),
    "value of 'reference' is inf": lambda: bars("t", {"a": 1.0}, reference=float("inf")),
    "intervals is 'b', must be one of ['a']": lambda: bars("t", {"a": 1.0}, {"b": (0.0, 1.0)}),
    "intervals['a'] is (1.0, 0.0)": lambda: bars("t", {"a": 1.0}, {"a": (1.0, 0.0)}),
    "intervals['a'] is (nan, 0.0)": lambda: bars("t", {"a": 1.0}, {"a": (NAN, 0.0)}),
    "highlight is 'b', must be one of ['a']": lambda: bars("t", {"a": 1.0}, highlight="b"),
    "series is [], must": lambda: curves("t", {}, "x", "y"),
    "series is ['0', '1'": lambda: curves("t", {str(i): [POINT] for i in range(8)}, "x", "y"),
    "series['a'] is [], must": lambda: curves("t", {"a": []}, "x", "y"),
    "must have increasing x": lambda: curves("t", {"a": [POINT, POINT]}, "x", "y"),
    "must have low <= high": lambda: curves("t", {"a": [(0.0, 0.5, 1.0, 0.0)]}, "x", "y"),
    "series['a'] is (0.0, nan": lambda: curves("t", {"a": [(0.0, NAN, 0.0, 1.0)]}, "x", "y"),
    "points is [], must": lambda: calibration("t", {}),
    "points['a'] is (0.5, 0.5, 0), must": lambda: calibration("t", {"a": [(0.5, 0.5, 0)]}),
    "rows is [], must": lambda: table([]),
    "rows is {'b': 1}, must have the columns": lambda: table([{"a": 1}, {"b": 1}]),
    "best is 'b', must be a column of numbers": lambda: table([{"a": 1}], {"b": "high"}),
    "best is 'a', must be a column of numbers": lambda: table([{"a": "x"}], {"a": "high"}),
    "sections is [], must": lambda: page("t", "l", []),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named_with_its_value_and_a_way_out(message):
    with pytest.raises(ValueError) as error:
        BAD[message]()
    assert message in str(error.value) and ": " in str(error.value).split("must")[1]
