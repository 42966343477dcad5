"""Quantized arrays: what to quantize to (``QuantSpec``), the result (``QTensor``), and ``quantize`` between them."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.exact import as_float32, magnitude, multiply, pinned
from fp4jax.formats import FloatFormat
from fp4jax.rounding import NEAREST_EVEN, Rounding
from fp4jax.scaling import AbsMax, Granularity, PerVector, ScaleRule, Scales, TwoLevel, manual_axes, normalize_axis
from fp4jax.typing import Array, Axis, AxisName, Key


@dataclasses.dataclass(frozen=True)
class QuantSpec:
    """How an array is quantized: the format of its values, who shares a scale, how the scale is stored, and rounding.

    Args:
        format: a ``FloatFormat`` with a sign, such as ``E2M1``.
        granularity: ``PerTensor()``, ``PerVector()``, ``PerBlock(size)`` or ``PerBlock2D(rows, cols)``.
        scale: ``AbsMax()``, ``PowerOfTwo(mode)`` or ``TwoLevel()``.
        rounding: ``NEAREST_EVEN``, ``TIES_UP`` or ``STOCHASTIC``.

    Raises:
        TypeError: if an argument is of another kind (pass objects, not names).
        ValueError: if ``format`` cannot hold signed values.

    Example:
        >>> import fp4jax
        >>> fp4jax.QuantSpec(fp4jax.E2M1, fp4jax.PerBlock(16), fp4jax.TwoLevel())
        E2M1 PerBlock(size=16) TwoLevel() NEAREST_EVEN
    """

    format: FloatFormat
    granularity: Granularity = PerVector()
    scale: ScaleRule = AbsMax()
    rounding: Rounding = NEAREST_EVEN

    def __post_init__(self):
        kinds = {"format": FloatFormat, "granularity": Granularity, "scale": ScaleRule, "rounding": Rounding}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"QuantSpec needs a {kind.__name__} as {name}, got {name}={value!r}")
        if not self.format.signed:
            raise ValueError(f"format={self.format!r} has no sign and no zero: it stores scales, not values")

    @property
    def needs_key(self) -> bool:
        """Whether quantizing draws noise."""
        return self.rounding.needs_key

    def __repr__(self) -> str:
        return f"{self.format!r} {self.granularity!r} {self.scale!r} {self.rounding!r}"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scale", "outer_scale"],
    meta_fields=["spec", "axis"],
)
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized array: ``x ≈ values · scale`` (times ``outer_scale`` where there is one), scales spread over blocks.

    A pytree whose leaves are the arrays; ``spec`` and ``axis`` are static, so it passes through jit, vmap, scan, remat,
    shard_map, donation and checkpoints.

    Attributes:
        values: values of ``spec.format`` in ``spec.format.storage_dtype``, of the shape of the array.
        scale: one a block, as ``spec.scale`` stores it; as many dimensions as ``values``. NaN for a block that was not
            finite.
        outer_scale: float32 [1, …, 1] for ``TwoLevel``, else None.
        spec: the ``QuantSpec``.
        axis: the contraction axes, negative, since vmap adds leading ones.
    """

    values: Array
    scale: Array
    outer_scale: Array | None
    spec: QuantSpec
    axis: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that was quantized."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array that was quantized."""
        return self.values.ndim

    @property
    def nbytes(self) -> int:
        """Bytes that values and scales need when packed (an E2M1 value counts half a byte)."""
        scales = [s for s in (self.scale, self.outer_scale) if s is not None]
        return -(-math.prod(self.shape) * self.spec.format.bits // 8) + sum(
            math.prod(s.shape) * s.dtype.itemsize for s in scales
        )

    def scales(self) -> Array:
        """float32 scale of every block, outer scale included; the shape of ``scale``."""
        return self.spec.scale.decode(self.scale, self.outer_scale)

    def dequantize(self, dtype=jnp.float32) -> Array:
        """values · scale, rounded to ``dtype`` and saturated at its ends; all NaN in a block that was not finite."""
        scales = self.spec.granularity.expand(self.scales(), self.shape, self.axis)
        limit = np.float32(
            jnp.finfo(dtype).max
        )  # a power-of-two scale can lift the largest value past the input's range
        return jnp.clip(self.values.astype(jnp.float32) * scales, -limit, limit).astype(dtype)


def find_scales(x: Array, spec: QuantSpec, axis: tuple[int, ...]) -> Scales:
    """Scales of the blocks of float32 ``x``."""
    return spec.scale(spec.granularity.reduce_max(magnitude(x), axis), spec.format, tensor_axes(x, spec))


def tensor_axes(x: Array, spec: QuantSpec) -> tuple[AxisName, ...]:
    """The manual mesh axes over which an outer scale is shared: those of the granularity, else those x varies over."""
    if not isinstance(spec.scale, TwoLevel):
        return ()
    return manual_axes(x) if spec.granularity.axis_name is None else spec.granularity.named_axes


def scaled_input(x: Array, scales: Scales, spec: QuantSpec, axis: tuple[int, ...]) -> Array:
    """u = x · r, the input in units of the grid; float32."""
    return multiply(x, spec.granularity.expand(scales.reciprocal, x.shape, axis))


def grid_values(x: Array, scales: Scales, spec: QuantSpec, axis: tuple[int, ...], key: Key | None) -> Array:
    """The values of float32 ``x`` on the grid, as float32; NaN in blocks that are not finite."""
    return spec.rounding(scaled_input(x, scales, spec, axis), spec.format, key)


def check_spec(spec: object) -> None:
    """Raises TypeError for what is no ``QuantSpec``, such as a bare format."""
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"spec={spec!r} must be a QuantSpec, such as fp4jax.QuantSpec(fp4jax.E2M1)")


def quantize(x: Array, spec: QuantSpec, *, axis: Axis, key: Key | None = None) -> QTensor:
    """Quantizes ``x``: one rounding from its own precision to the grid of ``spec.format``, under one scale a block.

    values = round(x · r) and x ≈ values · scale, with r and scale as ``fp4jax.scaling`` pins them. The result is the
    same bit for bit under jit, vmap, scan, remat and on any mesh. It has no gradient: see ``fake_quant``.

    Args:
        x: float32, bfloat16 or float16 array of any shape, empty ones included.
        spec: what to quantize to.
        axis: the contraction axis, or a tuple of them.
        key: PRNG key; compulsory for ``STOCHASTIC`` rounding.

    Returns:
        A ``QTensor`` of the same shape.

    Raises:
        TypeError: for another dtype of ``x``.
        ValueError: for a bad ``axis``, or stochastic rounding without a key.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> q = fp4jax.quantize(jnp.array([[0.1, -0.7, 2.0]]), fp4jax.QuantSpec(fp4jax.E2M1), axis=-1)
        >>> q.values.tolist(), q.scale.tolist()
        ([[0.5, -2.0, 6.0]], [[0.3333333432674408]])

    References:
        Wang et al., arXiv:2501.17116, §3 and §4.1.
    """
    check_spec(spec)
    x = jnp.asarray(x)
    axes = normalize_axis(axis, x.ndim)
    if spec.needs_key and key is None:
        raise ValueError(f"rounding={spec.rounding!r} draws noise and key=None; pass key=jax.random.key(...)")
    x = lax.stop_gradient(as_float32(pinned(x)))
    scales = find_scales(x, spec, axes)
    values = grid_values(x, scales, spec, axes, key)
    # E2M1 has no NaN, and casts of NaN to it differ by device: the scale carries it.
    values = jnp.where(jnp.isnan(values), jnp.float32(0), values)
    return QTensor(values.astype(spec.format.storage_dtype), scales.scale, scales.outer_scale, spec, axes)


def dequantize(q: QTensor, dtype=jnp.float32) -> Array:
    """``q.dequantize(dtype)``."""
    return q.dequantize(dtype)
