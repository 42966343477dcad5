"""A snapshot for people: a table of the layers, and the ones that FP4 hurts most by name."""

import dataclasses
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fp4jax.telemetry.operands import SQRT3_DB
from fp4jax.telemetry.snapshot import Record, Snapshot

WIDTH = 110


@dataclasses.dataclass(frozen=True)
class Report:
    """What ``report`` returns: rich prints it as tables, ``str`` is the same in plain text.

    Attributes:
        snapshot: what it is about.
        top: how many of the worst layers it lists.
    """

    snapshot: Snapshot
    top: int = 5

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        def fits(table: Table) -> bool:
            return Measurement.get(console, options.update(max_width=10_000), table).maximum <= options.max_width

        for title, caption, layers, columns in (_by_layer(self.snapshot), _worst(self.snapshot, self.top)):
            yield Text(title, style="bold")
            yield from _tables(layers, columns, fits)
            yield Text(caption, style="dim")
        yield Text(_verdict(self))

    def __str__(self) -> str:
        stream = io.StringIO()
        Console(file=stream, width=WIDTH, color_system=None, force_jupyter=False).print(self)
        return stream.getvalue().rstrip()


def report(snapshot: Snapshot, *, top: int = 5) -> Report:
    """A table of the SNR by layer and operand, and the ``top`` layers that FP4 hurts most.

    A layer is ranked by the SNR that its two operands leave to the forward product (``Snapshot.product_snr_db``). Of a
    stack the table shows the mean over the blocks and the lowest one. Gradients whose norm is below √3 times that of
    their quantization noise (arXiv:2505.19115) are named.

    Raises:
        ValueError: ``top`` is not positive, or the snapshot is empty.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> model = fp4jax.nn.Linear(64, 32, recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0))
        >>> meter = fp4jax.telemetry.Meter(model, lambda model, x: jnp.sum(model(x) ** 2))
        >>> print(report(meter(model, jnp.ones((8, 64)))))  # doctest: +ELLIPSIS
        SNR (dB)...
    """
    if top < 1:
        raise ValueError(f"top={top} must be a positive integer")
    if not snapshot.records:
        raise ValueError("the snapshot holds no records")
    return Report(snapshot, top)


def decibels(values: Sequence[float] | np.ndarray) -> str:
    """Mean of SNRs in dB and, of several, the lowest in brackets; "exact" where nothing was lost.

    One that lost nothing, and so is infinite, stays out of the mean of the others.
    """
    array = np.asarray(values, np.float64)
    if not array.size:
        return ""
    if np.isnan(array).any():
        return "NaN"
    lossy = array[np.isfinite(array)]
    if not lossy.size:
        return "exact"
    return f"{lossy.mean():.1f}" if array.size == 1 else f"{lossy.mean():.1f} ({lossy.min():.1f})"


type _Columns = Mapping[str, Sequence[str]]
"""By heading, a cell for each layer."""
type _Content = tuple[str, str, Sequence[str], Sequence[_Columns]]
"""A title, what stands below, the layers, and columns in the groups that stay together where not all fit."""


def _by_layer(snapshot: Snapshot) -> _Content:
    stacked = any(record.index for record in snapshot.records)
    ratios = {
        place: [decibels(snapshot.values("snr_db", place=place, layer=layer)) for layer in snapshot.layers]
        for place in snapshot.places
    }
    forward = [[r for r in snapshot.of(layer) if r.place.startswith("fprop")] for layer in snapshot.layers]
    shares = {
        header: [_percent(records, name) for records in forward]
        for header, name in (("underflow", "underflow"), ("clipped", "clipped"), ("residual", "residual_share"))
    }
    return (
        "SNR (dB) by layer and operand" + (", mean over the blocks (lowest)" if stacked else ""),
        "underflow, clipped, residual: % of the entries of the forward operands, activation / weight\n",
        snapshot.layers,
        (ratios, shares),
    )


def _tables(layers: Sequence[str], groups: Sequence[_Columns], fits: Callable[[Table], bool]) -> Iterator[Table]:
    """One table if it fits, else as many as it takes; no cell is ever broken over two lines."""
    whole = _table(layers, {header: cells for group in groups for header, cells in group.items()})
    if fits(whole):
        yield whole
        return
    for group in groups:
        shown: dict[str, Sequence[str]] = {}
        for header, cells in group.items():
            if shown and not fits(_table(layers, {**shown, header: cells})):
                yield _table(layers, shown)
                shown = {}
            shown[header] = cells
        yield _table(layers, shown)


def _table(layers: Sequence[str], columns: _Columns) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("layer", style="bold", no_wrap=True)
    for header in columns:
        table.add_column(header, justify="right", no_wrap=True)
    for layer, *cells in zip(layers, *columns.values(), strict=True):
        table.add_row(Text(layer or "(model)"), *cells)
    return table


def _percent(records: Sequence[Record], name: str) -> str:
    means = []
    for place in ("fprop.lhs", "fprop.rhs"):
        values = [r.values[name] for r in records if r.place == place]
        if values and not (name == "residual_share" and place == "fprop.rhs"):  # weights have no residual
            means.append(f"{100 * float(np.mean(values)):.1f}")
    return " / ".join(means)


def _worst(snapshot: Snapshot, top: int) -> _Content:
    by_label: dict[str, list[Record]] = {}
    for record in snapshot.records:
        if record.place.startswith("fprop"):
            by_label.setdefault(record.label, []).append(record)
    layers = snapshot.worst(top)
    worse = [min(by_label[label], key=lambda r: -math.inf if math.isnan(r.snr_db) else r.snr_db) for label, _ in layers]
    return (
        "Hurt most in the forward product",
        "operand: the worse of the two, which what follows tells of; scales: largest / smallest\n",
        [label for label, _ in layers],
        (
            {
                "SNR dB": [decibels([snr]) for _, snr in layers],
                "operand": [record.place for record in worse],
                "cosine": [f"{record.values['cosine']:.4f}" for record in worse],
                "underflow": [f"{record.values['underflow']:.1%}" for record in worse],
                "crest": [f"{record.values['crest']:.1f}" for record in worse],
                "scales": [f"2^{record.values['scale_spread']:.1f}" for record in worse],
            },
        ),
    )


def _verdict(report: Report) -> str:
    gradients = [record for record in report.snapshot.records if record.is_gradient]
    drowned = [record for record in gradients if record.drowned]
    broken = [record for record in report.snapshot.records if math.isnan(record.snr_db)]
    lines = []
    if gradients:
        named = ", ".join(f"{r.label} {r.place} {r.snr_db:.1f} dB" for r in drowned[: report.top])
        more = f" and {len(drowned) - report.top} more" if len(drowned) > report.top else ""
        lines.append(
            f"{len(drowned)} of {len(gradients)} gradients are below √3 times their quantization noise "
            f"({SQRT3_DB:.2f} dB)" + (f": {named}{more}" if drowned else "")
        )
    if broken:
        lines.append(f"{len(broken)} operands hold NaN or infinity, the first {broken[0].label} {broken[0].place}")
    return "\n".join(lines)
