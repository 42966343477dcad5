"""The picture of a snapshot: layer × operand, colored by SNR, the blocks of a model side by side."""

import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fp4jax.packages import require
from fp4jax.telemetry.operands import STATISTICS
from fp4jax.telemetry.snapshot import Record, Snapshot

_LABELS = {
    "snr_db": "SNR (dB)", "cosine": "cosine similarity", "underflow": "underflow to 0 (share)",
    "clipped": "clipped (share)", "scale_spread": "log2(largest / smallest scale)", "crest": "crest factor",
}  # fmt: skip
_HIGH_IS_BAD = ("mse", "underflow", "clipped", "nonfinite", "residual_saturated", "scale_spread", "crest")


def draw_heatmap(
    snapshot: Snapshot, path: str | os.PathLike[str], *, statistic: str = "snr_db", title: str | None = None
) -> None:
    """Draw a row for each kind of layer, a group of columns for each operand, in it a column for each block.

    Layers whose paths differ by one number (``layers.0.mlp.up``, ``layers.1.mlp.up``) or that are stacked share a row.
    Dark is bad. A cell in which nothing was lost is white and says "exact"; one that was not finite, or not measured,
    is blank.

    Args:
        snapshot: from a ``Meter``, ``collect`` or ``read``.
        path: of the figure; its suffix says the format, such as .svg. Without one it is a PNG.
        statistic: which of ``telemetry.STATISTICS`` to show.
        title: above the figure.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: an unknown statistic, an empty snapshot, or a suffix that matplotlib does not know.
    """
    if statistic not in STATISTICS:
        raise ValueError(f"statistic={statistic!r} is none of {', '.join(STATISTICS)}")
    if not snapshot.records:
        raise ValueError("the snapshot holds no records")
    names, grids = heatmap_grids(snapshot, statistic)
    label = _LABELS.get(statistic, statistic)
    draw_grids(
        path, names, grids, label=label, title=title or f"{label} by layer and operand",
        high_is_dark=statistic in _HIGH_IS_BAD,
    )  # fmt: skip


def draw_grids(
    path: str | os.PathLike[str],
    names: Sequence[str],
    grids: Mapping[str, np.ndarray],
    *,
    label: str,
    title: str,
    high_is_dark: bool,
    form: Callable[[float], str] | None = None,
) -> None:
    """Draw matrices side by side, with common rows and a common scale of colors.

    Args:
        path: of the figure; its suffix says the format.
        names: of the rows.
        grids: for each title a float64 [rows, columns]; NaN is left blank, infinity reads "exact".
        label: of the color bar.
        title: above the figure.
        high_is_dark: whether large numbers are dark.
        form: how a number is written into its cell.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    require("matplotlib", "drawing a heat map")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    blocks = next(iter(grids.values())).shape[1]
    finite = np.concatenate([grid[np.isfinite(grid)] for grid in grids.values()])
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    cell = 0.62 if blocks <= 8 else max(0.16, 7.0 / blocks)
    width = 1.9 + len(grids) * (blocks * cell + 0.35) + 0.9
    height = max(2.6, 1.7 + 0.42 * len(names))
    figure = Figure(figsize=(max(6.0, width), height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(grids), sharey=True, squeeze=False)[0]
    image = None
    for axis, (head, grid) in zip(axes, grids.items(), strict=True):
        shown = np.ma.masked_invalid(grid)
        colors = "viridis_r" if high_is_dark else "viridis"
        image = axis.imshow(shown, cmap=colors, vmin=low, vmax=high, aspect="auto")
        axis.set_title(head, fontsize=11)
        axis.set_xticks(range(0, blocks, -(-blocks // 8)) if blocks > 1 else [])
        axis.set_xlabel("block" if blocks > 1 else "", fontsize=10)
        axis.tick_params(labelsize=10, length=0)
        if blocks <= 8:
            _write_cells(axis, grid, low, high, form or _short, high_is_dark=high_is_dark)
    axes[0].set_yticks(range(len(names)), names)
    if image is not None:
        bar = figure.colorbar(image, ax=list(axes), pad=0.02, fraction=0.05)
        bar.set_label(textwrap.fill(label, int(height / 0.1)), fontsize=11)  # a letter takes less than .1 inch
        bar.ax.tick_params(labelsize=10)
    figure.suptitle(title, fontsize=12, x=0.01, ha="left")
    figure.savefig(path)


def heatmap_grids(snapshot: Snapshot, statistic: str) -> tuple[list[str], dict[str, np.ndarray]]:
    """Names of the rows, and for each place a float64 [rows, blocks]; NaN where nothing was measured."""
    rows = list(dict.fromkeys(_row_name(record) for record in snapshot.records))
    blocks = 1 + max(_block(record) for record in snapshot.records)
    grids = {place: np.full((len(rows), blocks), np.nan) for place in snapshot.places}
    for record in snapshot.records:
        grids[record.place][rows.index(_row_name(record)), _block(record)] = record.values[statistic]
    return rows, grids


def _row_name(record: Record) -> str:
    """The path without the number of the block, the first in it, and without what leads up to that."""
    if record.index:
        return ".".join([record.layer, *map(str, record.index[1:])])
    return re.sub(r"(^|\.)\d+(?=\.|$)", "", record.layer, count=1).lstrip(".") or "(model)"


def _block(record: Record) -> int:
    if record.index:
        return record.index[0]
    number = re.search(r"(?:^|\.)(\d+)(?=\.|$)", record.layer)
    return int(number[1]) if number else 0


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) >= 1 else f"{value:.3f}"


def _write_cells(
    axis: Any, grid: np.ndarray, low: float, high: float, form: Callable[[float], str], *, high_is_dark: bool
) -> None:
    for (row, column), value in np.ndenumerate(grid):
        if np.isposinf(value):
            axis.text(column, row, "exact", ha="center", va="center", fontsize=8, color="black")
        elif np.isfinite(value):
            share = (value - low) / (high - low) if high > low else 1.0
            bright = share < 0.4 if high_is_dark else share > 0.6
            color = "black" if bright else "white"
            axis.text(column, row, form(float(value)), ha="center", va="center", fontsize=8, color=color)
