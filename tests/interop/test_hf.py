"""Hugging Face folders: the layout against NumPy, round trips bit for bit, and what is refused."""

import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference_llama
from flax import nnx
from safetensors.numpy import load_file, save_file
from small_llama import SMALL, TOKENS, assert_same_bits, draw, edit_config, saved, small

from fp4jax.interop import InteropError, build_model, from_hf_config, load_hf, save_hf, to_hf_config
from fp4jax.models import MODELS

INDEX = "model.safetensors.index.json"


def tensors_of(folder):
    """All tensors of a folder, read without fp4jax."""
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def rewrite(folder, change):
    """Change the tensors of a folder of one file."""
    tensors = tensors_of(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True])
def test_our_model_computes_what_hugging_faces_does(tmp_path, tied):
    folder, params = saved(tmp_path / "hf", small(tie_embeddings=tied))
    expected = reference_llama.logits(json.loads((folder / "config.json").read_text()), tensors_of(folder), TOKENS)
    config, loaded = load_hf(folder, dtype="float32")
    actual = build_model(config, loaded)(jnp.asarray(TOKENS))
    # Float32 sums of about 60 terms against float64.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert_same_bits(loaded, params)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_a_round_trip_keeps_every_bit(tmp_path, tied, shard_bytes):
    config = small(tie_embeddings=tied)
    folder, params = saved(tmp_path / "a", config, shard_bytes=shard_bytes)
    assert (folder / INDEX).exists() == (shard_bytes == 20_000)
    found, loaded = load_hf(folder, dtype="float32")
    assert found == config
    assert_same_bits(loaded, params)
    save_hf(tmp_path / "b", found, loaded)
    assert_same_bits(tensors_of(tmp_path / "b"), tensors_of(folder))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_what_hugging_face_stores_in_sixteen_bits_comes_back_as_it_was(tmp_path, dtype):
    saved(tmp_path / "a", dtype=dtype)
    config, params = load_hf(tmp_path / "a")
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    save_hf(tmp_path / "b", config, params, dtype=dtype)
    stored = tensors_of(tmp_path / "b")
    assert {tensor.dtype for tensor in stored.values()} == {np.dtype(dtype)}
    assert_same_bits(stored, tensors_of(tmp_path / "a"))
    assert json.loads((tmp_path / "b" / "config.json").read_text())["torch_dtype"] == np.dtype(dtype).name


def test_extreme_values_survive_and_float16_refuses_what_it_cannot_hold(tmp_path):
    params = draw()
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    kernel[0, 0, :6] = [-0.0, 1e-40, 3e38, np.inf, -np.inf, np.nan]
    save_hf(tmp_path / "a", SMALL, params)
    assert_same_bits(load_hf(tmp_path / "a")[1], params)
    kernel[0, 0, :6] = 1e6
    with pytest.raises(InteropError, match=r"layers.0.mlp.up_proj.weight holds values beyond float16's 65504"):
        save_hf(tmp_path / "b", SMALL, params, dtype=np.float16)
    assert not (tmp_path / "b").exists()
    assert not list(tmp_path.glob(".b-*")), "a scratch folder was left behind"


def test_modules_and_states_are_taken_as_parameters(tmp_path):
    params = draw()
    model = build_model(SMALL, params)
    for name, form in (("module", model), ("state", nnx.state(model, nnx.Param))):
        save_hf(tmp_path / name, SMALL, form)
        assert_same_bits(load_hf(tmp_path / name)[1], params)


@pytest.mark.parametrize("name", MODELS)
def test_every_configuration_survives_config_json(name):
    assert from_hf_config(json.loads(json.dumps(to_hf_config(MODELS[name])))) == MODELS[name]


def test_both_generations_of_transformers_are_read():
    values = to_hf_config(SMALL)
    del values["rope_theta"], values["rope_scaling"]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}  # version 5
    assert from_hf_config(values | rope, dtype="float32") == SMALL
    assert from_hf_config(values, dtype="float32").rope_base == 10_000  # Hugging Face's default


def test_absent_settings_mean_hugging_faces_defaults():
    sizes = ("vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    values = to_hf_config(small(num_kv_heads=4, head_dim=8))
    config = from_hf_config({key: values[key] for key in (*sizes, "model_type")}, dtype="float32")
    assert config == small(
        num_kv_heads=4, head_dim=8, max_seq_len=2048, rope_base=1e4, norm_eps=1e-6, tie_embeddings=False
    )


REFUSED = {
    "model_type='mistral' is not 'llama'": {"model_type": "mistral"},
    "model_type=None is not 'llama'": {"model_type": ...},
    "attention_bias=True is not supported: our LLaMA has attention_bias=False": {"attention_bias": True},
    "mlp_bias=True": {"mlp_bias": True},
    "sliding_window=4096": {"sliding_window": 4096},
    "hidden_act='gelu'": {"hidden_act": "gelu"},
    "quantization_config={'quant_method': 'gptq'}": {"quantization_config": {"quant_method": "gptq"}},
    "rope_scaling={'rope_type': 'llama3', 'factor': 8.0}": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "rope_scaling={'type': 'linear', 'factor': 2.0}": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "rope_parameters={'rope_type': 'yarn'}": {"rope_parameters": {"rope_type": "yarn"}},
    "partial_rotary_factor=0.5": {"partial_rotary_factor": 0.5},
    "lacks vocab_size, hidden_size": {"vocab_size": ..., "hidden_size": ...},
    "hidden_size=32 is not a multiple of num_attention_heads=5": {"head_dim": None, "num_attention_heads": 5},
    "num_kv_heads=3 must divide num_heads=4": {"num_key_value_heads": 3},
    "num_layers must be a positive integer, got 'two'": {"num_hidden_layers": "two"},
    "rms_norm_eps='small' is not a positive number": {"rms_norm_eps": "small"},
    "rope_theta=None is not a positive number": {"rope_theta": None},
}


@pytest.mark.parametrize(("message", "change"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_is_not_our_llama_is_refused_by_name(tmp_path, message, change):
    folder, _ = saved(tmp_path / "hf")
    edit_config(folder, **change)
    with pytest.raises(InteropError) as error:
        load_hf(folder)
    assert message in str(error.value)
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def cut_header(folder):
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")


def damage(what):
    return lambda folder: rewrite(folder, what)


def pop(*names):
    return damage(lambda tensors: [tensors.pop(name) for name in names])


DAMAGED = {
    r"model.safetensors' is not a whole safetensors file: .*MetadataIncompleteBuffer|incomplete": cut,
    r"model.safetensors' is not a whole safetensors file: .*[Hh]eader": cut_header,
    r"lacks model.layers.1.mlp.up_proj.weight$": pop("model.layers.1.mlp.up_proj.weight"),
    r"lacks lm_head.weight: the head is tied .* tie_word_embeddings=true": pop("lm_head.weight"),
    r"lacks lm_head.weight, model.embed_tokens.weight, .* and 18 more$": damage(lambda tensors: tensors.clear() or
        tensors.update(odd=np.ones(3, np.float32))),
    r"has tensors that our LLaMA does not: model.layers.0.self_attn.q_proj.bias$": damage(
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.ones(40, np.float32)})),
    r"model.norm.weight has shape \(31,\), and the configuration says \(32,\)": damage(
        lambda tensors: tensors.update({"model.norm.weight": np.ones(31, np.float32)})),
    r"model.norm.weight has dtype F64, and should be F32 or BF16 or F16": damage(
        lambda tensors: tensors.update({"model.norm.weight": np.ones(32, np.float64)})),
    r"model.norm.weight has dtype F8_E4M3": damage(
        lambda tensors: tensors.update({"model.norm.weight": np.ones(32, ml_dtypes.float8_e4m3fn)})),
    r"there is no model.safetensors in": lambda folder: (folder / "model.safetensors").unlink(),
    r"no such file: .*config.json": lambda folder: (folder / "config.json").unlink(),
    r"cannot read .*config.json.*: Expecting": lambda folder: (folder / "config.json").write_text("{"),
    r"config.json' holds list, and should hold a JSON object": lambda folder: (folder / "config.json").write_text("[]"),
}  # fmt: skip


@pytest.mark.parametrize(("message", "harm"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_damaged_folders_are_refused_with_the_name_of_what_is_wrong(tmp_path, message, harm):
    folder, _ = saved(tmp_path / "hf")
    harm(folder)
    with pytest.raises(InteropError, match=message):
        load_hf(folder)


def test_a_damaged_index_is_refused(tmp_path):
    folder, _ = saved(tmp_path / "hf", shard_bytes=20_000)
    index = json.loads((folder / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    for message, value in (
        ("has no weight_map", {}),
        (
            r"'../model.safetensors' should name a file of the same folder",
            {"weight_map": {"a": "../model.safetensors"}},
        ),
        (r"lacks lm_head.weight, .* and 13 more", {"weight_map": {"a": first}}),
        (r"there is no gone.safetensors in", {"weight_map": {"a": "gone.safetensors"}}),
    ):
        (folder / INDEX).write_text(json.dumps(value))
        with pytest.raises(InteropError, match=message):
            load_hf(folder)


def test_old_pickles_are_named(tmp_path):
    folder, _ = saved(tmp_path / "hf")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InteropError, match=r"holds pytorch_model.bin and no model.safetensors: save it with safe_ser"):
        load_hf(folder)


def test_buffers_of_old_checkpoints_and_a_repeated_tied_head_are_let_pass(tmp_path):
    folder, params = saved(tmp_path / "hf", small(tie_embeddings=True))
    table = tensors_of(folder)["model.embed_tokens.weight"]

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(5, np.float32)
        tensors["lm_head.weight"] = table

    rewrite(folder, add)
    assert_same_bits(load_hf(folder)[1], params)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": table + 1}))
    with pytest.raises(InteropError, match=r"tie_word_embeddings=true, and lm_head.weight differs"):
        load_hf(folder)


def test_parameters_of_another_model_are_refused(tmp_path):
    params = draw()
    with pytest.raises(InteropError, match=r"the parameters lack head.kernel$"):
        save_hf(tmp_path / "a", SMALL, {key: params[key] for key in params if key != "head"})
    with pytest.raises(InteropError, match=r"the parameters have the unknown head.kernel$"):
        save_hf(tmp_path / "a", small(tie_embeddings=True), params)
    with pytest.raises(InteropError, match=r"parameter layers.mlp.\w+.kernel has shape .*; this model's is"):
        save_hf(tmp_path / "a", small(mlp_dim=45), params)
    with pytest.raises(InteropError, match=r"dtype=int8 is not one of float32, bfloat16, float16"):
        save_hf(tmp_path / "a", SMALL, params, dtype=np.int8)
    assert not (tmp_path / "a").exists()


def test_weights_may_be_read_by_whoever_may_read_the_rest(tmp_path):
    folder, _ = saved(tmp_path / "hf", small())
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_nothing_is_overwritten(tmp_path):
    folder, params = saved(tmp_path / "hf")
    before = tensors_of(folder)
    with pytest.raises(InteropError, match=r"is not empty: give a new folder"):
        save_hf(folder, SMALL, draw(seed=1))
    assert_same_bits(tensors_of(folder), before)
    with pytest.raises(InteropError, match=r"is a file: give a new folder"):
        save_hf(folder / "config.json", SMALL, params)
    (tmp_path / "empty").mkdir()
    save_hf(tmp_path / "empty", SMALL, params)
    with pytest.raises(InteropError, match=r"no such folder"):
        load_hf(tmp_path / "gone")


def test_transformers_reads_our_configuration(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, _ = saved(tmp_path / "hf", dtype=jnp.bfloat16)
    found = transformers.AutoConfig.from_pretrained(folder)
    assert from_hf_config(found.to_dict(), dtype="float32") == SMALL


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_computes_the_same_logits_from_our_export(tmp_path, tied):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder, params = saved(tmp_path / "hf", small(tie_embeddings=tied), shard_bytes=20_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS, dtype=torch.long)).logits.numpy()
    actual = np.asarray(build_model(small(tie_embeddings=tied), params)(jnp.asarray(TOKENS)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    model.save_pretrained(tmp_path / "back")
    assert_same_bits(load_hf(tmp_path / "back")[1], params)
