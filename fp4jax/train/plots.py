"""The figure of a run: loss curves, and beneath them the gap to the baseline."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp4jax.train.errors import require
from fp4jax.train.metrics import read_metrics

COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's colors, told apart by every kind of color vision; the baseline is black."""


_MARKER = {"markerfacecolor": "white", "markersize": 6, "markeredgewidth": 1.5}


@dataclasses.dataclass(frozen=True)
class Curves:
    """The losses of a recipe, by step: one row a seed.

    Args:
        label: the recipe.
        loss: [S, steps] training loss; NaN where a step was not finite.
        validation_steps: [V].
        validation: [S, V].
    """

    label: str
    loss: np.ndarray
    validation_steps: np.ndarray
    validation: np.ndarray

    @classmethod
    def read(cls, label: str, folders: Sequence[Path]) -> "Curves":
        """From the metrics.jsonl of each seed's folder."""
        train = [[row["loss"] for row in read_metrics(folder, "train")] for folder in folders]
        rows = [read_metrics(folder, "validation") for folder in folders]
        return cls(
            label,
            np.array(train, float),
            np.array([row["step"] for row in rows[0]]),
            np.array([[row["loss"] for row in seed] for seed in rows], float),
        )


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centered mean over `window` steps of [S, steps], fewer at the ends; NaN counts for nothing.

    Example:
        >>> smooth(np.array([[1.0, 2.0, 6.0]]), 3)
        array([[1.5, 3. , 4. ]])
    """
    known = np.nan_to_num(values)
    kernel = np.ones(window)
    total = np.stack([np.convolve(row, kernel, "same") for row in known]) if len(known) else known
    count = np.stack([np.convolve(row, kernel, "same") for row in np.isfinite(values).astype(float)])
    with np.errstate(invalid="ignore"):
        return total / np.where(count == 0, math.nan, count)


def require_matplotlib() -> None:
    """Import matplotlib.

    Raises:
        MissingPackageError: it is not installed.
    """
    require("matplotlib", "drawing curves")


def draw_curves(
    path: Path, curves: Sequence[Curves], *, baseline: str, tokens_per_step: int, title: str, token: str = "token"
) -> None:
    """Write a PNG: training loss (smoothed) with validation points, and, given more than the baseline, the gap in %.

    Several seeds are drawn as their mean in a band of one standard deviation; a gap is taken seed by seed.

    Args:
        path: of the PNG.
        curves: at least one.
        baseline: label of the curve that the gap is measured to.
        tokens_per_step: tokens of a step and seed, for the axis.
        title: above the figure.
        token: what a token is, for the axes: "byte" where tokens are bytes.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    others = [curve for curve in curves if curve.label != baseline]
    base = next((curve for curve in curves if curve.label == baseline), None)
    figure = Figure(figsize=(8, 6.4 if others and base else 4.4), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    rows = 2 if others and base else 1
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=[2, 1][:rows])[:, 0]
    tokens, unit = _token_axis(curves, tokens_per_step)

    colors = _colors(curves, baseline)
    for curve in curves:
        _draw_loss(axes[0], curve, colors[curve.label], tokens)
    axes[0].set_ylabel(f"loss (nats per {token})")
    axes[0].set_title(title, fontsize=13, loc="left")
    axes[0].set_ylim(*_loss_limits(curves))
    axes[0].legend(frameon=False, fontsize=12, title="final validation loss", title_fontsize=12, alignment="left")
    axes[0].text(
        0.02, 0.05, "line: training, smoothed (faint below)   ○: validation", transform=axes[0].transAxes, fontsize=11
    )
    if rows == 2 and base is not None:
        for curve in others:
            _draw_gap(axes[1], curve, base, colors[curve.label], tokens)
        axes[1].axhline(0, color=colors[baseline], linewidth=1.5)
        axes[1].set_ylabel(f"gap to {baseline} (%)")
    axes[-1].set_xlabel(f"training {token}s{unit}")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=11)
        axis.xaxis.label.set_size(12)
        axis.yaxis.label.set_size(12)
    figure.savefig(path)


def _token_axis(curves: Sequence[Curves], tokens_per_step: int) -> tuple[float, str]:
    total = max(curve.loss.shape[1] for curve in curves) * tokens_per_step
    for size, unit in ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)")):
        if total >= size:
            return tokens_per_step / size, unit
    return float(tokens_per_step), ""


def _colors(curves: Sequence[Curves], baseline: str) -> dict[str, str]:
    labels = [baseline] + [curve.label for curve in curves if curve.label != baseline]
    return {label: COLORS[i % len(COLORS)] for i, label in enumerate(labels)}


def _window(steps: int) -> int:
    return max(1, steps // 25) | 1


def _draw_loss(axis: Any, curve: Curves, color: str, tokens: float) -> None:
    steps = curve.loss.shape[1]
    x = np.arange(1, steps + 1) * tokens
    lines = smooth(curve.loss, _window(steps))
    final = curve.validation[:, -1] if curve.validation.size else np.array([math.nan])
    spread = f" ± {final.std(ddof=1):.3f}" if len(final) > 1 else ""
    axis.plot(x, lines.mean(axis=0), color=color, linewidth=2, label=f"{curve.label}: {final.mean():.3f}{spread}")
    _band(axis, x, lines, color)
    axis.plot(
        curve.validation_steps * tokens,
        curve.validation.mean(axis=0),
        "o",
        color=color,
        zorder=3,
        **_MARKER,
    )


def _draw_gap(axis: Any, curve: Curves, base: Curves, color: str, tokens: float) -> None:
    """The validation gap, seed by seed against the same seed of the baseline; faint, that of the training loss."""
    steps = curve.loss.shape[1]
    window = _window(steps)
    faint = 100 * (smooth(curve.loss, window) / smooth(base.loss, window) - 1).mean(axis=0)
    axis.plot(np.arange(1, steps + 1) * tokens, faint, color=color, linewidth=1, alpha=0.45)
    gap = 100 * (curve.validation / base.validation - 1)
    x = curve.validation_steps * tokens
    axis.plot(x, gap.mean(axis=0), "o-", color=color, linewidth=2, **_MARKER)
    _band(axis, x, gap, color)


def _band(axis: Any, x: np.ndarray, rows: np.ndarray, color: str) -> None:
    if len(rows) > 1:
        mean, std = rows.mean(axis=0), rows.std(axis=0, ddof=1)
        axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.15, linewidth=0)


def _loss_limits(curves: Sequence[Curves]) -> tuple[float, float]:
    """From below the lowest loss to that after a twentieth of the run: the fall from chance would hide the rest."""
    early = max(1, curves[0].loss.shape[1] // 20)
    smoothed = [smooth(curve.loss, _window(curve.loss.shape[1])) for curve in curves]
    shown = np.concatenate([s[:, early:] if s.shape[1] > early else s for s in smoothed], axis=None)
    shown = np.append(shown, [curve.validation for curve in curves])
    shown = shown[np.isfinite(shown)]
    if not shown.size:
        return 0.0, 1.0
    margin = 0.05 * np.ptp(shown) or 0.1
    return float(shown.min() - margin), float(shown.max() + margin)
