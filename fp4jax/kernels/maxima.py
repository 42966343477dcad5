"""Maxima of a matrix, and the scales that follow from them: what the quantizers need before they can write values."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.device import triton_call
from fp4jax.kernels.quantile import RowExtremes
from fp4jax.kernels.quantizer_device import Stream, Tiles, amax_kernel
from fp4jax.kernels.value_device import Extremes, Rule, bits_of, bounds_of, float_of
from fp4jax.quantize import QuantSpec
from fp4jax.scaling import Scales
from fp4jax.typing import Array

# Rows and columns of a tile, and how many tiles side by side are one program's. With a scale a column they have nothing
# in common, and more rows leave fewer maxima to compare.
_ROWS, _COLS, _SPAN = 16, 128, 32
_ROWS_OF_COLUMNS = 64


def maxima_of(
    read: list[Array], streams: tuple[Stream, ...], folds: list[list[Array]], rule: Rule, together: bool
) -> list[Array]:
    """Bits of the maxima of each stream, by scale, or one vector of those of all streams that have but one scale.

    ``read`` is the matrix, and thresholds if any.
    """
    height, width = read[0].shape
    rows, span = (_ROWS_OF_COLUMNS, 1) if any(s.scale == 1 for s in streams) else (_ROWS, _SPAN)
    rows, cols = math.gcd(height, rows), math.gcd(width, _COLS)
    problem = Tiles(rows, cols, (height // rows, width // cols), width, rule, streams, 1, span)
    grid = problem.grid[0], problem.spans
    partial = {None: grid, 0: (height, grid[1]), 1: (grid[0], width)}
    maxima = triton_call(
        functools.partial(amax_kernel, problem=problem),
        [jax.ShapeDtypeStruct(partial[s.scale], jnp.int32) for s in problem.streams],
        *read, *(f for fold in folds for f in fold), name="fp4jax_amax", grid=grid,
    )  # fmt: skip
    if together:
        return [jnp.max(jnp.stack(maxima), axis=(1, 2))]
    return [
        jnp.max(bits, axis=None if s.scale is None else 1 - s.scale) for bits, s in zip(maxima, streams, strict=True)
    ]


def amax_of_rows(extremes: RowExtremes, bounds: Array | None, rule: Rule) -> Array:
    """Bits of amax of rows."""
    whole = bits_of(jnp.maximum(jnp.abs(extremes.top), jnp.abs(extremes.bottom)))
    return Extremes(whole, *extremes).amax(None if bounds is None else bounds_of(bounds), rule)


def known_scales(bits: Array, spec: QuantSpec, names: tuple[str, ...]) -> Scales:
    """Scales from bits of maxima, by the reference's own rule."""
    if names:
        bits = lax.pmax(bits, names)
    scales = spec.scale(float_of(bits), spec.format)
    return scales._replace(scale=spec.scale.decode(scales.scale, None))
