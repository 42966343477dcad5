"""Packed weights: bit for bit there and back, the bits they cost, their layout on the disk, damage."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_llama import SMALL, assert_same_bits, draw, saved, small

import fp4jax
from fp4jax import E1M2, E2M1, E3M0, E4M3, PerBlock, PerBlock2D, PerTensor, PerVector, PowerOfTwo, TwoLevel
from fp4jax.interop import (
    InteropError,
    dequantize_params,
    initial_params,
    load_hf,
    load_packed,
    quantize_params,
    save_hf,
    save_packed,
)

NAME = "model.layers.1.mlp.up_proj.weight"
SPECS = {
    "vector": fp4jax.QuantSpec(E2M1),
    "tensor, ties up": fp4jax.QuantSpec(E2M1, PerTensor(), rounding=fp4jax.TIES_UP),
    "mxfp4": fp4jax.QuantSpec(E2M1, PerBlock(32), PowerOfTwo("floor")),
    "nvfp4": fp4jax.QuantSpec(E2M1, PerBlock(16), TwoLevel()),
    "squares": fp4jax.QuantSpec(E2M1, PerBlock2D(16, 16), TwoLevel()),
    "E1M2": fp4jax.QuantSpec(E1M2),
    "E3M0": fp4jax.QuantSpec(E3M0, PerVector(), PowerOfTwo("rceil")),
    "E4M3": fp4jax.QuantSpec(E4M3),
}
"""Every kind of scale, and block sizes that do not divide the axes (32, 40 and 44 long)."""


def recipe(spec):
    plain = fp4jax.recipes.bf16()
    return dataclasses.replace(plain, name="test", fprop=fp4jax.Gemm(None, spec))


def packed(spec=SPECS["vector"], config=SMALL, params=None):
    rules = [("mlp.up|attention.output", recipe(spec)), (".*", None)]
    return quantize_params(config, draw(config) if params is None else params, rules)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_round_trip_keeps_codes_scales_and_the_rest_bit_for_bit(tmp_path, spec):
    params = packed(spec)
    save_packed(tmp_path / "a", SMALL, params)
    config, loaded = load_packed(tmp_path / "a", dtype="float32")
    assert config == SMALL
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    assert_same_bits(loaded, params)


@pytest.mark.parametrize("spec", [SPECS["tensor, ties up"], SPECS["nvfp4"]], ids=["tensor", "nvfp4"])
def test_each_block_is_quantized_as_its_product_would(spec):
    params = packed(spec)
    stacked = params["layers"]["attention"]["output"]["kernel"]
    plain = dequantize_params(params)["layers"]["attention"]["output"]["kernel"]
    for i, kernel in enumerate(draw()["layers"]["attention"]["output"]["kernel"]):
        alone = fp4jax.quantize(jnp.asarray(kernel), spec, axis=-2)
        assert_same_bits(jax.tree.map(lambda leaf, i=i: leaf[i], stacked), alone)
        assert_same_bits(plain[i], alone.dequantize())


def test_zeros_signs_and_blocks_that_are_not_finite_survive(tmp_path):
    params = draw()
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    kernel[0, :, 0], kernel[0, :, 1] = 0.0, -0.0
    kernel[1, 3, 2], kernel[1, 3, 3] = np.nan, np.inf
    for name in ("vector", "nvfp4"):
        before = packed(SPECS[name], params=params)
        save_packed(tmp_path / name, SMALL, before)
        _, loaded = load_packed(tmp_path / name)
        assert_same_bits(loaded, before)
        plain = dequantize_params(loaded)["layers"]["mlp"]["up"]["kernel"]
        assert np.isnan(plain[1, 3, 2:4]).all()
        assert np.isfinite(plain[0]).all()


def test_the_files_hold_low_nibbles_first_and_scales_as_bytes(tmp_path):
    params = packed(SPECS["nvfp4"])
    save_packed(tmp_path / "a", SMALL, params)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    q = jax.tree.map(lambda leaf: leaf[1], params["layers"]["mlp"]["up"]["kernel"])
    codes = tensors[f"{NAME}.codes"]
    assert (codes.dtype, codes.shape) == (np.uint8, (44, 16))
    # By the format's own definition: element 0, along k, in the low nibble of byte 0.
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    grid = np.concatenate([positive, -positive])
    assert np.array_equal(grid[codes & 15], np.asarray(q.values, np.float32).T[:, 0::2])
    assert np.array_equal(grid[codes >> 4], np.asarray(q.values, np.float32).T[:, 1::2])
    scale = tensors[f"{NAME}.scale"]
    assert (scale.dtype, scale.shape) == (np.uint8, (44, 2))
    assert scale.tobytes() == np.ascontiguousarray(np.asarray(q.scale).T).tobytes()
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert manifest["quantized"][NAME] == {
        "shape": [44, 32], "format": "e2m1", "granularity": {"name": "PerBlock", "size": 16},
        "scale_rule": {"name": "TwoLevel"}, "rounding": "nearest_even",
        "scale": {"dtype": "float8_e4m3fn", "shape": [44, 2]}, "outer_scale": {"dtype": "float32", "shape": [1, 1]},
    }  # fmt: skip
    assert all(tensor.dtype in (np.uint8, np.float32) for tensor in tensors.values())


@pytest.mark.parametrize("spec", ["vector", "E4M3"])
def test_the_bits_reported_are_those_on_the_disk(tmp_path, spec):
    config = small(embed_dim=512, mlp_dim=640, num_layers=1, head_dim=64)
    bits = save_packed(tmp_path / "a", config, packed(SPECS[spec], config))
    assert bits == json.loads((tmp_path / "a" / "manifest.json").read_text())["bits_per_quantized_weight"]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith((".codes", ".scale")))
    weights = 512 * (256 + 640)
    assert bits == 8 * stored / weights
    # 4 and 32/k, k = 256 and 512.
    assert 4.06 < bits < 4.1 if spec == "vector" else 8.06 < bits < 8.1


def test_the_rest_can_be_narrower_and_a_folder_opens_like_any_model(tmp_path):
    params = packed()
    save_packed(tmp_path / "a", SMALL, params, dtype=jnp.bfloat16)
    assert load_file(tmp_path / "a" / "model.safetensors")["model.norm.weight"].dtype.name == "bfloat16"
    config, opened, tokenizer = initial_params(tmp_path / "a", dtype="float32")
    assert (config, tokenizer) == (SMALL, None)
    expected = dequantize_params(params)
    assert_same_bits(opened["layers"]["mlp"]["up"], expected["layers"]["mlp"]["up"])
    assert_same_bits(opened["norm"]["scale"], np.asarray(jnp.asarray(expected["norm"]["scale"], jnp.bfloat16), "f4"))
    save_hf(tmp_path / "hf", config, opened)  # dequantized, for transformers
    assert_same_bits(load_hf(tmp_path / "hf")[1], opened)


def test_what_cannot_be_packed_is_refused(tmp_path):
    params = draw()
    stochastic = dataclasses.replace(SPECS["vector"], rounding=fp4jax.STOCHASTIC)
    with pytest.raises(InteropError, match=r"rounds weights stochastically \(E2M1 .*\): export to nearest"):
        packed(stochastic)
    tied = small(tie_embeddings=True)
    with pytest.raises(InteropError, match=r"rules quantize 'head' .* tied to the embedding: begin them with \('head'"):
        quantize_params(tied, draw(tied), [(".*", recipe(SPECS["vector"]))])
    with pytest.raises(InteropError, match=r"no parameter is quantized: make them with quantize_params"):
        save_packed(tmp_path / "a", SMALL, params)
    with pytest.raises(InteropError, match=r"dtype=int8 is not one of float32, bfloat16, float16"):
        save_packed(tmp_path / "a", SMALL, packed(), dtype=np.int8)
    assert not (tmp_path / "a").exists()
    folder, _ = saved(tmp_path / "hf")
    with pytest.raises(InteropError, match=r"is not empty: give a new folder"):
        save_packed(folder, SMALL, packed())


def rewrite(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors")


def edit(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


DAMAGED = {
    r"is not a whole safetensors file": lambda folder: (folder / "model.safetensors").write_bytes(b"1" * 64),
    r"has format and version \(None, 1\), and this fp4jax reads": lambda f: edit(f, lambda m: m.pop("format")),
    r"has format and version .* 2\)": lambda folder: edit(folder, lambda m: m.update(version=2)),
    r"lacks its config or its list": lambda folder: edit(folder, lambda m: m.pop("quantized")),
    r"config in .*manifest.json.*: model_type='gpt2'": lambda f: edit(f, lambda m: m["config"].update(
        model_type="gpt2")),
    r"lists tensors that our LLaMA does not have: odd": lambda f: edit(f, lambda m: m["quantized"].update(odd={})),
    r"up_proj.weight has no readable record: KeyError\('e2m0'\)": lambda f: edit(f, lambda m: m["quantized"][
        NAME].update(format="e2m0")),
    r"is quantized in another way in some blocks": lambda f: edit(f, lambda m: m["quantized"][NAME].update(
        rounding="ties_up")),
    r"there is no tensor model.layers.1.mlp.up_proj.weight$": lambda f: edit(f, lambda m: m["quantized"].pop(NAME)),
    r"up_proj.weight.codes has dtype F32, and should be U8": lambda f: rewrite(
        f, f"{NAME}.codes", lambda x: x.astype(np.float32)),
    r"up_proj.weight.codes has shape \(43, 16\), and": lambda f: rewrite(f, f"{NAME}.codes", lambda x: x[1:].copy()),
    r"up_proj.weight.scale has dtype U8, and should be F32": lambda f: rewrite(
        f, f"{NAME}.scale", lambda x: x.astype(np.uint8)),
}  # fmt: skip


@pytest.mark.parametrize(("message", "harm"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_damaged_folders_are_refused_with_the_name_of_what_is_wrong(tmp_path, message, harm):
    save_packed(tmp_path / "a", SMALL, packed())
    harm(tmp_path / "a")
    with pytest.raises(InteropError, match=message):
        load_packed(tmp_path / "a")
