"""What every part of the model is made of: the annotated linear layer, the norm, the SwiGLU."""

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.blocks import explicit_sharding
from fp4jax.models.configs import LlamaConfig
from fp4jax.models.sharding import gathered, merge_rows, product_sharding, split_axes
from fp4jax.nn import Linear
from fp4jax.recipe import Recipe


def axis_names(*names: str) -> dict[str, Any]:
    """Variable metadata that names a parameter's axes, for `nnx.get_partition_spec` under logical axis rules.

    Names stay names: the parameter is not resharded when it is created, so that a model can be built with no mesh.
    """
    return {"out_sharding": names, "eager_sharding": False}


class MeshLinear(Linear):
    """`fp4jax.nn.Linear` for [rows, in_features], which follows an Explicit mesh."""

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """[rows, in_features] -> [rows, out_features], rows split as they were."""
        if explicit_sharding(inputs) is None:
            return super().__call__(inputs, out_sharding)
        # In the dtype of the product, before it is gathered: without a recipe that is half the bytes.
        inputs, kernel = self.promote_dtype((inputs, self.kernel[...]), dtype=self.dtype)
        kernel = gathered(kernel, inputs)
        return self.dot_general(inputs, kernel, (((1,), (0,)), ((), ())), out_sharding=product_sharding(inputs, kernel))


def linear(
    path: str,
    in_features: int,
    out_features: int,
    axes: tuple[str, str],
    *,
    config: LlamaConfig,
    recipes: Mapping[str, Recipe | None],
    backend: str | None,
    rngs: nnx.Rngs,
    std: float | None = None,
) -> MeshLinear:
    """The linear layer at `path`: its recipe, its initial weights (normal, `config.weight_std` or std), its axes."""
    recipe = recipes[path]
    return MeshLinear(
        in_features,
        out_features,
        recipe=recipe,
        backend=None if recipe is None else backend,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=nnx.initializers.normal(config.weight_std if std is None else std),
        kernel_metadata=axis_names(*axes),
        rngs=streams(rngs, path, recipe, params=rngs.params()),
    )


def streams(rngs: nnx.Rngs, path: str, recipe: Recipe | None, **others: jax.Array) -> nnx.Rngs:
    """The streams of the layer at `path`: others, and noise if its recipe draws any.

    The noise key is a function of the "noise" seed and the path alone. Nothing is drawn from a stream, so that the
    noise of one layer does not move when a rule changes another's recipe.
    """
    if recipe is not None and recipe.needs_key:
        others["noise"] = jax.random.fold_in(rngs.noise.key[...], zlib.crc32(path.encode()))
    return nnx.Rngs(**others)


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
        recipes: recipe of each layer path.
        backend: backend of the recipes, None to choose.
        rngs: draws the parameters.
    """

    def __init__(
        self, config: LlamaConfig, recipes: Mapping[str, Recipe | None], *, backend: str | None, rngs: nnx.Rngs
    ):
        d, f = config.embed_dim, config.mlp_dim
        options = {"config": config, "recipes": recipes, "backend": backend, "rngs": rngs}
        self.gate = linear("layers.mlp.gate", d, f, ("embed", "mlp"), **options)
        self.up = linear("layers.mlp.up", d, f, ("embed", "mlp"), **options)
        self.down = linear("layers.mlp.down", f, d, ("mlp", "embed"), std=config.residual_std, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., d] -> [..., d]."""
        tokens = rows(x)
        return split_axes(self.down(_gated_silu(self.gate(tokens), self.up(tokens))), x.shape[:-1], x.shape[-1:])


# The float32 values inside these two are twice the size of what goes in. Kept for the backward pass they would cost
# more memory traffic than computing them again, which XLA fuses into their consumers.
@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def _rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * (inverse * scale.astype(jnp.float32))).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _gated_silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
