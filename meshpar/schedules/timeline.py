"""Timelines: ranks down, time across, colour by action, microbatch numbers."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from meshpar.schedules.actions import OPS, Action, Costs
from meshpar.schedules.simulation import simulate

if TYPE_CHECKING:
    from meshpar.schedules.schedule import Schedule

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#f2b14a"}
ROW, GAP, LEFT, TOP = 26, 4, 62, 46  # heights and margins, in pixels


@dataclass(frozen=True, slots=True)
class Bar:
    """One action on a timeline; the parts of a combined one share its time, `part` of `parts`."""

    rank: int
    start: float
    end: float
    action: Action
    part: int
    parts: int

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, width and height, in time and in ranks."""
        height = 1 / self.parts
        return self.start, self.rank + self.part * height, self.end - self.start, height


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule in time, which shows itself in Jupyter.

    Attributes:
      title: name, size, bubble and peak.
      ranks: their number.
      chunks: stages on each rank; later chunks are drawn paler.
      makespan: the right end of the time axis.
      bars: all actions.
    """

    title: str
    ranks: int
    chunks: int
    makespan: float
    bars: tuple[Bar, ...]

    @property
    def svg(self) -> str:
        """The drawing as SVG text."""
        wide = min(24.0, max(4.0, 1400 / self.makespan))  # pixels for one unit of time
        width = max(LEFT + self.makespan * wide + 12, 420)
        height = TOP + self.ranks * (ROW + GAP) + 30
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" '
            f'viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" font-size="11">',
            f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
            f'<text x="8" y="16" font-size="13" font-weight="bold">{escape(self.title)}</text>',
            *self._legend(),
        ]
        for rank in range(self.ranks):
            y = TOP + rank * (ROW + GAP)
            lines.append(f'<text x="8" y="{y + ROW / 2 + 4:.1f}">rank {rank}</text>')
            lines.append(
                f'<rect x="{LEFT}" y="{y}" width="{self.makespan * wide:.1f}" height="{ROW}" '
                'fill="#eeeeee"/>'
            )
        for bar in self.bars:
            lines += _svg_bar(bar, wide, self.opacity(bar.action))
        base = TOP + self.ranks * (ROW + GAP)
        for time in axis_times(self.makespan):
            x = LEFT + time * wide
            lines.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="middle">{time:g}</text>')
        return "\n".join([*lines, "</svg>"])

    def opacity(self, action: Action) -> float:
        """Of the action's colour: chunks are told apart by it."""
        return 1 - 0.55 * action.chunk / max(1, self.chunks - 1) if self.chunks > 1 else 1

    def save(self, path: str | Path) -> None:
        """Writes the drawing to a file.

        Args:
          path: ends in `.svg`, `.html` or `.png`; PNG needs matplotlib.

        Raises:
          ValueError: another ending.
        """
        path = Path(path)
        if path.suffix in (".svg", ".html"):
            path.write_text(self.svg, encoding="utf-8")
        elif path.suffix == ".png":
            self._save_png(path)
        else:
            raise ValueError(f"save({str(path)!r}): the name ends in .svg, .html or .png.")

    def _repr_html_(self) -> str:
        return self.svg

    def _legend(self) -> list[str]:
        used = {bar.action.op for bar in self.bars}
        lines = []
        for place, op in enumerate(op for op in OPS if op in used):
            x = LEFT + place * 40
            lines.append(f'<rect x="{x}" y="24" width="12" height="12" fill="{COLOURS[op]}"/>')
            lines.append(f'<text x="{x + 16}" y="34">{op}</text>')
        return lines

    def _save_png(self, path: Path) -> None:
        # matplotlib is optional and slow to load; without pyplot there is no global state to close.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(min(30, 2 + self.makespan * 0.18), 1.2 + 0.4 * self.ranks))
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for bar in self.bars:
            x, y, width, height = bar.box
            colour = COLOURS[bar.action.op]
            axes.broken_barh(
                [(x, width)],
                (y + 0.05 * height, 0.9 * height),
                facecolors=colour,
                alpha=self.opacity(bar.action),
                edgecolor="white",
                linewidth=0.5,
            )
            label = str(bar.action.microbatch)
            axes.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=6)
        axes.set(xlim=(0, self.makespan), ylim=(self.ranks, 0), xlabel="time", title=self.title)
        axes.set_yticks([rank + 0.5 for rank in range(self.ranks)])
        axes.set_yticklabels([f"rank {rank}" for rank in range(self.ranks)])
        used = {bar.action.op for bar in self.bars}
        patches = [Patch(color=COLOURS[op], label=op) for op in OPS if op in used]
        axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.tight_layout()
        figure.savefig(path, dpi=120)


def timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """Draws a valid schedule by the asynchronous clock of `simulate`."""
    result = simulate(schedule, costs)
    bars = tuple(
        Bar(rank, start, end, action, part, len(cell))
        for rank, order in enumerate(schedule.orders)
        for cell, start, end in zip(order, result.starts[rank], result.ends[rank], strict=True)
        for part, action in enumerate(cell)
    )
    peak = max(result.peak_until_W)
    title = f"{schedule.title}: bubble {result.bubble:.1%}, peak {peak} stage activations"
    return Timeline(title, schedule.P, schedule.V, result.makespan, bars)


def axis_times(makespan: float) -> list[float]:
    """Round times for an axis, about ten of them."""
    step = 10.0 ** (len(str(int(makespan))) - 2)
    while makespan / step > 12:
        step *= 2
    return [step * i for i in range(int(makespan / step) + 1)]


def _svg_bar(bar: Bar, wide: float, opacity: float) -> list[str]:
    x, y, width, height = bar.box
    left, pixels = LEFT + x * wide, width * wide
    top = TOP + bar.rank * (ROW + GAP) + (y - bar.rank) * ROW
    tall = height * ROW
    action = bar.action
    hint = f"{action.op} chunk {action.chunk} microbatch {action.microbatch}, {x:g} to {bar.end:g}"
    lines = [
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{pixels:.2f}" height="{tall:.2f}" '
        f'fill="{COLOURS[action.op]}" fill-opacity="{opacity:.2f}" stroke="white" '
        f'stroke-width="0.6"><title>{hint}</title></rect>'
    ]
    size = min(11.0, tall - 2, 1.6 * pixels / len(str(action.microbatch)))
    if size >= 5:
        lines.append(
            f'<text x="{left + pixels / 2:.2f}" y="{top + tall / 2 + size * 0.36:.2f}" '
            f'font-size="{size:.1f}" text-anchor="middle">{action.microbatch}</text>'
        )
    return lines
