"""Putting taps into a Flax NNX model, and taking the statistics out."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.dot import DotGeneral
from fp4jax.dot.geometry import Geometry
from fp4jax.nn import KeyedDotGeneral
from fp4jax.recipe import Recipe
from fp4jax.telemetry.probe import SHAPE, Observed, forward_statistics, observe
from fp4jax.typing import Array, DimensionNumbers, Key


class Probe(nnx.Variable):
    """Dummy input of a tap, float32 zeros; its gradient holds the statistics of the layer (``telemetry.collect``)."""


class Forward(nnx.Intermediate):
    """What a tap records under ``telemetry.capture``: sums of the statistics of fprop's operands."""


class Tap(nnx.Module):
    """A ``DotGeneral`` that is observed. Its results are those of ``dot``, bit for bit.

    Args:
        dot: the product.
        stacked: shape of the leading axes by which the layer is stacked, such as (L,) under ``nnx.scan``.
    """

    def __init__(self, dot: DotGeneral, stacked: tuple[int, ...] = ()):
        self.dot = dot
        self.probe = Probe(jnp.zeros(stacked + SHAPE, jnp.float32))

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        *,
        key: Key | None = None,
    ) -> Array:
        """The product, as ``dot`` has it."""
        y = self.dot(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding, key=key)
        return _observed(self, y, lhs, rhs, dimension_numbers, self.dot.recipe, key)


class KeyedTap(KeyedDotGeneral):
    """A ``KeyedDotGeneral`` that is observed: same stream, same draws.

    Args:
        keyed: the product.
    """

    def __init__(self, keyed: KeyedDotGeneral):
        self.dot = keyed.dot
        self.stream = keyed.stream
        self.deterministic = keyed.deterministic
        self.probe = Probe(jnp.zeros(keyed.stream.count.shape + SHAPE, jnp.float32))

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        """The product, with the next key of the stream."""
        key = jax.random.fold_in(self.stream.key[...], self.stream.count[...])  # what the call below draws
        y = super().__call__(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
        return _observed(self, y, lhs, rhs, dimension_numbers, self.dot.recipe, key)


def _observed(
    tap: Tap | KeyedTap,
    y: Array,
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    recipe: Recipe,
    key: Key | None,
) -> Array:
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    if hasattr(tap, "__captures__"):  # inside telemetry.capture
        static = Observed(recipe, Geometry.make(lhs.ndim, rhs.ndim, dimension_numbers), lhs.dtype)
        sums = forward_statistics(jax.lax.stop_gradient(lhs), jax.lax.stop_gradient(rhs), key, static)
        tap.sow(Forward, "forward", sums, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros(SHAPE, jnp.float32))
    return observe(y, tap.probe[...], lhs, rhs, dimension_numbers, recipe, key)


def instrument[M: nnx.Module](model: M, *, stacked: Callable[[str], tuple[int, ...]] | None = None) -> M:
    """A twin of ``model`` that can be measured: every quantizing product in it is tapped. ``model`` stays as it is.

    The twin has the same parameters (the same arrays, under the same paths), the same noise streams and the same
    results, bit for bit; beside them it has a ``telemetry.Probe`` for each product. Differentiate with respect to the
    probes, and ``telemetry.collect`` what comes out.

    A product is what stands in an attribute ``dot_general`` of a module and is an ``fp4jax.DotGeneral`` or an
    ``fp4jax.nn.KeyedDotGeneral``: so in ``nnx.Linear``, ``LinearGeneral``, ``MultiHeadAttention``, the layers of
    ``fp4jax.nn``, ``fp4jax.models.Llama``. One whose recipe quantizes nothing is left alone.

    Args:
        model: any NNX model; abstract ones (``nnx.eval_shape``) too.
        stacked: for modules of your own whose parameters are stacked (one module stands for L layers, as ``nnx.vmap``
            creates them and ``nnx.scan`` runs them): dotted path -> shape of the stack. Those of Flax and fp4jax tell
            by the rank of their kernel.

    Raises:
        ValueError: nothing to measure, or a module of which it is not clear whether it is stacked.

    Example:
        >>> import fp4jax
        >>> model = fp4jax.nn.Linear(64, 32, recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0))
        >>> twin = instrument(model)
        >>> loss = lambda twin, x: jnp.sum(twin(x) ** 2)
        >>> sums = nnx.grad(loss, argnums=nnx.DiffState(0, Probe))(twin, jnp.ones((8, 64)))
        >>> sums["dot_general"]["probe"].shape == SHAPE
        True
    """
    twin = nnx.merge(*nnx.split(model))
    found = list(products(twin))
    if not found:
        raise ValueError(
            "the model has no product to measure: no module has a dot_general that is an fp4jax.DotGeneral or "
            "fp4jax.nn.KeyedDotGeneral with a recipe that quantizes (pass recipe= to fp4jax.nn.Linear, rules= to Llama)"
        )
    for path, module in found:
        dot = module.dot_general
        if isinstance(dot, Tap | KeyedTap):
            raise ValueError(f"{path or 'the model'} is instrumented already")
        if isinstance(dot, KeyedDotGeneral):
            module.dot_general = KeyedTap(dot)
        else:
            shape = _stack_of(twin, path, module) if stacked is None else stacked(path)
            module.dot_general = nnx.data(Tap(dot, shape))
    return twin


def products(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """(dotted path, module) for every module whose ``dot_general`` follows a recipe that quantizes."""
    for path, module in nnx.iter_modules(model):
        dot = vars(module).get("dot_general")
        recipe = dot.recipe if isinstance(dot, DotGeneral) else getattr(getattr(dot, "dot", None), "recipe", None)
        if isinstance(recipe, Recipe) and recipe.quantizes:
            yield ".".join(map(str, path)), module


def _stack_of(model: nnx.Module, path: str, module: Any) -> tuple[int, ...]:
    """The leading axes that the kernel of a layer has beside its own."""
    owner = module
    if path.endswith("einsum_op"):  # the kernel is that of the nnx.Einsum around it
        owner = dict(_modules(model))[path.removesuffix("einsum_op").rstrip(".")]
    kernel = getattr(owner, "kernel", None)
    if kernel is None:
        return ()
    own = _rank(owner)
    if own is None and kernel.ndim > 2:
        raise ValueError(
            f"{path}: cannot tell whether this {type(owner).__name__} with a kernel of shape {kernel.shape} is "
            "stacked; "
            "pass stacked=lambda path: (L,) with the shape of the stack of each path, () for none"
        )
    return kernel.shape[: kernel.ndim - (2 if own is None else own)]


def _rank(layer: Any) -> int | None:
    """Axes of the kernel of one layer; None if the type does not say."""
    match layer:
        case nnx.Linear():
            return 2
        case nnx.LinearGeneral():
            return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
        case nnx.Einsum():
            return len(layer.kernel_shape)
    return None


def _modules(model: nnx.Module) -> Iterator[tuple[str, nnx.Module]]:
    for path, module in nnx.iter_modules(model):
        yield ".".join(map(str, path)), module


def capture(fn: Callable, model: nnx.Module, *args, **kwargs) -> tuple[Any, nnx.State]:
    """``fn(model, *args, **kwargs)`` and the statistics of fprop's operands: forward only, no gradient is taken.

    Works under ``nnx.jit``, and through ``nnx.scan`` and ``nnx.remat`` inside the model.

    Args:
        fn: the function, such as ``lambda model, x: model(x)``.
        model: from ``telemetry.instrument``.

    Returns:
        The result, and what ``telemetry.collect`` takes.

    Raises:
        ValueError: ``model`` is not instrumented, or a product did not run, or ran where its module is a copy (such
            as blocks that are unstacked by hand): take gradients of the probes instead, which come through everything.

    Example:
        >>> import fp4jax
        >>> twin = instrument(fp4jax.nn.Linear(64, 32, recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0)))
        >>> y, sums = capture(lambda model, x: model(x), twin, jnp.ones((8, 64)))
        >>> y.shape, sums["dot_general"]["forward"].shape == SHAPE
        ((8, 32), True)
    """
    taps = {path for path, module in _modules(model) if isinstance(module, Tap | KeyedTap)}
    if not taps:
        raise ValueError("the model is not instrumented; pass telemetry.instrument(model)")
    out, sums = nnx.capture(fn, Forward)(model, *args, **kwargs)
    recorded = {".".join(map(str, path[:-1])) for path, _ in nnx.to_flat_state(sums)}
    if missing := sorted(taps - recorded):
        raise ValueError(
            f"nothing was recorded for {', '.join(missing)}: they did not run, or ran as copies (blocks unstacked by "
            "hand, as in Llama with scan_layers=False); take gradients of the probes instead (docs/telemetry.md)"
        )
    return out, sums


def count_probes(model: nnx.Module) -> int:
    """How many products an instrumented model measures, each block of a stack for itself."""
    probes = jax.tree.leaves(nnx.state(model, Probe))
    return sum(math.prod(probe.shape[: -len(SHAPE)]) for probe in probes)
