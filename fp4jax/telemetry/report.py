"""A snapshot for people: a table of the layers, and the ones that FP4 hurts most by name."""

import dataclasses
import io
import math
from collections.abc import Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table

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

    def __rich__(self) -> Group:
        return Group(_layers_table(self.snapshot), "", _worst_table(self.snapshot, self.top), "", _verdict(self))

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


def _layers_table(snapshot: Snapshot) -> Table:
    stacked = any(record.index for record in snapshot.records)
    title = "SNR (dB) by layer and operand" + (", mean over the blocks (lowest)" if stacked else "")
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("layer", style="bold", overflow="fold")
    for place in snapshot.places:
        table.add_column(place, justify="right", no_wrap=True)
    for header in ("underflow %", "clipped %", "residual %"):
        table.add_column(header, justify="right")
    for layer in snapshot.layers:
        cells = [decibels(snapshot.values("snr_db", place=place, layer=layer)) for place in snapshot.places]
        forward = [r for r in snapshot.of(layer) if r.place.startswith("fprop")]
        shares = [_percent(forward, name) for name in ("underflow", "clipped", "residual_share")]
        table.add_row(layer or "(model)", *cells, *shares)
    table.caption = "Shares are of the entries of the forward operands, activation / weight."
    table.caption_justify = "left"
    return table


def _percent(records: Sequence[Record], name: str) -> str:
    means = []
    for place in ("fprop.lhs", "fprop.rhs"):
        values = [r.values[name] for r in records if r.place == place]
        if values and not (name == "residual_share" and place == "fprop.rhs"):  # weights have no residual
            means.append(f"{100 * float(np.mean(values)):.1f}")
    return " / ".join(means)


def _worst_table(snapshot: Snapshot, top: int) -> Table:
    table = Table(title="Hurt most in the forward product", title_justify="left", title_style="bold")
    table.box, table.pad_edge = SIMPLE_HEAD, False
    table.add_column("layer", style="bold", overflow="fold")
    for header in ("SNR (dB)", "worse operand", "cosine", "underflow", "crest", "scale spread"):
        table.add_column(header, justify="right")
    by_label: dict[str, list[Record]] = {}
    for record in snapshot.records:
        if record.place.startswith("fprop"):
            by_label.setdefault(record.label, []).append(record)
    for label, snr in snapshot.worst(top):
        worse = min(by_label[label], key=lambda r: -math.inf if math.isnan(r.snr_db) else r.snr_db)
        v = worse.values
        table.add_row(
            label or "(model)",
            decibels([snr]),
            worse.place,
            f"{v['cosine']:.4f}",
            f"{v['underflow']:.1%}",
            f"{v['crest']:.1f}",
            f"2^{v['scale_spread']:.1f}",
        )
    return table


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
