"""``dot_general`` under a recipe, as a function and as a callable to inject into layers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.blocks import explicit_sharding
from fp4jax.dot.call import Call
from fp4jax.dot.geometry import Geometry
from fp4jax.dot.registry import BACKENDS, check_name, choose
from fp4jax.recipe import Recipe
from fp4jax.typing import Array, DimensionNumbers, Key

_DTYPES = ("float32", "bfloat16", "float16")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dot(lhs: Array, rhs: Array, key: Key | None, call: Call) -> Array:
    return BACKENDS[call.backend].fprop(lhs, rhs, key, call)[0]


def _dot_fwd(lhs, rhs, key, call):
    return BACKENDS[call.backend].fprop(lhs, rhs, key, call)


def _dot_bwd(call, residuals, g):
    backend = BACKENDS[call.backend]
    return backend.dgrad(residuals, g, call), backend.wgrad(residuals, g, call), None


_dot.defvjp(_dot_fwd, _dot_bwd)


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding=None,
    *,
    recipe: Recipe,
    key: Key | None = None,
    backend: str | None = None,
) -> Array:
    """``jax.lax.dot_general`` under a recipe: quantized operands forward and backward.

    Args:
        lhs: the activation; float32, bfloat16 or float16.
        rhs: the weight; may be of another dtype (keep it in that of the master parameters: it is quantized from there).
        dimension_numbers: ``((lhs_contract, rhs_contract), (lhs_batch, rhs_batch))``.
        precision: for products with an operand in float32; grid values need none.
        preferred_element_type: dtype of the result; by default the recipe's, else that of ``lhs``.
        out_sharding: of the result, on an Explicit mesh.
        recipe: what to quantize. One that quantizes nothing is ``lax.dot_general`` on ``rhs`` cast to the dtype of
            ``lhs``.
        key: PRNG key, compulsory if ``recipe.needs_key``. Every quantizer folds in its own number.
        backend: name of a backend; None takes the best that supports the call.

    Returns:
        The product, [batch, lhs free, rhs free]. Gradients have the dtypes of ``lhs`` and ``rhs``.

    Raises:
        TypeError: for another dtype of an operand.
        ValueError: for bad ``dimension_numbers``, a missing key, an unknown or unable backend.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> x, w = jnp.array([[1.0, 6.0]]), jnp.array([[0.5], [3.0]])
        >>> fp4jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=fp4jax.recipes.fp4_vector())
        Array([[18.5]], dtype=float32)
    """
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    for name, operand in (("lhs", lhs), ("rhs", rhs)):
        if operand.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {operand.dtype}; dot_general takes {', '.join(_DTYPES)} (cast it first)")
    out_dtype = jnp.dtype(preferred_element_type or recipe.output_dtype or lhs.dtype)
    if not recipe.quantizes:
        check_name(backend)
        out = lax.dot_general(
            lhs, rhs.astype(lhs.dtype), dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
        )
        return out.astype(out_dtype)
    if recipe.needs_key and key is None:
        raise ValueError(
            f"recipe {recipe.name!r} rounds stochastically and key=None; pass key=jax.random.key(...) "
            "(fp4jax.nn layers draw theirs from rngs)"
        )
    lhs, rhs = _align(lhs, rhs)
    call = Call(
        recipe=recipe,
        geometry=Geometry.make(lhs.ndim, rhs.ndim, dimension_numbers),
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        out_dtype=out_dtype,
        backend="",
        precision=precision,
        out_sharding=out_sharding,
        lhs_sharding=explicit_sharding(lhs),
        rhs_sharding=explicit_sharding(rhs),
    )
    return _dot(lhs, rhs, key, dataclasses.replace(call, backend=choose(backend, call)))


def _align(lhs: Array, rhs: Array) -> tuple[Array, Array]:
    """Inside shard_map, makes both operands vary over the same mesh axes; the transpose sums the gradients of the
    other.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in (lhs, rhs)]
    both = varying[0] | varying[1]
    lhs, rhs = (
        lax.pcast(x, tuple(both - own), to="varying") if both - own else x
        for x, own in zip((lhs, rhs), varying, strict=True)
    )
    return lhs, rhs


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """``dot_general`` with its recipe bound: a hashable callable for layers that take one.

    Args:
        recipe: what to quantize.
        backend: as in ``dot_general``.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> dot = fp4jax.DotGeneral(fp4jax.recipes.fp4())
        >>> layer = nnx.Linear(32, 64, use_bias=False, dot_general=dot, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 32))).shape
        (2, 64)
    """

    recipe: Recipe
    backend: str | None = None

    def __post_init__(self):
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"recipe={self.recipe!r} must be a Recipe, such as fp4jax.recipes.fp4()")
        check_name(self.backend)

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: lax.PrecisionLike = None,
        preferred_element_type: jax.typing.DTypeLike | None = None,
        out_sharding=None,
        *,
        key: Key | None = None,
    ) -> Array:
        """The product, as ``dot_general`` has it."""
        return dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding,
            recipe=self.recipe, key=key, backend=self.backend,
        )  # fmt: skip
