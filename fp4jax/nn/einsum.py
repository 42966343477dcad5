"""Two-operand einsum on an injected `dot_general`, activation first: `einsum`, `DotEinsum`, and the layer `Einsum`.

`jnp.einsum(_dot_general=...)` is free to swap its operands, which would quantize the activation as a weight. Here lhs
stays the activation and rhs the weight, whatever the equation.
"""

import dataclasses
import string
from collections import Counter
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from fp4jax.nn.linear import promotion
from fp4jax.nn.product import product
from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class _Lowering:
    """`dot_general` with these numbers, then `transpose` to the order that was asked for."""

    dimension_numbers: tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
    permutation: tuple[int, ...]


def einsum(
    equation: str,
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dot_general: Callable[..., jax.Array] = lax.dot_general,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """`jnp.einsum(equation, lhs, rhs)` as one `dot_general(lhs, rhs)` and at most one transpose.

    Args:
        equation: two operands and an explicit result, such as "bthd,hdf->btf"; "..." stands for leading axes.
        lhs: the activation.
        rhs: the weight.
        dot_general: the product, with the signature of `jax.lax.dot_general`.
        precision: passed to the product.
        preferred_element_type: passed to the product if given.
        out_sharding: sharding of the result in the equation's order, passed to the product in its own.

    Raises:
        ValueError: the equation is not of this form: it repeats an index within one operand, sums an index of one
            operand alone, or its sizes disagree. The message says which index.

    Example:
        >>> einsum("btd,dhk->bthk", jnp.ones((2, 3, 8)), jnp.ones((8, 4, 2))).shape
        (2, 3, 4, 2)
    """
    lowering = _lower(equation, lhs.shape, rhs.shape)
    options: dict[str, Any] = {"precision": precision}
    if preferred_element_type is not None:
        options["preferred_element_type"] = preferred_element_type
    if out_sharding is not None:
        options["out_sharding"] = _unpermute(out_sharding, lowering.permutation)
    out = dot_general(lhs, rhs, lowering.dimension_numbers, **options)
    if lowering.permutation == tuple(range(out.ndim)):
        return out
    return jnp.transpose(out, lowering.permutation)


class DotEinsum(nnx.Module):
    """`einsum` with its product bound, for `nnx.Einsum(einsum_op=...)` and whatever else calls an einsum.

    Args:
        dot_general: the product: `fp4jax.DotGeneral(recipe)`, or a module with a noise stream.
    """

    def __init__(self, dot_general: Callable[..., jax.Array]):
        self.dot_general = dot_general

    def __call__(self, equation: str, lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        """`einsum(equation, lhs, rhs)`; options as there."""
        return einsum(equation, lhs, rhs, dot_general=self.dot_general, **options)


class Einsum(nnx.Einsum):
    """`flax.nnx.Einsum` with a recipe: the input is the activation (lhs), the kernel the weight (rhs).

    With `recipe=None` it is `flax.nnx.Einsum`, bit for bit. Dtypes, noise and the remaining arguments are those of
    `fp4jax.nn.Linear`.

    Args:
        einsum_str: see `einsum`.
        kernel_shape: shape of the kernel.
        bias_shape: shape of the bias, None for none.

    Example:
        >>> heads = fp4jax.nn.Einsum("btd,dhk->bthk", (64, 4, 16), recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0))
        >>> heads(jnp.ones((2, 8, 64))).shape
        (2, 8, 4, 16)
    """

    def __init__(
        self,
        einsum_str: str,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None = None,
        *,
        recipe: Recipe | None = None,
        backend: str | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: Any = None,
        kernel_init: nnx.Initializer = default_kernel_init,
        bias_init: nnx.Initializer = default_bias_init,
        preferred_element_type: DTypeLike | None = None,
        rngs: nnx.Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ):
        super().__init__(
            einsum_str,
            kernel_shape,
            bias_shape,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            einsum_op=jnp.einsum if recipe is None else DotEinsum(product(recipe, backend, rngs)),
            promote_dtype=promotion(recipe, backend, preferred_element_type),
        )
        self.recipe = recipe


def _lower(equation: str, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> _Lowering:
    """Classify every index as batch, contracted, or free, and find the transpose that restores the asked order."""
    lhs, rhs, out = parse_equation(equation, len(lhs_shape), len(rhs_shape))
    for name, indices in (("the first operand", lhs), ("the second operand", rhs), ("the result", out)):
        repeated = [index for index, count in Counter(indices).items() if count > 1]
        if repeated:
            raise ValueError(
                f"einsum {equation!r}: index {repeated[0]!r} appears twice in {name}; take the diagonal first"
            )
    for name, indices, other in (("first", lhs, rhs), ("second", rhs, lhs)):
        alone = [index for index in indices if index not in other and index not in out]
        if alone:
            raise ValueError(
                f"einsum {equation!r}: index {alone[0]!r} is summed but appears only in the {name} operand; sum that "
                "operand over it first"
            )
    unknown = [index for index in out if index not in lhs and index not in rhs]
    if unknown:
        raise ValueError(f"einsum {equation!r}: index {unknown[0]!r} of the result appears in neither operand")
    for index in lhs:
        if index in rhs and lhs_shape[lhs.index(index)] != rhs_shape[rhs.index(index)]:
            raise ValueError(
                f"einsum {equation!r}: index {index!r} has size {lhs_shape[lhs.index(index)]} in the first operand, of "
                f"shape {lhs_shape}, and {rhs_shape[rhs.index(index)]} in the second, of shape {rhs_shape}"
            )

    shared = [index for index in lhs if index in rhs]
    batch = [index for index in shared if index in out]
    contracted = [index for index in shared if index not in out]
    result = [*batch, *(i for i in lhs if i not in shared), *(i for i in rhs if i not in shared)]
    numbers = (
        (tuple(map(lhs.index, contracted)), tuple(map(rhs.index, contracted))),
        (tuple(map(lhs.index, batch)), tuple(map(rhs.index, batch))),
    )
    return _Lowering(numbers, tuple(map(result.index, out)))


def parse_equation(equation: str, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
    """Split "a,b->c" into its three index strings, with "..." written out in letters the equation does not use."""
    operands, arrow, out = equation.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        raise ValueError(f"einsum {equation!r}: write two operands and the result, as in 'btd,df->btf'")
    lhs, rhs = operands.split(",")
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = {}
    for name, indices, ndim in (("first", lhs, lhs_ndim), ("second", rhs, rhs_ndim)):
        letters = indices.replace("...", "", 1)
        if not all(letter in string.ascii_letters for letter in letters):
            raise ValueError(f"einsum {equation!r}: indices are letters and one '...', not {indices!r}")
        hidden[name] = ndim - len(letters) if "..." in indices else 0
        if hidden[name] < 0 or ("..." not in indices and ndim != len(letters)):
            raise ValueError(
                f"einsum {equation!r}: the {name} operand has {ndim} axes, its indices {indices!r} name {len(letters)}"
            )
    widest = max(hidden.values())
    if "..." in lhs and "..." in rhs and hidden["first"] != hidden["second"]:
        raise ValueError(
            f"einsum {equation!r}: '...' stands for {hidden['first']} axes of the first operand and {hidden['second']} "
            "of the second; give both the same"
        )
    if widest and "..." not in out:
        raise ValueError(f"einsum {equation!r}: the result must contain '...' too; axes behind it are not summed")
    dots = "".join(spare[:widest])
    return lhs.replace("...", dots), rhs.replace("...", dots), out.replace("...", dots)


def _unpermute(sharding: NamedSharding | PartitionSpec, permutation: tuple[int, ...]) -> NamedSharding | PartitionSpec:
    """Move the sharding of the transposed result to the axes as `dot_general` returns them."""
    spec = sharding.spec if isinstance(sharding, NamedSharding) else sharding
    axes = [*spec, *(None,) * (len(permutation) - len(spec))]
    moved = PartitionSpec(*(axes[permutation.index(axis)] for axis in range(len(permutation))))
    return NamedSharding(sharding.mesh, moved) if isinstance(sharding, NamedSharding) else moved
