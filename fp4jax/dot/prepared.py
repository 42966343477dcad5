"""An operand quantized once, for several products."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from fp4jax.dot.call import Call
from fp4jax.recipe import Recipe
from fp4jax.typing import Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["array", "quantized"],
    meta_fields=["side", "recipe", "axis", "backend"],
)
@dataclasses.dataclass(frozen=True)
class Prepared:
    """An array and what fprop makes of it: give it to ``dot_general`` in place of the array.

    The product is that of the array, forward and backward, but does not quantize again. Gradients flow to the array,
    each product's in the array's dtype, and are summed as those of separate products are: bit for bit the same. Nothing
    flows through ``quantized``.

    It is a pytree: it passes through jit, scan, remat and vmap. Made by ``DotGeneral.prepare_lhs`` and ``prepare_rhs``.

    Attributes:
        array: the activation or the weight; where gradients go. None in what ``without_array`` returns.
        quantized: what the backend made of it; a pytree that is the backend's business.
        side: ``"lhs"`` or ``"rhs"``.
        recipe: what it was quantized by.
        axis: the contraction axes, negative.
        backend: the backend that made it, and that will run the products.
    """

    array: Any
    quantized: Any
    side: str
    recipe: Recipe
    axis: tuple[int, ...]
    backend: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """Rank of the array."""
        return self.array.ndim

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array, and of its gradient."""
        return self.array.dtype

    def with_array(self, array: Array) -> "Prepared":
        """The same values under another tracer of the array: what a function differentiates with respect to.

        A step that accumulates gradients prepares its weights once and puts them behind the argument of ``jax.grad``:

            prepared = dot.prepare_rhs(w)
            loss = lambda w, x: dot(x, prepared.with_array(w), dims).sum()

        Whether ``array`` holds the numbers that were prepared cannot be checked: that is the caller's word. On an
        Explicit mesh it may be split otherwise; the quantized values follow it, at a byte or two each.

        Raises:
            ValueError: for another shape or dtype.
        """
        if self.array is not None and (array.shape != self.shape or array.dtype != self.dtype):
            raise ValueError(
                f"array is {array.dtype}{list(array.shape)}; this {self.side} was prepared from "
                f"{self.dtype}{list(self.shape)}"
            )
        return dataclasses.replace(self, array=array)

    def without_array(self) -> "Prepared":
        """The quantized values alone, to be kept beside the array and joined by ``with_array``."""
        return dataclasses.replace(self, array=None)

    def check(self, side: str, call: Call) -> None:
        """Raises ValueError unless it fits this side of ``call``."""
        axis = call.lhs_axis if side == "lhs" else call.rhs_axis
        for what, mine, asked in (
            ("as", self.side, side),
            ("for axis", self.axis, axis),
            ("for recipe", self.recipe.name, call.recipe.name),
        ):
            if mine != asked:
                raise ValueError(f"{side} was prepared {what} {mine!r}, and the product takes it {what} {asked!r}")
        if self.recipe != call.recipe:
            raise ValueError(
                f"{side} was prepared for another recipe of the name {self.recipe.name!r} than the product's:\n"
                f"{self.recipe.describe()}\n{call.recipe.describe()}"
            )
