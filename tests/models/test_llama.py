"""`Llama` against a second LLaMA, and what must not change it: scan, remat, sharding names, how it is called."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_llama import plain_llama
from small import SMALL, TOKENS, apply, assert_bit_equal, build, forward, loss_and_grads, train

import fp4jax
from fp4jax.models import Llama, cross_entropy
from fp4jax.models.head import wide_dot_general
from fp4jax.models.llama import LINEAR_PATHS
from fp4jax.nn import default_rules

BF16, FP8, FP4, FP4_VECTOR, FP4_DIRECT = (
    fp4jax.recipes.bf16(),
    fp4jax.recipes.fp8(),
    fp4jax.recipes.fp4(),
    fp4jax.recipes.fp4_vector(),
    fp4jax.recipes.fp4_direct(),
)
each_recipe = pytest.mark.parametrize(
    "recipe", [None, BF16, FP8, FP4, FP4_VECTOR, FP4_DIRECT], ids=lambda recipe: recipe.name if recipe else "plain"
)
tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def plain_train(config, params):
    """What `small.train` returns, of the second LLaMA."""

    def loss(params, tokens):
        logits = plain_llama(config, params, tokens[:, :-1])
        return cross_entropy(logits, tokens[:, 1:]), logits

    (loss, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, TOKENS)
    return loss, grads, logits


@tied_or_not
def test_high_precision_is_plain_flax_bit_for_bit(tied):
    _, params, _ = build(tie_embeddings=tied)
    expected = plain_train(dataclasses.replace(SMALL, tie_embeddings=tied), nnx.to_pure_dict(params))
    for recipe in (None, BF16):
        loss, grads, logits = train(recipe, tie_embeddings=tied)
        assert_bit_equal((loss, nnx.to_pure_dict(grads), logits), expected)


def test_high_precision_is_plain_flax_in_float32():
    _, params, _ = build(dtype=jnp.float32)
    expected = plain_train(dataclasses.replace(SMALL, dtype=jnp.float32), nnx.to_pure_dict(params))
    _, grads, logits = train(None, dtype=jnp.float32)
    # Not bit for bit: on CPU, LLVM contracts a·b + c to an FMA in some fusions and not in others.
    np.testing.assert_allclose(logits, expected[2], atol=3e-6)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), nnx.to_pure_dict(grads), expected[1])


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        pytest.param(None, {"scan_layers": False}, id="plain-loop"),
        pytest.param(None, {"remat": "full"}, id="plain-full"),
        pytest.param(None, {"remat": "dots", "scan_layers": False}, id="plain-loop-dots"),
        pytest.param(FP4, {"scan_layers": False}, id="fp4-loop"),
        pytest.param(FP4, {"remat": "full"}, id="fp4-full"),
        pytest.param(FP4, {"remat": "quantized"}, id="fp4-quantized"),
    ],
)
def test_scan_and_remat_do_not_change_a_bit(recipe, changes):
    assert_bit_equal(train(recipe, **changes), train(recipe))


@pytest.mark.parametrize("recipe", [FP8, FP4_DIRECT], ids=lambda recipe: recipe.name)
def test_scan_and_loop_agree_with_scales_of_a_tensor(recipe):
    loop, scan = train(recipe, scan_layers=False), train(recipe)
    # Products of E4M3 and E5M2 values are not summed exactly, and XLA orders the sums of a loop and a scan differently.
    for a, e in zip(jax.tree.leaves(loop), jax.tree.leaves(scan), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-6 * float(jnp.max(jnp.abs(e))))


@pytest.mark.parametrize("policy", ["quantized", "full"])
def test_only_the_quantized_policy_keeps_quantized_operands(policy, capsys):
    graphdef, params, rest = build(FP4, remat=policy, scan_layers=False)
    jax.ad_checkpoint.print_saved_residuals(lambda params: apply(graphdef, params, rest).sum(), params)
    kept = capsys.readouterr().out
    # Seven weights and four activations: query, key and value share one, gate and up another.
    assert kept.count("u8[") == (11 * SMALL.num_layers if policy == "quantized" else 0), kept


@each_recipe
def test_gradients_have_the_parameters_dtype_and_are_finite(recipe):
    _, params, _ = build(recipe)
    loss, grads, _ = train(recipe)
    assert loss.dtype == jnp.float32
    assert jax.tree.map(lambda g: (g.shape, g.dtype), grads) == jax.tree.map(lambda p: (p.shape, p.dtype), params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        assert bool(jnp.all(jnp.isfinite(grad))), path
        assert bool(jnp.any(grad != 0)), path


def test_recipes_differ_so_the_rules_reach_the_layers():
    recipes = [None, BF16, FP8, FP4, FP4_VECTOR, FP4_DIRECT]
    losses = [float(train(recipe)[0]) for recipe in recipes]
    assert losses[0] == losses[1]
    assert len(set(losses)) == len(recipes) - 1


def test_logits_are_float32_and_causal():
    model = build(FP4_VECTOR)  # token-wise scales: no token sees a later one
    logits = forward(*model)
    assert logits.dtype == jnp.float32
    assert logits.shape == (*TOKENS.shape, SMALL.vocab_size)
    changed = forward(*model, TOKENS.at[:, 9].add(1) % SMALL.vocab_size)
    np.testing.assert_array_equal(changed[:, :9], logits[:, :9])
    assert bool(jnp.all(jnp.any(changed[:, 9:] != logits[:, 9:], axis=-1)))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no rows", "no tokens"])
def test_an_empty_batch_has_empty_logits(shape):
    assert forward(*build(FP4_VECTOR), jnp.zeros(shape, jnp.int32)).shape == (*shape, SMALL.vocab_size)


def test_rows_of_a_batch_do_not_mix():
    model = build(FP4_VECTOR)
    other = forward(*model, TOKENS.at[0].set(0))
    np.testing.assert_array_equal(other[1], forward(*model)[1])


def test_tied_head_shares_the_embedding():
    _, params, _ = tied = build(tie_embeddings=True)
    assert "head" not in params
    graphdef, untied_params, rest = build()
    arrays = nnx.to_pure_dict(params) | {"head": {"kernel": params["embed"]["embedding"].T}}
    nnx.replace_by_pure_dict(untied_params, arrays)
    np.testing.assert_array_equal(forward(*tied), forward(graphdef, untied_params, rest))

    grad = train(tie_embeddings=True)[1]["embed"]["embedding"][...]
    seen = jnp.isin(jnp.arange(SMALL.vocab_size), TOKENS)
    assert not bool(jnp.all(seen))
    assert bool(jnp.all(jnp.any(grad != 0, axis=1)))  # the lookup reaches the tokens seen, the head every row


@tied_or_not
def test_the_head_follows_its_rule(tied):
    config = dataclasses.replace(SMALL, tie_embeddings=tied)
    rules = [("layers", None), ("head", FP4_VECTOR)]
    low = forward(*nnx.split(Llama(config, rules=rules, rngs=nnx.Rngs(params=0, noise=1)), nnx.Param, ...))
    high = forward(*build(None, tie_embeddings=tied))
    assert low.dtype == jnp.float32
    assert 0.01 < float(jnp.linalg.norm(low - high) / jnp.linalg.norm(high)) < 0.5


def test_gradients_of_wide_logits_are_multiplied_narrow():
    def loss(x, w):
        return jnp.sum(wide_dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32) ** 2)

    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 6))
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, w))
    assert jaxpr.count("dot_general") == 3
    assert jaxpr.count("preferred_element_type=float32") == 1
    grads = jax.grad(loss, argnums=(0, 1))(x, w)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.float32]


def test_initial_weights_do_not_depend_on_the_rules():
    assert_bit_equal(nnx.to_pure_dict(build(FP4)[1]), nnx.to_pure_dict(build(None)[1]))


def test_a_rule_that_matches_no_layer_lists_the_layers():
    with pytest.raises(ValueError, match=r"rules\[0\]: 'qurey' matches no layer; did you mean 'query'\?") as error:
        Llama(SMALL, rules=[("qurey", None), (".*", FP4)], rngs=nnx.Rngs(0))
    assert all(path in str(error.value) for path in LINEAR_PATHS)


def test_every_parameter_names_its_axes_and_no_more():
    _, params, _ = build()
    for path, variable in nnx.to_flat_state(params):
        names = variable.get_metadata("out_sharding")
        assert len(names) == variable[...].ndim, path
        assert (names[0] == "layers") == (path[0] == "layers"), path
        assert set(names) <= {"layers", "embed", "mlp", "heads", "kv", "vocab"}, path


def test_axis_names_become_partition_specs_under_logical_rules():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    rules = (("embed", "data"), ("mlp", "tensor"), ("heads", "tensor"), ("kv", None), ("vocab", None), ("layers", None))
    _, params, _ = build()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
        model = Llama(SMALL, rngs=nnx.Rngs(0))  # names are annotations: creation reshards nothing
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
    assert specs["layers"]["mlp"]["gate"]["kernel"].get_value() == jax.P(None, "data", "tensor")
    assert specs["embed"]["embedding"].get_value() == jax.P(None, "data")
    shardings = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), nnx.to_pure_dict(specs))
    placed = jax.device_put(nnx.to_pure_dict(params), shardings)
    assert placed["layers"]["mlp"]["down"]["kernel"].sharding.spec == jax.P(None, "tensor", "data")


def test_vmap_over_seeds_equals_a_loop():
    runs = [build(FP4_VECTOR, seed=seed) for seed in range(2)]
    graphdef, _, rest = runs[0]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params for _, params, _ in runs))

    (losses, _), grads = jax.vmap(lambda params: loss_and_grads(graphdef, params, rest))(stacked)
    for seed in range(2):
        expected_loss, expected_grads, _ = train(FP4_VECTOR, seed=seed)
        np.testing.assert_allclose(losses[seed], expected_loss, rtol=1e-3)
        for a, e in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
            np.testing.assert_allclose(a[seed], e, atol=0.05 * float(jnp.max(jnp.abs(e))))


def test_jit_of_the_module_equals_eager():
    model = nnx.merge(*build(FP4_VECTOR))
    np.testing.assert_array_equal(nnx.jit(lambda model, tokens: model(tokens))(model, TOKENS), model(TOKENS))


@pytest.mark.parametrize("shape", [(5,), (1, 25), (1, 2, 3)])
def test_tokens_of_the_wrong_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"tokens must be \[batch, time ≤ max_seq_len=24\], got shape"):
        Llama(SMALL, rngs=nnx.Rngs(0))(jnp.zeros(shape, jnp.int32))


def test_a_token_outside_the_vocabulary_is_loud():
    logits = forward(*build(), jnp.array([[1, 2, SMALL.vocab_size], [1, 2, SMALL.vocab_size - 1]]))
    assert bool(jnp.all(jnp.isnan(logits[0, 2])))
    assert not bool(jnp.any(jnp.isnan(logits[1])))


def test_a_model_without_noise_needs_no_noise_seed():
    Llama(SMALL, rules=default_rules(FP4), rngs=nnx.Rngs(params=0))
    noisy = fp4jax.Gemm(fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC))
    with pytest.raises(ValueError, match="rngs has neither a stream 'noise' nor a default one"):
        Llama(SMALL, rules=default_rules(fp4jax.Recipe("noisy", noisy)), rngs=nnx.Rngs(params=0))


def test_a_head_without_quantizers_is_a_head_without_a_recipe():
    def losses(rules):
        return loss_and_grads(*nnx.split(Llama(SMALL, rules=rules, rngs=nnx.Rngs(params=0)), nnx.Param, ...))

    assert_bit_equal(losses([(".*", BF16)]), losses(None))
