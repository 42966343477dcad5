"""The "hopper" backend: what it refuses, and a model of which it runs every linear.

``tests/test_conformance_dot.py`` compares it with the NumPy model, ``tests/dot/test_hopper.py`` tests it on meshes.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp4jax
from fp4jax import kernels
from fp4jax.models import Llama, cross_entropy
from fp4jax.models.configs import MODELS

recipes = fp4jax.recipes
STOCHASTIC = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)


def test_what_it_does_not_support_is_listed():
    x, w = jnp.ones((4, 8), jnp.float32), jnp.ones((8, 2), jnp.float32)
    dims = (((1,), (0,)), ((), ()))
    with pytest.raises(
        ValueError, match=r"backend='hopper' does not support recipe 'fp4'.*the device is no H100 or H200"
    ):
        fp4jax.dot_general(x, w, dims, recipe=recipes.fp4(), backend="hopper")
    cases = {
        r"fprop.lhs: granularity PerBlock\(size=16\)": recipes.fp4_vector(activation=fp4jax.PerBlock(16)),
        "dgrad.lhs=None": recipes.fp4(gradient=None),
        r"outliers=OCC\(.*scope='vector'": recipes.fp4(scope="vector"),
    }
    with kernels.interpret():
        for reason, recipe in cases.items():
            with pytest.raises(ValueError, match=reason):
                fp4jax.dot_general(x, w, dims, recipe=recipe, backend="hopper")
        with pytest.raises(ValueError, match="lhs is not contracted along its last axes"):
            fp4jax.dot_general(x.T, w, (((0,), (0,)), ((), ())), recipe=recipes.fp4(), backend="hopper")
        batch = (((2,), (1,)), ((0,), (0,)))
        noisy = dataclasses.replace(recipes.fp4(), fprop=fp4jax.Gemm(STOCHASTIC, STOCHASTIC))
        with pytest.raises(ValueError, match="stochastic rounding under batch axes"):
            fp4jax.dot_general(x[None], w[None], batch, recipe=noisy, backend="hopper", key=jax.random.key(0))
        with pytest.raises(ValueError, match="batch axes that are not the first axes of both operands"):
            fp4jax.dot_general(
                x[:, None], w[None], (((2,), (1,)), ((1,), (0,))), recipe=recipes.fp4(), backend="hopper"
            )
        dot = fp4jax.DotGeneral(recipes.fp4(alpha=None), "hopper")
        with pytest.raises(ValueError, match="lhs was prepared for products without batch axes"):
            jax.eval_shape(lambda x, w: dot(dot.prepare_lhs(x), w, batch), x[None], w[None])


def test_every_linear_of_a_llama_runs_on_it():
    """The 1.3B model at sequence 2048, traced for an H200: forward and both gradients, in a scan over remat."""
    config = dataclasses.replace(MODELS["1.3b"], remat="quantized", attention="xla")

    def loss(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:])

    with jax.numpy_dtype_promotion("standard"), kernels.lowering_for():
        rules = [("head", None), (".*", recipes.fp4())]
        graph, params = nnx.split(nnx.eval_shape(lambda: Llama(config, rules=rules, rngs=nnx.Rngs(0))))
        tokens = jax.ShapeDtypeStruct((1, 2049), jnp.int32)
        found = fp4jax.explain(jax.grad(loss), params, tokens).check(recipe="fp4", backend="hopper", share=0.8)
    kinds = collections.Counter(p.kind for p in found.quantized)
    assert kinds == {"fprop": 7, "dgrad": 7, "wgrad": 7}
    assert {p.count for p in found.quantized} == {24}
    assert {p.out for p in found.quantized if p.kind != "wgrad"} == {"bfloat16"}
