"""Linen: products to inject, and rules for whole models whose code does not change."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import fp4jax
from fp4jax.linen import DotGeneral, KeepKernelDtype, describe_model, dot_general_cls, quantize_model
from fp4jax.nn import Blocks, keep_blocks

FP4, BF16 = fp4jax.recipes.fp4_vector(), fp4jax.recipes.bf16()
NOISY = dataclasses.replace(
    FP4,
    name="noisy",
    fprop=dataclasses.replace(FP4.fprop, lhs=fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)),
)
ALL = [(".*", FP4)]
X = jax.random.normal(jax.random.key(0), (6, 16))
TOKENS = jnp.arange(8).reshape(2, 4)
NUMBERS = (((1,), (0,)), ((), ()))
dot = jax.jit(lambda x, w: fp4jax.dot_general(x, w, NUMBERS, recipe=FP4))


class Plain(linen.Module):
    """A residual dense layer."""

    @linen.compact
    def __call__(self, x, _=None):
        return x + linen.Dense(16, name="out")(x), None


class Block(linen.Module):
    """Attention, an einsum and a dense layer, as a user would have them."""

    @linen.compact
    def __call__(self, x, _=None):
        y = linen.MultiHeadDotProductAttention(2, name="attention")(x)
        y = linen.Einsum((16, 16), "...d,df->...f", name="mix")(y)
        return x + linen.Dense(16, name="out")(y), None


JitBlock = linen.jit(Block)


class Model(linen.Module):
    """Embedding, two blocks in one of the ways to run them, and a head."""

    mode: str = "loop"
    block: Any = Block
    split: Any = dataclasses.field(default_factory=lambda: {"params": True, "noise": True})

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(11, 16, name="embed")(tokens)
        if "scan" in self.mode:
            block = linen.remat(self.block, prevent_cse=False) if "remat" in self.mode else self.block
            x, _ = linen.scan(block, variable_axes={"params": 0}, split_rngs=self.split, length=2)(name="blocks")(
                x, None
            )
        else:
            block = {"loop": self.block, "remat": linen.remat(self.block), "jit": JitBlock}[self.mode]
            for i in range(2):
                x, _ = block(name=f"blocks_{i}")(x)
        return linen.Dense(11, name="head")(x)


RULES = [("embed|head", None), (".*", FP4)]


def shapes(model, x=TOKENS):
    """Variables of a model, without their values."""
    return jax.eval_shape(model.init, jax.random.key(0), x)


def noise(seed):
    return {"noise": jax.random.key(seed)}


# --- products to inject --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linen.Dense, linen.DenseGeneral], ids=["Dense", "DenseGeneral"])
def test_the_kernel_reaches_the_injected_product_unrounded(make):
    cls = dot_general_cls(FP4)
    dense = make(12, dtype=jnp.bfloat16, dot_general_cls=cls, promote_dtype=KeepKernelDtype())
    variables = dense.init(jax.random.key(0), X)
    assert set(variables) == {"params"}
    kernel = variables["params"]["kernel"]
    expected = dot(X.astype(jnp.bfloat16), kernel)
    assert kernel.dtype == jnp.float32
    np.testing.assert_array_equal(jax.jit(dense.apply)(variables, X), expected)


def test_injected_noise_comes_from_make_rng():
    dense = linen.Dense(12, use_bias=False, dot_general_cls=dot_general_cls(NOISY, noise="sr"))
    variables = dense.init({"params": jax.random.key(0), "sr": jax.random.key(1)}, X)
    apply = jax.jit(dense.apply)
    first, again, other = (apply(variables, X, rngs={"sr": jax.random.key(i)}) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert bool(jnp.any(first != other))
    with pytest.raises(
        ValueError, match=r"layer '' .*'noisy'\) and finds no random stream 'sr': pass rngs=\{'sr': key\}"
    ):
        dense.apply(variables, X)


def test_products_check_their_arguments():
    assert dot_general_cls(FP4) is dot_general_cls(fp4jax.recipes.fp4_vector())
    assert isinstance(dot_general_cls(FP4)(), DotGeneral)
    with pytest.raises(TypeError, match="recipe='fp4' must be a Recipe"):
        dot_general_cls("fp4")
    with pytest.raises(ValueError, match="backend='tpu' is unknown"):
        dot_general_cls(FP4, "tpu")


# --- whole models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["loop", "remat", "jit", "scan", "remat scan"])
def test_a_model_follows_its_rules_however_it_runs_its_blocks(mode):
    model = Model(mode)
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    jax.eval_shape(model.apply, variables, TOKENS)  # so that linen.jit has traced the block without rules
    quantized = quantize_model(model, RULES)
    assert jax.eval_shape(quantized.init, jax.random.key(0), TOKENS) == variables

    explanation = fp4jax.explain(quantized.apply, variables, TOKENS)
    kinds = [p.kind for p in explanation.products for _ in range(p.count)]
    assert kinds.count("fprop") == 2 * (4 + 1 + 1)  # the projections of attention, the einsum, the dense layer
    assert kinds.count("plain") == 2 * 2 + 1  # scores and values, and the head

    unquantized = quantize_model(model, [(".*", None)])
    text = [jax.jit(m.apply).lower(variables, TOKENS).as_text() for m in (model, unquantized)]
    assert re.sub("@jit_\\w+", "", text[0]) == re.sub("@jit_\\w+", "", text[1])


def test_a_scan_equals_its_loop_and_trains():
    loop, scan = (quantize_model(Model(mode, Plain), RULES) for mode in ("loop", "remat scan"))
    variables = loop.init(jax.random.key(0), TOKENS)
    jax.tree.map(np.testing.assert_array_equal, variables, loop.module.init(jax.random.key(0), TOKENS))
    params = dict(variables["params"])
    blocks = [params.pop(f"blocks_{i}") for i in range(2)]
    stacked = {"params": {**params, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}}

    def loss(model):
        return jax.jit(jax.value_and_grad(lambda v: (model.apply(v, TOKENS) ** 2).mean()))

    expected, grads = loss(loop)(variables)
    actual, stacked_grads = loss(scan)(stacked)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    for i in range(2):
        jax.tree.map(
            lambda a, e, i=i: np.testing.assert_allclose(a[i], e, rtol=1e-3, atol=1e-6),
            stacked_grads["params"]["blocks"],
            grads["params"][f"blocks_{i}"],
        )
    stepped = jax.tree.map(lambda p, g: p - 0.05 * g, stacked, stacked_grads)
    assert float(loss(scan)(stepped)[0]) < float(actual)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_layers_multiply_unrounded_kernels(dtype):
    layers = [
        linen.Dense(12, dtype=dtype),
        linen.DenseGeneral((3, 4), dtype=dtype),
        linen.Einsum((16, 3, 4), "td,dhk->thk", dtype=dtype),
    ]
    for layer in layers:
        variables = layer.init(jax.random.key(0), X)
        kernel, bias = variables["params"]["kernel"], variables["params"]["bias"] + 0.5
        out = jax.jit(quantize_model(layer, ALL).apply)({"params": {"kernel": kernel, "bias": bias}}, X)
        x = X if dtype is None else X.astype(dtype)
        product = jax.jit(lambda x, w, b: dot(x, w) + b)(x, kernel.reshape(16, 12), bias.reshape(12).astype(x.dtype))
        assert out.dtype == x.dtype
        np.testing.assert_array_equal(out.reshape(6, 12), product)


@pytest.mark.parametrize("equation", ["...d,dhk->...hk", "td,dhk->hkt", "td,hdk->thk", "htd,hdk->htk"])
def test_einsum_and_its_bias_are_those_of_flax(equation):
    x = X if "htd" not in equation else X.reshape(3, 2, 16)
    layer = linen.Einsum((16, 3, 4) if "dhk" in equation else (3, 16, 4), equation)
    variables = layer.init(jax.random.key(0), x)
    variables["params"]["bias"] += jnp.arange(variables["params"]["bias"].size).reshape(
        variables["params"]["bias"].shape
    )
    exact = quantize_model(layer, [(".*", BF16)])  # quantizes nothing: the product in the dtype of the input
    out, expected = (jax.jit(model.apply)(variables, x) for model in (exact, layer))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


# --- noise ---------------------------------------------------------------------------------------------------------


class Pair(linen.Module):
    """Two layers of the same input."""

    @linen.compact
    def __call__(self, x):
        return linen.Dense(16, name="a")(x), linen.Dense(16, name="b")(x)


class Repeated(linen.Module):
    """One dense layer, shared by the steps of a scan that maps nothing but the noise."""

    split: bool = True

    @linen.compact
    def __call__(self, x):
        dense = linen.Dense(16, use_bias=False, name="dense")
        scan = linen.scan(
            lambda dense, carry, _: (carry, dense(x)),
            variable_broadcast="params",
            split_rngs={"params": False, "noise": self.split},
            length=3,
        )
        return scan(dense, 0, None)[1]


def test_draws_differ_by_block_layer_and_step():
    model = quantize_model(Repeated(), [(".*", NOISY)])
    variables = model.init(jax.random.key(0), X)
    first, again, next_step = (jax.jit(model.apply)(variables, X, rngs=noise(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert bool(jnp.any(first != next_step))
    assert len({draw.tobytes() for draw in np.asarray(first)}) == 3
    pair = quantize_model(Pair(), [(".*", NOISY)])
    same = {"kernel": jax.random.normal(jax.random.key(1), (16, 16)), "bias": jnp.zeros(16)}
    a, b = jax.jit(pair.apply)({"params": {"a": same, "b": same}}, X, rngs=noise(0))
    assert bool(jnp.any(a != b))


def test_noise_may_come_from_a_stream_the_model_splits_already():
    model = Model("scan", split={"params": True, "dropout": True})
    rules = [("embed|head", None), (".*", NOISY)]
    variables = model.init(jax.random.key(0), TOKENS)
    with pytest.raises(
        ValueError, match=r"'blocks\.attention\.query' .* finds no random stream 'noise'.*noise='dropout'"
    ):
        quantize_model(model, rules).apply(variables, TOKENS, rngs=noise(0))
    quantized = quantize_model(model, rules, noise="dropout")
    apply = jax.jit(quantized.apply)
    a, b = (apply(variables, TOKENS, rngs={"dropout": jax.random.key(i)}) for i in (0, 1))
    assert bool(jnp.any(a != b))


# --- rules ---------------------------------------------------------------------------------------------------------


def test_blocks_by_number():
    model = Model("loop")
    variables = shapes(model)
    quantized = quantize_model(model, [keep_blocks("blocks", last=1), *RULES])
    rows = {row.path: row.recipe for row in describe_model(quantized, TOKENS).layers}
    assert rows["blocks_0.out"] == FP4
    assert rows["blocks_1.out"] is None
    kinds = [p.kind for p in fp4jax.explain(quantized.apply, variables, TOKENS).products]
    assert kinds.count("fprop") == 6


@pytest.mark.parametrize("pattern", [r"blocks\.0", Blocks("blocks", (-1,))])
def test_single_blocks_of_a_scan_are_refused(pattern):
    quantized = quantize_model(Model("scan"), [(pattern, None), *RULES])
    message = (
        "is a stack of 2 blocks that linen.scan or linen.vmap run as one, so they share a recipe, but the rules give"
    )
    with pytest.raises(ValueError, match=message):
        shapes(quantized)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(quantized.apply, shapes(Model("scan")), TOKENS)


def test_a_rule_that_matches_nothing_raises_in_init_apply_and_the_table():
    quantized = quantize_model(Model(), [("haed", None), (".*", FP4)])
    variables = shapes(Model())
    for run in (
        lambda: shapes(quantized),
        lambda: jax.eval_shape(quantized.apply, variables, TOKENS),
        lambda: describe_model(quantized, TOKENS),
    ):
        with pytest.raises(ValueError, match=r"rules\[0\]: 'haed' matches no layer; did you mean 'head'\?"):
            run()
    undecided = quantize_model(Model(), [("head", FP4)])
    with pytest.raises(
        ValueError, match=r"no rule matches layer 'blocks_0\.attention\.\w+'; add one, or end the rules"
    ):
        jax.eval_shape(undecided.apply, variables, TOKENS)
    only_embed = quantize_model(Model(), [("embed", FP4), (".*", None)])
    with pytest.raises(ValueError, match=r"'embed' \(linen\.Embed\) stays in high precision; write None for it"):
        shapes(only_embed)


def test_what_is_no_unbound_linen_module_is_refused():
    with pytest.raises(TypeError, match=r"module is an NNX module; fp4jax\.nn\.quantize_model takes those"):
        quantize_model(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), ALL)
    with pytest.raises(TypeError, match=r"must be a flax\.linen\.Module, got .*; create it first"):
        quantize_model(Model, ALL)
    with pytest.raises(ValueError, match=r"module is bound to variables; quantize the unbound module"):
        quantize_model(linen.Dense(3).bind({"params": {}}), ALL)
    with pytest.raises(TypeError, match="rules must be a list of pairs"):
        quantize_model(Model(), FP4)
    with pytest.raises(ValueError, match=r"rules\[0\]: 'a\(' is not a regular expression"):
        quantize_model(Model(), [("a(", FP4)])
    again = quantize_model(quantize_model(Model(), ALL), RULES)
    assert (again.module, again.rules) == (Model(), tuple(RULES))


# --- layers with something of their own, and other methods ---------------------------------------------------------


class Bypass(linen.Dense):
    @linen.compact
    def __call__(self, x):
        return x @ self.param("kernel", self.kernel_init, (x.shape[-1], self.features))


class Doubled(linen.Einsum):
    @linen.compact
    def __call__(self, x):
        return 2 * super().__call__(x)


class Scaled(linen.Dense):
    @linen.compact
    def __call__(self, x):
        return 2 * super().__call__(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (linen.Dense(3, dot_general=jax.lax.dot_general), "it has a dot_general of its own"),
        (linen.Dense(3, dot_general_cls=lambda: jax.lax.dot_general), "it has a dot_general_cls of its own"),
        (linen.Dense(3, promote_dtype=lambda *args, dtype: args), "it has a promote_dtype of its own"),
        (Bypass(3), "its class Bypass does not use the dot_general_cls it inherits"),
        (Doubled((16, 3), "td,df->tf"), "its class Doubled is not linen.Einsum itself"),
    ],
)
def test_layers_that_cannot_follow_a_recipe(layer, message):
    variables = layer.init(jax.random.key(0), X)
    with pytest.raises(
        ValueError, match=f"layer '' cannot follow recipe 'fp4_vector': {message}.*Give it None in the rules"
    ):
        jax.eval_shape(quantize_model(layer, ALL).apply, variables, X)
    kept = quantize_model(layer, [(".*", None)])
    assert str(jax.make_jaxpr(kept.apply)(variables, X)) == str(jax.make_jaxpr(layer.apply)(variables, X))


@pytest.mark.parametrize(
    "layer",
    [
        Scaled(3),
        linen.remat(linen.Dense)(3),
        linen.jit(linen.Dense)(3),
        linen.remat(linen.Einsum)((16, 3), "td,df->tf"),
    ],
)
def test_subclasses_and_lifted_layers_follow_theirs(layer):
    variables = layer.init(jax.random.key(0), X)
    layer.apply(variables, X)
    expected = dot(X, variables["params"]["kernel"])
    factor = 2 if isinstance(layer, Scaled) else 1
    for _ in range(2):
        np.testing.assert_allclose(
            jax.jit(quantize_model(layer, ALL).apply)(variables, X), factor * expected, rtol=1e-6
        )


class Around(linen.Module):
    """Holds modules as fields, which are bound before the model runs."""

    inner: linen.Module
    several: Any = ()

    def __call__(self, x):
        for module in (self.inner, *jax.tree.leaves(self.several, is_leaf=lambda m: isinstance(m, linen.Module))):
            x = module(x)
        return x


@pytest.mark.parametrize(
    "model",
    [
        linen.Sequential([linen.Dense(16), linen.relu, linen.Dense(16)]),
        Around(linen.Dense(16), [linen.Dense(16)]),
        Around(Around(linen.Dense(16)), {"a": linen.Dense(16)}),
        linen.remat(Around)(Around(linen.Dense(16)), (linen.Dense(16),)),
        linen.jit(Around)(linen.Dense(16), [linen.Dense(16)]),
    ],
)
def test_modules_held_as_fields_are_quantized(model):
    variables = shapes(model, X)
    jax.eval_shape(model.apply, variables, X)
    quantized = quantize_model(model, ALL)
    assert shapes(quantized, X) == variables
    assert [p.kind for p in fp4jax.explain(quantized.apply, variables, X).products] == ["fprop"] * 2


class Encoder(linen.Module):
    def setup(self):
        self.layers = [linen.Dense(16), linen.Dense(16)]
        self.norm = linen.BatchNorm(use_running_average=False)

    def encode(self, x):
        return self.layers[0](x)

    def __call__(self, x):
        return self.norm(self.layers[1](self.encode(x)))


def test_other_methods_and_mutable_collections():
    model = quantize_model(Encoder(), [("layers_0", FP4), (".*", None)])
    variables = model.init(jax.random.key(0), X)
    expected = dot(X, variables["params"]["layers_0"]["kernel"])
    for method in ("encode", Encoder.encode, Encoder().encode):
        np.testing.assert_array_equal(jax.jit(partial(model.apply, method=method))(variables, X), expected)
    apply = jax.jit(partial(model.apply, capture_intermediates=True, mutable=["intermediates", "batch_stats"]))
    _, state = apply(variables, X)
    assert set(state) == {"intermediates", "batch_stats"}
    np.testing.assert_array_equal(state["intermediates"]["layers_0"]["__call__"][0], expected)


def test_rules_end_at_the_model_they_were_given_to():
    inner = Encoder()
    variables = inner.init(jax.random.key(0), X)

    class Outer(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(16, name="own")(x) + inner.apply(variables, x, method="encode")

    outer = quantize_model(Outer(), [(".*", FP4)])
    kinds = [p.kind for p in fp4jax.explain(outer.apply, shapes(outer, X), X).products]
    assert sorted(kinds) == ["fprop", "plain"]


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
def test_eight_devices_compute_what_one_does(kind):
    model = quantize_model(linen.Dense(16), ALL)
    x = jnp.tile(X[:4], (2, 1))
    variables = model.init(jax.random.key(0), x)
    grads = jax.jit(jax.value_and_grad(lambda v, x: (model.apply(v, x) ** 2).mean()))
    expected = grads(variables, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(variables, jax.NamedSharding(mesh, jax.P()))
        actual = grads(placed, jax.device_put(x, jax.NamedSharding(mesh, jax.P("data"))))
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


def test_the_table_of_a_scanned_model():
    report = describe_model(quantize_model(Model("scan"), RULES, backend="xla"), TOKENS)
    rows = {row.path: row.cells() for row in report.layers}
    assert rows["blocks.attention.query"][1:] == ("linen.DenseGeneral", "2 × (16 × 2 × 8)", "fp4_vector", "xla", "544")
    assert rows["blocks.mix"][1:3] == ("linen.Einsum", "2 × (16 × 16)")
    assert rows["embed"] == ("embed", "linen.Embed", "–", "–", "–", "176")
    vmapped = linen.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(8)
    row = describe_model(quantize_model(vmapped, ALL), X).layers[0]
    assert row.cells()[1:3] == ("linen.Dense", "6 × (16 × 8)")
    assert str(report).endswith("84.7% of 3,627 parameters are quantized")
