"""The last product: hidden states to float32 logits, with a kernel of its own or the embedding table."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from fp4jax.dot import DotGeneral
from fp4jax.models.configs import LlamaConfig
from fp4jax.models.parts import axis_names, rows
from fp4jax.models.sharding import gathered, product_sharding, split_axes
from fp4jax.nn import LAYERS, LayerKind


class Head(nnx.Module):
    """Float32 logits x W, or x Eᵀ against the embedding table E where `config.tie_embeddings`; in high precision.

    Args:
        config: the model's configuration.
        rngs: draws the kernel, unless tied.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.in_features, self.out_features = config.embed_dim, config.vocab_size
        if config.tie_embeddings:
            self.kernel = nnx.data(None)
        else:
            init = nnx.initializers.normal(config.weight_std)
            shape = (config.embed_dim, config.vocab_size)
            self.kernel = nnx.Param(init(rngs.params(), shape, config.param_dtype), **axis_names("embed", "vocab"))
        self.dot_general = wide_dot_general

    @jax.named_scope("head")
    def __call__(self, x: jax.Array, table: jax.Array) -> jax.Array:
        """x [..., d], table [v, d] (used if tied) -> float32 logits [..., v]."""
        weight, axis = (table, 1) if self.kernel is None else (self.kernel[...], 0)
        tokens = rows(x)
        if self.dot_general is wide_dot_general:
            weight = weight.astype(x.dtype)  # before it is gathered: half the bytes
        weight = gathered(weight, tokens)
        logits = self.dot_general(
            tokens,
            weight,
            (((1,), (axis,)), ((), ())),
            preferred_element_type=jnp.float32,
            out_sharding=product_sharding(tokens, weight, 1 - axis),
        )
        return split_axes(logits, x.shape[:-1], (-1,))


def wide_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    *,
    preferred_element_type: DTypeLike,
    out_sharding: Any = None,
) -> jax.Array:
    """`lax.dot_general` in lhs's dtype with a wider result, whose gradient is multiplied in lhs's dtype as well.

    JAX's own transpose multiplies the wide gradient with the narrow operands, which XLA then widens: twice the bytes,
    and float32 tensor cores (TF32) have half the rate of bfloat16's.
    """
    return _wide_dot(lhs, rhs.astype(lhs.dtype), dimension_numbers, preferred_element_type, out_sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _wide_dot(lhs: jax.Array, rhs: jax.Array, numbers: Any, dtype: DTypeLike, out_sharding: Any) -> jax.Array:
    return lax.dot_general(lhs, rhs, numbers, preferred_element_type=dtype, out_sharding=out_sharding)


def _wide_dot_fwd(lhs, rhs, numbers, dtype, out_sharding):
    return _wide_dot(lhs, rhs, numbers, dtype, out_sharding), (lhs, rhs)


def _wide_dot_bwd(numbers, dtype, out_sharding, residuals, g):
    del dtype
    lhs, rhs = residuals
    g = g.astype(lhs.dtype)
    dot = functools.partial(lax.dot_general, dimension_numbers=numbers, out_sharding=out_sharding)
    (lhs_grad,) = jax.linear_transpose(lambda lhs: dot(lhs, rhs), lhs)(g)
    (rhs_grad,) = jax.linear_transpose(lambda rhs: dot(lhs, rhs), rhs)(g)
    return lhs_grad, rhs_grad


_wide_dot.defvjp(_wide_dot_fwd, _wide_dot_bwd)


def _wide_unless_quantized(dot: DotGeneral | nnx.Module) -> Any:
    return wide_dot_general if isinstance(dot, DotGeneral) and not dot.recipe.quantizes else dot


LAYERS[Head] = LayerKind(
    "dot_general",
    (wide_dot_general,),
    lambda head: (head.in_features, head.out_features),
    wrap=_wide_unless_quantized,
    promotes=False,
    contraction=lambda head: (0,),
)
