"""Device side of the quantizer that also writes transposed values (Pallas on Triton), with one scale a row.

The scale of a row is known only once all of the row has been read, and tiles that transpose well take many rows: more
than a multiprocessor can hold. So rows are read twice, the second time from L2: some programs scale strips of rows,
others quantize tiles of the strips scaled a little before. Programs number themselves as they start, so none waits for
one that cannot run.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from fp4jax.kernels.noise_device import noise_tile
from fp4jax.kernels.quantizer_device import Extremes, Rule, as_float32, bits_of, strided_rows, transposed_of


@dataclasses.dataclass(frozen=True)
class Strips:
    """Static side of ``strips_kernel``; sizes in elements.

    Attributes:
        m, n: of the matrix; whole tiles.
        rows, cols: of a tile; a strip is one row of tiles.
        scale_rows, scale_cols: what a scaling program reads at a time, of its ``scale_rows`` rows.
        unit: columns of which ``n`` and ``scale_cols`` are multiples.
        lag: strips between those that are scaled and those that are quantized.
        width: columns before padding, by which noise is numbered.
        packed: values that are transposed as one, 1 or 4.
        interpreted: programs run one after the other, and wait for nothing.
    """

    m: int
    n: int
    rows: int
    cols: int
    scale_rows: int
    scale_cols: int
    unit: int
    lag: int
    width: int
    rule: Rule
    folded: bool
    packed: int
    interpreted: bool

    @property
    def strips(self) -> int:
        """Strips of the matrix."""
        return self.m // self.rows

    @property
    def scaling(self) -> int:
        """Programs that scale a strip."""
        return self.rows // self.scale_rows

    @property
    def quantizing(self) -> int:
        """Programs that quantize a strip."""
        return self.n // self.cols

    @property
    def programs(self) -> int:
        """All programs."""
        return self.strips * (self.scaling + self.quantizing)


def _task(ticket, p: Strips):
    """(whether to scale, strip, part of it): scaling runs ``lag`` strips ahead."""
    ahead = p.lag * p.scaling
    both = p.scaling + p.quantizing
    middle = (p.strips - p.lag) * both
    later = ticket - ahead
    group, place = later // both, lax.rem(later, both)
    last = later - middle
    first, in_middle = ticket < ahead, later < middle
    scales = first | (in_middle & (place < p.scaling))
    strip = jnp.where(
        first,
        ticket // p.scaling,
        jnp.where(
            in_middle,
            jnp.where(place < p.scaling, group + p.lag, group),
            p.strips - p.lag + last // p.quantizing,
        ),
    )
    part = jnp.where(
        first,
        lax.rem(ticket, p.scaling),
        jnp.where(in_middle, jnp.where(place < p.scaling, place, place - p.scaling), lax.rem(last, p.quantizing)),
    )
    return scales, strip, part


def _add(counter_ref, at, value):
    """Adds to a counter, and returns what it was. Orders memory as acquire and release do."""
    return triton.atomic_add(counter_ref, at, np.int32(value))


def strips_kernel(*refs, problem: Strips):
    """Values [m, n], transposed values [n, m], scale [m] and reciprocal [m] of x [m, n].

    Refs: x; fold [m], thresholds [2] and key [2] if any; zeros [1 + strips], which become counters: of programs, and of
    scaling programs done with each strip; then the outputs, the counters last.
    """
    p, refs = problem, list(refs)
    x_ref = refs.pop(0)
    fold_ref = refs.pop(0) if p.folded else None
    bounds_ref = refs.pop(0) if p.rule.outliers != "none" else None
    key_ref = refs.pop(0) if p.rule.rounding == "stochastic" else None
    _, values_ref, transposed_ref, scale_ref, reciprocal_ref, counter_ref = refs
    scales, strip, part = _task(_add(counter_ref, np.int32(0), 1), p)
    bounds = (bounds_ref[0], bounds_ref[1]) if bounds_ref is not None else None

    def load(rows, cols):
        value = as_float32(x_ref[rows, cols])
        return value if fold_ref is None else value * fold_ref[rows][:, None]

    def scale():
        rows = pl.ds(strip * p.rows + part * p.scale_rows, p.scale_rows)

        def chunk(c):
            # The last one may read again what the one before has read. As a product, the start is known to be aligned.
            start = jnp.minimum(c * (p.scale_cols // p.unit), (p.n - p.scale_cols) // p.unit) * p.unit
            return load(rows, pl.ds(start, p.scale_cols))

        found = lax.fori_loop(
            1,
            -(-p.n // p.scale_cols),
            lambda c, best: best.including(chunk(c), p.rule),
            Extremes.of(chunk(0), p.rule),
        )
        scale, reciprocal, finite = p.rule.scales(found.of_rows().amax(bounds, p.rule))
        scale_ref[rows] = scale
        reciprocal_ref[rows] = jnp.where(finite, reciprocal, jnp.float32(np.nan))
        if not p.interpreted:
            triton.debug_barrier()  # all threads have written before one of them counts
        _add(counter_ref, 1 + strip, 1)

    def quantize():
        if not p.interpreted:

            def look(_):
                return _add(counter_ref, 1 + strip, 0)

            lax.while_loop(lambda done: done < p.scaling, look, look(None))
        row, col = strip * p.rows, part * p.cols
        cols, parts = pl.ds(col, p.cols), []
        for j in range(p.packed):
            rows = strided_rows(row, j, p.rows, p.packed)
            reciprocal = reciprocal_ref[rows]
            finite = (bits_of(reciprocal) & np.int32(0x7FFFFFFF)) < np.int32(0x7F800000)
            noise = noise_tile(key_ref, row + j, col, (p.rows // p.packed, p.cols), p.width, p.packed)
            values = p.rule.quantize(load(rows, cols), reciprocal[:, None], finite[:, None], bounds, noise)
            parts.append(values.astype(values_ref.dtype))
            values_ref[rows, cols] = parts[-1]
        transposed_ref[cols, pl.ds(row, p.rows)] = transposed_of(parts)

    lax.cond(scales, scale, quantize)
