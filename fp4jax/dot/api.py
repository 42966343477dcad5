"""``dot_general`` under a recipe, as a function and as a callable to inject into layers."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from fp4jax.blocks import explicit_sharding
from fp4jax.dot.call import Call
from fp4jax.dot.geometry import Geometry
from fp4jax.dot.prepared import Prepared
from fp4jax.dot.registry import BACKENDS, check_name, choose
from fp4jax.exact import pinned
from fp4jax.recipe import Recipe
from fp4jax.scaling import normalize_axis
from fp4jax.typing import Array, Axis, DimensionNumbers, Key

_DTYPES = ("float32", "bfloat16", "float16")


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _dot(lhs: Array, rhs: Array, lhs_quantized: Any, rhs_quantized: Any, key: Key | None, call: Call) -> Array:
    return _dot_fwd(lhs, rhs, lhs_quantized, rhs_quantized, key, call)[0]


def _dot_fwd(lhs, rhs, lhs_quantized, rhs_quantized, key, call):
    backend, batch = BACKENDS[call.backend], len(call.geometry.lhs_batch)
    if lhs_quantized is None:
        lhs_quantized = backend.quantize_lhs(pinned(lhs), call.recipe, call.lhs_axis, key, batch)
    if rhs_quantized is None:
        rhs_quantized = backend.quantize_rhs(pinned(rhs), call.recipe, call.rhs_axis, key, batch)
    return backend.fprop(lhs, rhs, lhs_quantized, rhs_quantized, key, call)


def _dot_bwd(call, residuals, g):
    backend, g = BACKENDS[call.backend], pinned(g)
    return backend.dgrad(residuals, g, call), backend.wgrad(residuals, g, call), None, None, None


_dot.defvjp(_dot_fwd, _dot_bwd)


def dot_general(
    lhs: Array | Prepared,
    rhs: Array | Prepared,
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
        lhs: the activation; float32, bfloat16 or float16. One that several products share can be quantized once, by
            ``prepare_lhs``.
        rhs: the weight; may be of another dtype (keep it in that of the master parameters: it is quantized from there).
            One that several calls share can be quantized once, by ``prepare_rhs``.
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
        TypeError: for another dtype of an operand, or sizes that do not match; for a ``recipe`` that is none.
        ValueError: for bad ``dimension_numbers``, a missing key, an unknown or unable backend, or an operand prepared
            for another recipe, axis, side or backend.

    Example:
        >>> import fp4jax, jax.numpy as jnp
        >>> x, w = jnp.array([[1.0, 6.0]]), jnp.array([[0.5], [3.0]])
        >>> fp4jax.dot_general(x, w, (((1,), (0,)), ((), ())), recipe=fp4jax.recipes.fp4_vector())
        Array([[18.5]], dtype=float32)
    """
    _check_recipe(recipe)
    prepared = {"lhs": lhs, "rhs": rhs}
    prepared = {side: operand for side, operand in prepared.items() if isinstance(operand, Prepared)}
    for side, operand in prepared.items():
        if operand.array is None:
            raise ValueError(f"{side} was prepared and is without its array; put it behind one by with_array")
    arrays: list[Any] = [operand.array if isinstance(operand, Prepared) else operand for operand in (lhs, rhs)]
    lhs, rhs = _checked("lhs", arrays[0]), _checked("rhs", arrays[1])
    out_dtype = jnp.dtype(preferred_element_type or recipe.output_dtype or lhs.dtype)
    if not recipe.quantizes:
        check_name(backend)
        if prepared:
            raise ValueError(f"{next(iter(prepared))} was prepared, but recipe {recipe.name!r} quantizes nothing")
        # A wider result is that of the sum, not of its rounding.
        preferred = preferred_element_type or (recipe.output_dtype and out_dtype)
        out = lax.dot_general(
            lhs, rhs.astype(lhs.dtype), dimension_numbers, precision, preferred, out_sharding=out_sharding
        )
        return out.astype(out_dtype)
    _need_key(recipe, key)
    lhs, rhs = _align(lhs, rhs)
    geometry = Geometry.make(lhs.ndim, rhs.ndim, dimension_numbers)
    geometry.check_shapes(lhs.shape, rhs.shape)
    call = Call(
        recipe=recipe,
        geometry=geometry,
        lhs_dtype=lhs.dtype,
        rhs_dtype=rhs.dtype,
        out_dtype=out_dtype,
        backend="",
        precision=precision,
        out_sharding=out_sharding,
        lhs_sharding=explicit_sharding(lhs),
        rhs_sharding=explicit_sharding(rhs),
    )
    quantized = {}
    for side, operand in prepared.items():
        operand.check(side, call)
        if backend not in (None, operand.backend):
            raise ValueError(
                f"{side} was prepared for backend {operand.backend!r}, and the product asks for {backend!r}"
            )
        backend = operand.backend
        quantized[side] = operand.quantized
        if side == "rhs" and call.rhs_sharding is not None:
            quantized[side] = BACKENDS[backend].reshard_rhs(operand.quantized, call.rhs_axis, call.rhs_sharding)
    call = dataclasses.replace(call, backend=choose(backend, call))
    return _dot(lhs, rhs, quantized.get("lhs"), quantized.get("rhs"), key, call)


def _checked(name: str, operand: Array) -> Array:
    operand = jnp.asarray(operand)
    if operand.dtype not in _DTYPES:
        raise TypeError(f"{name} has dtype {operand.dtype}; dot_general takes {', '.join(_DTYPES)} (cast it first)")
    return operand


def _check_recipe(recipe: object) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe={recipe!r} must be a Recipe, such as fp4jax.recipes.fp4()")


def _need_key(recipe: Recipe, key: Key | None, side: str | None = None) -> None:
    spec = {"lhs": recipe.activation_spec, "rhs": recipe.weight_spec}.get(side or "")
    draws = recipe.needs_key if side is None else spec is not None and spec.needs_key
    if draws and key is None:
        raise ValueError(
            f"recipe {recipe.name!r} rounds stochastically and key=None; pass key=jax.random.key(...) "
            "(fp4jax.nn layers draw theirs from rngs)"
        )


def _prepare(
    side: str, array: Array, axis: Axis, recipe: Recipe, key: Key | None, backend: str | None
) -> Array | Prepared:
    _check_recipe(recipe)
    array = _checked(side, array)
    if not recipe.quantizes:
        check_name(backend)
        return array
    _need_key(recipe, key, side)
    axes = normalize_axis(axis, array.ndim)
    contract, other = tuple(a + array.ndim for a in axes), tuple(range(len(axes)))
    # The backend is chosen for a plain product: a matrix on the other side, contracted in this order and split alike.
    if side == "lhs":
        geometry = Geometry.make(array.ndim, len(axes) + 1, ((contract, other), ((), ())))
    else:
        other = tuple(a + 1 for a in other)
        geometry = Geometry.make(len(axes) + 1, array.ndim, ((other, contract), ((), ())))
    shardings = _plain_shardings(side, array, contract)
    call = Call(recipe, geometry, array.dtype, array.dtype, array.dtype, "", **shardings)
    chosen = choose(backend, call)
    quantize = BACKENDS[chosen].quantize_lhs if side == "lhs" else BACKENDS[chosen].quantize_rhs
    quantized = lax.stop_gradient(quantize(lax.stop_gradient(pinned(array)), recipe, axes, key))
    if side == "rhs":
        quantized = BACKENDS[chosen].stored_rhs(quantized)
    return Prepared(array, quantized, side, recipe, axes, chosen)


def _plain_shardings(side: str, array: Array, contract: tuple[int, ...]) -> dict[str, NamedSharding]:
    sharding = explicit_sharding(array)
    if sharding is None:
        return {}
    entries = [*sharding.spec, *(None,) * (array.ndim - len(sharding.spec))]
    shared = [entries[a] for a in contract]
    other, spec = ("rhs", (*shared, None)) if side == "lhs" else ("lhs", (None, *shared))
    return {
        f"{side}_sharding": sharding,
        f"{other}_sharding": NamedSharding(sharding.mesh, PartitionSpec(*spec)),
    }


def prepare_lhs(
    lhs: Array, axis: Axis = -1, *, recipe: Recipe, key: Key | None = None, backend: str | None = None
) -> Array | Prepared:
    """Quantizes an activation once, for the linears that share it (query, key and value; gate and up).

    Args:
        lhs: the activation, as ``dot_general`` takes it.
        axis: the contraction axis, or a tuple of them.
        recipe: that of all the products. Products under another recipe need an operand of their own.
        key: PRNG key, compulsory if this operand is rounded stochastically. The products share its noise on this
            operand, and draw that of their other operands from the keys they are given.
        backend: name of a backend; None takes the best that supports a product of ``lhs`` with a matrix.

    Returns:
        What ``dot_general`` takes for ``lhs``; the array itself if the recipe quantizes nothing.

    Raises:
        TypeError, ValueError: as ``dot_general`` does.

    Example:
        >>> import fp4jax, jax, jax.numpy as jnp
        >>> dot = fp4jax.DotGeneral(fp4jax.recipes.fp4())
        >>> x, wq, wk = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones((8, 2))
        >>> shared = dot.prepare_lhs(x)
        >>> [dot(shared, w, (((1,), (0,)), ((), ()))).shape for w in (wq, wk)]
        [(4, 8), (4, 2)]
    """
    return _prepare("lhs", lhs, axis, recipe, key, backend)


def prepare_rhs(
    rhs: Array, axis: Axis = 0, *, recipe: Recipe, key: Key | None = None, backend: str | None = None
) -> Array | Prepared:
    """Quantizes a weight once, for the calls that share it (the microbatches of a step).

    Arguments, result and errors are those of ``prepare_lhs``. ``Prepared.with_array`` puts the result behind the array
    that a function is differentiated by. The estimator's factor is applied to the gradient of each call, as without
    preparation.

    Example:
        >>> import fp4jax, jax, jax.numpy as jnp
        >>> dot, w, batches = fp4jax.DotGeneral(fp4jax.recipes.fp4()), jnp.ones((8, 2)), jnp.ones((3, 4, 8))
        >>> prepared = dot.prepare_rhs(w)
        >>> loss = lambda w, x: dot(x, prepared.with_array(w), (((1,), (0,)), ((), ()))).sum()
        >>> add = lambda total, x: (total + jax.grad(loss)(w, x), None)
        >>> jax.lax.scan(add, jnp.zeros_like(w), batches)[0].shape
        (8, 2)
    """
    return _prepare("rhs", rhs, axis, recipe, key, backend)


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
        _check_recipe(self.recipe)
        check_name(self.backend)

    def __call__(
        self,
        lhs: Array | Prepared,
        rhs: Array | Prepared,
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

    def prepare_lhs(self, lhs: Array, axis: Axis = -1, *, key: Key | None = None) -> Array | Prepared:
        """``lhs`` quantized once, for several products; see ``fp4jax.dot.prepare_lhs``."""
        return prepare_lhs(lhs, axis, recipe=self.recipe, key=key, backend=self.backend)

    def prepare_rhs(self, rhs: Array, axis: Axis = 0, *, key: Key | None = None) -> Array | Prepared:
        """``rhs`` quantized once, for several products; see ``fp4jax.dot.prepare_rhs``."""
        return prepare_rhs(rhs, axis, recipe=self.recipe, key=key, backend=self.backend)


def share_lhs(lhs: Array, products: Sequence[Any], axis: Axis = -1) -> list[Array | Prepared]:
    """The operand of each product of one activation: quantized once for those that quantize it alike.

    Args:
        lhs: the activation.
        products: what multiplies it: ``DotGeneral`` objects share by recipe and backend, and so do modules that have
            one as their attribute ``dot``; whatever else there is, such as ``jax.lax.dot_general``, and whatever rounds
            stochastically, with noise of its own, is given the array.
        axis: the contraction axis, or a tuple of them.

    Returns:
        An operand for each product, in order.

    Example:
        >>> import fp4jax, jax, jax.numpy as jnp
        >>> dot = fp4jax.DotGeneral(fp4jax.recipes.fp4())
        >>> query, key, gate = fp4jax.dot.share_lhs(jnp.ones((4, 8)), [dot, dot, jax.lax.dot_general])
        >>> type(query).__name__, query is key, type(gate).__name__
        ('Prepared', True, 'ArrayImpl')
    """
    dots = [getattr(product, "dot", product) for product in products]
    counts = Counter(dot for dot in dots if isinstance(dot, DotGeneral) and not dot.recipe.needs_key)
    shared = {dot: dot.prepare_lhs(lhs, axis) for dot, count in counts.items() if count > 1}
    return [shared.get(dot, lhs) if isinstance(dot, DotGeneral) else lhs for dot in dots]
