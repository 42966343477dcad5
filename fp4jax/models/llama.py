"""LLaMA-2 in Flax NNX, with the recipe of every linear layer chosen by one rule list."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.blocks import explicit_sharding
from fp4jax.models.attention import Attention, rope_tables
from fp4jax.models.configs import LlamaConfig
from fp4jax.models.head import Head
from fp4jax.models.parts import RMSNorm, SwiGLU, axis_names
from fp4jax.models.remat import REMAT_POLICIES
from fp4jax.models.sharding import lookup
from fp4jax.nn import Rules, join_runs, quantize_model, split_runs

LINEAR_PATHS = (
    "layers.attention.query",
    "layers.attention.key",
    "layers.attention.value",
    "layers.attention.output",
    "layers.mlp.gate",
    "layers.mlp.up",
    "layers.mlp.down",
    "head",
)
"""Paths of the products a rule list decides. The blocks are stacked, so that one path names a layer in all of them; one
of them alone is "layers.3.mlp.up"."""


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        config: the model's configuration.
        rngs: draws the parameters.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """x [b, t, d] -> [b, t, d]."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    """LLaMA-2 (arXiv:2307.09288): tokens in, float32 logits out.

    Pre-norm blocks of rotary causal attention and SwiGLU, no biases, RMSNorm. Activations are `config.dtype`,
    parameters `config.param_dtype`; kernels reach their products unrounded. The blocks' parameters are stacked along a
    leading axis of size `num_layers`, whether they run under scan or unrolled.

    Args:
        config: shape and numerics; see `MODELS`.
        rules: which linear layer follows which recipe; see `fp4jax.nn.default_rules`, `keep_blocks` and
            `LINEAR_PATHS`. None leaves all in high precision. `fp4jax.nn.quantize_model` changes them later.
        backend: backend of the recipes, None to choose.
        rngs: "params" draws the weights. "noise" seeds stochastic recipes, if there are any; the weights do not depend
            on it, nor on the rules.

    Example:
        >>> from fp4jax.models import MODELS
        >>> from fp4jax.nn import default_rules
        >>> model = Llama(MODELS["tiny"], rules=default_rules(fp4jax.recipes.fp4()), rngs=nnx.Rngs(0))
        >>> graphdef, params = nnx.split(model, nnx.Param)  # for jax.jit, jax.grad, jax.vmap over seeds
        >>> apply = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
        >>> apply(params, jnp.zeros((2, 16), jnp.int32)).shape
        (2, 16, 256)
    """

    splits_runs = ("layers",)
    """What `fp4jax.nn.quantize_model` may give recipes block by block."""

    def __init__(self, config: LlamaConfig, *, rules: Rules | None = None, backend: str | None = None, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Embed(
            config.vocab_size,
            config.embed_dim,
            # The lookup stays in the table's dtype: so does its gradient, a sum over all places a token stands.
            dtype=config.param_dtype,
            param_dtype=config.param_dtype,
            embedding_init=nnx.initializers.normal(config.weight_std),
            embedding_metadata=axis_names("vocab", "embed"),
            rngs=rngs,
        )
        self.layers = _stack_blocks(config, rngs)
        self.norm = RMSNorm(config)
        self.head = Head(config, rngs=rngs)
        if rules is not None:
            quantize_model(self, rules, rngs=rngs, backend=backend)

    def __call__(self, tokens: jax.Array, *, positions: jax.Array | None = None) -> jax.Array:
        """Logits of the next token at every place.

        Args:
            tokens: integers [b, t]. A token outside the vocabulary makes its sequence NaN.
            positions: integers [t] or [b, t] for the rotary embedding; None counts from 0. Attention is causal in the
                order of the axis, whatever the positions.

        Returns:
            float32 logits [b, t, v].

        Raises:
            ValueError: tokens are not [b, t] with t ≤ max_seq_len.
        """
        config = self.config
        if tokens.ndim != 2 or tokens.shape[1] > config.max_seq_len:
            raise ValueError(
                f"tokens must be [batch, time ≤ max_seq_len={config.max_seq_len}], got shape {tokens.shape}"
            )
        if positions is None:
            positions = jnp.arange(tokens.shape[1])
        cos, sin = rope_tables(positions, config.head_dim, config.rope_base)
        with jax.named_scope("embed"):
            if explicit_sharding(tokens) is None:
                x = self.embed(tokens).astype(config.dtype)
            else:
                x = lookup(self.embed.embedding[...], tokens).astype(config.dtype)
        x = self._blocks(x, cos, sin)
        return self.head(self.norm(x), self.embed.embedding[...])

    def _blocks(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """Run the stacked blocks, in runs of equal recipe, of which there is one unless rules tell blocks apart.

        NNX carries the noise counts of stochastic recipes out of scan and remat.
        """

        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x, cos, sin)

        if self.config.remat != "none":
            # Inside scan the loop keeps XLA from merging the two forward passes; unrolled, only barriers do.
            run = nnx.remat(
                run, policy=REMAT_POLICIES[self.config.remat], prevent_cse=not self.config.scan_layers, graph=False
            )
        parts = split_runs(self.layers)
        for part in parts:
            x = self._scan(run, x, part) if self.config.scan_layers else self._unroll(run, x, part)
        join_runs(self.layers, parts)
        return x

    @staticmethod
    def _scan(run: Callable[..., jax.Array], x: jax.Array, blocks: Block) -> jax.Array:
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, graph=False)(x, blocks)

    @staticmethod
    def _unroll(run: Callable[..., jax.Array], x: jax.Array, stack: Block) -> jax.Array:
        leaves, treedef = jax.tree.flatten(stack)
        blocks = [treedef.unflatten(parts) for parts in zip(*map(jnp.unstack, leaves), strict=True)]
        for block in blocks:
            x = run(x, block)
        counts = [nnx.state(block, nnx.RngCount) for block in blocks]
        nnx.update(stack, jax.tree.map(lambda *parts: jnp.stack(parts), *counts))
        return x


def _stack_blocks(config: LlamaConfig, rngs: nnx.Rngs) -> Block:
    """`num_layers` blocks in one: parameters get a leading axis named "layers"."""

    @nnx.split_rngs(splits=config.num_layers)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
    def create(rngs: nnx.Rngs) -> Block:
        return Block(config, rngs=rngs)

    return create(rngs)
