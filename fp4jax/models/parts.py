"""What every part of the model is made of: the annotated linear layer, the norm, the SwiGLU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.blocks import explicit_sharding
from fp4jax.dot import Prepared, share_lhs
from fp4jax.models.configs import LlamaConfig
from fp4jax.models.sharding import entries, gathered, merge_rows, product_sharding, split_axes
from fp4jax.nn import LAYERS, Linear


def axis_names(*names: str) -> dict[str, Any]:
    """Variable metadata that names a parameter's axes, for `nnx.get_partition_spec` under logical axis rules.

    Names stay names: the parameter is not resharded when it is created, so that a model can be built with no mesh.
    """
    return {"out_sharding": names, "eager_sharding": False}


class MeshLinear(Linear):
    """`fp4jax.nn.Linear` for [rows, in_features], also quantized beforehand, which follows an Explicit mesh."""

    def __call__(self, inputs: Any, out_sharding: Any = None) -> jax.Array:
        """[rows, in_features] -> [rows, out_features], rows split as they were.

        Where the rows' mesh axes split the contraction of a weight that is quantized, its product gathers it, after
        that: a byte a value or two, not four.
        """
        x = inputs.array if isinstance(inputs, Prepared) else inputs
        kernel = self.kernel[...]
        if x is inputs:
            if explicit_sharding(x) is None:
                return super().__call__(x, out_sharding)
            inputs, kernel = self.promote_dtype((inputs, kernel), dtype=self.dtype)
        if self.recipe is None or not self.recipe.quantizes:
            kernel = gathered(kernel.astype(inputs.dtype), x)
        out_sharding = product_sharding(x, kernel)
        if out_sharding is not None and out_sharding.spec[-1] != entries(kernel)[-1]:
            kernel = gathered(kernel, x)
        return self.dot_general(inputs, kernel, (((1,), (0,)), ((), ())), out_sharding=out_sharding)


LAYERS[MeshLinear] = LAYERS[nnx.Linear]  # its product takes the kernel as it is, gathered or not


def linear(
    in_features: int,
    out_features: int,
    axes: tuple[str, str],
    *,
    config: LlamaConfig,
    rngs: nnx.Rngs,
    std: float | None = None,
) -> MeshLinear:
    """A linear layer in high precision: its initial weights (normal, `config.weight_std` or std), its axes."""
    return MeshLinear(
        in_features,
        out_features,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nnx.initializers.normal(config.weight_std if std is None else std),
        kernel_metadata=axis_names(*axes),
        rngs=nnx.Rngs(params=rngs.params()),
    )


def apply_together(x: jax.Array, *layers: MeshLinear) -> list[jax.Array]:
    """layer(x) for layers that read the same x [rows, d]: quantized once where they quantize it alike."""
    operands = share_lhs(x, [layer.dot_general for layer in layers])
    return [layer(operand) for layer, operand in zip(layers, operands, strict=True)]


def rows(x: jax.Array) -> jax.Array:
    """[..., d] -> [tokens, d], what linear layers are given.

    The gradient of a kernel then sums over one axis. Over two, XLA's CPU code takes a naive loop, fifty times slower.
    """
    return merge_rows(x)


class RMSNorm(nnx.Module):
    """x/√(mean(x²) + ε) · scale over the last axis, in float32, rounded once to x's dtype (arXiv:1910.07467).

    `flax.nnx.RMSNorm` rounds the scale to the layer's dtype first.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: LlamaConfig):
        self.scale = nnx.Param(jnp.ones(config.embed_dim, config.param_dtype), **axis_names("embed"))
        self.epsilon = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d] -> [..., d]."""
        return _rms_norm(x, gathered(self.scale[...], x), self.epsilon)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) ⊙ up(x)) (Shazeer, arXiv:2002.05202).

    Args:
        config: the model's configuration.
        rngs: draws the parameters.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        d, f = config.embed_dim, config.mlp_dim
        self.gate = linear(d, f, ("embed", "mlp"), config=config, rngs=rngs)
        self.up = linear(d, f, ("embed", "mlp"), config=config, rngs=rngs)
        self.down = linear(f, d, ("mlp", "embed"), std=config.residual_std, config=config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d] -> [..., d]."""
        gate, up = apply_together(rows(x), self.gate, self.up)
        return split_axes(self.down(_gated_silu(gate, up)), x.shape[:-1], x.shape[-1:])


# The float32 values inside these two are twice the size of what goes in. Kept for the backward pass they would cost
# more memory traffic than computing them again, which XLA fuses into their consumers.
@jax.named_scope("rms_norm")
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * (inverse * scale.astype(jnp.float32))).astype(x.dtype)


@jax.named_scope("swiglu")
@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
