"""Stochastic recipes in the model: noise depends on (key, layer, step) and on nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import SMALL, TOKENS, assert_bit_equal, build, forward, loss_and_grads

import fp4jax
from fp4jax.models import Llama
from fp4jax.nn import default_rules, set_noise_step

VECTOR = fp4jax.recipes.fp4_vector()
STOCHASTIC = dataclasses.replace(
    VECTOR,
    name="stochastic",
    fprop=dataclasses.replace(VECTOR.fprop, lhs=fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)),
)


def one_stochastic_layer(**changes):
    """(graphdef, params, other state) of a model that compiles fast."""
    rules = [("mlp.up", STOCHASTIC), (".*", None)]
    model = Llama(dataclasses.replace(SMALL, **changes), rules=rules, rngs=nnx.Rngs(params=0, noise=1))
    return nnx.split(model, nnx.Param, ...)


def streams(model):
    """Keys (as integers) and counts by layer path, one row a block."""
    state = nnx.to_flat_state(nnx.state(model, nnx.RngState))
    return {path: v[...] if path[-1] == "count" else jax.random.key_data(v[...]) for path, v in state}


def test_every_layer_of_every_block_has_a_key_of_its_own():
    model = nnx.merge(*build(STOCHASTIC))
    keys = [value for path, value in streams(model).items() if path[-1] == "key"]
    assert len(keys) == 7
    flat = np.concatenate(keys)
    assert flat.shape == (7 * SMALL.num_layers, 2)
    assert len(np.unique(flat, axis=0)) == len(flat)


def test_stacked_blocks_draw_distinct_noise():
    """Blocks with equal weights and equal input still round differently."""
    model = nnx.merge(*build(STOCHASTIC))
    kernel = model.layers.mlp.up.kernel
    kernel[...] = jnp.broadcast_to(kernel[...][:1], kernel[...].shape)
    x = jax.random.normal(jax.random.key(3), (5, SMALL.embed_dim))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0), graph=False)
    def run(x, block):
        return x, block.mlp.up(x)

    first, second = run(x, model.layers)[1]
    assert bool(jnp.any(first != second))


@pytest.mark.parametrize(
    "changes", [{"scan_layers": False}, {"remat": "quantized"}], ids=lambda changes: next(iter(changes))
)
def test_scan_and_remat_draw_the_same_noise(changes):
    assert_bit_equal(loss_and_grads(*one_stochastic_layer(**changes)), loss_and_grads(*one_stochastic_layer()))


@pytest.mark.parametrize("scan_layers", [True, False])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_a_call_advances_every_stream_once(scan_layers, remat):
    model = nnx.merge(*one_stochastic_layer(scan_layers=scan_layers, remat=remat))
    first, second = (nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS) for _ in range(2))
    assert bool(jnp.any(first != second))
    counts = [value for path, value in streams(model).items() if path[-1] == "count"]
    assert all(np.array_equal(count, [2] * SMALL.num_layers) for count in counts)


def test_noise_of_a_step_is_pinned_by_its_number():
    graphdef, params, rest = one_stochastic_layer()

    @jax.jit
    def at_step(params, rest, step):
        model = nnx.merge(graphdef, params, rest, copy=True)
        set_noise_step(model, step)
        return model(TOKENS)

    np.testing.assert_array_equal(at_step(params, rest, 0), forward(graphdef, params, rest))
    np.testing.assert_array_equal(at_step(params, rest, 3), at_step(params, rest, 3))
    assert bool(jnp.any(at_step(params, rest, 3) != at_step(params, rest, 4)))


def test_the_noise_of_a_layer_does_not_depend_on_the_rules_of_others():
    rules = [("query", None), *default_rules(STOCHASTIC)]
    some = streams(Llama(SMALL, rules=rules, rngs=nnx.Rngs(params=0, noise=1)))
    every = streams(nnx.merge(*build(STOCHASTIC)))
    assert len(some) == len(every) - 2
    for path, value in some.items():
        np.testing.assert_array_equal(value, every[path])


def test_weights_and_noise_have_seeds_of_their_own():
    def kernels(**seeds):
        return nnx.to_pure_dict(
            nnx.state(Llama(SMALL, rules=default_rules(STOCHASTIC), rngs=nnx.Rngs(**seeds)), nnx.Param)
        )

    assert_bit_equal(kernels(params=0, noise=1), kernels(params=0, noise=2))
    assert_bit_equal(
        nnx.to_pure_dict(nnx.state(Llama(SMALL, rngs=nnx.Rngs(5)), nnx.Param)),
        nnx.to_pure_dict(nnx.state(Llama(SMALL, rules=default_rules(STOCHASTIC), rngs=nnx.Rngs(5)), nnx.Param)),
    )
