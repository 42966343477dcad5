"""Weights quantized once a step, for all its microbatches: the same bits as quantizing them in each."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import assert_bit_equal

import fp4jax
from fp4jax.models import Llama, LlamaConfig, cross_entropy
from fp4jax.models.llama import LINEAR_PATHS
from fp4jax.parallel import batch_sharding, make_mesh, parameter_sharding
from fp4jax.train.gradient import nothing_prepared, reduced_gradient
from fp4jax.train.step import Architecture

CONFIG = LlamaConfig(
    vocab_size=32,
    num_layers=2,
    embed_dim=32,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    mlp_dim=32,
    max_seq_len=16,
    dtype=jnp.bfloat16,
)
STOCHASTIC = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
E5M2 = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())
FP4 = fp4jax.recipes.fp4(alpha=None)  # outliers are the activation's business, and slow to compile
NOISY_WEIGHTS = fp4jax.Recipe(
    "noisy_weights",
    fp4jax.Gemm(STOCHASTIC, STOCHASTIC),
    fp4jax.Gemm(E5M2, fp4jax.REUSE),
    fp4jax.Gemm(fp4jax.REUSE, E5M2),
)
RECIPES = [
    (".*attention.*", FP4),
    (".*mlp.gate", fp4jax.recipes.fp4_vector()),
    (".*mlp.up", fp4jax.recipes.fp8()),
    (".*mlp.down", FP4),
    ("head", fp4jax.recipes.fp8()),
]


def architecture(rules, **changes) -> Architecture:
    config = dataclasses.replace(CONFIG, **changes)
    return Architecture(lambda rngs: Llama(config, rules=rules, rngs=rngs))


def gradients(arch: Architecture, prepare: bool):
    def loss_fn(params, noise, tokens, step, prepared):
        return cross_entropy(arch.merge(params, noise, step, prepared)(tokens[:, :-1]), tokens[:, 1:])

    return reduced_gradient(loss_fn, 2, "float32", arch.prepare if prepare else nothing_prepared)


TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)


def both(arch: Architecture, place=lambda params, axes: params, tokens=TOKENS):
    """Loss and gradient of the step with weights quantized once, and in each microbatch."""
    params, noise = jax.jit(arch.init)(0)
    params = place(params, arch.parameter_axes)
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return [
        jax.jit(gradients(arch, prepare), compiler_options=quickly)(params, noise, tokens, jnp.int32(3))
        for prepare in (True, False)
    ]


def test_on_one_device():
    assert_bit_equal(*both(architecture(RECIPES)))


def test_on_a_mesh():
    mesh = make_mesh("data=2,fsdp=2,tensor=2")

    def place(params, axes):
        put = lambda x, names: jax.device_put(x, parameter_sharding(mesh, names, x.shape))
        return jax.tree.map(put, params, axes)

    with jax.set_mesh(mesh):
        tokens = jax.device_put(TOKENS, batch_sharding(mesh))
        assert_bit_equal(*both(architecture(RECIPES), place, tokens))


def maxima(arch: Architecture, prepare: bool) -> int:
    """How many maxima are searched for in each microbatch."""
    args = *jax.eval_shape(arch.init, 0), TOKENS, jnp.int32(0)
    *_, microbatches = [e for e in jax.make_jaxpr(gradients(arch, prepare))(*args).eqns if e.primitive.name == "scan"]
    return str(microbatches.params["jaxpr"]).count("reduce_max")


def prepared_paths(rules) -> set[str]:
    arch = architecture(rules)
    return set(jax.eval_shape(arch.prepare, *jax.eval_shape(arch.init, 0)))


def test_no_microbatch_searches_for_the_maxima_of_weights():
    """Not for DGE's factor either."""
    arch = architecture([(".*", FP4)])
    assert maxima(arch, prepare=False) - maxima(arch, prepare=True) == len(LINEAR_PATHS)
    assert prepared_paths([(".*", FP4)]) == set(LINEAR_PATHS)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ([("head", None), (".*", FP4)], {"head"}),
        ([(".*mlp.up", NOISY_WEIGHTS), (".*", FP4)], {"layers.mlp.up"}),  # noise of its own in each microbatch
        ([("layers.0.mlp.up", None), (".*", FP4)], {"layers.mlp.up"}),  # blocks that follow different recipes
    ],
    ids=["high precision", "stochastic", "blocks"],
)
def test_what_is_quantized_in_each_microbatch(rules, left):
    assert prepared_paths(rules) == {*LINEAR_PATHS} - left
