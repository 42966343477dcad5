"""RoPE and grouped-query attention against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import SMALL, TOKENS, build, forward, loss_and_grads

from fp4jax.models import Llama
from fp4jax.models.attention import apply_rope, attention_implementation, rope_tables


@pytest.mark.parametrize("positions", [np.arange(12), np.stack([np.arange(12), 1000 + 3 * np.arange(12)])])
def test_rope_rotates_half_split_pairs(positions):
    head_dim, base = 10, 10_000.0
    x = np.random.default_rng(0).normal(size=(2, 12, 3, head_dim)).astype(np.float32)
    rotated = apply_rope(jnp.asarray(x), *rope_tables(jnp.asarray(positions), head_dim, base))

    angles = np.broadcast_to(positions, (2, 12))[..., None] * base ** (-np.arange(0, head_dim, 2) / head_dim)
    pairs = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * np.exp(1j * angles)[:, :, None]
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(rotated, expected, atol=5e-4 if positions.max() > 100 else 5e-6)


def test_rope_keeps_the_dtype_and_rounds_once():
    x = jax.random.normal(jax.random.key(0), (1, 6, 2, 8), jnp.bfloat16)
    tables = rope_tables(jnp.arange(6), 8, 10_000.0)
    assert tables[0].dtype == jnp.float32
    assert tables[0].shape == (6, 4)
    rotated = apply_rope(x, *tables)
    assert rotated.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rotated, apply_rope(x.astype(jnp.float32), *tables).astype(jnp.bfloat16))


def attention_parts(num_kv_heads):
    model = Llama(dataclasses.replace(SMALL, num_kv_heads=num_kv_heads, dtype=jnp.float32), rngs=nnx.Rngs(0))
    block = jax.tree.map(lambda a: a[0], model.layers)
    return model.config, block.attention


def test_attention_equals_numpy():
    config, attention = attention_parts(2)
    x = np.random.default_rng(1).normal(size=(2, 9, config.embed_dim)).astype(np.float32)
    tables = rope_tables(jnp.arange(9), config.head_dim, config.rope_base)
    kernel = lambda layer: np.asarray(layer.kernel[...], np.float64)
    heads = lambda layer: (x.astype(np.float64) @ kernel(layer)).reshape(2, 9, -1, config.head_dim)
    rotate = lambda x: np.asarray(apply_rope(jnp.asarray(x, jnp.float32), *tables), np.float64)

    q, k, v = rotate(heads(attention.query)), rotate(heads(attention.key)), heads(attention.value)
    k, v = np.repeat(k, 2, axis=2), np.repeat(v, 2, axis=2)
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(config.head_dim)
    scores = np.where(np.tril(np.ones((9, 9), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v).reshape(2, 9, -1)
    np.testing.assert_allclose(attention(jnp.asarray(x), *tables), out @ kernel(attention.output), atol=2e-6)


def test_grouped_query_attention_is_multi_head_attention_with_repeated_heads():
    _, grouped = attention_parts(2)
    config, full = attention_parts(4)
    for name in ("query", "output"):
        getattr(full, name).kernel[...] = getattr(grouped, name).kernel[...]
    for name in ("key", "value"):
        kernel = getattr(grouped, name).kernel[...].reshape(-1, 2, config.head_dim)
        getattr(full, name).kernel[...] = jnp.repeat(kernel, 2, axis=1).reshape(config.embed_dim, -1)
    x = jax.random.normal(jax.random.key(2), (2, 9, config.embed_dim))
    tables = rope_tables(jnp.arange(9), config.head_dim, config.rope_base)
    np.testing.assert_allclose(grouped(x, *tables), full(x, *tables), atol=1e-6)


def test_attention_depends_on_relative_positions_only():
    model = build(dtype=jnp.float32)
    t = TOKENS.shape[1]
    expected = forward(*model)
    np.testing.assert_array_equal(forward(*model, positions=jnp.arange(t)), expected)
    np.testing.assert_allclose(forward(*model, positions=5 + jnp.arange(t)), expected, atol=1e-5)
    per_row = jnp.stack([jnp.arange(t), 3 + jnp.arange(t)])
    np.testing.assert_allclose(forward(*model, positions=per_row), expected, atol=1e-5)
    assert float(jnp.max(jnp.abs(forward(*model, positions=3 * jnp.arange(t)) - expected))) > 1e-3


def test_the_implementation_named_is_the_one_used():
    assert attention_implementation(dataclasses.replace(SMALL, attention="cudnn"), 8) == "cudnn"
    assert attention_implementation(SMALL, 7) == "xla"  # cuDNN has no backward pass for an odd length
    if jax.default_backend() == "cpu":
        assert attention_implementation(SMALL, 8) == "xla"


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [2, 4])
def test_cudnn_and_xla_attention_agree(num_kv_heads):
    config = {"num_kv_heads": num_kv_heads, "head_dim": 64, "max_seq_len": 128}
    tokens = jax.random.randint(jax.random.key(1), (2, 129), 0, SMALL.vocab_size)
    (cudnn, _), cudnn_grads = loss_and_grads(*build(attention="cudnn", **config), tokens)
    (xla, _), xla_grads = loss_and_grads(*build(attention="xla", **config), tokens)
    assert attention_implementation(dataclasses.replace(SMALL, **config), 128) == "cudnn"
    np.testing.assert_allclose(cudnn, xla, rtol=1e-3)
    for a, e in zip(jax.tree.leaves(cudnn_grads), jax.tree.leaves(xla_grads), strict=True):
        np.testing.assert_allclose(a, e, atol=0.03 * float(jnp.max(jnp.abs(e))))
