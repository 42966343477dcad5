"""Rotary embedding and causal grouped-query attention."""

import functools
import math
from typing import Literal

import jax
import jax.extend as jex
import jax.numpy as jnp
from flax import nnx

from fp4jax.models.configs import LlamaConfig
from fp4jax.models.parts import apply_together, linear, rows
from fp4jax.models.sharding import locally, split_axes


def rope_tables(positions: jax.Array, head_dim: int, base: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin of position · base^(−2i/h) for the h/2 pairs of a head, in float32.

    Computed once per forward pass and shared by all blocks. Source: Su et al., arXiv:2104.09864.

    Args:
        positions: integer positions [..., t].
        head_dim: h, even.
        base: θ.

    Returns:
        Two float32 arrays [..., t, h/2].
    """
    frequencies = base ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


@jax.named_scope("rope")
def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs (x[i], x[i + h/2]) of every head: the half-split convention of Hugging Face's LLaMA.

    Meta's own checkpoints pair (x[2i], x[2i+1]) and must be permuted. Computed in float32, rounded once.

    Args:
        x: [b, t, n, h].
        cos: float32 [t, h/2] or [b, t, h/2].
        sin: as cos.

    Returns:
        An array like x.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attention_implementation(config: LlamaConfig, seq_len: int) -> Literal["xla", "cudnn"]:
    """The implementation `config.attention` names, or the best that takes this dtype and head on this machine."""
    if config.attention is not None:
        return config.attention
    sixteen_bit = jnp.dtype(config.dtype) in (jnp.bfloat16, jnp.float16)
    fits = config.head_dim <= 128 and config.head_dim % 8 == 0 and seq_len % 2 == 0
    cuda = "cuda" in jex.backend.get_backend().platform_version
    return "cudnn" if cuda and sixteen_bit and fits else "xla"


class Attention(nnx.Module):
    """Causal self-attention: softmax(q kᵀ/√h) v with rotated q and k, and an output projection.

    Args:
        config: the model's configuration.
        rngs: draws the parameters.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        d, q, kv = config.embed_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = linear(d, q, ("embed", "heads"), config=config, rngs=rngs)
        self.key = linear(d, kv, ("embed", "kv"), config=config, rngs=rngs)
        self.value = linear(d, kv, ("embed", "kv"), config=config, rngs=rngs)
        self.output = linear(q, d, ("heads", "embed"), std=config.residual_std, config=config, rngs=rngs)
        self.config = config

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x [b, t, d] -> [b, t, d]."""
        config = self.config
        lead, heads = x.shape[:-1], (-1, config.head_dim)
        query, key, value = apply_together(rows(x), self.query, self.key, self.value)
        attend = functools.partial(
            jax.nn.dot_product_attention,
            is_causal=True,
            implementation=attention_implementation(config, x.shape[1]),
        )
        query = apply_rope(split_axes(query, lead, heads), cos, sin)
        key = apply_rope(split_axes(key, lead, heads), cos, sin)
        with jax.named_scope("attention"):
            encoded = locally(attend, query, key, split_axes(value, lead, heads))
        # One axis at a time: each merge follows the mesh by itself.
        merged = rows(encoded.reshape(*lead, math.prod(encoded.shape[len(lead) :])))
        return split_axes(self.output(merged), lead, x.shape[-1:])
