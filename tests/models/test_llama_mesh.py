"""The model on meshes of eight devices against one device: the same codes, and gradients to the order of a sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax
from fp4jax.models import Llama, LlamaConfig, cross_entropy
from fp4jax.nn import default_rules
from fp4jax.parallel import batch_sharding, make_mesh, parameter_sharding

CONFIG = LlamaConfig(
    vocab_size=64,
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    max_seq_len=16,
    dtype=jnp.float32,
)
MESHES = ("data=8", "fsdp=8", "data=2,fsdp=2,tensor=2")


def high_precision_gradients() -> fp4jax.Recipe:
    """`fp4` with gradients unrounded. Rounded, one that lies on a tie falls either way as sums differ in an ulp."""
    recipe = fp4jax.recipes.fp4()
    return dataclasses.replace(recipe, dgrad=fp4jax.Gemm(None, fp4jax.REUSE), wgrad=fp4jax.Gemm(fp4jax.REUSE, None))


class Problem:
    """A model, its parameters, tokens, and a program that returns loss, gradient and what forward kept."""

    def __init__(self, recipe, **changes):
        model = Llama(dataclasses.replace(CONFIG, **changes), rules=default_rules(recipe), rngs=nnx.Rngs(0))
        self.graphdef, self.params = nnx.split(model, nnx.Param)
        self.specs = nnx.get_partition_spec(self.params)
        self.tokens = np.random.default_rng(0).integers(0, 64, (8, 17)).astype(np.int32)

    def run(self, params, tokens):
        def loss(params):
            return cross_entropy(nnx.merge(self.graphdef, params)(tokens[:, :-1]), tokens[:, 1:])

        value, backward = jax.vjp(loss, params)
        kept = [x for x in jax.tree.leaves(backward) if x.dtype == jnp.uint8]
        return value, backward(jnp.ones_like(value))[0], kept

    def on(self, mesh):
        with jax.set_mesh(mesh):
            place = lambda x, spec: jax.device_put(
                x, parameter_sharding(mesh, (*spec, *[None] * (x.ndim - len(spec))), x.shape)
            )
            params = jax.tree.map(place, self.params, self.specs)
            return jax.jit(self.run)(params, jax.device_put(self.tokens, batch_sharding(mesh)))


@pytest.fixture(scope="module")
def alone():
    """The problem and its results on one device."""
    problem = Problem(high_precision_gradients())
    return problem, jax.jit(problem.run)(problem.params, problem.tokens)


@pytest.mark.parametrize("shape", MESHES)
def test_a_mesh_quantizes_to_the_same_codes_and_sums_gradients_in_float32(alone, shape):
    problem, (loss, gradient, kept) = alone
    mesh_loss, mesh_gradient, mesh_kept = problem.on(make_mesh(shape))
    assert len(kept) == len(mesh_kept) == 11  # seven weights and four activations, two of them shared
    for one, many in zip(kept, mesh_kept, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(many))
    np.testing.assert_allclose(mesh_loss, loss, rtol=1e-6)
    for (path, one), many in zip(
        jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(mesh_gradient), strict=True
    ):
        bound = 2e-6 * np.abs(one).max()
        np.testing.assert_allclose(many, one, rtol=0, atol=bound, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(
    "changes",
    [{"tie_embeddings": True, "remat": "quantized"}, {"scan_layers": False, "remat": "full", "num_kv_heads": 4}],
    ids=["tied", "unrolled"],
)
def test_other_shapes_of_the_model_follow_the_mesh(changes):
    problem = Problem(fp4jax.recipes.fp8(), **changes)
    loss, gradient, _ = jax.jit(problem.run)(problem.params, problem.tokens)
    mesh_loss, mesh_gradient, _ = problem.on(make_mesh("data=2,fsdp=2,tensor=2"))
    np.testing.assert_allclose(mesh_loss, loss, rtol=1e-5)
    norms = [optax_norm(tree) for tree in (gradient, mesh_gradient)]
    np.testing.assert_allclose(*norms, rtol=1e-3)


def optax_norm(tree):
    return np.sqrt(sum(float(np.sum(np.square(np.asarray(x, np.float64)))) for x in jax.tree.leaves(tree)))


def test_gradients_lie_as_their_parameters():
    problem = Problem(None)
    mesh = make_mesh("data=2,fsdp=2,tensor=2")
    _, gradient, _ = problem.on(mesh)
    for x, spec in zip(jax.tree.leaves(gradient), jax.tree.leaves(problem.specs), strict=True):
        assert x.sharding.is_equivalent_to(parameter_sharding(mesh, tuple(spec), x.shape), x.ndim)


def test_a_token_outside_the_vocabulary_is_nan_on_a_mesh_too():
    problem = Problem(None)
    problem.tokens[0, 3] = 64
    problem.tokens[1, 3] = -1
    model = nnx.merge(problem.graphdef, problem.params)
    mesh = make_mesh("data=4,tensor=2")
    with jax.set_mesh(mesh):
        tokens = jax.device_put(problem.tokens[:, :-1], batch_sharding(mesh))
        logits = jax.jit(lambda tokens: model(tokens))(tokens)
    bad = np.isnan(np.asarray(logits)).any(axis=(1, 2))
    np.testing.assert_array_equal(bad, [True, True, *[False] * 6])
