"""The oracle's dot_general: forward and both gradients of any recipe, in NumPy, from the design's equations.

Operands are quantized by ``oracle`` (bit for bit); products are summed in float64 and come with the sum of their
magnitudes, which is what the rounding error of any order of summation is proportional to.
"""

import dataclasses
import math
from typing import Any

import numpy as np
import oracle

F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Sum:
    """A sum of products in float64, and the sum of their magnitudes."""

    value: np.ndarray
    mass: np.ndarray

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(self.value + other.value, self.mass + other.mass)


@dataclasses.dataclass(frozen=True)
class DotModel:
    """One product and its two gradients.

    ``pinned_y`` is float32 Σ of grid values · sx · sw, in this order, where scales leave the sum: what a product whose
    sum is exact must give to the bit.
    """

    y: Sum
    dlhs: Sum
    drhs: Sum
    pinned_y: np.ndarray


@dataclasses.dataclass(frozen=True)
class Side:
    """One operand's axes: views it as a matrix [batch, free, contracted], each group of axes flattened, and back."""

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    contracted: tuple[int, ...]

    @property
    def free(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in (*self.batch, *self.contracted))

    @property
    def order(self) -> tuple[int, ...]:
        return (*self.batch, *self.free, *self.contracted)

    def matrix(self, x: np.ndarray) -> np.ndarray:
        groups = (self.batch, self.free, self.contracted)
        return x.transpose(self.order).reshape([math.prod(self.shape[d] for d in group) for group in groups])

    def array(self, matrix: np.ndarray) -> np.ndarray:
        return matrix.reshape([self.shape[d] for d in self.order]).transpose(np.argsort(self.order).tolist())


def high_precision(x: np.ndarray) -> oracle.Quantized:
    """An operand left alone: its values in float32, scale 1."""
    x = np.asarray(x).astype(F32)
    one = np.ones_like(x)
    return oracle.Quantized(x, one, one, F32(1), None, x)


def is_spec(spec: Any) -> bool:
    """Neither None (high precision) nor REUSE."""
    return hasattr(spec, "granularity")


def product(a: np.ndarray, b: np.ndarray) -> Sum:
    """[b, m, k] · [b, k, n] in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return Sum(a @ b, np.abs(a) @ np.abs(b))


def first_scale(side: Side, operand: oracle.Quantized) -> np.ndarray:
    """The scale at the first contracted index, [batch, free]; 1 where nothing is contracted."""
    scale = side.matrix(operand.scale)
    return scale[:, :, 0] if scale.shape[2] else np.ones(scale.shape[:2], F32)


def folded_scale(side: Side, operand: oracle.Quantized) -> np.ndarray:
    """The scale of a reused operand, [batch, free]: it must be the same all along what fprop contracted."""
    scale, first = side.matrix(operand.scale), first_scale(side, operand)
    if not ((scale == first[:, :, None]) | np.isnan(scale)).all():
        raise ValueError("a reused operand needs one scale a vector or a tensor")
    return first


def dot_general(lhs: np.ndarray, rhs: np.ndarray, dimension_numbers: Any, recipe: Any, dy: np.ndarray) -> DotModel:
    """Y = X·W, dX = Q(dY·sw)·Wqᵀ ⊙ activation factor, dW = Xqᵀ·Q(dY·sx) ⊙ f'(W·r), whatever the recipe says.

    An operand of a backward product is one of three things. REUSE: fprop's grid values, their scale folded into dY by
    one float32 product before dY is quantized. A spec: quantized anew along the axis this product contracts. None: as
    it came. OCC with "sparse" compensation adds ΔX·Wq to Y and ΔXᵀ·dY to dW.
    """
    (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = dimension_numbers
    left = Side(lhs.shape, tuple(lhs_batch), tuple(lhs_contracted))
    right = Side(rhs.shape, tuple(rhs_batch), tuple(rhs_contracted))
    fprop, dgrad, wgrad = recipe.fprop, recipe.dgrad, recipe.wgrad

    x, w = high_precision(lhs), high_precision(rhs)
    if fprop.lhs is not None:
        x = oracle.quantize_activation(lhs, fprop.lhs, recipe.outliers, left.contracted)
    if fprop.rhs is not None:
        w = oracle.quantize(rhs, fprop.rhs, right.contracted)

    # dY is [batch…, lhs free…, rhs free…]; as a matrix [b, m, n].
    batch, m_axes = len(left.batch), len(left.free)
    m_range, n_range = tuple(range(batch, batch + m_axes)), tuple(range(batch + m_axes, dy.ndim))
    dy32 = np.asarray(dy).astype(F32)
    b, m, n = (math.prod(dy.shape[d] for d in group) for group in (range(batch), m_range, n_range))

    def gradient(spec: Any, scale: np.ndarray | None, axis: tuple[int, ...]) -> np.ndarray:
        g = dy32 if scale is None else (dy32.reshape(b, m, n) * scale).reshape(dy.shape)
        return (g if spec is None else oracle.quantize(g, spec, axis).exact).reshape(b, m, n)

    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        y = product(left.matrix(x.exact), right.matrix(w.exact).transpose(0, 2, 1))
        pinned = product(left.matrix(x.values), right.matrix(w.values).transpose(0, 2, 1)).value.astype(F32)
        pinned = pinned * first_scale(left, x)[:, :, None] * first_scale(right, w)[:, None, :]
        sparse = recipe.outliers is not None and recipe.outliers.compensation == "sparse"
        if sparse:
            y = y + product(left.matrix(x.residual), right.matrix(w.exact).transpose(0, 2, 1))

        scale = None
        if dgrad.rhs is None:
            operand = rhs.astype(F32)
        elif is_spec(dgrad.rhs):
            operand = oracle.quantize(rhs, dgrad.rhs, right.free).exact
        else:
            operand, scale = w.values, folded_scale(right, w)[:, None, :]
        dx = product(gradient(dgrad.lhs, scale, n_range), right.matrix(operand))  # [b, m, n] · [b, n, k]

        scale = None
        if wgrad.lhs is None:
            operand = lhs.astype(F32)
        elif is_spec(wgrad.lhs):
            operand = oracle.quantize_activation(lhs, wgrad.lhs, recipe.outliers, left.free, left.contracted).exact
        else:
            operand, scale = x.values, folded_scale(left, x)[:, :, None]
        g = gradient(wgrad.rhs, scale, m_range)
        dw = product(g.transpose(0, 2, 1), left.matrix(operand))  # [b, n, m] · [b, m, k]
        if sparse and wgrad.lhs is not None:  # an activation left in high precision still holds its outliers
            dw = dw + product(dy32.reshape(b, m, n).transpose(0, 2, 1), left.matrix(x.residual))

    def through(total: Sum, side: Side, estimator: Any, spec: Any, q: oracle.Quantized) -> Sum:
        factor = 1.0 if spec is None else oracle.estimator_factor(estimator, q, oracle.format_of(spec.format))
        return Sum(side.array(total.value) * factor, side.array(total.mass) * factor)

    return DotModel(
        Sum(y.value.reshape(dy.shape), y.mass.reshape(dy.shape)),
        through(dx, left, recipe.activation_estimator, fprop.lhs, x),
        through(dw, right, recipe.weight_estimator, fprop.rhs, w),
        pinned.reshape(dy.shape),
    )
