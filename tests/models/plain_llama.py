"""LLaMA-2 written a second time, from stock Flax layers and a Python loop, to compare `fp4jax.models.Llama` with."""

import jax
import jax.numpy as jnp
from flax import nnx


def plain_llama(config, params, tokens):
    """Logits of `config` with the parameters of a `Llama`, a nested dict of arrays."""
    b, t = tokens.shape
    h, dtype = config.head_dim, config.dtype

    def dense(kernel, x, **options):
        layer = nnx.Linear(*kernel.shape, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0), **options)
        layer.kernel[...] = kernel
        # One token axis, as the model has it: the order in which a kernel's gradient is summed depends on it.
        return layer(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def norm(scale, x):
        layer = nnx.RMSNorm(x.shape[-1], epsilon=config.norm_eps, dtype=jnp.float32, rngs=nnx.Rngs(0))
        layer.scale[...] = scale
        return layer(x).astype(dtype)

    inverse = config.rope_base ** -(jnp.arange(0, h, 2, dtype=jnp.float32) / h)
    angles = jnp.arange(t, dtype=jnp.float32)[:, None] * inverse
    cos, sin = (jnp.concatenate([f(angles)] * 2, -1)[None, :, None, :] for f in (jnp.cos, jnp.sin))

    def rotate(x):
        wide = x.astype(jnp.float32)
        half = jnp.concatenate([-wide[..., h // 2 :], wide[..., : h // 2]], -1)
        return (wide * cos + half * sin).astype(dtype)

    x = params["embed"]["embedding"][tokens].astype(dtype)
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], params["layers"])
        y = norm(layer["attention_norm"]["scale"], x)
        q, k, v = (
            dense(layer["attention"][name]["kernel"], y).reshape(b, t, -1, h) for name in ("query", "key", "value")
        )
        out = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True).reshape(b, t, -1)
        x = x + dense(layer["attention"]["output"]["kernel"], out)
        y = norm(layer["mlp_norm"]["scale"], x)
        gate, up = (dense(layer["mlp"][name]["kernel"], y) for name in ("gate", "up"))
        y = (nnx.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(dtype)
        x = x + dense(layer["mlp"]["down"]["kernel"], y)
    x = norm(params["norm"]["scale"], x)
    # Float32 logits whose gradient is that of stock bfloat16 logits. The difference of the two is exact.
    if config.tie_embeddings:
        table, numbers = params["embed"]["embedding"].astype(dtype), (((1,), (1,)), ((), ()))
        x = x.reshape(b * t, -1)
        narrow, wide = (jax.lax.dot_general(x, table, numbers, preferred_element_type=p) for p in (dtype, jnp.float32))
        narrow, wide = narrow.reshape(b, t, -1), wide.reshape(b, t, -1)
    else:
        narrow, wide = (dense(params["head"]["kernel"], x, preferred_element_type=t) for t in (dtype, jnp.float32))
    return narrow.astype(jnp.float32) + jax.lax.stop_gradient(wide - narrow.astype(jnp.float32))
