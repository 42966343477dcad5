"""Models from Flax's documentation: converted by one call, trained, and fed the checkpoint of the unquantized model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import stock
from flax import nnx

import fp4jax
from fp4jax.nn import describe_model, quantize_model

FP4 = fp4jax.recipes.fp4_vector()
LABELS = jnp.arange(16) % 10
MODELS = {
    "mlp": (
        lambda: stock.MLP(16, 32, 10, rngs=nnx.Rngs(0)),
        jax.random.normal(jax.random.key(1), (16, 16)),
        LABELS,
        [("linear2", None), (".*", FP4)],
    ),
    "cnn": (
        lambda: stock.CNN(rngs=nnx.Rngs(0)),
        jax.random.normal(jax.random.key(1), (16, 8, 8, 1)),
        LABELS,
        [("linear2", None), (".*", FP4)],
    ),
    "transformer": (
        lambda: stock.MiniGPT(8, 32, 16, 1, rngs=nnx.Rngs(0)),
        jax.random.randint(jax.random.key(1), (4, 8), 0, 32),
        jax.random.randint(jax.random.key(2), (4, 8), 0, 32),
        [("emb|output_layer", None), (".*", FP4)],
    ),
}


@nnx.jit
def train_step(model, optimizer, inputs, labels):
    def loss_fn(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(inputs), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize("name", MODELS)
def test_one_call_converts_it_its_checkpoint_loads_and_it_trains(name, tmp_path):
    create, inputs, labels, rules = MODELS[name]
    trained = create()
    for _, variable in nnx.to_flat_state(nnx.state(trained, nnx.Param)):
        variable[...] = variable[...] + 0.01  # not what `create` makes
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", nnx.state(trained))
        checkpointer.wait_until_finished()

        model = quantize_model(create(), rules)
        nnx.update(model, checkpointer.restore(tmp_path / "checkpoint", target=nnx.state(model)))
    assert_same_state(nnx.state(model), nnx.state(trained))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    losses = [float(train_step(model, optimizer, inputs, labels)) for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]

    quantize_model(model, [(".*", None)])  # and back: the same program as the model that was never quantized
    nnx.update(trained, nnx.state(model))
    assert nnx.graphdef(model) == nnx.graphdef(trained)


def assert_same_state(actual, expected):
    actual, expected = dict(nnx.to_flat_state(actual)), dict(nnx.to_flat_state(expected))
    assert list(actual) == list(expected)
    for path, variable in expected.items():
        assert type(actual[path]) is type(variable)
        assert actual[path].get_metadata() == variable.get_metadata()
        if not isinstance(variable, nnx.RngKey):
            np.testing.assert_array_equal(actual[path][...], variable[...])


def test_the_table_says_that_convolutions_stay():
    table = str(describe_model(quantize_model(stock.CNN(rngs=nnx.Rngs(0)), MODELS["cnn"][3])))
    assert table == "\n".join(
        [
            "path     layer       kernel         recipe      backend  parameters",
            "-------  ----------  -------------  ----------  -------  ----------",
            "conv1    nnx.Conv    3 × 3 × 1 × 4  –           –                40",
            "conv2    nnx.Conv    3 × 3 × 4 × 8  –           –               296",
            "linear1  nnx.Linear  32 × 32        fp4_vector  auto          1,056",
            "linear2  nnx.Linear  32 × 10        –           –               330",
            "59.5% of 1,722 parameters are quantized",
        ]
    )


def test_the_projections_of_attention_are_layers():
    report = describe_model(quantize_model(MODELS["transformer"][0](), MODELS["transformer"][3]))
    mha = {row.path: row for row in report.layers if "0.mha" in row.path}
    assert list(mha) == [f"transformer_blocks.0.mha.{name}" for name in ("key", "out", "query", "value")]
    assert all(row.recipe == FP4 for row in mha.values())
    assert mha["transformer_blocks.0.mha.out"].kernel == (2, 8, 16)
    text = str(report)
    assert "token_emb" in text
    assert "nnx.LayerNorm" in text


def test_the_program_multiplies_what_the_table_says():
    create, inputs, _, rules = MODELS["transformer"]
    graphdef, params, rest = nnx.split(quantize_model(create(), rules), nnx.Param, ...)
    explanation = fp4jax.explain(lambda p: nnx.merge(graphdef, p, rest, copy=True)(inputs), params)
    kinds = [(p.kind, p.lhs, p.rhs) for p in explanation.products]
    assert kinds.count(("fprop", "E2M1", "E2M1")) == 4 + 2  # the projections of attention and two layers
    assert kinds.count(("plain", "float32", "float32")) == 2 + 1  # scores, values, and the head
