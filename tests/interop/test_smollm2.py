"""SmolLM2-135M-Instruct: logits and loss of Hugging Face, conversion, packing. Needs the file of 98 MB.

It runs where $FP4JAX_SMOLLM2 names the file, or `fp4jax.interop.fetch_smollm2` has fetched it.
"""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small_llama import assert_same_bits

import fp4jax
from fp4jax.interop import (
    InteropError,
    build_model,
    find_smollm2,
    gguf_tokenizer,
    load_gguf,
    load_hf,
    load_packed,
    quantize_params,
    save_hf,
    save_packed,
)
from fp4jax.models import count_parameters, token_nll

REFERENCE = json.loads(Path(__file__).with_name("smollm2_reference.json").read_text())
"""450 tokens of a text and, at 8 places of it, Hugging Face's logits of 32 vocabulary entries and nll of the next."""

LOGITS = "FP4JAX_SMOLLM2_LOGITS"
"""Environment variable that names the whole reference, an .npz: `ids` [4, 512], and `logits`
[4, 8, 49152] of every 64th place."""


def _find():
    try:
        return find_smollm2()
    except InteropError:  # a stale variable skips here; test_pretrained.py tests its message
        return None


FILE = _find()
pytestmark = pytest.mark.skipif(FILE is None, reason="SmolLM2 is not here")


@pytest.fixture(scope="module")
def smollm2():
    assert FILE is not None
    return load_gguf(FILE, dtype="float32")


def test_its_shape(smollm2):
    config, _ = smollm2
    assert count_parameters(config) == 134_515_008
    assert (config.num_layers, config.embed_dim, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.rope_base, config.norm_eps, config.tie_embeddings) == (1e5, 1e-5, True)


@functools.partial(jax.jit, static_argnums=0)
def forward(graphdef, state, ids):
    return nnx.merge(graphdef, state)(ids)


def test_logits_and_loss_are_hugging_faces(smollm2):
    model = build_model(*smollm2)
    ids = jnp.asarray(REFERENCE["ids"], jnp.int32)[None]
    logits = forward(*nnx.split(model), ids)[0]
    places = np.array(REFERENCE["places"])
    expected = np.array(REFERENCE["logits"], np.float32)
    actual = np.asarray(logits)[np.ix_(places, REFERENCE["vocabulary"])]
    assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()  # four decimals are kept
    nll = token_nll(logits[:-1], ids[0, 1:])[places]
    np.testing.assert_allclose(nll, REFERENCE["nll"], rtol=0, atol=1e-4)


@pytest.mark.skipif(LOGITS not in os.environ, reason=f"${LOGITS} does not name the whole reference")
def test_all_logits_and_the_mean_loss_are_hugging_faces(smollm2):
    reference = np.load(os.environ[LOGITS])
    parts = nnx.split(build_model(*smollm2))
    losses = []
    for ids, expected in zip(reference["ids"].astype(np.int32), reference["logits"]):
        logits = forward(*parts, ids[None])[0]
        assert np.abs(np.asarray(logits)[::64] - expected).max() < 1e-3 * np.abs(expected).max()
        losses.append(token_nll(logits[:-1], jnp.asarray(ids[1:])))
    assert float(jnp.mean(jnp.stack(losses))) == pytest.approx(3.18073, abs=1e-4)


def test_its_tokenizer_gives_the_ids_of_hugging_faces():
    assert FILE is not None
    tokenizer = gguf_tokenizer(FILE)
    text = tokenizer.decode(REFERENCE["ids"])
    assert text.startswith("To the Congress of the United States: The State of the Union is sound.")
    assert tokenizer.encode(text).ids == REFERENCE["ids"]
    assert [tokenizer.decode([i]) for i in tokenizer.encode("It's 1977, né?").ids] == [
        "It", "'s", " ", "1", "9", "7", "7", ",", " n", "é", "?",
    ]  # fmt: skip


def test_it_goes_round_through_hugging_face_bit_for_bit(smollm2, tmp_path):
    config, params = smollm2
    save_hf(tmp_path / "hf", config, params, shard_bytes=300_000_000)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 2
    found, loaded = load_hf(tmp_path / "hf", dtype="float32")
    assert found == config
    assert_same_bits(loaded, params)


def test_packed_it_takes_less_than_four_and_a_tenth_bits_a_weight(smollm2, tmp_path):
    config, params = smollm2
    packed = quantize_params(config, params, fp4jax.nn.default_rules(fp4jax.recipes.fp4()))
    bits = save_packed(tmp_path / "packed", config, packed, dtype=jnp.bfloat16)
    assert 4.04 < bits < 4.06
    size = (tmp_path / "packed" / "model.safetensors").stat().st_size
    # 106.2 M linear weights in 4.05 bits and 28.3 M others in 16, and a header.
    assert 110e6 < size < 111e6
    _, loaded = load_packed(tmp_path / "packed")
    assert_same_bits(loaded["layers"]["mlp"], packed["layers"]["mlp"])
