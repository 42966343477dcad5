"""Weights followed from snapshot to snapshot."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from reference import QUICK

import fp4jax
from fp4jax import E2M1, Gemm, PerBlock, PerTensor, PowerOfTwo, QuantSpec, Recipe, TwoLevel
from fp4jax.telemetry import Oscillation, follow, start_trace

WEIGHTS = Recipe("weights", Gemm(None, QuantSpec(E2M1)))


@pytest.mark.parametrize("spec", [QuantSpec(E2M1), QuantSpec(E2M1, PerBlock(16), TwoLevel())])
def test_rates_equal_a_recomputation_in_numpy(spec):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((32, 12)).astype(np.float32)
    trace = jax.jit(lambda w: start_trace(w, spec, axis=0), compiler_options=QUICK)(w)
    step = jax.jit(lambda trace, w: follow(trace, w, spec, axis=0), compiler_options=QUICK)
    values = [oracle.quantize(w, spec, 0).values]
    last = np.zeros(w.shape)  # the last direction in which an entry moved
    for _ in range(4):
        w = w + 0.2 * rng.standard_normal(w.shape).astype(np.float32)
        trace, rates = step(trace, w)
        values.append(oracle.quantize(w, spec, 0).values)
        move = np.sign(values[-1] - values[-2])
        assert float(rates["changed"]) == pytest.approx(np.mean(move != 0))
        assert float(rates["flipped"]) == pytest.approx(np.mean((move != 0) & (move == -last)))
        last = np.where(move == 0, last, move)
    assert float(rates["flipped"]) > 0.05


def test_a_weight_on_its_way_changes_and_one_at_a_midpoint_flips():
    spec, rates = QuantSpec(E2M1, PerTensor()), []
    begin = jax.jit(lambda w: start_trace(w, spec, axis=0), compiler_options=QUICK)
    step = jax.jit(lambda trace, w: follow(trace, w, spec, axis=0), compiler_options=QUICK)
    trace = begin(jnp.array([6.0, 0.0, 2.4]))
    for travels, hovers in ((1.0, 2.6), (2.0, 2.4), (3.0, 2.6)):
        trace, rate = step(trace, jnp.array([6.0, travels, hovers]))
        rates.append((round(3 * float(rate["changed"])), round(3 * float(rate["flipped"]))))
    assert rates == [(2, 0), (2, 1), (2, 1)]


def test_empty_and_stochastic_weights():
    noisy = dataclasses.replace(QuantSpec(E2M1), rounding=fp4jax.STOCHASTIC)
    trace, rates = follow(start_trace(jnp.zeros((4, 0)), noisy, axis=0), jnp.zeros((4, 0)), noisy, axis=0)
    assert trace.values.shape == (4, 0)
    assert {name: float(rate) for name, rate in rates.items()} == {"changed": 0.0, "flipped": 0.0}


class Model(nnx.Module):
    """One layer of each kind, and a stack."""

    def __init__(self, rngs, recipe=WEIGHTS):
        dot = fp4jax.DotGeneral(recipe)
        self.linear = nnx.Linear(6, 8, dot_general=dot, rngs=rngs)
        self.general = nnx.LinearGeneral((2, 4), (3, 5), axis=(-2, -1), dot_general=dot, rngs=rngs)
        self.einsum = nnx.Einsum("bij,kij->bk", (7, 3, 5), einsum_op=fp4jax.nn.DotEinsum(dot), rngs=rngs)
        create = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: nnx.Linear(7, 7, dot_general=dot, rngs=rngs)))
        self.stack = create(rngs)
        self.plain = nnx.Linear(7, 7, rngs=rngs)


def test_every_layer_of_a_model_is_followed_along_its_own_axes():
    model = Model(nnx.Rngs(0))
    oscillation = Oscillation(model)
    before = {name: np.asarray(getattr(model, name).kernel[...]) for name in ("linear", "general", "einsum", "stack")}
    for name, kernel in before.items():
        nudge = (np.arange(kernel.size) % 3).reshape(kernel.shape)
        getattr(model, name).kernel[...] = jnp.asarray(kernel + np.float32(0.3) * kernel[::-1] * nudge, jnp.float32)
    rates = oscillation(model)
    assert list(rates) == ["einsum", "general", "linear", "stack[0]", "stack[1]"]
    for name, axis in (("einsum", (1, 2)), ("general", (0, 1)), ("linear", 0)):
        after = np.asarray(getattr(model, name).kernel[...])
        old, new = (oracle.quantize(w, QuantSpec(E2M1), axis).values for w in (before[name], after))
        assert rates[name]["changed"] == pytest.approx(np.mean(old != new)), name
    stacks = before["stack"], np.asarray(model.stack.kernel[...])
    for i in range(2):
        old, new = (oracle.quantize(stack[i], QuantSpec(E2M1), 0).values for stack in stacks)
        assert rates[f"stack[{i}]"]["changed"] == pytest.approx(np.mean(old != new))
    assert oscillation(model)["linear"] == {"changed": 0.0, "flipped": 0.0}


def test_another_model_is_refused():
    oscillation = Oscillation(Model(nnx.Rngs(0)))
    other = Recipe("other", Gemm(None, QuantSpec(E2M1, scale=PowerOfTwo("rceil"))))
    with pytest.raises(ValueError, match="the model is not the one that was followed: its quantized layers or recipes"):
        oscillation(Model(nnx.Rngs(0), other))
    activations = Recipe("activations", Gemm(QuantSpec(E2M1), None))
    with pytest.raises(ValueError, match=r"no quantized weight to follow; give its layers a recipe with fprop.rhs"):
        Oscillation(Model(nnx.Rngs(0), activations))
