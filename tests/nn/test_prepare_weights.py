"""`prepare_weights` on layers of every kind: the numbers of the plain model, and what it refuses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax
from fp4jax.nn import Einsum, Linear, prepare_weights, quantize_model, use_prepared

FP4 = fp4jax.recipes.fp4(alpha=None)
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)), jnp.float32)


class Mixed(nnx.Module):
    """[b, 16] -> [b, 8] by a layer that makes two axes, one that contracts both, one with "...", and a plain one."""

    def __init__(self, rngs: nnx.Rngs):
        self.heads = nnx.LinearGeneral(16, (4, 8), rngs=rngs)
        self.join = Einsum("bhd,hdf->bf", (4, 8, 16), rngs=rngs)
        self.dots = Einsum("bd,d...->b...", (16, 16), rngs=rngs)
        self.last = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dots(self.join(self.heads(x))))


NOISY_E5M2 = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor(), rounding=fp4jax.STOCHASTIC)
NOISY = dataclasses.replace(
    FP4,
    name="noisy",
    dgrad=fp4jax.Gemm(NOISY_E5M2, fp4jax.REUSE),
    wgrad=fp4jax.Gemm(fp4jax.REUSE, NOISY_E5M2),
)
"""Its weights are rounded to nearest, its gradients stochastically."""


def model() -> nnx.Module:
    mixed = quantize_model(Mixed(nnx.Rngs(0)), [("last", NOISY), (".*", FP4)], rngs=nnx.Rngs(noise=0))
    mixed.eval()  # so that the noise is that of one call, every time
    return mixed


def test_every_kind_of_layer_gives_the_numbers_of_the_plain_one():
    graphdef, params, noise = nnx.split(model(), nnx.Param, ...)
    prepared = prepare_weights(model())
    assert set(prepared) == {"heads", "join", "last"}  # which axes "..." stands for is known in the call only

    def loss(params, noise, prepared):
        return jnp.sum(jnp.square(use_prepared(nnx.merge(graphdef, params, noise), prepared)(X)))

    got, want = (jax.jit(jax.value_and_grad(loss))(params, noise, p) for p in (prepared, {}))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


class Normed(nnx.Linear):
    """What it multiplies by is not its kernel."""

    def __call__(self, x):
        return self.dot_general(
            x, self.kernel[...] / jnp.linalg.norm(self.kernel[...], axis=0), (((1,), (0,)), ((), ()))
        )


RULES = [(".*", FP4)]
LEFT_ALONE = {
    "casts its kernel": nnx.Linear(16, 8, dtype=jnp.bfloat16, dot_general=fp4jax.DotGeneral(FP4), rngs=nnx.Rngs(0)),
    "computes something of it": quantize_model(Normed(16, 8, use_bias=False, rngs=nnx.Rngs(0)), RULES),
    "has batch axes": quantize_model(nnx.LinearGeneral(16, 8, batch_axis={0: 4}, rngs=nnx.Rngs(0)), RULES),
    "has batch axes, written out": Einsum("bd,bdf->bf", (4, 16, 8), recipe=FP4, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_a_layer_that_would_get_other_numbers_is_left_alone(why):
    assert not prepare_weights(LEFT_ALONE[why])


def test_a_layer_casts_as_it_did():
    """Its bias too, which here is rounded to bfloat16 before it is added to a float32 result."""
    layer = nnx.Linear(
        16,
        8,
        dtype=jnp.bfloat16,
        preferred_element_type=jnp.float32,
        bias_init=nnx.initializers.normal(),
        dot_general=fp4jax.DotGeneral(FP4),
        promote_dtype=fp4jax.nn.KeepKernelDtype(),
        rngs=nnx.Rngs(0),
    )
    want = layer(X)
    np.testing.assert_array_equal(use_prepared(layer, prepare_weights(layer))(X), want)


def test_weights_of_another_model_are_refused():
    prepared = prepare_weights(model())
    with pytest.raises(ValueError, match=r"prepared has a weight for 'heads' under recipe 'fp4', and the model no"):
        use_prepared(quantize_model(model(), [(".*", fp4jax.recipes.fp8())]), prepared)
    with pytest.raises(ValueError, match="prepared has a weight for 'heads'"):
        use_prepared(Linear(16, 16, recipe=FP4, rngs=nnx.Rngs(0)), prepared)


def test_what_was_prepared_needs_its_array():
    dot = fp4jax.DotGeneral(FP4)
    weight: Any = dot.prepare_rhs(jnp.ones((16, 8)))
    weight = weight.without_array()
    with pytest.raises(ValueError, match="rhs was prepared and is without its array; put it behind one by with_array"):
        dot(X, weight, (((1,), (0,)), ((), ())))


def test_a_model_that_outlives_its_prepared_weights_takes_new_ones_or_none():
    mixed = quantize_model(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), [(".*", FP4)])
    first = mixed(X)
    use_prepared(mixed, prepare_weights(mixed))
    mixed.kernel[...] = mixed.kernel[...] * 3
    np.testing.assert_array_equal(mixed(X), first)  # the caller's word
    use_prepared(mixed, prepare_weights(mixed))
    again = mixed(X)
    use_prepared(mixed, {})
    assert "PreparedDotGeneral" not in repr(mixed)
    np.testing.assert_array_equal(again, mixed(X))
    assert not np.array_equal(again, first)


def prepared_model() -> nnx.Module:
    return use_prepared(model(), prepare_weights(model()))


@pytest.mark.parametrize("rngs", [None, nnx.Rngs(noise=1)], ids=["goes on", "new noise"])
def test_quantizing_a_model_that_uses_prepared_weights_is_quantizing_the_model(rngs):
    rules = [("heads", None), ("join", fp4jax.recipes.fp8()), (".*", NOISY)]
    rules_of_noise = [("last", NOISY), (".*", None)]  # only this layer has noise to go on with
    for new in (rules, rules_of_noise) if rngs is not None else (rules_of_noise,):
        got, want = (quantize_model(m, new, rngs=rngs) for m in (prepared_model(), model()))
        assert nnx.graphdef(got) == nnx.graphdef(want)
        np.testing.assert_array_equal(got(X), want(X))  # pyright: ignore[reportCallIssue]
        noise = [nnx.state(m, nnx.RngState) for m in (got, want)]
        for a, b in zip(*map(jax.tree.leaves, noise), strict=True):
            assert (a == b).all()


def test_only_prepared_weights_can_be_used():
    with pytest.raises(TypeError, match=r"prepared\['last'\]=1 must come from prepare_weights"):
        use_prepared(model(), {"last": 1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"prepared=None must come from prepare_weights, or be {} for none"):
        use_prepared(model(), None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"model must be a flax\.nnx\.Module, got <class 'flax.nnx.*State'>"):
        prepare_weights(nnx.state(model()))  # pyright: ignore[reportArgumentType]
