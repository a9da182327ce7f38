"""A chart as an SVG, for where no script runs: a notebook that is read offline, or not trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from hpo.report.figures import AXIS_COLOR, TEXT_COLOR, Chart, Series
from hpo.report.formats import format_number

WIDTH, HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 630, 30, 215


def svg(chart: Chart) -> str:
    """The points, lines and staircases of a chart, with the ends of its axes; or why there are none."""
    if chart.absent:
        return f"<p>{escape(chart.absent)}</p>"
    plane = _Plane(chart.series)
    names = {one.name: one.color for one in chart.series if one.in_legend}
    legend = "".join(f'<tspan fill="{color}" dx="12">{escape(name)}</tspan>' for name, color in names.items())
    drawn = "".join(shape for one in chart.series for shape in plane.shapes(one))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'role="img" font-family="sans-serif" font-size="12" fill="{TEXT_COLOR}">'
        f'<text x="8" y="16">{escape(chart.title)}{legend}</text>'
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="{AXIS_COLOR}"/>'
        f"{plane.ticks()}"
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>'
        f"{drawn}</svg>"
    )


class _Plane:
    """From values to pixels."""

    def __init__(self, series: Sequence[Series]) -> None:
        self.x = _ends([x for one in series for x in one.x])
        self.y = _ends([y for one in series for y in one.y])

    def at(self, x: float, y: float) -> tuple[float, float]:
        (low, high), (bottom, top) = self.x, self.y
        across, up = (x - low) / ((high - low) or 1), (y - bottom) / ((top - bottom) or 1)
        return _LEFT + 12 + across * (_RIGHT - _LEFT - 24), _BOTTOM - 10 - up * (_BOTTOM - _TOP - 20)

    def ticks(self) -> str:
        across = [(self.at(x, 0)[0], _BOTTOM + 18.0, "middle", x) for x in dict.fromkeys(self.x)]
        upright = [(_LEFT - 8.0, self.at(0, y)[1] + 4, "end", y) for y in dict.fromkeys(self.y)]
        return "".join(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{format_number(value)}</text>'
            for x, y, anchor, value in across + upright
        )

    def shapes(self, series: Series) -> Iterator[str]:
        points = [self.at(x, y) for x, y in zip(series.x, series.y, strict=True)]
        if series.draw == "points":
            for n, (x, y) in enumerate(points):
                told = f"<title>{escape(series.hover[n])}</title>" if series.hover else ""
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{series.color}">{told}</circle>'
        elif points:
            steps = "".join(
                f"H{x:.1f}V{y:.1f}" if series.draw == "steps_after" else f"L{x:.1f} {y:.1f}"
                for x, y in points[1:]
            )
            start = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
            yield f'<path d="{start}{steps}" fill="none" stroke="{series.color}" stroke-width="1.5"/>'


def _ends(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)
