"""The train step: one program, skipped when not finite, accumulation, noise from (seed, step), seeds side by side."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from micro import assert_bit_equal

import fp4jax
from fp4jax.models import Llama, LlamaConfig, token_nll
from fp4jax.nn import default_rules
from fp4jax.train.config import OptimizerOptions
from fp4jax.train.optimizer import make_optimizer, make_schedule
from fp4jax.train.step import METRICS, Architecture, make_init, make_train_step, make_validation_step

VOCABULARY = 64
SMALL = LlamaConfig(
    vocab_size=VOCABULARY, num_layers=2, embed_dim=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=32
)
OPTIONS = OptimizerOptions(learning_rate=1e-2)
STEPS = 20


def noisy() -> fp4jax.Recipe:
    """`fp4` with weights that round stochastically."""
    fp4 = fp4jax.recipes.fp4()
    weight = dataclasses.replace(fp4.fprop.rhs, rounding=fp4jax.STOCHASTIC)
    return dataclasses.replace(fp4, name="noisy", fprop=fp4jax.Gemm(fp4.fprop.lhs, weight))


RULES = {
    "none": None,
    "bf16": default_rules(fp4jax.recipes.bf16()),
    "fp4": default_rules(fp4jax.recipes.fp4()),
    "ste": default_rules(fp4jax.recipes.fp4_vector(gradient=None)),
    "noisy": default_rules(noisy()),
}


@functools.cache
def architecture(rules: str, dtype: str = "bfloat16") -> Architecture:
    config = dataclasses.replace(SMALL, dtype=dtype)
    return Architecture(lambda rngs: Llama(config, rules=RULES[rules], rngs=rngs))


@functools.cache
def programs(rules: str, accumulate: int = 1):
    """Compiled init and step; every test that names the same ones shares them."""
    optimizer = make_optimizer(OPTIONS, STEPS)
    step = make_train_step(
        architecture(rules), optimizer, make_schedule(OPTIONS, STEPS), accumulate=accumulate, clip_norm=1.0
    )
    return jax.jit(make_init(architecture(rules), optimizer)), jax.jit(step, donate_argnums=0)


@functools.cache
def validation_program():
    return jax.jit(make_validation_step(architecture("noisy"), num_sources=3))


def tokens(seed: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (rows, 17)).astype(np.int32)


def copied(state):
    """A state that a donating step may consume."""
    return jax.tree.map(lambda x: x.copy(), state)


def run(rules: str, batches, seed: int = 0):
    init, step = programs(rules)
    state, rows = init(seed), []
    for batch in batches:
        state, metrics = step(state, batch)
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows


def test_one_program_serves_every_step():
    init, step = programs("noisy")
    state = init(3)
    for batch in range(4):
        state, metrics = step(state, tokens(batch))
    assert step._cache_size() == 1
    assert set(metrics) == set(METRICS)
    assert all(value.dtype == jnp.float32 and value.shape == () for value in metrics.values())
    assert (int(state.step), int(state.skipped)) == (4, 0)


def test_the_state_is_donated_and_keeps_its_dtypes():
    init, step = programs("noisy")
    state = init(0)
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    after, _ = step(state, tokens(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == before
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}


def test_the_loss_falls():
    state, rows = run("noisy", [tokens(0)] * 15)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    assert [row["clipped"] for row in rows] == [row["grad_norm"] > 1 for row in rows]
    assert int(state.clipped) == sum(row["clipped"] for row in rows) > 0


def test_a_step_with_a_loss_that_is_not_finite_changes_counters_only():
    bad = tokens(1)
    bad[2, 5] = VOCABULARY + 7  # the model makes its sequence NaN
    init, step = programs("bf16")
    state, _ = step(init(0), tokens(0))
    skipped, metrics = step(copied(state), bad)
    assert np.isnan(metrics["loss"])
    assert (float(metrics["skipped"]), float(metrics["clipped"])) == (1, 0)
    assert (int(skipped.step), int(skipped.skipped)) == (2, 1)
    assert_bit_equal((skipped.params, skipped.opt_state), (state.params, state.opt_state))
    # And training goes on as if the batch had never been, at the learning rate of the update that is due.
    with_bad, rows = run("bf16", [tokens(0), bad, tokens(2)])
    without, expected = run("bf16", [tokens(0), tokens(2)])
    assert_bit_equal((with_bad.params, with_bad.opt_state), (without.params, without.opt_state))
    assert rows[2]["learning_rate"] == expected[1]["learning_rate"]


def test_twenty_bad_steps_in_a_row_leave_everything_as_it_was():
    init, step = programs("bf16")
    state = start = copied(init(0))
    state = copied(start)
    for _ in range(20):
        state, _ = step(state, np.full((4, 17), VOCABULARY, np.int32))
    assert_bit_equal((state.params, state.opt_state), (start.params, start.opt_state))
    assert (int(state.step), int(state.skipped)) == (20, 20)


class Cliff(nnx.Module):
    """Logits √w · (0, 1): at w = 0 the loss is log 2 and its derivative infinite."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.zeros(()))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.sqrt(self.kernel[...]) * jnp.broadcast_to(jnp.array([0.0, 1.0]), (*tokens.shape, 2))


def test_a_gradient_that_is_not_finite_skips_the_step_although_the_loss_is():
    optimizer = optax.sgd(1.0)
    step = jax.jit(make_train_step(Architecture(Cliff), optimizer, lambda count: 1.0))
    state = make_init(Architecture(Cliff), optimizer)(0)
    after, metrics = step(state, np.ones((1, 3), np.int32))
    assert float(metrics["loss"]) == pytest.approx(np.log(2))
    assert not np.isfinite(metrics["grad_norm"])
    assert int(after.skipped) == 1
    assert float(after.params["kernel"]) == 0


@pytest.mark.parametrize("rules", ["none", "ste"])
def test_accumulated_microbatches_equal_one_batch(rules):
    """In float32 with SGD, so that parameters show the gradient itself; the sums differ in order only.

    A scale a vector is that of a token or of a weight, whichever rows are beside it.
    """
    optimizer, batch = optax.sgd(1.0), tokens(0, rows=8)
    arch = architecture(rules, "float32")
    states, metrics = {}, {}
    for parts in (1, 4):
        step = jax.jit(make_train_step(arch, optimizer, lambda count: 1.0, accumulate=parts))
        states[parts], metrics[parts] = step(make_init(arch, optimizer)(0), batch)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[4][name], metrics[1][name], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), states[4].params, states[1].params)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), states[1].params, arch.init(0)[0])
    assert min(jax.tree.leaves(moved)) > 1e-4  # so that the comparison could have failed


def test_a_bad_microbatch_skips_the_whole_step():
    init, step = programs("noisy", accumulate=2)
    bad = tokens(0, rows=8)
    bad[3, 0] = VOCABULARY
    start = init(0)
    state, _ = step(copied(start), bad)
    assert int(state.skipped) == 1
    assert_bit_equal(state.params, start.params)


def test_the_recipe_without_quantizers_trains_as_plain_flax_bit_for_bit():
    batches = [tokens(0), tokens(1), tokens(2)]
    plain, rows = run("none", batches)
    bf16, same = run("bf16", batches)
    assert_bit_equal(bf16, plain)
    assert rows == same
    quantized, _ = run("noisy", batches)
    assert not np.array_equal(quantized.params["head"]["kernel"], plain.params["head"]["kernel"])


def test_noise_is_a_function_of_seed_and_step_alone():
    init, step = programs("noisy")

    def loss(state, number: int) -> float:
        return float(step(dataclasses.replace(copied(state), step=jnp.int32(number)), tokens(0))[1]["loss"])

    first, second = init(0), init(1)
    assert loss(first, 5) == loss(first, 5)
    assert loss(first, 5) != loss(first, 6)
    assert loss(first, 5) != loss(dataclasses.replace(first, noise=second.noise), 5)
    state, _ = step(copied(first), tokens(0))
    assert_bit_equal(state.noise, first.noise)  # a step leaves the streams as they were


def test_microbatches_draw_different_noise():
    """Two microbatches of the same rows: with the same noise, their mean would be the loss of one of them."""
    init, step = programs("noisy", accumulate=2)
    _, alone = programs("noisy")
    rows = tokens(0)
    state = init(0)
    at = [float(alone(dataclasses.replace(copied(state), step=jnp.int32(n)), rows)[1]["loss"]) for n in (0, 1)]
    both = float(step(copied(state), np.repeat(rows, 2, axis=0))[1]["loss"])
    assert at[0] != at[1]
    assert both == pytest.approx(np.mean(at), abs=1e-6)


def test_the_noise_begins_with_a_key_that_no_weight_draws():
    seen = []

    def create(rngs: nnx.Rngs) -> nnx.Module:
        seen.append(jax.random.key_data(rngs.noise.key[...]).tolist())
        seen.extend(jax.random.key_data(rngs.params()).tolist() for _ in range(50))
        return nnx.Linear(1, 1, rngs=rngs)

    Architecture(create).init(0)
    noise, *weights = seen
    assert len({tuple(key) for key in weights}) == 50
    assert noise not in weights


def test_weights_do_not_depend_on_the_recipe_but_on_the_seed():
    states = {rules: programs(rules)[0](0) for rules in ("none", "noisy")}
    assert_bit_equal(states["noisy"].params, states["none"].params)
    other = programs("none")[0](1)
    assert not np.array_equal(other.params["head"]["kernel"], states["none"].params["head"]["kernel"])


def test_seeds_side_by_side_are_those_one_after_another():
    rules = "noisy"
    optimizer = make_optimizer(OPTIONS, STEPS)
    init = jax.jit(jax.vmap(make_init(architecture(rules), optimizer)))
    step = jax.jit(
        jax.vmap(make_train_step(architecture(rules), optimizer, make_schedule(OPTIONS, STEPS), clip_norm=1.0)),
        donate_argnums=0,
    )
    together = init(jnp.array([4, 7], jnp.uint32))
    for i, seed in enumerate((4, 7)):
        assert_bit_equal(jax.tree.map(lambda x, i=i: x[i], together), programs(rules)[0](seed))
    for number in range(2):
        together, metrics = step(together, np.stack([tokens(number), tokens(number + 10)]))
    assert step._cache_size() == 1
    for i, seed in enumerate((4, 7)):
        alone, rows = run(rules, [tokens(number + 10 * i) for number in range(2)], seed=seed)
        assert float(metrics["loss"][i]) == pytest.approx(rows[-1]["loss"], rel=2e-3)
        assert int(together.step[i]) == int(alone.step)


def weighted_nll(state, batch, noise_step: int) -> np.ndarray:
    """The loss of each row, [b], its weighted tokens summed in float64."""

    @jax.jit
    def nll(params, noise):
        model = architecture("noisy").merge(params, noise, noise_step)
        model.eval()
        return token_nll(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    return np.sum(np.asarray(nll(state.params, state.noise), np.float64) * batch["weights"], axis=1)


def test_the_validation_step_sums_weighted_losses_by_source():
    state = programs("noisy")[0](0)
    validate = validation_program()
    batch = {
        "tokens": tokens(0),
        "weights": np.ones((4, 16), np.float32),
        "source": np.array([0, 2, 2, 0], np.int32),
    }
    batch["weights"][3, 8:] = 0
    batch["tokens"][3, 9:] = 0
    sums = validate(state.params, state.noise, batch)
    assert sums["weight"].tolist() == [24, 0, 32]
    assert float(sums["loss"][1]) == 0
    first, second = (weighted_nll(state, batch, noise_step) for noise_step in (0, 1))
    np.testing.assert_allclose(sums["loss"], [first[0] + first[3], 0, first[1] + first[2]], rtol=1e-5)
    assert np.abs(first - second).min() > 1e-3  # so that noise of another step would have been seen


def test_dtypes_stay_under_x64():
    with jax.enable_x64(True):
        optimizer = make_optimizer(OPTIONS, STEPS)
        state = jax.eval_shape(make_init(architecture("fp4"), optimizer), jnp.uint32(0))
        step = make_train_step(
            architecture("fp4"), optimizer, make_schedule(OPTIONS, STEPS), accumulate=2, clip_norm=1.0
        )
        after, metrics = jax.eval_shape(step, state, tokens(0))
        assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
        assert {value.dtype for value in metrics.values()} == {jnp.dtype("float32")}
