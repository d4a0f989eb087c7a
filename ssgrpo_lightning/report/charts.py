"""Charts, tables and pages of a benchmark report: HTML with inline SVG, no script, no network.

Every chart is one `<svg>` element; `page` lays them out. Text is escaped; None and NaN read "none".
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from numbers import Integral, Real
from typing import Literal, NamedTuple

Better = Literal["high", "low"]
Point = tuple[float, float, float, float]  # x, mean, low, high
# Okabe and Ito's colours, which colour-blind readers tell apart, without their yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#1f2328")
WIDTH, GAP, LETTER = 520, 16, 7.8  # pixels: of a chart, from label to label, of a wide letter
_STYLE = """.chart text{font:13px system-ui,sans-serif;fill:#1f2328;paint-order:stroke;stroke:#fff;
stroke-width:3px;stroke-linejoin:round} .chart .title{font-size:14px;font-weight:600}
.chart .muted,.chart .tick{fill:#57606a} .chart .tick{font-size:12px} .chart .bold{font-weight:700}
.chart .end{text-anchor:end} .chart .middle{text-anchor:middle} .chart .grid{stroke:#eaeef2}
.chart .zero{stroke:#57606a} .chart line.reference{stroke:#1f2328;stroke-dasharray:5 4}
.chart .whisker{stroke:#1f2328;fill:none} .chart .bar,.chart circle{fill:currentColor}
.chart .sample{stroke:currentColor;stroke-width:3} .chart .leader{stroke-width:.8}
.chart polyline{fill:none;stroke:currentColor;stroke-width:2.2;stroke-linejoin:round}
.chart .join{stroke-opacity:.5} .chart .marker{fill-opacity:.75;stroke:#fff}
.chart .band{fill:currentColor;fill-opacity:.14;stroke:currentColor;stroke-opacity:.25}"""
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:68rem;margin:2rem auto;padding:0 1rem;
color:#1f2328;background:#f6f8fa}} main{{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fit,minmax(min(29rem,100%),1fr))}} .num{{text-align:right}}
article{{border:1px solid #d0d7de;border-radius:8px;padding:.8rem 1rem;background:#fff;
overflow-x:auto}} article:has(table){{grid-column:1/-1}} svg{{width:100%;max-width:40rem}}
table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}} h1{{font-size:20px}}
h2{{font-size:1rem;margin:0}} p{{margin:.2rem 0 .8rem;color:#57606a}} th{{color:#57606a}}
th,td{{text-align:left;padding:.3rem .7rem;border-bottom:1px solid #d0d7de}}
</style><h1>{title}</h1><p>{lead}</p><main>{body}</main></html>
"""


def bars(
    title: str,
    values: Mapping[str, float | None],
    intervals: Mapping[str, tuple[float, float]] | None = None,
    reference: float | None = None,
    unit: str = "",
    better: Better = "high",
    highlight: str | None = None,
) -> str:
    """Horizontal bars from zero, each with its number; the best number is bold.

    Args:
        title: Heading of the chart.
        values: Length of each bar, in the order shown; None or NaN is shown as "none".
        intervals: Low and high end of a bar's whisker; a bar without an interval has none.
        reference: Where a dashed line with its number stands; None or NaN for no line.
        unit: Unit of the values, such as "%" or "s".
        better: Whether high or low values are good.
        highlight: The only bar in full colour, ours; without it all bars have it.

    Raises:
        ValueError: No values, an infinite value, an unknown name, an interval with low above high.
    """
    intervals = intervals or {}
    _check_bars(values, intervals, reference, highlight)
    best = _best(values.values(), better, "better")
    unit_ = unit if unit in ("", "%") else f" {unit}"
    labels = [(_number(value) + unit_).replace(f"none{unit_}", "none") for value in values.values()]
    ends = [0.0, *(end for pair in intervals.values() for end in pair)]
    ends += [v for v in (reference, *values.values()) if v is not None and not math.isnan(v)]
    room, names = 14 + LETTER * max(map(len, labels)), [_short(name, 24) for name in values]
    left = 14 + LETTER * max(map(len, names)) + (room if min(ends) < 0 else 0)
    ticks = _ticks(ends if any(ends) else [0.0, 1.0])
    frame = _Frame(left, WIDTH - room, 66, 70 + 28 * len(values), ticks, [])
    note = f"{better}er is better" + (f", in {unit}" if unit else "")
    parts, x = [_text(0, 38, note, "muted"), frame.grid()], frame.x(0.0)
    parts.append(_line("zero", x, frame.top, x, frame.bottom))
    if reference is not None and reference in ends:
        x, label = frame.x(reference), f"reference {_number(float(reference))}{unit_}"
        parts.append(_line("reference", x, frame.top, x, frame.bottom))
        parts.append(_text(min(x, WIDTH - LETTER * len(label) / 2), 58, label, "middle reference"))
    for row, (name, value) in enumerate(values.items()):
        colour, y = COLOURS[0] if highlight in (None, name) else "#afb8c1", 82 + 28 * row
        parts.append(f'<g color="{colour}"><title>{escape(name)}</title>')
        parts.append(_text(0, y + 4, names[row], "bold" if name == highlight else ""))
        parts += [_bar(frame, y, value, intervals.get(name), labels[row], value == best), "</g>"]
    return _svg(title, frame.bottom + 24, parts)


def curves(title: str, series: Mapping[str, Sequence[Point]], x_label: str, y_label: str) -> str:
    """Lines with bands, named at their ends and in a legend.

    Args:
        title: Heading of the chart.
        series: Points (x, mean, low, high) of each line, x increasing; up to 7 lines.
        x_label: What x is.
        y_label: What the lines show.

    Raises:
        ValueError: No or too many series, no points, not finite, x not increasing, low above high.
    """
    _check_series("series", series, lambda p: p[2] <= p[3], "have low <= high: swap them")
    for name, xs in ((name, [point[0] for point in line]) for name, line in series.items()):
        _check(xs == sorted(set(xs)), f"series[{name!r}]", xs, "have increasing x: sort the points")
    legend, top = _legend(series)
    points, names = [p for line in series.values() for p in line], [_short(n, 24) for n in series]
    x_ticks, y_ticks = _ticks([p[0] for p in points]), _ticks([v for p in points for v in p[1:]])
    left = 10 + LETTER * max(map(len, _tick_labels(y_ticks)))
    right = WIDTH - 22 - LETTER * max(map(len, names))
    frame = _Frame(left, right, top, top + 270, x_ticks, y_ticks)
    ends = [frame.y(line[-1][1]) for line in series.values()]
    parts = [legend, frame.grid(x_label, y_label)]
    places = _spread(ends, frame.top, frame.bottom)
    for colour, line, name, end, y in zip(COLOURS, series.values(), names, ends, places):
        band = [(x, low) for x, _, low, _ in line] + [(x, high) for x, _, _, high in line[::-1]]
        middle, x = frame.path(point[:2] for point in line), frame.x(line[-1][0])
        leader = f"{x:.2f},{end:.2f} {right + 4:.2f},{end:.2f} {right + 14:.2f},{y:.2f}"
        parts.append(f'<g color="{colour}"><polygon class="band" points="{frame.path(band)}"/>')
        parts.append(f'<polyline class="curve" points="{middle}"/>')
        parts.append(f'<circle cx="{x:.2f}" cy="{end:.2f}" r="3.2"/>')
        parts.append(f'<polyline class="leader" points="{leader}"/></g>')
        parts.append(_text(right + 18, y + 4, name, "label"))
    return _svg(title, frame.bottom + 42, parts)


def calibration(title: str, points: Mapping[str, Sequence[tuple[float, float, int]]]) -> str:
    """Predicted against observed, a marker a bin, its area in proportion to the count.

    Args:
        title: Heading of the chart.
        points: Predicted value, observed value and count of each bin; up to 7 series.

    Raises:
        ValueError: No or too many series, no points, a number that is not finite, a count below 1.
    """
    _check_series("points", points, lambda p: p[2] >= 1, "count at least 1: drop empty bins")
    legend, top = _legend(points)
    bins = [point for line in points.values() for point in line]
    ticks = _ticks([0.0, 1.0, *(value for bin_ in bins for value in bin_[:2])])  # of both axes
    left, most = 10 + LETTER * max(map(len, _tick_labels(ticks))), max(bin_[2] for bin_ in bins)
    frame = _Frame(left, left + 400, top, top + 400, ticks, ticks)
    parts = [legend, frame.grid("predicted", f"observed (area: count, up to {_number(most)})")]
    parts.append(_line("reference", frame.left, frame.bottom, frame.right, frame.top))
    parts.append(_text(left + 8, top + 18, "predicted too low", "tick"))
    parts.append(_text(frame.right - 8, frame.bottom - 10, "predicted too high", "tick end"))
    for colour, (name, line) in zip(COLOURS, points.items()):
        joined = frame.path(sorted(point[:2] for point in line))
        parts.append(f'<g color="{colour}"><polyline class="join" points="{joined}"/>')
        for x, y, count in line:
            place = f'cx="{frame.x(x):.2f}" cy="{frame.y(y):.2f}"'
            size = f'class="marker" r="{12 * math.sqrt(count / most):.2f}"'
            parts.append(f"<circle {place} {size}><title>{escape(name)}: {count}</title></circle>")
        parts.append("</g>")
    return _svg(title, frame.bottom + 42, parts)


def table(rows: Sequence[Mapping[str, object]], best: Mapping[str, Better] | None = None) -> str:
    """Rows as an HTML table: numbers on the right, the best of each named column bold.

    Args:
        rows: Cells of each row by column; the first row orders the columns.
        best: Whether high or low is good, for the columns where that is marked; equals share it.

    Raises:
        ValueError: No cells, rows of different columns, a column in best that is no numbers.
    """
    _check(any(rows[:1]), "rows", rows, "have a row with a column: leave the table out")
    columns, tops = list(rows[0]), {}
    for row in rows:
        rule = f"have the columns of the first row, {columns}: use None for an empty cell"
        _check(set(row) == set(columns), "rows", dict(row), rule)
    text = {n for row in rows for n in columns if isinstance(row[n], bool | str)}
    side = {name: "" if name in text else "num" for name in columns}
    for name, better in (best or {}).items():
        rule = f"be a column of numbers: choose from {[n for n in columns if side[n]]}"
        _check(bool(side.get(name)), "best", name, rule)
        tops[name] = _best((row[name] for row in rows), better, f"best[{name!r}]")
    lines = ["".join(f'<th class="{side[name]}">{escape(name)}</th>' for name in columns)]
    for row in rows:
        shown = {name: escape(_number(row[name])) for name in columns}
        shown |= {n: f"<b>{shown[n]}</b>" for n, top in tops.items() if row[n] == top is not None}
        lines.append("".join(f'<td class="{side[n]}">{shown[n]}</td>' for n in columns))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def page(title: str, lead: str, sections: Sequence[tuple[str, str, str]]) -> str:
    """A self-contained page of cards, side by side where the window is wide enough.

    Args:
        title: Heading of the page.
        lead: The sentence below it.
        sections: Heading, one sentence that says what to see, and HTML, the only part kept as is.

    Raises:
        ValueError: No sections.
    """
    _check(len(sections) > 0, "sections", sections, "have at least one: write no page")
    cards = (f"<h2>{escape(name)}</h2><p>{escape(see)}</p>{html}" for name, see, html in sections)
    body = "".join(f"<article>{card}</article>" for card in cards)
    return _PAGE.format(title=escape(title), lead=escape(lead), body=body)


class _Frame(NamedTuple):
    """Where numbers lie on the canvas: pixels of the edges, round ticks along them."""

    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[float]
    y_ticks: list[float]

    def x(self, value: float) -> float:
        share = (value - self.x_ticks[0]) / (self.x_ticks[-1] - self.x_ticks[0])
        return self.left + share * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (value - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return self.bottom - share * (self.bottom - self.top)

    def path(self, points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x):.2f},{self.y(y):.2f}" for x, y in points)

    def grid(self, x_label: str = "", y_label: str = "") -> str:
        parts, middle = [_text(0, self.top - 17, y_label, "muted")], (self.left + self.right) / 2
        for x, label in zip(map(self.x, self.x_ticks), _tick_labels(self.x_ticks)):
            parts.append(_line("grid", x, self.top, x, self.bottom))
            parts.append(_text(x, self.bottom + 17, label, "tick middle"))
        for y, label in zip(map(self.y, self.y_ticks), _tick_labels(self.y_ticks)):
            parts.append(_line("grid", self.left, y, self.right, y))
            parts.append(_text(self.left - 6, y + 4, label, "tick end"))
        return "".join(parts) + _text(middle, self.bottom + 36, x_label, "muted middle")


def _number(value: object) -> str:
    """Three significant digits, counts in full: 0.5 is 0.500, 1234.5 is 1,230, 1234 is 1,234."""
    if value is None or (isinstance(value, Real) and math.isnan(value)):
        return "none"
    if isinstance(value, bool) or not isinstance(value, Real):
        return str(value)
    rounded = float(f"{float(value):.2e}")
    power = math.floor(math.log10(abs(rounded))) if 0 < abs(rounded) < math.inf else 0
    shown = f"{rounded:,.{max(0, 2 - power)}f}" if -5 < power < 7 else f"{rounded:.2e}"
    return (f"{value:,}" if isinstance(value, Integral) else shown).replace("-", "\u2212")


def _ticks(values: Sequence[float]) -> list[float]:
    """Round numbers, about five steps apart, that enclose the values."""
    pad = abs(values[0]) / 10 or 1.0 if len(set(values)) == 1 else 0.0
    low, high = min(values) - pad, max(values) + pad
    base = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(m * base for m in (1, 2, 5, 10) if m * base * 5 >= (high - low) * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _tick_labels(ticks: list[float]) -> list[str]:
    places = max((-math.floor(math.log10(b - a) + 1e-9) for a, b in pairwise(ticks)), default=0)
    return [f"{tick:,.{max(0, places)}f}".replace("-", "\u2212") for tick in ticks]


def _spread(places: list[float], low: float, high: float) -> list[float]:
    """The places, moved apart to GAP where they would overlap, between low and high."""
    order, moved = sorted(range(len(places)), key=places.__getitem__), list(places)
    low, high = low - GAP, high + GAP
    for index in order:
        moved[index] = low = max(moved[index], low + GAP)
    for index in reversed(order):
        moved[index] = high = min(moved[index], high - GAP)
    return moved


def _bar(frame, y, value, interval, label, bold) -> str:
    zero, sign, parts = frame.x(0.0), -1 if (value or 0) < 0 else 1, ""
    end = zero if label == "none" else frame.x(value)
    if label != "none":
        size = f'x="{min(zero, end):.2f}" y="{y - 9}" width="{abs(end - zero):.2f}" height="18"'
        parts += f'<rect class="bar" rx="2" {size}/>'
    if interval is not None:
        low, high = map(frame.x, interval)
        caps = f"M{low:.2f} {y - 5}v10M{high:.2f} {y - 5}v10"
        parts += f'{_line("whisker", low, y, high, y)}<path class="whisker" d="{caps}"/>'
        end = min(end, low) if sign < 0 else max(end, high)
    look = "value end" if sign < 0 else "value muted" if label == "none" else "value"
    return parts + _text(end + 7 * sign, y + 4, label, look + " bold" * bold)


def _legend(names: Iterable[str]) -> tuple[str, float]:
    """Names beside samples of their colours, and where the plot below them begins."""
    parts, x, y = "", 0.0, 36
    for colour, name in zip(COLOURS, (_short(name, 56) for name in names)):
        width = 24 + LETTER * len(name)
        x, y = (0.0, y + 20) if x and x + width > WIDTH else (x, y)
        sample, text = _line("sample", x, y, x + 18, y), _text(x + 24, y + 4, name, "legend")
        parts += f'<g color="{colour}">{sample}</g>{text}'
        x += width + 14
    return parts, y + 44


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}"'
    name = f'role="img" class="chart"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f"{start} {name}{_text(0, 16, title, 'title')}{''.join(parts)}</svg>"


def _text(x: float, y: float, text: str, class_: str = "") -> str:
    return f'<text class="{class_}" x="{x:.2f}" y="{y:.2f}">{escape(text)}</text>'


def _line(class_: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{class_}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def _best(values: Iterable[object], better: str, argument: str) -> float | None:
    _check(better in ("high", "low"), argument, better, "be high or low: choose one")
    known = [float(v) for v in values if isinstance(v, Real) and not math.isnan(v)]
    return (max if better == "high" else min)(known, default=None)


def _check(holds: bool, argument: str, value: object, rule_and_way_out: str) -> None:
    if not holds:
        raise ValueError(f"{argument} is {value!r}, must {rule_and_way_out}")


def _check_series(argument: str, series: Mapping[str, Sequence], holds, rule: str) -> None:
    most = f"have 1 to {len(COLOURS)} series, a colour each: split the chart or leave it out"
    _check(0 < len(series) <= len(COLOURS), argument, list(series), most)
    for name, points in series.items():
        where, finite = f"{argument}[{name!r}]", "be finite: leave out points without a value"
        _check(len(points) > 0, where, points, "have a point: leave the series out")
        for point in points:
            _check(all(map(math.isfinite, point)), where, point, finite)
            _check(holds(point), where, point, rule)


def _check_bars(values, intervals, reference, highlight) -> None:
    _check(len(values) > 0, "values", values, "have at least one bar: leave the chart out")
    known = f"be one of {list(values)}: use the names in values"
    _check(highlight is None or highlight in values, "highlight", highlight, known)
    for name, value in [*values.items(), ("reference", reference)]:
        rule = "be finite: use None where there is none"
        _check(value is None or not math.isinf(value), f"the value of {name!r}", value, rule)
    for name, (low, high) in intervals.items():
        _check(name in values, "intervals", name, known)
        rule = "be finite with low <= high: leave a missing interval out"
        _check(-math.inf < low <= high < math.inf, f"intervals[{name!r}]", (low, high), rule)
