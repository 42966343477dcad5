"""Small models for the tests of this folder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.models import Llama, LlamaConfig, cross_entropy
from fp4jax.nn import default_rules

SMALL = LlamaConfig(
    vocab_size=61, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=10, mlp_dim=44, max_seq_len=24
)
TOKENS = jax.random.randint(jax.random.key(7), (2, 17), 0, SMALL.vocab_size)


def build(recipe=None, seed=0, **changes):
    """(graphdef, params, other state) of a small model under the default rules."""
    config = dataclasses.replace(SMALL, **changes)
    model = Llama(config, rules=default_rules(recipe), rngs=nnx.Rngs(params=seed, noise=seed + 1))
    return nnx.split(model, nnx.Param, ...)


def apply(graphdef, params, rest, tokens=TOKENS, **options):
    """Logits, as a pure function."""
    return nnx.merge(graphdef, params, rest, copy=True)(tokens, **options)


forward = jax.jit(apply, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_grads(graphdef, params, rest, tokens=TOKENS):
    """((loss, logits), gradients) of next-token prediction."""

    def loss(params):
        logits = apply(graphdef, params, rest, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]), logits

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def train(recipe=None, seed=0, **changes):
    """Loss, gradients and logits of a small model, kept for other tests."""
    (loss, logits), grads = loss_and_grads(*build(recipe, seed, **changes))
    return loss, grads, logits


def assert_bit_equal(actual, expected):
    """Two trees of arrays hold the same bits, in the same dtypes, with names and all."""
    actual, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, expected))
    assert [path for path, _ in actual] == [path for path, _ in expected]
    for (path, a), (_, e) in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype, jax.tree_util.keystr(path)
        assert bool(jnp.all(a == e)), f"{jax.tree_util.keystr(path)} differs by up to {jnp.max(jnp.abs(a - e))}"
