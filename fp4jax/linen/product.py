"""The product of a Linen layer, with noise from `make_rng`, and a dtype promotion that leaves the kernel alone."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike

import fp4jax.dot
from fp4jax.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class KeepKernelDtype:
    """A `promote_dtype` for stock Linen layers that never touches the kernel; see `fp4jax.nn.KeepKernelDtype`.

        linen.Dense(64, dtype=jnp.bfloat16, dot_general_cls=fp4jax.linen.dot_general_cls(recipe),
                    promote_dtype=fp4jax.linen.KeepKernelDtype(recipe.output_dtype))

    Args:
        output_dtype: dtype the product returns; None means that of the inputs.
    """

    output_dtype: DTypeLike | None = None

    def __call__(self, inputs: Any, kernel: Any, *bias: Any, dtype: DTypeLike | None = None, inexact: bool = True):
        """Cast the inputs to `dtype`, the bias to that of the result, and leave the kernel as it is stored."""
        (inputs,) = promote_dtype(inputs, dtype=dtype, inexact=inexact)
        assert inputs is not None
        output = inputs.dtype if self.output_dtype is None else self.output_dtype
        return [inputs, jnp.asarray(kernel), *(None if b is None else jnp.asarray(b, output) for b in bias)]


class DotGeneral(linen.Module):
    """`jax.lax.dot_general` under a recipe, as a Linen module without variables, for `dot_general_cls`.

    A stochastic recipe draws its key by `make_rng(noise)`: it differs by layer and call, and by step as the key given
    to `apply` does. Where `linen.scan` or `linen.vmap` run the layer, `split_rngs={"noise": True}` makes it differ by
    block, and remat draws the same again.

    Attributes:
        recipe: what to quantize.
        backend: name of a backend, None to choose.
        noise: the random stream of a stochastic recipe.
    """

    recipe: Recipe
    backend: str | None = None
    noise: str = "noise"

    @linen.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> jax.Array:
        """The product.

        Raises:
            ValueError: the recipe is stochastic and there is no stream `noise`.
        """
        key = None
        if self.recipe.needs_key:
            if not self.has_rng(self.noise):
                raise ValueError(
                    f"layer {'.'.join(self.path[:-1])!r} is to round stochastically (recipe {self.recipe.name!r}) and "
                    f"finds no random stream {self.noise!r}: pass rngs={{{self.noise!r}: key}} to apply and, where "
                    f"linen.scan or linen.vmap run the layer, split_rngs={{{self.noise!r}: True}} to those; or name a "
                    "stream that is split there already, as in noise='dropout'"
                )
            key = self.make_rng(self.noise)
        return fp4jax.dot.dot_general(
            lhs, rhs, dimension_numbers, precision, preferred_element_type,
            recipe=self.recipe, key=key, backend=self.backend,
        )  # fmt: skip


@functools.cache
def dot_general_cls(recipe: Recipe, backend: str | None = None, noise: str = "noise") -> Any:
    """The argument `dot_general_cls` of `linen.Dense` and `DenseGeneral`: makes a `DotGeneral` where it is called.

    Equal arguments give the same object, so that what `linen.jit` compiled is found again.

    Example:
        >>> recipe = fp4jax.recipes.fp4()
        >>> dense = linen.Dense(8, dot_general_cls=dot_general_cls(recipe), promote_dtype=KeepKernelDtype())
        >>> variables = dense.init(jax.random.key(0), jnp.ones((2, 16)))
        >>> dense.apply(variables, jnp.ones((2, 16))).shape, list(variables["params"])
        ((2, 8), ['kernel', 'bias'])
    """
    fp4jax.dot.DotGeneral(recipe, backend)  # checks both
    return functools.partial(DotGeneral, recipe, backend, noise)
