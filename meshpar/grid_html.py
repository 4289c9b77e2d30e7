"""Coloured HTML grids for notebooks: which rank sits where, and who holds what."""

from __future__ import annotations

import colorsys
import html
import itertools
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["Cell", "grid_html", "mesh_html", "rank_colour"]

Cell = tuple[str, str, str]
"""What one cell shows: its text, its background colour, and the tooltip."""

_CELL = (
    "border:1px solid #8888;padding:2px 6px;text-align:center;color:#111;"
    "font-family:monospace;font-size:12px;min-width:1.6em"
)
_HEAD = "padding:2px 6px;text-align:center;font-family:monospace;font-size:11px;opacity:.75"


def rank_colour(rank: int) -> str:
    """A light CSS colour; neighbouring ranks get clearly different hues."""
    hue = (rank * 0.618034) % 1.0  # the golden ratio spreads any number of hues evenly
    red, green, blue = colorsys.hls_to_rgb(hue, 0.80, 0.65)
    return f"#{int(red * 255):02x}{int(green * 255):02x}{int(blue * 255):02x}"


def grid_html(
    caption: str,
    shape: tuple[int, int],
    cell: Callable[[int, int], Cell],
    row_labels: Sequence[str] = (),
    column_labels: Sequence[str] = (),
) -> str:
    """One table of `shape` (rows, columns) with optional labels on both sides."""
    rows, columns = shape
    out = [
        '<table style="border-collapse:collapse;display:inline-table;margin:4px">',
        f'<caption style="{_HEAD};text-align:left">{html.escape(caption)}</caption>',
    ]
    if column_labels:
        heads = "".join(f'<th style="{_HEAD}">{html.escape(c)}</th>' for c in column_labels)
        out.append(f"<tr>{'<th></th>' if row_labels else ''}{heads}</tr>")
    for i in range(rows):
        label = f'<th style="{_HEAD}">{html.escape(row_labels[i])}</th>' if row_labels else ""
        cells = (cell(i, j) for j in range(columns))
        out.append(
            f"<tr>{label}"
            + "".join(
                f'<td style="{_CELL};background:{colour}" title="{html.escape(tip)}">'
                f"{html.escape(text)}</td>"
                for text, colour, tip in cells
            )
            + "</tr>"
        )
    out.append("</table>")
    return "\n".join(out)


def mesh_html(ranks: np.ndarray, names: Sequence[str]) -> str:
    """Draws a mesh: the last two axes are a grid, each index of the axes before gets its own."""
    title = "ProcessMesh(" + ", ".join(
        f"{name}={size}" for name, size in zip(names, ranks.shape, strict=True)
    )
    title += ")"
    planes = ranks.reshape(ranks.shape[:-2] + (1,) * max(0, 2 - ranks.ndim) + ranks.shape[-2:])
    out = [f'<div><b style="font-family:monospace">{html.escape(title)}</b><br>']
    for at in itertools.product(*map(range, planes.shape[:-2])):
        plane = planes[at]
        where = ", ".join(f"{name}={i}" for name, i in zip(names, at, strict=False))

        def cell(i: int, j: int, plane: np.ndarray = plane) -> Cell:
            rank = int(plane[i, j])
            return str(rank), rank_colour(rank), f"rank {rank}"

        row_labels = [f"{names[-2]}={i}" for i in range(plane.shape[0])] if len(names) > 1 else []
        column_labels = [f"{names[-1]}={j}" for j in range(plane.shape[1])]
        out.append(
            grid_html(where, (plane.shape[0], plane.shape[1]), cell, row_labels, column_labels)
        )
    out.append("</div>")
    return "".join(out)
