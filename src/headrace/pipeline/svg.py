"""A plan as an SVG picture, without any dependency: boxes in columns, arrows between."""

from __future__ import annotations

from html import escape

from headrace.pipeline.draw import OUTPUT, STATE, STEP, STREAM, TABLE, Node, graph, shortened
from headrace.pipeline.layout import layout
from headrace.pipeline.plan import PipelinePlan

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 230, 62, 56, 18, 24
_LINE = 36  # characters of a line that fit a box
_FILLS = {STREAM: "#e8f1fb", TABLE: "#e6f4ea", STEP: "#ffffff", STATE: "#fff4e0", OUTPUT: "#f3e8fb"}
_CLASS = "headrace-plan"
_STYLE = "".join(  # for this picture alone: in a notebook, others are on the same page
    f".{_CLASS} {rule}"
    for rule in (
        "text{font-family:system-ui,sans-serif;fill:#1d2733}",
        ".name{font-size:13px;font-weight:600}",
        ".says{font-size:11px;fill:#4a5665}",
        "rect{stroke:#5f6b7a;stroke-width:1.2}",
        "path{fill:none;stroke:#5f6b7a;stroke-width:1.4}",
    )
)

_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path d="M0 0L8 4L0 8z" style="fill:#5f6b7a;stroke:none"/></marker></defs>'
)


def svg(plan: PipelinePlan) -> str:
    """The whole picture."""
    drawn = graph(plan)
    placed = layout(drawn)
    nodes = {node.id: node for node in drawn.nodes}
    tallest = max(map(len, placed.columns))
    corners = {
        name: (_MARGIN + column * (_WIDTH + _GAP_X), _MARGIN + round((row + (tallest - len(names)) / 2) * (_HEIGHT + _GAP_Y)))
        for column, names in enumerate(placed.columns)
        for row, name in enumerate(names)
    }
    width = 2 * _MARGIN + len(placed.columns) * (_WIDTH + _GAP_X) - _GAP_X
    height = 2 * _MARGIN + tallest * (_HEIGHT + _GAP_Y) - _GAP_Y
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{_CLASS}" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
        f"<title>The pipeline {escape(plan.name)}</title><style>{_STYLE}</style>",
        _TIP,
        f'<rect width="{width}" height="{height}" style="fill:#ffffff;stroke:none"/>',
        *(_arrow([corners[name] for name in route]) for route in placed.routes),
        *(_box(nodes[name], *corner) for name, corner in corners.items() if name in nodes),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _arrow(corners: list[tuple[int, int]]) -> str:
    """From the right side of the first box to the left side of the last, level through the places between."""
    x, y = corners[0][0] + _WIDTH, corners[0][1] + _HEIGHT // 2
    path = f"M{x} {y}"
    for left, top in corners[1:]:
        middle, level = (x + left) // 2, top + _HEIGHT // 2
        path += f"C{middle} {y} {middle} {level} {left} {level}"
        x, y = left, level
        if (left, top) != corners[-1]:
            x = left + _WIDTH
            path += f"L{x} {y}"
    return f'<path d="{path}" marker-end="url(#tip)"/>'


def _box(node: Node, x: int, y: int) -> str:
    """The name, and below it what the step does on at most two lines; the rest shows when the pointer rests on it."""
    lines, inset = _wrapped(node.says), 26 if node.kind == OUTPUT else 10
    said = "".join(f'<text class="says" x="{x + inset}" y="{y + 38 + 15 * row}">{escape(line)}</text>' for row, line in enumerate(lines))
    return (
        f'<g><title>{escape(node.title)}: {escape(node.says)}</title><rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'rx="{_HEIGHT // 2 if node.kind == OUTPUT else 6}" style="fill:{_FILLS[node.kind]}"/>'
        f'<text class="name" x="{x + inset}" y="{y + 20}">{escape(shortened(node.title, 29))}</text>{said}</g>'
    )


def _wrapped(text: str) -> list[str]:
    """One or two lines, broken between words where there are any."""
    if len(text) <= _LINE:
        return [text]
    cut = text.rfind(" ", 1, _LINE + 1)
    cut = cut if cut > 0 else _LINE
    return [text[:cut], shortened(text[cut:].strip(), _LINE)]
