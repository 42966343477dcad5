"""Shapes, parameter counts and refusals of `LlamaConfig`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from small import SMALL

from fp4jax.models import MODELS, Llama, LlamaConfig, count_parameters


def abstract_parameters(config: LlamaConfig) -> list[jax.ShapeDtypeStruct]:
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return jax.tree.leaves(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(config, id=name) for name, config in MODELS.items()),
        pytest.param(SMALL, id="gqa"),
        pytest.param(dataclasses.replace(SMALL, tie_embeddings=True), id="tied"),
    ],
)
def test_closed_form_counts_what_the_model_holds(config):
    parameters = abstract_parameters(config)
    assert sum(p.size for p in parameters) == count_parameters(config)
    assert {p.dtype for p in parameters} == {jnp.dtype("float32")}


def test_published_counts():
    assert count_parameters(MODELS["7b"]) == 6_738_415_616
    assert count_parameters(MODELS["13b"]) == 13_015_864_320
    assert count_parameters(MODELS["60m"]) == 58_073_600  # GaLore's llama_60m
    assert count_parameters(dataclasses.replace(MODELS["1.3b"], tie_embeddings=True)) == 1_279_887_360


@pytest.mark.parametrize("name", [name for name in MODELS if name != "tiny"])
def test_a_name_is_true_to_its_count_within_15_percent(name):
    named = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert count_parameters(MODELS[name]) == pytest.approx(named, rel=0.15)


def test_tiny_is_tiny():
    tiny = MODELS["tiny"]
    assert tiny.vocab_size == 256
    assert count_parameters(tiny) - 2 * tiny.vocab_size * tiny.embed_dim < 1_000_000


def test_initial_standard_deviation_is_the_authors_at_their_width():
    assert MODELS["7b"].weight_std == pytest.approx(0.0099, abs=5e-5)
    model = Llama(dataclasses.replace(SMALL, embed_dim=128, mlp_dim=256), rngs=nnx.Rngs(0))
    config = model.config
    assert float(jnp.std(model.layers.mlp.gate.kernel[...])) == pytest.approx(config.weight_std, rel=0.02)
    assert float(jnp.std(model.layers.mlp.down.kernel[...])) == pytest.approx(config.weight_std / 2, rel=0.02)
    assert bool(jnp.all(model.layers.mlp_norm.scale[...] == 1))


def test_layers_start_from_different_weights():
    kernels = Llama(SMALL, rngs=nnx.Rngs(0)).layers.mlp.up.kernel[...]
    assert not bool(jnp.any(kernels[0] == kernels[1]))


def test_configurations_compare_and_hash_by_meaning():
    same = dataclasses.replace(SMALL, dtype="bfloat16")
    assert same == SMALL
    assert hash(same) == hash(SMALL)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be a positive integer, got 0"),
        ({"embed_dim": 32.0}, "embed_dim must be a positive integer, got 32.0"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"head_dim": 7}, "head_dim=7 must be even: RoPE rotates pairs"),
        ({"attention": "flash"}, "attention='flash' must be None or one of xla, cudnn"),
        ({"remat": "some"}, "remat='some' must be one of none, full, dots, quantized"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)
