"""Putting taps into a Flax NNX model, and taking the statistics out."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.dot import DotGeneral, Prepared
from fp4jax.dot.geometry import Geometry
from fp4jax.nn import KeyedDotGeneral
from fp4jax.nn.einsum import DotEinsum
from fp4jax.nn.layers import find_layers
from fp4jax.nn.product import PreparedDotGeneral, unprepared
from fp4jax.nn.runs import BlockwiseDotGeneral
from fp4jax.recipe import Recipe
from fp4jax.telemetry.probe import SHAPE, Observed, forward_statistics, observe
from fp4jax.typing import Array, DimensionNumbers, Key

type Stacked = Callable[[str], tuple[int, ...]]


class Probe(nnx.Variable):
    """Dummy input of a tap, float32 zeros; its gradient holds the statistics of the layer (``telemetry.collect``)."""


class Forward(nnx.Intermediate):
    """What a tap records under ``telemetry.capture``: sums of the statistics of fprop's operands."""


def new_probe(stack: tuple[int, ...]) -> Probe:
    """A probe of a layer, or of a stack of them."""
    return Probe(jnp.zeros(stack + SHAPE, jnp.float32))


class Tap(nnx.Module):
    """A ``DotGeneral`` that is observed. Its results are those of ``dot``, bit for bit.

    Args:
        dot: the product.
        probe: its dummy input.
    """

    def __init__(self, dot: DotGeneral, probe: Probe):
        self.dot = dot
        self.probe = probe

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
    """A ``KeyedDotGeneral`` that is observed: same stream under the same path, same draws.

    Args:
        keyed: the product.
        probe: its dummy input.
    """

    def __init__(self, keyed: KeyedDotGeneral, probe: Probe):
        super().__init__(keyed.dot, keyed.stream)
        self.deterministic = keyed.deterministic
        self.probe = probe

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
        key = self.stream(advance=False)  # what the call below draws
        y = super().__call__(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding)
        return _observed(self, y, lhs, rhs, dimension_numbers, self.dot.recipe, key)


class BlockwiseTap(BlockwiseDotGeneral):
    """A ``BlockwiseDotGeneral`` whose runs are observed; blocks in high precision are not.

    Args:
        blockwise: the product of a stack whose blocks follow different recipes.
        probe: dummy inputs of all blocks.
    """

    def __init__(self, blockwise: BlockwiseDotGeneral, probe: Probe):
        super().__init__(blockwise.recipes, blockwise.backend, blockwise.stream)
        self.deterministic = blockwise.deterministic
        self.probe = probe

    def of_block(self, block: int) -> Any:
        """The observed product of one block."""
        product = super().of_block(block)
        if product is None or not product_recipes(product)[0].quantizes:
            return product
        return KeyedTap(product, self.probe) if isinstance(product, KeyedDotGeneral) else Tap(product, self.probe)


TAPS = (Tap, KeyedTap, BlockwiseTap)


def _observed(
    tap: Tap | KeyedTap,
    y: Array,
    lhs: Array,
    rhs: Array,
    dimension_numbers: DimensionNumbers,
    recipe: Recipe,
    key: Key | None,
) -> Array:
    lhs, rhs = array_of(lhs), array_of(rhs)
    if hasattr(tap, "__captures__"):  # inside telemetry.capture
        static = Observed(recipe, Geometry.make(lhs.ndim, rhs.ndim, dimension_numbers))
        sums = forward_statistics(jax.lax.stop_gradient(lhs), jax.lax.stop_gradient(rhs), key, static)
        tap.sow(Forward, "forward", sums, reduce_fn=jnp.add, init_fn=lambda: jnp.zeros(SHAPE, jnp.float32))
    return observe(y, tap.probe[...], lhs, rhs, dimension_numbers, recipe, key)


def array_of(operand: Any) -> Array:
    """An operand of a product as an array, also where it was quantized beforehand."""
    return operand.array if isinstance(operand, Prepared) else jnp.asarray(operand)


def instrument[M: nnx.Module](model: M, *, stacked: Stacked | None = None) -> M:
    """A twin of ``model`` that can be measured: every quantizing product in it is tapped. ``model`` stays as it is.

    The twin has the same parameters (the same arrays, under the same paths), the same noise streams and the same
    results, bit for bit; beside them it has a ``telemetry.Probe`` for each product. Differentiate with respect to the
    probes, and ``telemetry.collect`` what comes out.

    A product is what stands in an attribute ``dot_general`` of a module and is an ``fp4jax.DotGeneral`` or one of
    ``fp4jax.nn``'s: so in ``nnx.Linear``, ``LinearGeneral``, ``Einsum``, ``MultiHeadAttention``, the layers of
    ``fp4jax.nn``, ``fp4jax.models.Llama``, and whatever ``quantize_model`` returned. One whose recipe quantizes nothing
    is left alone.

    Args:
        model: any NNX model; abstract ones (``nnx.eval_shape``) too.
        stacked: for modules of your own that stand for L layers, as ``nnx.vmap`` creates and ``nnx.scan`` runs them:
            dotted path -> shape of the stack. Layers in ``fp4jax.nn.LAYERS`` tell by the shape of their kernel.

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

    def tapped(product: Any, stack: tuple[int, ...]) -> nnx.Module:
        match product:
            case BlockwiseDotGeneral():
                return BlockwiseTap(product, new_probe(stack))
            case KeyedDotGeneral():
                return KeyedTap(product, new_probe(stack))
        return Tap(product, new_probe(stack))

    return replace_products(model, tapped, stacked)


def replace_products[M: nnx.Module](
    model: M, replacement: Callable[[Any, tuple[int, ...]], nnx.Module], stacked: Stacked | None = None
) -> M:
    """A copy of ``model``, sharing its arrays, with ``replacement(product, stack)`` for every quantizing product.

    Raises:
        ValueError: as ``instrument`` does.
    """
    twin = nnx.merge(*nnx.split(model))
    found = list(products(twin))
    if not found:
        raise ValueError(
            "the model has no product to measure: no module has a dot_general that is an fp4jax.DotGeneral or "
            "fp4jax.nn.KeyedDotGeneral with a recipe that quantizes (pass recipe= to fp4jax.nn.Linear, rules= to "
            "Llama, or use fp4jax.nn.quantize_model)"
        )
    stacks = _stacks(twin)
    for path, module in found:
        product = unprepared(module.dot_general)
        if not isinstance(product, DotGeneral) and type(product) not in (KeyedDotGeneral, BlockwiseDotGeneral):
            raise ValueError(
                f"{path or 'the model'} is instrumented already: its product is a {type(product).__name__}"
            )
        if stacked is not None:
            stack = stacked(path)
        elif isinstance(product, KeyedDotGeneral):
            stack = product.stream.count.shape
        else:
            stack = stacks[id(module)] if id(module) in stacks else _stack_of(path, module)
        replaced = nnx.data(replacement(product, stack))
        if isinstance(module.dot_general, PreparedDotGeneral):  # whose weight stays where the state of `model` has it
            module.dot_general.product = replaced
        else:
            module.dot_general = replaced
    return twin


def products(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """(dotted path, module) for every module whose ``dot_general`` follows a recipe that quantizes."""
    for path, module in nnx.iter_modules(model):
        if any(recipe.quantizes for recipe in product_recipes(vars(module).get("dot_general"))):
            yield ".".join(map(str, path)), module


def product_recipes(product: Any) -> Sequence[Recipe]:
    """The recipes that a product follows; none if it is not one of ours."""
    if isinstance(product, BlockwiseDotGeneral):
        return [recipe for recipe in product.recipes if recipe is not None]
    dot = product if isinstance(product, DotGeneral) else getattr(product, "dot", None)
    return [dot.recipe] if isinstance(dot, DotGeneral) else []


def _stacks(model: nnx.Module) -> dict[int, tuple[int, ...]]:
    """For each layer of a kind in ``fp4jax.nn.LAYERS`` the id of the module with its ``dot_general``, and its stack."""
    stacks = {}
    for found in find_layers(model):
        if found.kind is not None:
            held = getattr(found.module, found.kind.product)
            stacks[id(held if isinstance(held, DotEinsum) else found.module)] = found.stack
    return stacks


def _stack_of(path: str, module: Any) -> tuple[int, ...]:
    """That of a module of another kind: it has a plain kernel [k, n], or none."""
    kernel = getattr(module, "kernel", None)
    if kernel is not None and kernel.ndim != 2:
        raise ValueError(
            f"{path or 'the model'}: cannot tell whether this {type(module).__name__} with a kernel of shape "
            f"{kernel.shape} is stacked; pass stacked=lambda path: (L,) with the shape of the stack of each path, () "
            "for none"
        )
    return ()


def capture(fn: Callable, model: nnx.Module, *args, **kwargs) -> tuple[Any, nnx.State]:
    """``fn(model, *args, **kwargs)`` and the statistics of fprop's operands: forward only, no gradient is taken.

    Works under ``nnx.jit``, and through ``nnx.scan`` and ``nnx.remat`` inside the model.

    Args:
        fn: the function, such as ``lambda model, x: model(x)``.
        model: from ``telemetry.instrument``.

    Returns:
        The result, and what ``telemetry.collect`` takes.

    Raises:
        ValueError: ``model`` is not instrumented, or a product did not run, or runs where its module is a copy (blocks
            unstacked by hand, or cut into runs of equal recipe): take gradients of the probes instead, which come
            through everything.

    Example:
        >>> import fp4jax
        >>> twin = instrument(fp4jax.nn.Linear(64, 32, recipe=fp4jax.recipes.fp4(), rngs=nnx.Rngs(0)))
        >>> y, sums = capture(lambda model, x: model(x), twin, jnp.ones((8, 64)))
        >>> y.shape, sums["dot_general"]["forward"].shape == SHAPE
        ((8, 32), True)
    """
    taps = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model) if isinstance(module, TAPS)}
    if not taps:
        raise ValueError("the model is not instrumented; pass telemetry.instrument(model)")
    if cut := sorted(path for path, tap in taps.items() if isinstance(tap, BlockwiseTap)):
        raise ValueError(
            f"nothing can be recorded for {', '.join(cut)}, whose blocks follow different recipes and run as copies; "
            "take gradients of the probes instead (docs/telemetry.md)"
        )
    out, sums = nnx.capture(fn, Forward)(model, *args, **kwargs)
    recorded = {".".join(map(str, path[:-1])) for path, _ in nnx.to_flat_state(sums)}
    if missing := sorted(taps.keys() - recorded):
        raise ValueError(
            f"nothing was recorded for {', '.join(missing)}: they did not run, or ran as copies (blocks unstacked by "
            "hand, as in Llama with scan_layers=False); take gradients of the probes instead (docs/telemetry.md)"
        )
    return out, sums
