"""Axes of a general product and of its two gradients, without reshapes: sharded operands stay where they are."""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import lax

from fp4jax.typing import Array, DimensionNumbers


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Axes of ``lax.dot_general(lhs, rhs, dimension_numbers)`` for operands of given rank.

    The result has axes [batch, lhs free, rhs free]. "Free" axes are neither contracted nor batch.
    """

    lhs_ndim: int
    rhs_ndim: int
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]

    @classmethod
    def make(cls, lhs_ndim: int, rhs_ndim: int, dimension_numbers: DimensionNumbers) -> "Geometry":
        """Checks and normalizes ``dimension_numbers`` as ``lax.dot_general`` takes them.

        Raises:
            ValueError: if an axis is out of range or named twice, the operands name different numbers of axes, or
                nothing is contracted.
        """
        try:
            (lc, rc), (lb, rb) = dimension_numbers
        except (TypeError, ValueError):
            raise ValueError(
                f"dimension_numbers={dimension_numbers} must be ((lhs_contract, rhs_contract), "
                "(lhs_batch, rhs_batch)), such as (((1,), (0,)), ((), ()))"
            ) from None
        sides = []
        for name, axes, ndim in (
            ("lhs", lc, lhs_ndim),
            ("rhs", rc, rhs_ndim),
            ("lhs", lb, lhs_ndim),
            ("rhs", rb, rhs_ndim),
        ):
            for a in axes:
                if not -ndim <= a < ndim:
                    raise ValueError(
                        f"dimension_numbers={dimension_numbers} names axis {a} of {name}, which has {ndim} axes"
                    )
            sides.append(tuple(int(a) % ndim for a in axes))
        for name, axes in (("lhs", sides[0] + sides[2]), ("rhs", sides[1] + sides[3])):
            if len(set(axes)) < len(axes):
                raise ValueError(f"dimension_numbers={dimension_numbers} names an axis of {name} twice")
        if len(sides[0]) != len(sides[1]) or len(sides[2]) != len(sides[3]):
            raise ValueError(
                f"dimension_numbers={dimension_numbers} must name as many contracted and as many batch axes of lhs as "
                "of rhs"
            )
        if not sides[0]:
            raise ValueError(
                f"dimension_numbers={dimension_numbers} contracts nothing, so there is no axis for scales to run "
                "along; use recipe=fp4jax.recipes.bf16()"
            )
        return cls(lhs_ndim, rhs_ndim, *sides)

    def check_shapes(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> None:
        """Raises TypeError, as ``lax.dot_general`` does, where axes that meet have different sizes.

        Checked here for every backend: one that flattens its operands would take (2, 6) and (3, 4) for the same 12.
        """
        for what, lhs_axes, rhs_axes in (
            ("contracting", self.lhs_contract, self.rhs_contract),
            ("batch", self.lhs_batch, self.rhs_batch),
        ):
            sizes = tuple(lhs[a] for a in lhs_axes), tuple(rhs[a] for a in rhs_axes)
            if sizes[0] != sizes[1]:
                raise TypeError(
                    f"lhs has shape {lhs} and rhs {rhs}; their {what} dimensions have sizes {sizes[0]} and {sizes[1]}, "
                    "and must have the same"
                )

    @functools.cached_property
    def lhs_free(self) -> tuple[int, ...]:
        """Axes of lhs that the result keeps."""
        return tuple(a for a in range(self.lhs_ndim) if a not in self.lhs_contract + self.lhs_batch)

    @functools.cached_property
    def rhs_free(self) -> tuple[int, ...]:
        """Axes of rhs that the result keeps."""
        return tuple(a for a in range(self.rhs_ndim) if a not in self.rhs_contract + self.rhs_batch)

    @property
    def out_batch(self) -> tuple[int, ...]:
        """Batch axes of the result."""
        return tuple(range(len(self.lhs_batch)))

    @property
    def out_lhs(self) -> tuple[int, ...]:
        """Axes of the result that come from lhs."""
        start = len(self.lhs_batch)
        return tuple(range(start, start + len(self.lhs_free)))

    @property
    def out_rhs(self) -> tuple[int, ...]:
        """Axes of the result that come from rhs."""
        start = len(self.lhs_batch) + len(self.lhs_free)
        return tuple(range(start, start + len(self.rhs_free)))

    @property
    def fprop(self) -> DimensionNumbers:
        """Dimension numbers of Y = lhs · rhs."""
        return (self.lhs_contract, self.rhs_contract), (self.lhs_batch, self.rhs_batch)

    @property
    def dgrad(self) -> DimensionNumbers:
        """Dimension numbers of dLhs = dY · rhs, whose axes come out as ``dgrad_axes`` of lhs."""
        return (self.out_rhs, self.rhs_free), (self.out_batch, self.rhs_batch)

    @property
    def wgrad(self) -> DimensionNumbers:
        """Dimension numbers of dRhs = lhs · dY, whose axes come out as ``wgrad_axes`` of rhs."""
        return (self.lhs_free, self.out_lhs), (self.lhs_batch, self.out_batch)

    @property
    def dgrad_axes(self) -> tuple[int, ...]:
        """Which axis of lhs each axis of the dgrad product is."""
        partner = dict(zip(self.rhs_contract, self.lhs_contract, strict=True))
        return self.lhs_batch + self.lhs_free + tuple(partner[a] for a in sorted(self.rhs_contract))

    @property
    def wgrad_axes(self) -> tuple[int, ...]:
        """Which axis of rhs each axis of the wgrad product is."""
        partner = dict(zip(self.lhs_contract, self.rhs_contract, strict=True))
        return self.rhs_batch + tuple(partner[a] for a in sorted(self.lhs_contract)) + self.rhs_free


def scale_to_result(scale: Array, ndim_contract: int, dnums: DimensionNumbers, side: int, other_free: int) -> Array:
    """Lays a scale with its contraction axes kept as 1 out along the result of a product.

    Args:
        scale: as many axes as the operand; 1 along the contraction.
        ndim_contract: how many axes are contracted.
        dnums: dimension numbers of the product.
        side: 0 for lhs, 1 for rhs.
        other_free: how many free axes the other operand has.

    Returns:
        [batch, own free, 1 …] for lhs, [batch, 1 …, own free] for rhs.
    """
    contract, batch = dnums[0][side], dnums[1][side]
    free = tuple(a for a in range(scale.ndim) if a not in contract + batch)
    laid = lax.squeeze(jnp.transpose(scale, batch + free + contract), range(scale.ndim - ndim_contract, scale.ndim))
    start = len(batch) if side == 1 else laid.ndim
    return lax.expand_dims(laid, range(start, start + other_free))


def merge_free(rhs: Array, dnums: DimensionNumbers) -> tuple[Array, DimensionNumbers, tuple[int, ...]]:
    """The right operand with its free axes merged into one, its dimension numbers, and the sizes that were merged."""
    (lhs_contract, contract), (lhs_batch, batch) = dnums
    free = tuple(a for a in range(rhs.ndim) if a not in contract + batch)
    sizes = tuple(rhs.shape[a] for a in free)
    kept = batch + contract
    shape = (*(rhs.shape[a] for a in kept), math.prod(sizes))
    merged = jnp.transpose(rhs, kept + free).reshape(shape)
    new = tuple(range(len(batch), len(kept))), tuple(range(len(batch)))
    return merged, ((lhs_contract, new[0]), (lhs_batch, new[1])), sizes


def restore(product: Array, axes: tuple[int, ...]) -> Array:
    """Transposes a product whose axis i is axis ``axes[i]`` of the operand back to the operand's order."""
    order = tuple(axes.index(a) for a in range(len(axes)))
    return product if order == tuple(range(len(axes))) else jnp.transpose(product, order)
