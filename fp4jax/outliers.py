"""Outliers of activations: clamping and compensation (OCC), its exact quantile, and the Hadamard rotation beside it."""

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.blocks import explicit_sharding
from fp4jax.exact import as_float32, pinned
from fp4jax.formats import E4M3, FloatFormat
from fp4jax.scaling import manual_axes, normalize_axis
from fp4jax.typing import Array, Axis, AxisName

SAMPLES = 16384  # what quantile="sampled" looks at
MAX_COUNT = 2**31  # values that an exact quantile counts, in int32


@dataclasses.dataclass(frozen=True)
class OCC:
    """Outlier clamping and compensation (arXiv:2501.17116, §3.2, Eq. 9).

    With lo and hi the (1-α) and α quantiles of the *signed* values, ``Xc = clip(X, lo, hi)`` and ``ΔX = X - Xc``:
    about 2(1-α) of the entries are outliers. α = 1 is the identity. Quantiles are order statistics without
    interpolation, of the sorted values s[0 … n-1]: lo = s[int((1-α) n)], hi = s[min(int(α n), n-1)].

    Args:
        alpha: in (0.5, 1].
        quantile: ``"exact"`` counts and equals sorting; ``"sampled"`` sorts a fixed strided sample of at most 16,384
            values.
        scope: ``"tensor"``: one pair of thresholds, so a token's value depends on all the others (later ones too: use
            ``"vector"`` for decoding); ``"vector"``: a pair for each vector along the contraction axis.
        compensation: what becomes of ΔX in a product. ``"none"``: dropped. ``"residual"``: carried in
            ``residual_format`` inside the quantized operand. ``"sparse"``: a product of its own, ΔX · Q(W), in the
            activation's dtype.
        residual_format: format of the carried entries (its grid must hold that of the values), or None for float32.
        axis_name: manual mesh axes over which the values are split, inside a ``jax.shard_map(check_vma=False)``.

    Raises:
        ValueError: for an argument out of its range.
    """

    alpha: float = 0.99
    quantile: Literal["exact", "sampled"] = "exact"
    scope: Literal["tensor", "vector"] = "tensor"
    compensation: Literal["none", "residual", "sparse"] = "residual"
    residual_format: FloatFormat | None = E4M3
    axis_name: AxisName | None = None

    def __post_init__(self):
        if not 0.5 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha} must be in (0.5, 1]")
        choices = {
            "quantile": ("exact", "sampled"), "scope": ("tensor", "vector"), "compensation": ("none", "residual",
            "sparse")
        }  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {', '.join(map(repr, allowed))}")
        if self.compensation == "sparse" and self.quantile != "exact":
            raise ValueError(
                'compensation="sparse" needs quantile="exact": only then is the number of outliers bounded, by '
                "2(1-alpha)"
            )


def clamp_outliers(x: Array, occ: OCC, *, axis: Axis) -> tuple[Array, Array]:
    """Splits ``x`` into ``(clamped, residual)``: clip(x, lo, hi), and x minus that.

    Both have the shape and dtype of ``x``. NaN stays in ``clamped``; thresholds of a tensor that holds NaN or infinity
    mean nothing. The derivatives of the two add up to the identity: the thresholds are constants, and an entry's
    gradient goes to the part that moves with it.

    Args:
        x: float32, bfloat16 or float16.
        occ: the parameters. Its ``compensation`` plays no part here.
        axis: the contraction axis or axes; used by ``scope="vector"``.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> clamped, residual = fp4jax.clamp_outliers(jnp.arange(8.0), fp4jax.OCC(alpha=0.75), axis=-1)
        >>> clamped.tolist(), residual[0].item(), residual[7].item()
        ([2.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0, 6.0], -2.0, 1.0)
    """
    x = pinned(jnp.asarray(x))
    value = as_float32(x)
    lo, hi = thresholds(x, occ, normalize_axis(axis, x.ndim))
    clamped = clip(value, lo, hi)
    return clamped.astype(x.dtype), (value - clamped).astype(x.dtype)


def clip(x: Array, lo: Array, hi: Array) -> Array:
    """x where lo ≤ x ≤ hi, else the bound passed; NaN stays, and zeros keep their sign.

    What is clamped to zero gets the sign of the side it came from, whichever zero sorting put at the bound.
    """
    lo, hi = jnp.where(lo == 0, jnp.float32(-0.0), lo), jnp.where(hi == 0, jnp.float32(0.0), hi)
    return jnp.where(x < lo, lo, jnp.where(x > hi, hi, x))


@jax.named_scope("quantile")
def thresholds(x: Array, occ: OCC, axis: tuple[int, ...]) -> tuple[Array, Array]:
    """lo and hi as float32 with as many dimensions as ``x``: order statistics of ``x`` in its own dtype."""
    x = lax.stop_gradient(x)
    axes = tuple(range(-x.ndim, 0)) if occ.scope == "tensor" else axis
    names = _names(x, occ)
    n = math.prod(x.shape[a] for a in axes) * _axis_size(names)
    if n == 0:
        empty = jnp.zeros([1 if a - x.ndim in axes else x.shape[a] for a in range(x.ndim)], jnp.float32)
        return empty, empty
    if occ.quantile == "sampled":
        return _sampled(x, occ.alpha, axes, names)
    lo, hi = order_statistics(x, ranks(occ.alpha, n), axes, names)
    return lo, hi


def ranks(alpha: float, n: int) -> tuple[int, int]:
    """Places of lo and hi in the sorted order of n values."""
    return int((1 - alpha) * n), min(int(alpha * n), n - 1)


def _names(x: Array, occ: OCC) -> tuple[AxisName, ...]:
    if occ.axis_name is not None:
        return occ.axis_name if isinstance(occ.axis_name, tuple) else (occ.axis_name,)
    return manual_axes(x) if occ.scope == "tensor" else ()


def _axis_size(names: tuple[AxisName, ...]) -> int:
    return math.prod(lax.axis_size(n) for n in names)


def _sampled(x: Array, alpha: float, axes: tuple[int, ...], names: tuple[AxisName, ...]) -> tuple[Array, Array]:
    if explicit_sharding(x) is not None:
        raise ValueError(
            "quantile='sampled' would gather an array on an Explicit mesh to sample it; use quantile='exact', which "
            "counts on every device"
        )
    moved = jnp.moveaxis(as_float32(x), axes, range(-len(axes), 0))
    lead = moved.shape[: x.ndim - len(axes)]
    flat = moved.reshape(*lead, math.prod(moved.shape[len(lead) :]))
    # An odd stride: an even one would meet the same channels in every row, and outliers sit in fixed channels.
    stride = -(-flat.shape[-1] // SAMPLES) | 1
    sample = flat[..., ::stride]
    sample = lax.all_gather(sample, names, axis=sample.ndim - 1, tiled=True) if names else sample
    ordered, n = jnp.sort(sample, axis=-1), sample.shape[-1]
    shape = [1 if a - x.ndim in axes else x.shape[a] for a in range(x.ndim)]
    lo, hi = (ordered[..., rank].reshape(shape) for rank in ranks(alpha, n))
    return lo, hi


# --- exact order statistics by counting --------------------------------------------------------------------------


def _to_key(x: Array) -> Array:
    """int32 keys in the order of the floats, NaN of either sign last; those of a 16-bit type lie in [-2¹⁵, 2¹⁵)."""
    integer = jnp.int32 if x.dtype == jnp.float32 else jnp.int16
    bits = lax.bitcast_convert_type(x, integer).astype(jnp.int32)
    bits = jnp.where(jnp.isnan(x), bits & jnp.iinfo(integer).max, bits)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(integer).max, bits)


def _from_key(key: Array, dtype) -> Array:
    integer = jnp.int32 if dtype == jnp.float32 else jnp.int16
    bits = jnp.where(key < 0, key ^ jnp.iinfo(integer).max, key)
    return as_float32(lax.bitcast_convert_type(bits.astype(integer), dtype))


def order_statistics(
    x: Array, ranks: tuple[int, ...], axes: tuple[int, ...], names: tuple[AxisName, ...] = ()
) -> list[Array]:
    """The values that would stand at ``ranks`` were ``x`` sorted along ``axes``; counts, so it never sorts or gathers.

    NaN sorts last, as in ``jnp.sort``; of zeros either may come back.

    Args:
        x: float32, bfloat16 or float16, any shape but empty.
        ranks: static positions in the sorted order, counted over all devices of ``names``.
        axes: negative axes that are reduced, kept as 1.
        names: manual mesh axes over which the values are split.

    Returns:
        A float32 array a rank.

    Raises:
        ValueError: for 2³¹ values or more.
    """
    n = math.prod(x.shape[a] for a in axes) * _axis_size(names)
    if n >= MAX_COUNT:
        raise ValueError(f"an exact quantile of {n} values overflows its int32 counts; use OCC(quantile='sampled')")
    # Scatter counts quickly on CPU (2M values: 1 ms, bisection 9) and slowly on GPU, where equal keys collide.
    whole = len(axes) == x.ndim and not names and explicit_sharding(x) is None
    bits = 8 * x.dtype.itemsize
    if whole and jax.default_backend() == "cpu":
        keys = _select_by_histogram(_to_key(x), ranks, bits)
    else:
        keys = _select_by_bisection(_to_key(x), ranks, bits, axes, names)
    return [_from_key(key, x.dtype) for key in keys]


def _select_by_histogram(keys: Array, ranks: tuple[int, ...], bits: int) -> list[Array]:
    """Radix select, 16 bits at a time: counts of the upper digit, then of the lower among keys with the digit found."""

    def find(counts, rank):
        running = jnp.cumsum(counts, dtype=jnp.int32)
        digit = jnp.sum(running <= rank, dtype=jnp.int32)
        return digit, rank - (running[digit] - counts[digit])

    bins = jnp.zeros(2**16, jnp.int32)
    upper = (keys >> (bits - 16)) + 2**15
    counts = bins.at[upper].add(1)
    found = []
    for rank in ranks:
        digit, left = find(counts, rank)
        key = (digit - 2**15) << (bits - 16)
        if bits == 32:
            lower = jnp.where(upper == digit, keys & 0xFFFF, 2**16)
            key = key | find(bins.at[lower].add(1, mode="drop"), left)[0]
        found.append(key.reshape([1] * keys.ndim))
    return found


def _select_by_bisection(
    keys: Array, ranks: tuple[int, ...], bits: int, axes: tuple[int, ...], names: tuple[AxisName, ...]
) -> list[Array]:
    """The smallest key with count(keys ≤ key) > rank, by halving the range: a pass a bit, all ranks in each."""

    def halve(_, bounds):
        result = []
        for rank, (low, high) in zip(ranks, bounds, strict=True):
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            count = jnp.sum(keys <= middle, axis=axes, keepdims=True, dtype=jnp.int32)
            enough = (lax.psum(count, names) if names else count) > rank
            result.append((jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)))
        return tuple(result)

    low = jnp.min(keys, axis=axes, keepdims=True)
    high = jnp.max(keys, axis=axes, keepdims=True)
    if names:
        low, high = lax.pmin(low, names), lax.pmax(high, names)
    return [low for low, _ in lax.fori_loop(0, bits, halve, tuple((low, high) for _ in ranks))]


# --- rotation ----------------------------------------------------------------------------------------------------


@functools.cache
def _hadamard_matrix(size: int) -> np.ndarray:
    matrix = np.ones((1, 1), np.float32)
    while matrix.shape[0] < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]).astype(np.float32)
    return matrix / np.float32(np.sqrt(size))


def hadamard_rotate(x: Array, *, axis: int, size: int = 16) -> Array:
    """Rotates each run of ``size`` values along ``axis`` by the orthonormal Hadamard matrix, which spreads outliers.

    The matrix is symmetric, so the same call rotates back; rotating both operands of a product along their contraction
    axis leaves the product as it was.

    Args:
        x: float array.
        axis: the axis to rotate along; ``size`` must divide its length.
        size: a power of two.

    Raises:
        ValueError: if ``size`` is no power of two or does not divide the axis.

    References:
        NVIDIA, arXiv:2509.25149, §4.2; Castro et al. (Quartet), arXiv:2505.14669.
    """
    if size < 1 or size & (size - 1) or x.shape[axis] % size:
        raise ValueError(f"size={size} must be a power of two that divides x.shape[{axis}]={x.shape[axis]}")
    moved = jnp.moveaxis(x, axis, -1)
    runs = moved.reshape(*moved.shape[:-1], moved.shape[-1] // size, size)
    rotated = jnp.matmul(runs.astype(jnp.float32), _hadamard_matrix(size), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(rotated.reshape(moved.shape), -1, axis).astype(x.dtype)
