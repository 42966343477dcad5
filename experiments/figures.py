"""The figures of the experiments, from stored results."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.base import DEFAULT_SIZE, HEADLINE, ROOT
from experiments.experiment import Experiment
from experiments.statistics import gap_percent
from experiments.store import Lanes, sources_of
from experiments.tables import losses_by_rate, setting_text, token_of
from fp4jax.train.plots import COLORS, require_matplotlib

type Results = Mapping[str, Lanes]

ALT = {
    "figure": "Training loss, gap to BF16 during training, and final gap by arm",
    "rates": "Final loss and gap by peak learning rate",
    "weights": "Gradient norm, clipped steps, flipped weight codes, and where weights stand in their interval",
    "activations": "Outliers of activations during training, and the SNR of E2M1 without and with OCC",
}
"""What each figure shows, for the README."""


@dataclasses.dataclass(frozen=True)
class Units:
    """Of the axes: what a token is called, and in what multiples tokens are counted."""

    token: str
    multiple: float
    multiples: str

    @classmethod
    def of(cls, token: str, results: Results) -> "Units":
        """Those that suit the longest run."""
        longest = max(lanes.record["tokens_per_lane"] for lanes in results.values())
        return cls(token, *((1e6, "millions") if longest >= 1e6 else (1e3, "thousands")))

    @property
    def label(self) -> str:
        """Of the axis of training."""
        return f"training {self.token}s ({self.multiples})"

    def trained(self, lanes: Lanes, steps: np.ndarray) -> np.ndarray:
        """Tokens seen after so many steps, in `multiples`."""
        return steps * lanes.record["tokens_per_step"] / self.multiple


def files(experiment: Experiment, size: str) -> dict[str, str]:
    """The files of the figures of a size, by the names of the figures."""
    names = experiment.figures if "rates" in experiment.figures else ("figure", *experiment.figures)
    return {name: f"{name}{'' if size == DEFAULT_SIZE else f'-{size}'}.png" for name in names}


def draw(experiment: Experiment, size: str, results: Results, root: Path = ROOT) -> None:
    """Write the figures of an experiment at a size as PNG files into its folder.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    require_matplotlib()
    units = Units.of(token_of(experiment.settings[size]), results)
    for name, file in files(experiment, size).items():
        figure = FIGURES[name](experiment, results, units)
        figure.suptitle(f"{size}: {setting_text(experiment.settings[size], results)}", fontsize=12)
        figure.savefig(root / experiment.name / file)


def colors_of(experiment: Experiment) -> dict[str, str]:
    """A color an arm; that of the baseline is black."""
    labels = [experiment.baseline] + [arm.label for arm in experiment.arms if arm.label != experiment.baseline]
    palette = [*COLORS, "#8C564B", "#BCBD22"]
    return {label: palette[i % len(palette)] for i, label in enumerate(labels)}


def _new(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _tidy(axis: Any, xlabel: str, ylabel: str, title: str = "") -> None:
    axis.set_xlabel(xlabel, fontsize=13)
    axis.set_ylabel(ylabel, fontsize=13)
    axis.set_title(title, fontsize=13, loc="left")
    axis.tick_params(labelsize=12)
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _band(axis: Any, x: np.ndarray, rows: np.ndarray, color: str, **style: Any) -> None:
    """The mean of [S, P] in a band of one standard deviation."""
    mean = rows.mean(axis=0)
    axis.plot(x, mean, color=color, **{"linewidth": 2, **style})
    if len(rows) > 1:
        std = rows.std(axis=0, ddof=1)
        axis.fill_between(x, mean - std, mean + std, color=color, alpha=0.18, linewidth=0)


def _main(experiment: Experiment, results: Results, units: Units) -> Any:
    colors = colors_of(experiment)
    figure = _new(13, 6.4)
    grid = figure.add_gridspec(2, 2, width_ratios=[1.15, 1], height_ratios=[1.1, 1])
    loss, gap, final = (figure.add_subplot(place) for place in (grid[0, 0], grid[1, 0], grid[:, 1]))
    sources = sources_of(next(iter(results.values())).record, HEADLINE)
    named = " + ".join(sources) or "all text"
    for label, lanes in results.items():
        steps, curve = lanes.curve("loss")
        _band(loss, units.trained(lanes, steps)[3:], curve[:, 3:], colors[label], label=label)
        base = results.get(experiment.baseline)
        if base is not None and base is not lanes:
            gaps = gap_percent(lanes.validation(HEADLINE), base.validation(HEADLINE))
            x = units.trained(lanes, lanes.validation_steps)
            _band(gap, x, gaps, colors[label], marker="o", markersize=5)
    gap.axhline(0, color="black", linewidth=1.5)
    _tidy(loss, units.label, f"training loss (nats per {units.token})", "bands: ± one standard deviation over seeds")
    _tidy(gap, units.label, f"gap to {experiment.baseline} (%)", f"validation: {named}")
    handles, labels = loss.get_legend_handles_labels()
    loss.legend(handles, labels, frameon=False, fontsize=11, ncols=2)
    _final_gaps(final, experiment, results, colors)
    _tidy(final, f"final gap to {experiment.baseline} (%): {named}", "")
    final.grid(axis="y", visible=False)
    return figure


def _final_gaps(axis: Any, experiment: Experiment, results: Results, colors: Mapping[str, str]) -> None:
    """A bar an arm with its seeds as dots, and the paper's gap as a diamond where it is in range."""
    gaps = {}
    for label, lanes in results.items():
        base = results.get(experiment.baseline)
        if base is not None and base is not lanes:
            gaps[label] = gap_percent(lanes.final(HEADLINE), base.final(HEADLINE))
    arms = [arm for arm in experiment.arms if arm.label in gaps]
    paper_base = next((arm.paper for arm in experiment.arms if arm.label == experiment.baseline), None)
    largest = 1.35 * max((float(np.max(np.abs(values))) for values in gaps.values()), default=1.0)
    largest = max(largest, 5.0) if paper_base else largest
    inside, beside = [0.0, *(float(gap) for values in gaps.values() for gap in values)], []
    for row, arm in enumerate(arms):
        values = gaps[arm.label]
        axis.barh(row, values.mean(), color=colors[arm.label], alpha=0.35, height=0.6)
        axis.plot(values, np.full(len(values), row), "o", color=colors[arm.label], markersize=7)
        if arm.paper is None or paper_base is None:
            continue
        paper = 100 * (arm.paper / paper_base - 1)
        if paper <= largest:
            axis.plot(paper, row, "D", color="black", markerfacecolor="none", markersize=10, markeredgewidth=1.6)
            inside.append(paper)
        else:
            text = "paper: diverged" if np.isnan(paper) else f"paper: {paper:+.0f} % →"
            place = (max(values.max(), 0.0), row)
            axis.annotate(text, place, (10, 0), textcoords="offset points", fontsize=11, va="center")
            beside.append(place[0])
    axis.axvline(0, color="black", linewidth=1.5)
    low, high = min(inside), max(inside)
    high = max([high, *(place + 0.32 * (high - low) for place in beside)])
    axis.set_xlim(low - 0.03 * (high - low), high + 0.03 * (high - low))  # or dots near zero would be cut in half
    axis.set_yticks(range(len(arms)), [arm.label for arm in arms])
    axis.set_ylim(len(arms) - 0.35, -0.65)
    legend = "●: a seed   bar: mean" + ("   ◇: the paper (1.3B, 10B tokens)" if paper_base else "")
    axis.text(0, 1.01, legend, transform=axis.transAxes, fontsize=11)


def _rates(experiment: Experiment, results: Results, units: Units) -> Any:
    colors = colors_of(experiment)
    by_rate = {label: losses_by_rate(lanes) for label, lanes in results.items()}
    gaps = {}
    for label, losses in by_rate.items():
        base = by_rate.get(experiment.baseline, {})
        if experiment.baseline != label:
            gaps[label] = {r: gap_percent(losses[r], base[r]).mean() for r in losses if r in base}
    figure = _new(11 if gaps else 7.5, 4.4)
    axes = figure.subplots(1, 2 if gaps else 1, squeeze=False)[0]
    for label, losses in by_rate.items():
        means = [values.mean() for values in losses.values()]
        axes[0].plot(list(losses), means, "o-", color=colors[label], label=label, linewidth=2)
    for label, gap in gaps.items():
        axes[1].plot(list(gap), list(gap.values()), "o-", color=colors[label], linewidth=2)
        axes[1].axhline(0, color="black", linewidth=1.5)
        _tidy(axes[1], "peak learning rate", f"gap to {experiment.baseline} at the same rate (%)")
    named = " + ".join(sources_of(next(iter(results.values())).record, HEADLINE)) or "all text"
    _tidy(axes[0], "peak learning rate", f"final loss (nats per {units.token})", f"validation: {named}")
    rates = sorted({rate for losses in by_rate.values() for rate in losses})
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axis.minorticks_off()
    seeds = len(next(iter(results.values())).seeds) // len(rates)
    axes[-1].set_title("one seed a rate" if seeds == 1 else f"{seeds} seeds a rate", fontsize=13, loc="right")
    axes[0].legend(frameon=False, fontsize=12)
    return figure


def _weights(experiment: Experiment, results: Results, units: Units) -> Any:
    colors = colors_of(experiment)
    figure = _new(13, 7)
    norm, clipped, flips, histogram = figure.subplots(2, 2).ravel()
    for label, lanes in results.items():
        color = colors[label]
        for axis, name, factor in ((norm, "grad_norm", 1), (clipped, "clipped", 100)):
            steps, values = lanes.curve(name)
            _band(axis, units.trained(lanes, steps), factor * values, color, label=label)
        steps, values = lanes.probe("weights", "flipped")
        if len(steps):
            _band(flips, units.trained(lanes, steps), 100 * values.T, color, marker="o", markersize=5)
        _, shares = lanes.probe("weights", "histogram")
        last = shares[-1].mean(axis=0)
        histogram.stairs(last * len(last), np.linspace(0, 1, len(last) + 1), color=color, linewidth=2)
    norm.set_yscale("log")
    ticks = (0.2, 0.3, 0.5, 1, 2, 3)
    norm.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    norm.minorticks_off()
    clipped.set_ylim(0, 105)
    histogram.axvline(0.5, color="gray", linestyle=":", linewidth=1.5)
    _tidy(norm, units.label, "gradient norm,\nbefore clipping")
    _tidy(clipped, units.label, "steps with a clipped\ngradient (%)")
    _tidy(flips, units.label, "weights whose E2M1 code\nchanges in one step (%)")
    _tidy(histogram, "position of a weight in its E2M1 interval, at the end", "density")
    norm.set_title("bands: ± one standard deviation over seeds", fontsize=13, loc="left")
    histogram.set_title("E2M1 with a scale a channel, for every arm", fontsize=13, loc="left")
    norm.legend(frameon=False, fontsize=10, ncols=2)
    return figure


def _activations(experiment: Experiment, results: Results, units: Units) -> Any:
    figure = _new(13, 4.4)
    peaks, snr = figure.subplots(1, 2)
    shown = next(results[label] for label in (experiment.baseline, *results) if label in results)
    sites = {"attention": "into Q, K, V", "output": "into O", "mlp": "into gate, up", "down": "into down"}
    widths = (6, 2, 2, 2)  # the first and the third coincide
    for color, width, (site, name) in zip(COLORS[1:], widths, sites.items()):
        steps, values = shown.probe("activations", site, "peak")
        x = units.trained(shown, steps)
        _band(peaks, x, values.mean(axis=2).T, color, marker="o", linewidth=width, label=name)
        for key, style in (("snr", ":"), ("snr_occ", "-")):
            _, values = shown.probe("activations", site, key)
            _band(snr, x, values.mean(axis=2).T, color, marker="o", linewidth=width, linestyle=style)
    snr.plot([], [], "k:", label="E2M1 by token")
    snr.plot([], [], "k-", label="E2M1 by token, OCC α = .99")
    title = f"{experiment.baseline} arm; bands: ± one standard deviation over seeds"
    _tidy(peaks, units.label, "largest |x| over rms, mean of layers", title)
    _tidy(snr, units.label, "SNR of the activation (dB)")
    peaks.legend(frameon=False, fontsize=11)
    snr.legend(frameon=False, fontsize=11)
    return figure


FIGURES: dict[str, Callable[[Experiment, Results, Units], Any]] = {
    "figure": _main,
    "rates": _rates,
    "weights": _weights,
    "activations": _activations,
}
"""Figures by name; `Experiment.figures` chooses among them."""
