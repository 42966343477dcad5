"""Who shares a scale (granularity), and how the scale itself is stored (scale rule).

The arithmetic is pinned, so that NumPy, XLA and kernels agree bit for bit. For a block of finite values and a format
whose largest value is M, in float32 with one rounding an operation:

    amax  = max |x|, clamped to [M · 2^-125, M · 2^126]
    r     = M / amax                       (one division a block)
    u     = x · r                          (what is rounded to the grid)
    scale = amax · float32(1 / M)          (a product with a constant; x ≈ values · scale)

An all-zero block has scale 1. A block that holds NaN or infinity has scale NaN, so all of it dequantizes to NaN.
Subnormal inputs count with their exact value, although XLA's CPU and GPU code flushes them: see ``magnitude`` and
``multiply``.
"""

import abc
import dataclasses
import math
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.blocks import flatten, split, spread, unflatten
from fp4jax.exact import divide
from fp4jax.formats import E4M3, E8M0, FloatFormat
from fp4jax.rounding import NEAREST_EVEN
from fp4jax.typing import Array, Axis, AxisName

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def normalize_axis(axis: Axis, ndim: int) -> tuple[int, ...]:
    """The contraction axes as a tuple of negative ints, in the order given.

    Raises:
        ValueError: if an axis is out of range or named twice, or none is given.
    """
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    negative = []
    for a in axes:
        a = operator.index(a)
        if not -ndim <= a < ndim:
            raise ValueError(f"axis={axis} is out of range for an array of {ndim} dimensions")
        negative.append(a - ndim if a >= 0 else a)
    if not negative or len(set(negative)) != len(negative):
        raise ValueError(f"axis={axis} must name at least one axis, and none twice")
    return tuple(negative)


# --- granularity -------------------------------------------------------------------------------------------------


def manual_axes(x: Array) -> tuple[AxisName, ...]:
    """The mesh axes over which x varies inside a ``jax.shard_map``; none outside of one.

    Raises:
        ValueError: inside ``shard_map(check_vma=False)``, where JAX does not know over which axes x varies.
    """
    varying = jax.typeof(x).manual_axis_type.varying
    names = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not names or varying:
        return tuple(n for n in names if n in varying)
    if jax.typeof(lax.axis_index(names[0])).manual_axis_type.varying:  # tracked, and x is the same on all of them
        return ()
    raise ValueError(
        f"inside shard_map(check_vma=False) over {names} a scale shared across devices needs axis_name=: pass "
        f"axis_name={names!r} (or the axes x is split over; axis_name=() for none) to the granularity or OCC, or use "
        "check_vma=True"
    )


class Granularity(abc.ABC):
    """Which values share a scale. ``axis`` is always a tuple of negative axes: the contraction axes, in order.

    A granularity may carry ``axis_name``: the manual mesh axes, inside a ``jax.shard_map``, over which blocks are
    split.
    """

    axis_name: AxisName | None = None

    @abc.abstractmethod
    def reduce_max(self, magnitudes: Array, axis: tuple[int, ...]) -> Array:
        """Largest value of each block: float32, as many dimensions as the input."""

    @abc.abstractmethod
    def expand(self, blocks: Array, shape: tuple[int, ...], axis: tuple[int, ...]) -> Array:
        """Spreads a value a block over its elements: an array that broadcasts against ``shape``."""

    @property
    def leaves_the_sum(self) -> bool:
        """Whether a scale is constant along the contraction, so that it may be applied after the product."""
        return True

    def __repr__(self) -> str:
        fields = vars(self).items()
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in fields if v is not None)})"

    def _over_devices(self, amax: Array, names: tuple[AxisName, ...]) -> Array:
        return lax.pmax(amax, names) if names else amax

    @property
    def named_axes(self) -> tuple[AxisName, ...]:
        """``axis_name`` as a tuple; empty if it is None."""
        if self.axis_name is None:
            return ()
        return self.axis_name if isinstance(self.axis_name, tuple) else (self.axis_name,)


@dataclasses.dataclass(frozen=True, repr=False)
class PerTensor(Granularity):
    """One scale a tensor; scale shape [1, …, 1].

    Under ``vmap`` a tensor is one example. Inside a ``jax.shard_map`` the maximum runs over the mesh axes on which the
    value varies, or over ``axis_name`` where it is given.
    """

    axis_name: AxisName | None = None

    def reduce_max(self, magnitudes, axis):
        names = self.named_axes if self.axis_name is not None else manual_axes(magnitudes)
        return self._over_devices(jnp.max(magnitudes, keepdims=True, initial=0), names)

    def expand(self, blocks, shape, axis):
        return blocks


@dataclasses.dataclass(frozen=True, repr=False)
class PerVector(Granularity):
    """One scale for each vector along the contraction axis: token-wise for activations [m, k], output-channel-wise for
    weights [k, n]; scale shape: that of the tensor with the contraction axes 1.

    Inside a ``jax.shard_map`` that splits the contraction axis, pass the mesh axis as ``axis_name``.
    """

    axis_name: AxisName | None = None

    def reduce_max(self, magnitudes, axis):
        return self._over_devices(jnp.max(magnitudes, axis=axis, keepdims=True, initial=0), self.named_axes)

    def expand(self, blocks, shape, axis):
        return blocks


@dataclasses.dataclass(frozen=True, repr=False)
class PerBlock(Granularity):
    """One scale for each ``size`` values along the contraction axis; the last block may be short.

    Scale shape: that of the tensor with ceil(k / size) along the contraction axis. Several contraction axes count as
    one
    long axis, in the order given: the blocks then stand along the last of them and the others are 1.

    Raises:
        ValueError: if ``size`` is not positive.
    """

    size: int
    axis_name: AxisName | None = None

    def __post_init__(self):
        _check_positive(self, size=self.size)

    @property
    def leaves_the_sum(self):
        return False

    def reduce_max(self, magnitudes, axis):
        flat = flatten(jnp.moveaxis(magnitudes, axis, range(-len(axis), 0)), len(axis))
        amax = jnp.max(split(flat, -1, self.size), axis=-1, initial=0)
        amax = lax.expand_dims(amax, range(amax.ndim - 1, amax.ndim + len(axis) - 2))
        return jnp.moveaxis(amax, range(-len(axis), 0), axis)

    def expand(self, blocks, shape, axis):
        sizes = tuple(shape[a] for a in axis)
        moved = jnp.moveaxis(blocks, axis, range(-len(axis), 0))
        flat = lax.squeeze(moved, range(moved.ndim - len(axis), moved.ndim - 1))
        spread_out = spread(flat, -1, self.size, math.prod(sizes))
        return jnp.moveaxis(unflatten(spread_out, sizes), range(-len(axis), 0), axis)


@dataclasses.dataclass(frozen=True, repr=False)
class PerBlock2D(Granularity):
    """One scale for each ``rows`` × ``cols`` patch: rows along the contraction axis, cols along the other matrix axis
    (the last axis that is not contracted); patches at the ends may be short.

    Scale shape: that of the tensor with ceil(k / rows) and ceil(n / cols) there. A weight so quantized has the same
    values in fprop and dgrad.

    Raises:
        ValueError: if a size is not positive; on use, for several contraction axes or a tensor with no other axis.
    """

    rows: int
    cols: int
    axis_name: AxisName | None = None

    def __post_init__(self):
        _check_positive(self, rows=self.rows, cols=self.cols)

    @property
    def leaves_the_sum(self):
        return False

    def _axes(self, ndim: int, axis: tuple[int, ...]) -> tuple[int, int]:
        if len(axis) != 1 or ndim < 2:
            raise ValueError(
                f"{self!r} needs one contraction axis and another matrix axis, got axis={axis} of a {ndim}-dimensional "
                "array; use PerBlock"
            )
        return axis[0], -2 if axis[0] == -1 else -1

    def reduce_max(self, magnitudes, axis):
        row_axis, col_axis = self._axes(magnitudes.ndim, axis)
        amax = jnp.max(split(magnitudes, row_axis, self.rows), axis=row_axis, initial=0)
        return jnp.max(split(amax, col_axis, self.cols), axis=col_axis, initial=0)

    def expand(self, blocks, shape, axis):
        for a, size in zip(self._axes(len(shape), axis), (self.rows, self.cols), strict=True):
            blocks = spread(blocks, a, size, shape[a])
        return blocks


def _check_positive(owner: object, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{type(owner).__name__} needs a positive integer {name}, got {name}={size!r}")


# --- scale rules -------------------------------------------------------------------------------------------------


class Scales(NamedTuple):
    """What a scale rule returns, each with a value a block.

    Attributes:
        scale: as stored (float32, E8M0 or E4M3).
        outer_scale: float32 scale of the whole tensor, or None.
        reciprocal: float32 r with u = x · r.
    """

    scale: Array
    outer_scale: Array | None
    reciprocal: Array


class ScaleRule(abc.ABC):
    """How the scale of a block follows from its amax, and the type it is stored in."""

    storage = "float32"

    @abc.abstractmethod
    def __call__(self, amax: Array, format: FloatFormat, names: tuple[AxisName, ...] = ()) -> Scales:
        """Scales from amax (float32, a value a block; inf where the block is not finite).

        Args:
            amax: largest magnitude of each block.
            format: the format of the values.
            names: manual mesh axes over which the tensor is split (only rules with an outer scale need them).
        """

    def decode(self, scale: Array, outer_scale: Array | None) -> Array:
        """The float32 factor that a stored scale stands for; without ``outer_scale``, less that of the tensor."""
        return scale

    @property
    def exact_in_bfloat16(self) -> bool:
        """Whether value · scale (less an outer scale) is exact in bfloat16 for every value of at most 8 bits."""
        return False


def _clamp(amax: Array, format: FloatFormat, lowest_exponent: int = -125) -> Array:
    low = format.max * 2.0**lowest_exponent
    high = min(format.max * 2.0**126, _FLOAT32_MAX)
    return jnp.minimum(jnp.maximum(amax, jnp.float32(low)), jnp.float32(high))


def _replace(value: Array, amax: Array, zero: float, nonfinite: float) -> Array:
    """``value``, but ``zero`` where a block is all zero and ``nonfinite`` where it is not finite."""
    value = jnp.where(amax == 0, np.float32(zero), value)
    return jnp.where(jnp.isfinite(amax), value, np.float32(nonfinite))


@dataclasses.dataclass(frozen=True)
class AbsMax(ScaleRule):
    """float32 scale amax / M: the largest value of a block lands on ±M (arXiv:2501.17116, Eq. 1: γ = 1 / scale)."""

    def __call__(self, amax, format, names=()):
        clamped = _clamp(amax, format)
        scale = clamped * jnp.float32(1.0 / format.max)
        reciprocal = divide(jnp.full_like(clamped, format.max), clamped)
        return Scales(_replace(scale, amax, 1, np.nan), None, _replace(reciprocal, amax, 1, np.nan))


_MODES = ("floor", "ceil", "even", "rceil")


@dataclasses.dataclass(frozen=True)
class PowerOfTwo(ScaleRule):
    """Power-of-two scale stored as E8M0. With M = μ · 2^E (1 ≤ μ < 2) the scale is 2^e:

    - ``"floor"``: e = ⌊log2 amax⌋ - E (OCP Microscaling 1.0, §6.3); what lies past M saturates.
    - ``"ceil"``: e = ⌈log2 amax⌉ - E.
    - ``"even"``: e = ⌊log2 amax′⌋ - E, amax′ being amax rounded to the format's mantissa bits.
    - ``"rceil"``: the smallest e with amax / 2^e ≤ M, so nothing saturates.

    amax is clamped first, as above, and e kept in [-126, 126], so that scale and reciprocal are normal in float32.
    Everything is done on the bits.

    Raises:
        ValueError: for another ``mode``.
    """

    mode: str = "floor"
    storage = "e8m0"

    def __post_init__(self):
        if self.mode not in _MODES:
            raise ValueError(f"mode={self.mode!r} is none of {', '.join(map(repr, _MODES))}")

    def __call__(self, amax, format, names=()):
        bits = lax.bitcast_convert_type(_clamp(amax, format), jnp.int32)
        exponent, mantissa = (bits >> 23) - 127, bits & 0x007FFFFF
        top = math.frexp(format.max)[1] - 1
        match self.mode:
            case "floor":
                up = jnp.zeros_like(bits)
            case "ceil":
                up = (mantissa > 0).astype(jnp.int32)
            case "even":
                up = (mantissa + (1 << (22 - format.mantissa_bits)) >= 1 << 23).astype(jnp.int32)
            case "rceil":
                largest = int(np.float32(format.max).view(np.int32)) & 0x007FFFFF
                up = (mantissa > largest).astype(jnp.int32)
        e = jnp.clip(exponent - top + up, -126, 126)
        e = jnp.where(amax == 0, 0, e)
        byte = jnp.where(jnp.isfinite(amax), e + 127, 255).astype(jnp.uint8)
        reciprocal = lax.bitcast_convert_type((127 - e) << 23, jnp.float32)
        scale = lax.bitcast_convert_type(byte, E8M0.storage_dtype)
        return Scales(scale, None, jnp.where(jnp.isfinite(amax), reciprocal, np.float32(np.nan)))

    def decode(self, scale, outer_scale):
        # By bits: a cast of E8M0 goes through types that lose the ends of its range on some devices.
        field = lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)
        return jnp.where(field == 255, np.float32(np.nan), lax.bitcast_convert_type(field << 23, jnp.float32))

    @property
    def exact_in_bfloat16(self):
        return True


@dataclasses.dataclass(frozen=True)
class TwoLevel(ScaleRule):
    """E4M3 scale a block under one float32 scale a tensor (NVFP4; NVIDIA, arXiv:2509.25149, App. A). In float32:

    outer      = amax_tensor · float32(1 / (448 M)),    amax_tensor ≥ 448 M · 2^-116, over the finite blocks
    inverse    = 448 M / amax_tensor
    scale      = E4M3((amax · float32(1 / M)) · inverse), at least 2^-9
    r          = inverse / scale,    x ≈ values · (scale · outer)
    """

    storage = "e4m3"

    def __call__(self, amax, format, names=()):
        finite = jnp.isfinite(amax)
        tensor = jnp.max(jnp.where(finite, amax, jnp.float32(0)), keepdims=True, initial=0)
        tensor = lax.pmax(tensor, names) if names else tensor
        total = E4M3.max * format.max
        floor = jnp.maximum(tensor, jnp.float32(total * 2.0**-116))
        empty = tensor == 0
        outer = jnp.where(empty, jnp.float32(1), floor * jnp.float32(1.0 / total))
        inverse = jnp.where(empty, jnp.float32(1), divide(jnp.full_like(floor, total), floor))
        wanted = (amax * jnp.float32(1.0 / format.max)) * inverse
        block = jnp.maximum(NEAREST_EVEN(wanted, E4M3), jnp.float32(E4M3.grid[E4M3.grid > 0][0]))
        block = jnp.where(amax == 0, jnp.float32(1), block)
        reciprocal = divide(jnp.broadcast_to(inverse, block.shape), block)
        block, reciprocal = (jnp.where(finite, v, np.float32(np.nan)) for v in (block, reciprocal))
        return Scales(block.astype(E4M3.storage_dtype), outer, reciprocal)

    def decode(self, scale, outer_scale):
        block = scale.astype(jnp.float32)
        return block if outer_scale is None else block * outer_scale

    @property
    def exact_in_bfloat16(self):
        return True
