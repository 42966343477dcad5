"""The whole chain against float32 AdamW: the loss stays within .5 %, over three seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fp4jax import optim

# A sum over many coordinates, as in a layer, averages the noise of single ones.
SIZE = 2**15
SEEDS = 3


def quadratic(key):
    """½ mean h (x - x*)², curvatures over two decades, started at 0; gradients as of small batches, with noise."""
    k1, k2 = jax.random.split(key)
    h, target = 10 ** jax.random.uniform(k1, (SIZE,), minval=-2), jax.random.normal(k2, (SIZE,))

    def gradient(x, key):
        return h * (x - target) + 0.5 * jax.random.normal(key, (SIZE,))

    return lambda x: 0.5 * jnp.mean(h * (x - target) ** 2), gradient, jnp.zeros(SIZE)


def rosenbrock(key):
    """(1 - a)² + 100 (b - a²)² for many pairs, started at random; exact gradients."""

    def loss(x):
        a, b = x[::2], x[1::2]
        return jnp.mean((1 - a) ** 2 + 100 * (b - a * a) ** 2)

    return loss, lambda x, _: jax.grad(loss)(x), jax.random.uniform(key, (SIZE,), minval=-1.5, maxval=1.5)


def losses(tx, loss, gradient, x, keys):
    def body(carry, key):
        x, state = carry
        updates, state = tx.update(gradient(x.astype(jnp.float32), key), state, x)
        x = optim.apply_updates(x, updates)
        return (x, state), loss(x.astype(jnp.float32))

    return jax.lax.scan(body, (x, tx.init(x)), keys)[1]


@pytest.mark.parametrize(("dtype", "master_dtype"), [("float32", "float32"), ("bfloat16", "float16")])
@pytest.mark.parametrize(
    ("problem", "learning_rate", "steps"),
    [pytest.param(quadratic, 0.02, 200, id="quadratic"), pytest.param(rosenbrock, 0.01, 300, id="rosenbrock")],
)
def test_loss_within_half_a_percent_of_float32(problem, learning_rate, steps, dtype, master_dtype):
    """E4M3 gradients and m, FP16 v: the loss at the end, by when it has fallen fiftyfold, and the mean of all."""

    def both(seed):
        key = jax.random.key(seed)
        loss, gradient, start = problem(key)
        start, keys = start.astype(dtype), jax.random.split(key, steps)
        theirs = optax.adamw(learning_rate, weight_decay=1e-4)
        ours = optim.adamw(learning_rate, weight_decay=1e-4, master_dtype=master_dtype, seed=seed)
        return (
            losses(theirs, loss, gradient, start.astype(jnp.float32), keys),
            losses(ours, loss, gradient, start, keys),
        )

    theirs, ours = map(np.asarray, jax.jit(lambda seeds: jax.lax.map(both, seeds))(jnp.arange(SEEDS)))
    assert np.all(theirs[:, -1] < 0.02 * theirs[:, 0])
    np.testing.assert_allclose(ours[:, -1], theirs[:, -1], rtol=5e-3)
    np.testing.assert_allclose(ours.mean(axis=1), theirs.mean(axis=1), rtol=2e-3)
