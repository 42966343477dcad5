"""Quantizing some layers and not others, decided by an array: one compiled program measures every layer alone."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.dot import DotGeneral
from fp4jax.nn import KeyedDotGeneral
from fp4jax.nn.runs import BlockwiseDotGeneral
from fp4jax.telemetry.instrument import Stacked, array_of, replace_products
from fp4jax.typing import Array, DimensionNumbers, Key


class On(nnx.Variable):
    """bool: whether a layer follows its recipe; an array for a stack of layers."""


class Switch(nnx.Module):
    """A ``DotGeneral`` that can be turned off; it is then ``jax.lax.dot_general`` in the dtype of the activation.

    Args:
        dot: the product.
        on: the switch.
    """

    def __init__(self, dot: DotGeneral, on: On):
        self.dot = dot
        self.on = on

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        """One of the two products; the other is not computed, unless a vmap runs over the switch."""
        options = dimension_numbers, precision, preferred_element_type, out_sharding
        return _either(self.on[...], self.dot, lhs, rhs, options, None)


class KeyedSwitch(KeyedDotGeneral):
    """The same of a ``KeyedDotGeneral``. Its stream advances whether it is on or off.

    Args:
        keyed: the product.
        on: the switch.
    """

    def __init__(self, keyed: KeyedDotGeneral, on: On):
        super().__init__(keyed.dot, keyed.stream)
        self.deterministic = keyed.deterministic
        self.on = on

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        """One of the two products, with the next key of the stream."""
        key = self.stream(advance=not self.deterministic)
        options = dimension_numbers, precision, preferred_element_type, out_sharding
        return _either(self.on[...], self.dot, lhs, rhs, options, key)


def _either(on: Array, dot: DotGeneral, lhs: Array, rhs: Array, options: tuple, key: Key | None) -> Array:
    numbers, precision, preferred, out_sharding = options
    x, w = array_of(lhs), array_of(rhs)
    dtype = jnp.dtype(preferred or dot.recipe.output_dtype or x.dtype)

    def plain() -> Array:
        out = lax.dot_general(x, w.astype(x.dtype), numbers, precision, preferred, out_sharding=out_sharding)
        return out.astype(dtype)

    return lax.cond(on, lambda: dot(lhs, rhs, numbers, precision, preferred, out_sharding, key=key), plain)


def switchable[M: nnx.Module](model: M, *, stacked: Stacked | None = None) -> M:
    """A twin of ``model`` in which every quantizing product has a ``telemetry.On``: True, and it follows its recipe;
    False, and it is left in high precision.

    The switches are state, so a jitted function takes them as arguments: one program for every choice of layers, where
    rules would need one each. All are on at first.

    Args:
        model: as in ``telemetry.instrument``. Blocks with different recipes in one stack are refused.
        stacked: as there.

    Raises:
        ValueError: as ``telemetry.instrument`` does, and for a stack of different recipes.

    Example:
        >>> import fp4jax
        >>> model = fp4jax.nn.Linear(8, 4, recipe=fp4jax.recipes.fp4_direct(), rngs=nnx.Rngs(0))
        >>> x, twin = jnp.linspace(-1, 1, 16).reshape(2, 8), switchable(model)
        >>> bool((twin(x) == model(x)).all())
        True
        >>> nnx.update(twin, nnx.State({"dot_general": {"on": On(jnp.array(False))}}))
        >>> bool((twin(x) == x @ model.kernel[...]).all())
        True
    """

    def switched(product: Any, stack: tuple[int, ...]) -> nnx.Module:
        if isinstance(product, BlockwiseDotGeneral):
            raise ValueError(
                "the blocks of a stack follow different recipes; give all of them the recipe to be measured, and turn "
                "blocks off by the switches"
            )
        on = On(jnp.ones(stack, bool))
        return KeyedSwitch(product, on) if isinstance(product, KeyedDotGeneral) else Switch(product, on)

    return replace_products(model, switched, stacked)
