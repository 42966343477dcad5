"""Device side of the quantizers (Pallas on Triton): maxima, and values with their transpose."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from fp4jax.kernels.noise_device import noise_tile
from fp4jax.kernels.value_device import INFINITY, MAGNITUDE, Extremes, Rule, as_float32, bits_of, bounds_of


@dataclasses.dataclass(frozen=True)
class Rows:
    """Static side of ``rows_kernel``: a program takes ``rows`` rows, ``cols`` columns at a time, ``chunks`` times.

    ``width`` counts the columns before padding, by which noise is numbered.
    """

    rows: int
    cols: int
    chunks: int
    width: int
    rule: Rule
    folded: bool


def rows_kernel(*refs, problem: Rows):
    """One scale a row: maxima in a first sweep over a strip of rows, values in a second.

    Refs: x [m, k]; fold [m], thresholds [2] and key [2] if any; values [m, k], scale [m].
    """
    p, refs = problem, list(refs)
    x_ref = refs.pop(0)
    fold_ref = refs.pop(0) if p.folded else None
    bounds_ref = refs.pop(0) if p.rule.outliers != "none" else None
    key_ref = refs.pop(0) if p.rule.rounding == "stochastic" else None
    values_ref, scale_ref = refs
    row = pl.program_id(0) * p.rows
    rows = pl.ds(row, p.rows)
    fold = fold_ref[rows][:, None] if fold_ref is not None else None
    bounds = bounds_of(bounds_ref) if bounds_ref is not None else None

    def load(chunk):
        value = as_float32(x_ref[rows, pl.ds(chunk * p.cols, p.cols)])
        return value if fold is None else value * fold

    first = load(0)
    found = Extremes.of(first, p.rule)
    if p.chunks > 1:
        found = lax.fori_loop(1, p.chunks, lambda c, best: best.including(load(c), p.rule), found)
    scale, reciprocal, finite = p.rule.scales(found.of_rows().amax(bounds, p.rule))
    scale_ref[rows] = scale

    def write(chunk, value):
        noise = noise_tile(key_ref, row, chunk * p.cols, value.shape, p.width)
        values = p.rule.quantize(value, reciprocal[:, None], finite[:, None], bounds, noise)
        values_ref[rows, pl.ds(chunk * p.cols, p.cols)] = values.astype(values_ref.dtype)

    def second(chunk, _):
        write(chunk, load(chunk))
        return _

    if p.chunks == 1:
        write(0, first)
    else:
        lax.fori_loop(0, p.chunks, second, None)


def strided_rows(row, first: int, rows: int, stride: int):
    """Rows ``first``, ``first + stride``, ... of the ``rows`` rows that begin at ``row``."""
    return pl.ds(row + first, rows // stride, stride=stride)


def transposed_of(parts: list):
    """[cols, rows] of a tile given by its rows i, i + 1, ... modulo the number of ``parts``, which is 1 or 4.

    Four bytes that lie side by side in the transposed tile cross shared memory as one word; by themselves, each would
    take a store of its own.
    """
    if len(parts) == 1:
        return parts[0].T
    dtype = parts[0].dtype
    word, *higher = (lax.bitcast_convert_type(part, jnp.int8).astype(jnp.int32) & 255 for part in parts)
    for j, byte in enumerate(higher):
        word = word | byte << (8 * (j + 1))
    word = word.T
    first, second, third, fourth = (
        lax.bitcast_convert_type((word >> (8 * j)).astype(jnp.int8), dtype)[..., None] for j in range(4)
    )
    even, odd = (jnp.concatenate(pair, axis=-1)[..., None] for pair in ((first, third), (second, fourth)))
    return jnp.concatenate([even, odd], axis=-1).reshape(word.shape[0], -1)


@dataclasses.dataclass(frozen=True)
class Stream:
    """One quantization of a tensor whose scales are known: what it is multiplied by first, and what is written.

    Attributes:
        fold: axis (0 or 1) of the vector that is folded in, or None.
        scale: axis of the vector of reciprocals, or None for one of the whole tensor.
        plain, transposed: whether values and transposed values are written.
        place: of the reciprocal of the whole tensor in its vector.
    """

    fold: int | None
    scale: int | None
    plain: bool
    transposed: bool
    place: int = 0


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Static side of ``tiles_kernel`` and ``amax_kernel``: ``grid`` tiles of ``rows`` × ``cols``.

    ``width`` counts the columns before padding, by which noise is numbered; ``packed`` values are transposed as one;
    maxima are those of ``span`` tiles.
    """

    rows: int
    cols: int
    grid: tuple[int, int]
    width: int
    rule: Rule
    streams: tuple[Stream, ...]
    packed: int
    span: int = 1

    @property
    def spans(self) -> int:
        """Programs for a row of tiles that look for maxima."""
        return -(-self.grid[1] // self.span)


def _vector(ref, axis, rows, cols):
    """A vector along ``axis`` laid out against a tile."""
    return ref[rows][:, None] if axis == 0 else ref[cols][None, :]


def _bounds(refs: list, rule: Rule):
    """The thresholds, taken off ``refs``; None where nothing is clamped."""
    if rule.outliers == "none":
        return None
    return bounds_of(refs.pop(0))


def tiles_kernel(*refs, problem: Tiles):
    """Quantizes a tile under given reciprocals, once for each stream.

    Tiles are taken from the last to the first: ``amax_kernel`` has left the last in L2.

    Refs: x [m, n] and thresholds [2] if any; then for each stream fold (if any), r and key (if any); then for each its
    outputs. A NaN reciprocal marks a block that is not finite.
    """
    p, refs = problem, list(refs)
    row = (p.grid[0] - 1 - pl.program_id(0)) * p.rows
    col = (p.grid[1] - 1 - pl.program_id(1)) * p.cols
    cols, x_ref = pl.ds(col, p.cols), refs.pop(0)
    bounds = _bounds(refs, p.rule)
    draws = p.rule.rounding == "stochastic"
    operands = [
        (refs.pop(0) if s.fold is not None else None, refs.pop(0), refs.pop(0) if draws else None) for s in p.streams
    ]
    dtype = refs[-1].dtype
    outputs = [(refs.pop(0) if s.plain else None, refs.pop(0) if s.transposed else None, []) for s in p.streams]

    def quantize():
        for j in range(p.packed):
            rows = strided_rows(row, j, p.rows, p.packed)
            x = as_float32(x_ref[rows, cols])
            for stream, operand, output in zip(p.streams, operands, outputs, strict=True):
                (fold_ref, r_ref, key_ref), (plain_ref, transposed_ref, parts) = operand, output
                value = x if fold_ref is None else x * _vector(fold_ref, stream.fold, rows, cols)
                r = r_ref[stream.place] if stream.scale is None else _vector(r_ref, stream.scale, rows, cols)
                finite = (bits_of(r) & MAGNITUDE) < INFINITY
                noise = noise_tile(key_ref, row + j, col, x.shape, p.width, p.packed)
                values = p.rule.quantize(value, r, finite, bounds, noise).astype(dtype)
                if plain_ref is not None:
                    plain_ref[rows, cols] = values
                if transposed_ref is not None:
                    parts.append(values)
        for _, transposed_ref, parts in outputs:
            if transposed_ref is not None:
                transposed_ref[cols, pl.ds(row, p.rows)] = transposed_of(parts)

    # Always so. Outside a branch Triton would compute values twice, once for each layout in which they are stored.
    pl.when(pl.program_id(0) < p.grid[0])(quantize)


def amax_kernel(*refs, problem: Tiles):
    """Bits of amax of ``span`` tiles side by side for each stream; with outliers, which only rows have, of the clamped.

    Refs: x [m, n] and thresholds [2] if any; the folds that there are. Outputs, of the ``spans`` of a row of tiles:
    [row tiles, spans] for a scale a tensor, [m, spans] for one a row, [row tiles, n] for one a column.
    """
    p, refs = problem, list(refs)
    i, j = pl.program_id(0), pl.program_id(1)
    rows, x_ref = pl.ds(i * p.rows, p.rows), refs.pop(0)
    bounds = _bounds(refs, p.rule)
    folds = [refs.pop(0) if s.fold is not None else None for s in p.streams]

    def of_tile(tile, largest):
        cols = pl.ds(tile * p.cols, p.cols)
        x = as_float32(x_ref[rows, cols])
        found = []
        for stream, fold_ref, out_ref, best in zip(p.streams, folds, refs, largest, strict=True):
            value = x if fold_ref is None else x * _vector(fold_ref, stream.fold, rows, cols)
            if stream.scale == 1:
                out_ref[i, cols] = jnp.max(bits_of(value) & MAGNITUDE, axis=0)
                found.append(None)
            else:
                found.append(Extremes.of(value, p.rule) if best is None else best.including(value, p.rule))
        return tuple(found)

    first, last = j * p.span, jnp.minimum((j + 1) * p.span, p.grid[1])
    largest = of_tile(first, (None,) * len(p.streams))
    if p.span > 1:
        largest = lax.fori_loop(first + 1, last, of_tile, largest)
    for stream, out_ref, best in zip(p.streams, refs, largest, strict=True):
        if best is None:
            continue
        if stream.scale is None:
            out_ref[i, j] = best.of_all()
        else:
            out_ref[rows, j] = best.of_rows().amax(bounds, p.rule)
