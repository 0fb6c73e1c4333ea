"""Bars, as SVG that follows the light or dark mode of whoever looks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from .harness import number

WIDTH, LEFT, RIGHT = 760, 190, 90
ROW, TITLE, GAP = 22, 34, 14

STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif; fill: #1f2328 }
.title { font-weight: 600 }
.quiet, .hint { fill: #59636e }
.hint { font-weight: normal }
.bar { fill: #afb8c1 }
.ours { fill: #0969da }
line { stroke: #59636e; stroke-width: 1.5 }
.reference { stroke-dasharray: 3 3; stroke-width: 1 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .quiet, .hint { fill: #9198a1 }
  .bar { fill: #57606a }
  .ours { fill: #4493f8 }
  line { stroke: #9198a1 }
}
"""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a bar for each cell of a column."""

    title: str
    cells: Mapping[str, Mapping[str, Any]]
    #: Where a line is drawn to compare with.
    reference: float | None = None
    #: Whether less is better, or more.
    better: str = "less"

    @property
    def height(self) -> int:
        return TITLE + ROW * len(self.cells) + GAP


def draw(figures: Mapping[str, Sequence[Panel]], place: Path) -> list[str]:
    """One file for each of them. Returns their names."""
    place.mkdir(exist_ok=True)
    for name, panels in figures.items():
        (place / f"{name}.svg").write_text("\n".join(_picture(panels)) + "\n")
    return list(figures)


def _picture(panels: Sequence[Panel]) -> Iterator[str]:
    height = sum(panel.height for panel in panels)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    yield f"<style>{STYLE}</style>"
    top = 0
    for panel in panels:
        yield f'<g transform="translate(0 {top})">'
        yield from _bars(panel)
        yield "</g>"
        top += panel.height
    yield "</svg>"


def _bars(panel: Panel) -> Iterator[str]:
    largest = max((cell["q3"] for cell in panel.cells.values() if "q3" in cell), default=1)
    largest = max(largest, panel.reference or 0, 1e-9)

    def x(value: float) -> float:
        return round(LEFT + max(value, 0) / largest * (WIDTH - LEFT - RIGHT), 1)

    hint = f'<tspan class="hint" dx="8">{panel.better} is better</tspan>'
    yield f'<text class="title" x="{LEFT}" y="22">{escape(panel.title)}{hint}</text>'
    for index, (name, cell) in enumerate(panel.cells.items()):
        top = TITLE + index * ROW
        middle = top + ROW / 2
        ours = name.startswith("hangup")
        weight = "title" if ours else "name"
        yield f'<text class="{weight}" text-anchor="end" x="{LEFT - 8}" y="{middle + 4.5}">{escape(name)}</text>'
        if "cannot" in cell:
            yield f'<text class="quiet" x="{LEFT + 6}" y="{middle + 4.5}">{escape(cell["cannot"])}</text>'
            continue
        end = x(cell["median"])
        kind = "ours" if ours else "bar"
        yield f'<rect class="{kind}" x="{LEFT}" y="{top + 3}" width="{round(end - LEFT, 1)}" height="{ROW - 6}"/>'
        if cell["n"] > 1:
            yield f'<line x1="{x(cell["q1"])}" x2="{x(cell["q3"])}" y1="{middle}" y2="{middle}"/>'
        beside = max(end, x(cell["q3"])) + 6
        yield f'<text class="{weight}" x="{beside}" y="{middle + 4.5}">{number(cell["median"])}</text>'
    if panel.reference is not None:
        at, bottom = x(panel.reference), TITLE + ROW * len(panel.cells)
        yield f'<line class="reference" x1="{at}" x2="{at}" y1="{TITLE}" y2="{bottom}"/>'
