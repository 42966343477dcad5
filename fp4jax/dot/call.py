"""Everything static about one quantized product, and the mark by which ``explain`` finds it."""

import dataclasses
import functools
import hashlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax.dot.geometry import Geometry
from fp4jax.recipe import Recipe
from fp4jax.typing import Array, DimensionNumbers

MARK = "fp4jax_"


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of ``dot_general``: hashable, so that it can be a static argument.

    Attributes:
        recipe: what is quantized.
        geometry: axes.
        lhs_dtype, rhs_dtype: dtypes of the operands, and so of their gradients.
        out_dtype: dtype of the result.
        backend: name of the backend that runs it.
        precision: as ``lax.dot_general`` takes it; for products with an operand in float32.
        out_sharding: of the result.
        lhs_sharding, rhs_sharding: of the operands where their mesh is Explicit, else None; the gradients get the same.
    """

    recipe: Recipe
    geometry: Geometry
    lhs_dtype: np.dtype
    rhs_dtype: np.dtype
    out_dtype: np.dtype
    backend: str
    precision: Any = None
    out_sharding: NamedSharding | PartitionSpec | None = None
    lhs_sharding: NamedSharding | None = None
    rhs_sharding: NamedSharding | None = None

    @property
    def lhs_axis(self) -> tuple[int, ...]:
        """Contraction axes of lhs, negative."""
        return tuple(a - self.geometry.lhs_ndim for a in self.geometry.lhs_contract)

    @property
    def rhs_axis(self) -> tuple[int, ...]:
        """Contraction axes of rhs, negative."""
        return tuple(a - self.geometry.rhs_ndim for a in self.geometry.rhs_contract)

    def mark(self, product: str, sizes: tuple[int, int, int] | None = None) -> str:
        """Name of the inner jit around a product; the same for equal calls in every process.

        Args:
            product: ``"fprop"``, ``"dgrad"``, ``"wgrad"`` or ``"occ"``.
            sizes: m, n and k, where the inner jit holds no ``lax.dot_general`` that tells them.
        """
        parts = f"{self.recipe!r} {self.geometry!r} {self.lhs_dtype} {self.rhs_dtype}"
        digest = hashlib.sha256((parts if sizes is None else f"{parts} {sizes}").encode()).hexdigest()
        name = f"{MARK}{product}_{self.recipe.name}_{self.backend}_{digest[:8]}"
        MARKS[name] = Mark(self, product, sizes)
        return name


class Mark(NamedTuple):
    """What the name of an inner jit stands for; see ``Call.mark``."""

    call: Call
    product: str
    sizes: tuple[int, int, int] | None


MARKS: dict[str, Mark] = {}


def names_of(entry) -> tuple[str, ...]:
    """The mesh axes of an entry of a ``PartitionSpec``."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def permuted(sharding: NamedSharding | None, axes: tuple[int, ...]) -> NamedSharding | None:
    """The sharding of an array whose axis i is axis ``axes[i]`` of one sharded like this."""
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[a] for a in axes)))


@functools.lru_cache(maxsize=4096)
def marked_dot(name: str, dnums: DimensionNumbers, precision, out_sharding):
    """``lax.dot_general`` with float32 sums, as an inner jit of the given name."""

    def product(lhs: Array, rhs: Array) -> Array:
        return lax.dot_general(
            lhs, rhs, dnums, precision=precision, preferred_element_type=np.dtype("float32"), out_sharding=out_sharding
        )

    product.__name__ = product.__qualname__ = name
    return jax.jit(product)
