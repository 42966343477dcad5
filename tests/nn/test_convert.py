"""`quantize_model`: which layers it finds, what it leaves alone, what it refuses, and what the result prints."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stock
from flax import linen, nnx

import fp4jax
from fp4jax.nn import Blocks, KeepKernelDtype, RulesSchedule, describe_model, keep_blocks, quantize_model

FP4, FP8, BF16 = fp4jax.recipes.fp4_vector(), fp4jax.recipes.fp8(), fp4jax.recipes.bf16()
ALL = [(".*", FP4)]
X = jax.random.normal(jax.random.key(0), (6, 16))
call = nnx.jit(lambda model, x: model(x))  # one program: operations that run by themselves compile one by one


def linear(din=16, dout=12, seed=0, **options):
    return nnx.Linear(din, dout, rngs=nnx.Rngs(seed), **options)


def recipes_of(model):
    """Name of the recipe by path, of what can follow one."""
    rows = describe_model(model).layers
    return {row.path: getattr(row.recipe, "name", None) for row in rows if row.kind != "nnx.Embed"}


class Of(nnx.Module):
    """A model of these parts."""

    def __init__(self, **parts):
        for name, part in parts.items():
            setattr(self, name, nnx.data(part))


# --- what it finds -------------------------------------------------------------------------------------------------


def test_layers_stand_in_lists_dicts_sequentials_tuples_and_attributes():
    model = Of(
        up=linear(),
        blocks=nnx.List([linear(), linear()]),
        table=nnx.Dict(a=linear()),
        chain=nnx.Sequential(linear(), nnx.relu, linear(12, 3)),
        pair=(linear(), {"b": linear()}),
        general=nnx.LinearGeneral((4, 4), 12, axis=(-2, -1), rngs=nnx.Rngs(0)),
        heads=nnx.Einsum("td,dhk->thk", (16, 2, 4), rngs=nnx.Rngs(0)),
        ours=fp4jax.nn.Linear(16, 12, rngs=nnx.Rngs(0)),
        cell=nnx.GRUCell(16, 4, rngs=nnx.Rngs(0)),
        embed=nnx.Embed(3, 16, rngs=nnx.Rngs(0)),
    )
    found = recipes_of(quantize_model(model, ALL))
    assert set(found.values()) == {"fp4_vector"}
    assert set(found) == {
        "up", "blocks.0", "blocks.1", "table.a", "chain.layers.0", "chain.layers.2", "pair.0", "pair.1.b", "general",
        "heads", "ours", "cell.dense_i", "cell.dense_h",
    }  # fmt: skip
    assert model.ours.recipe == FP4


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [False, True])
def test_a_stock_layer_becomes_the_layer_of_fp4jax(dtype, use_bias):
    options = {"dtype": dtype, "use_bias": use_bias}
    ours = fp4jax.nn.Linear(16, 12, recipe=FP4, rngs=nnx.Rngs(0), **options)
    model = quantize_model(linear(**options), [("^$", FP4)])
    out, expected = call(model, X), call(ours, X)
    np.testing.assert_array_equal(out, expected)
    assert out.dtype == expected.dtype
    assert model.kernel[...].dtype == jnp.float32  # and it is not rounded on the way, or the values would differ


def test_linear_general_and_einsum_multiply_the_same_numbers():
    flat = quantize_model(linear(use_bias=False, dtype=jnp.bfloat16), ALL)
    general = nnx.LinearGeneral((4, 4), (3, 4), axis=(-2, -1), use_bias=False, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    heads = nnx.Einsum("td,dhk->thk", (16, 3, 4), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for layer, x in ((general, X.reshape(6, 4, 4)), (heads, X)):
        layer.kernel[...] = flat.kernel[...].reshape(layer.kernel.shape)
        out = call(quantize_model(layer, ALL), x)
        np.testing.assert_array_equal(out.reshape(6, 12), call(flat, X))


def test_parameters_their_paths_and_their_metadata_stay():
    model = stock.Scanned(8, 3, rngs=nnx.Rngs(0))
    before = nnx.to_flat_state(nnx.state(model))
    arrays = [variable[...] for _, variable in before]
    after = nnx.to_flat_state(nnx.state(quantize_model(model, ALL)))
    assert [path for path, _ in after] == [path for path, _ in before]
    assert all(variable[...] is array for (_, variable), array in zip(after, arrays, strict=True))


def test_partition_specs_have_the_rank_of_their_parameters():
    def create(rngs):
        return nnx.Linear(8, 8, kernel_metadata={"out_sharding": ("a", "b"), "eager_sharding": False}, rngs=rngs)

    split = nnx.split_rngs(splits=3)
    model = split(nnx.vmap(create, transform_metadata={nnx.PARTITION_NAME: "layers"}))(nnx.Rngs(0))
    specs = nnx.get_partition_spec(nnx.state(quantize_model(model, ALL)))
    assert specs["kernel"].get_raw_value() == jax.P("layers", "a", "b")


# --- changing recipes ----------------------------------------------------------------------------------------------


def test_it_can_be_called_again_and_taken_back():
    model = Of(
        up=linear(use_bias=False), down=linear(12, 16), heads=nnx.Einsum("td,dhk->thk", (16, 2, 4), rngs=nnx.Rngs(0))
    )
    plain = nnx.graphdef(model)
    rules = [("up", FP8), (".*", FP4)]
    once = nnx.graphdef(quantize_model(model, rules))
    assert once != plain
    assert nnx.graphdef(quantize_model(model, rules)) == once
    assert recipes_of(quantize_model(model, ALL)) == dict.fromkeys(("down", "heads", "up"), "fp4_vector")
    assert nnx.graphdef(quantize_model(model, [(".*", None)])) == plain


def test_an_error_changes_nothing():
    model = Of(first=linear(), second=linear(dot_general=lambda *args, **options: jax.lax.dot_general(*args)))
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match="'second' cannot follow recipe fp4_vector: its dot_general is <function"):
        quantize_model(model, ALL)
    assert nnx.graphdef(model) == before
    quantize_model(model, [("second", None), (".*", FP4)])
    assert recipes_of(model) == {"first": "fp4_vector", "second": None}


def test_a_jitted_step_compiles_once_for_each_recipe():
    schedule = RulesSchedule({0: ALL, 2: [(".*", None)], 4: ALL})
    model = quantize_model(linear(use_bias=False), schedule(0))
    traced = []

    @nnx.jit
    def step(model, x):
        traced.append(describe_model(model).layers[0].recipe)
        loss, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return loss

    seen = []
    for i in range(6):
        if schedule.switches(i):
            quantize_model(model, schedule(i))
        seen.append(describe_model(model).layers[0].recipe)
        step(model, X)
    assert seen == [FP4, FP4, None, None, FP4, FP4]
    assert traced == [FP4, None]


@pytest.mark.parametrize("phases", [{}, {1: ALL}, {-1: ALL, 0: ALL}])
def test_a_schedule_begins_at_0(phases):
    with pytest.raises(
        ValueError, match=re.escape(f"phases begin at steps {sorted(phases)}; the first must begin at 0")
    ):
        RulesSchedule(phases)
    with pytest.raises(ValueError, match="step=-1 must not be negative"):
        RulesSchedule({0: ALL})(-1)


# --- rules ---------------------------------------------------------------------------------------------------------


def test_a_rule_that_matches_nothing_names_near_misses():
    with pytest.raises(ValueError, match=r"rules\[0\]: 'blokcs' matches no layer; did you mean 'blocks' or") as error:
        quantize_model(Of(blocks=nnx.List([linear()])), [("blokcs", FP4), (".*", None)])
    assert str(error.value).endswith("The layers are:\n  blocks.0")


def test_rules_for_what_can_follow_no_recipe():
    model = Of(embed=nnx.Embed(3, 16, rngs=nnx.Rngs(0)), conv=nnx.Conv(1, 2, (3,), rngs=nnx.Rngs(0)), up=linear())
    assert recipes_of(quantize_model(model, [("embed", None), (".*", FP4)]))["up"] == "fp4_vector"
    message = r"'conv' matches only what can follow no recipe: 'conv' \(nnx\.Conv\) stays in high precision; write None"
    with pytest.raises(ValueError, match=message):
        quantize_model(model, [("conv", FP8), (".*", FP4)])


def test_models_without_layers():
    with pytest.raises(
        ValueError, match=r"rules\[0\]: '\.\*' matches no layer: the model has none that can follow a re"
    ):
        quantize_model(Of(), ALL)
    with pytest.raises(
        ValueError, match=r"'\.\*' matches only what can follow no recipe: 'embed' \(nnx\.Embed\) stays in high"
    ):
        quantize_model(Of(embed=nnx.Embed(3, 4, rngs=nnx.Rngs(0))), ALL)
    quantize_model(Of(embed=nnx.Embed(3, 4, rngs=nnx.Rngs(0))), [(".*", None)])
    assert str(describe_model(Of())).endswith("0.0% of 0 parameters are quantized")


def test_first_and_last_blocks_stay_in_high_precision():
    model = Of(layers=nnx.List([Of(up=linear(), down=linear(12, 16)) for _ in range(4)]), head=linear())
    quantize_model(model, [keep_blocks("layers", first=1, last=2), ("head", None), (".*", FP4)])
    kept = {path for path, recipe in recipes_of(model).items() if recipe is None}
    assert kept == {"head", *(f"layers.{i}.{name}" for i in (0, 2, 3) for name in ("up", "down"))}
    quantize_model(model, [(Blocks("layers", (-1,), part="up|gate"), FP8), (".*", None)])
    assert [path for path, recipe in recipes_of(model).items() if recipe] == ["layers.3.up"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (Blocks("layers", (4,)), r"names block 4, but 'layers' has 2, 0 to 1"),
        (Blocks("layers", (0, 1, -1)), r"names a block twice, since 'layers' has only 2"),
        (Blocks("laeyrs", (0,)), r"matches no layer; did you mean 'layers' or"),
        (Blocks("layers", (0,), part="("), r"'\(' is not a regular expression"),
    ],
)
def test_blocks_that_are_not_there(pattern, message):
    model = Of(layers=nnx.List([linear(), linear()]))
    with pytest.raises(ValueError, match=r"rules\[0\]: .*" + message):
        quantize_model(model, [(pattern, None), (".*", FP4)])


def test_blocks_want_indices():
    with pytest.raises(ValueError, match=r"indices=\(\) must be integers"):
        Blocks("layers", ())
    with pytest.raises(ValueError, match="first=0 and last=0 must be numbers of blocks"):
        keep_blocks("layers")


@pytest.mark.parametrize("rules", [FP4, ".*", {".*": FP4}, [("up", "fp4")]])
def test_rules_of_another_kind_are_refused(rules):
    with pytest.raises(TypeError, match="must be a"):
        quantize_model(linear(), rules)


def test_other_things_than_models_are_refused():
    with pytest.raises(TypeError, match=r"model is a Linen module; fp4jax\.linen\.quantize_model takes those"):
        quantize_model(linen.Dense(3), ALL)
    with pytest.raises(TypeError, match=r"model must be a flax\.nnx\.Module, got .*MLP'>; create it first"):
        quantize_model(stock.MLP, ALL)
    with pytest.raises(TypeError, match=r"model must be a flax\.nnx\.Module, got <class 'list'>"):
        quantize_model([linear()], ALL)
    with pytest.raises(TypeError, match=r"rngs must be nnx\.Rngs, such as nnx\.Rngs\(noise=0\), or None; got 0"):
        quantize_model(linear(), ALL, rngs=0)
    with pytest.raises(ValueError, match="backend='tpu' is unknown"):
        quantize_model(linear(), ALL, backend="tpu")


# --- layers with something of their own ----------------------------------------------------------------------------


def test_products_that_fp4jax_put_there_are_decided_anew():
    dot = fp4jax.DotGeneral(FP8, "xla")
    layer = linear(dot_general=dot, promote_dtype=KeepKernelDtype())
    assert describe_model(layer).layers[0].backend == "xla"
    assert describe_model(quantize_model(layer, ALL)).layers[0].recipe == FP4


def test_products_and_promotions_of_the_user_are_refused():
    general = nnx.LinearGeneral(16, 12, dot_general_cls=lambda: jax.lax.dot_general, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="it has a dot_general_cls of its own"):
        quantize_model(general, ALL)
    with pytest.raises(
        ValueError, match=r"it has a promote_dtype of its own, .* may round the kernel before it is quant"
    ):
        quantize_model(linear(promote_dtype=lambda args, **options: args), ALL)
    with pytest.raises(
        ValueError, match=r"its einsum_op is <function .*, not one of Flax or fp4jax. Give it None in the"
    ):
        quantize_model(nnx.Einsum("ab,bc->ac", (16, 4), einsum_op=lambda *a, **k: 0, rngs=nnx.Rngs(0)), ALL)


class Bypass(nnx.Linear):
    def __call__(self, x):
        return x @ self.kernel[...]


class Scaled(nnx.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_subclass_that_would_never_use_its_recipe_is_refused():
    with pytest.raises(ValueError, match="overrides __call__ and mentions neither dot_general nor super") as error:
        quantize_model(Bypass(16, 12, rngs=nnx.Rngs(0)), ALL)
    assert "fp4jax.nn.LAYERS[Bypass] =" in str(error.value)
    scaled = quantize_model(Scaled(16, 12, rngs=nnx.Rngs(0)), ALL)
    np.testing.assert_array_equal(call(scaled, X), 2 * call(quantize_model(linear(), ALL), X))
    lora = nnx.LoRALinear(16, 12, lora_rank=2, rngs=nnx.Rngs(0))
    assert [(row.path, row.recipe) for row in describe_model(quantize_model(lora, ALL)).layers] == [
        ("", FP4),
        ("lora", None),
    ]


def test_a_layer_of_ones_own_takes_part_by_a_row(monkeypatch):
    class Table(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 12)))
            self.dot_general = jax.lax.dot_general

        def __call__(self, x):
            return self.dot_general(x, self.kernel[...], (((1,), (0,)), ((), ())))

    ours = Table(nnx.Rngs(0))
    ours.dot_general = fp4jax.DotGeneral(FP8)
    assert describe_model(ours).layers[0].recipe == FP8
    with pytest.raises(ValueError, match="multiplies by fp4jax already, but its class Table has no row"):
        quantize_model(nnx.Dict(table=ours, up=linear()), ALL)

    row = fp4jax.nn.LayerKind("dot_general", (jax.lax.dot_general,), lambda table: (16, 12), promotes=False)
    monkeypatch.setitem(fp4jax.nn.LAYERS, Table, row)
    table = quantize_model(Table(nnx.Rngs(0)), ALL)
    expected = fp4jax.dot_general(X, table.kernel[...], (((1,), (0,)), ((), ())), recipe=FP4)
    np.testing.assert_array_equal(table(X), expected)
    quantize_model(table, [(".*", None)])
    assert table.dot_general is jax.lax.dot_general


# --- sharing -------------------------------------------------------------------------------------------------------


def test_a_shared_module_answers_to_all_of_its_paths():
    shared = linear()
    model = Of(a=shared, b=nnx.List([shared]), c=linear())
    quantize_model(model, [("a|b", FP4), ("c", None)])
    report = describe_model(model)
    assert [row.path for row in report.layers] == ["a (and 1 more)", "c"]
    assert report.parameters == 2 * (16 * 12 + 12)
    with pytest.raises(
        ValueError, match=r"'a' and layer 'b\.0' are one shared module, and the rules give it fp4_vector"
    ):
        quantize_model(model, [("a", FP4), (".*", None)])


def test_a_tied_kernel_counts_once_and_each_product_has_its_recipe():
    model = Of(a=linear(), b=linear())
    model.b.kernel = model.a.kernel
    report = describe_model(quantize_model(model, [("a", FP4), ("b", FP8)]))
    assert [row.recipe for row in report.layers] == [FP4, FP8]
    assert (report.parameters, report.covered) == (16 * 12 + 2 * 12, 16 * 12)


def test_a_module_that_refers_back_to_its_parent():
    model = Of(up=linear())
    model.up.parent = nnx.data(model)
    assert recipes_of(quantize_model(model, ALL)) == {"up": "fp4_vector"}


# --- what it prints ------------------------------------------------------------------------------------------------


def test_the_table_of_a_stacked_model():
    model = quantize_model(stock.Scanned(8, 3, rngs=nnx.Rngs(0)), [("head", BF16), (".*", FP4)], backend="xla")
    report = describe_model(model)
    assert str(report) == "\n".join(
        [
            "path           layer       kernel       recipe      backend  parameters",
            "-------------  ----------  -----------  ----------  -------  ----------",
            "head           nnx.Linear  8 × 8        bf16        xla              72",
            "layers.linear  nnx.Linear  3 × (8 × 8)  fp4_vector  xla             216",
            "layers.out     nnx.Linear  3 × (8 × 8)  fp4_vector  xla             192",
            "80.0% of 480 parameters are quantized",
        ]
    )
    assert report.share == 0.8
    assert dataclasses.asdict(report.layers[1])["stack"] == (3,)
