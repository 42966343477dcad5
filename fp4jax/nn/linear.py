"""`Linear`: `flax.nnx.Linear` with a recipe."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from flax.nnx.nn.linear import default_bias_init, default_kernel_init
from jax import lax
from jax.typing import DTypeLike

from fp4jax.nn.product import KeepKernelDtype, product
from fp4jax.recipe import Recipe


class Linear(nnx.Linear):
    """y = x W (+ b) over the last axis of x, with x and W quantized as `recipe` says.

    x[..., in_features] is the product's lhs, W[in_features, out_features] its rhs. With `recipe=None` the layer is
    `flax.nnx.Linear`, bit for bit; with a recipe the kernel reaches the product in `param_dtype`, never rounded to
    `dtype` first, and the result has `recipe.output_dtype`, or `dtype` where the recipe leaves it open.

    Args:
        in_features: size of the contracted axis.
        out_features: size of the new last axis.
        recipe: how the three products round, or None for plain high precision.
        backend: name of the backend that computes the recipe, None to choose; meaningless without a recipe.
        use_bias: add a bias (LLaMA has none, hence the default).
        dtype: dtype of the activation; None keeps the input's (without a recipe: Flax's promotion with the kernel's).
        param_dtype: dtype of kernel and bias.
        precision: passed to the product.
        kernel_init: initializer of the kernel.
        bias_init: initializer of the bias.
        preferred_element_type: dtype of the result, overriding the above.
        rngs: draws the kernel (and bias) from "params" and, if `recipe.needs_key`, one key from "noise". Give the two
            separate seeds where the initial weights must not depend on the recipe.
        kernel_metadata: metadata of the kernel variable, such as `{"out_sharding": ("embed", "mlp")}`.
        bias_metadata: metadata of the bias variable.

    Raises:
        TypeError: `recipe` is neither a `Recipe` nor None.
        ValueError: the backend is unknown, or named without a recipe.

    Example:
        >>> layer = fp4jax.nn.Linear(64, 128, recipe=fp4jax.recipes.fp4(), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((4, 64))).dtype.name, layer.kernel[...].dtype.name
        ('bfloat16', 'float32')
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | None = None,
        backend: str | None = None,
        use_bias: bool = False,
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
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            preferred_element_type=preferred_element_type,
            rngs=rngs,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
            dot_general=lax.dot_general if recipe is None else product(recipe, backend, rngs),
            promote_dtype=promotion(recipe, backend, preferred_element_type),
        )
        self.recipe = recipe


def promotion(recipe: Recipe | None, backend: str | None, preferred_element_type: DTypeLike | None):
    """Flax's own dtype promotion without a recipe; with one, the kernel is left alone."""
    if recipe is not None:
        return KeepKernelDtype(recipe.output_dtype if preferred_element_type is None else preferred_element_type)
    if backend is not None:
        raise ValueError(f"backend={backend!r} needs a recipe: without one the product is jax.lax.dot_general")
    return promote_dtype
