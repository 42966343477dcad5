"""GGUF files written here with the package `gguf`, in llama.cpp's layout, and what is refused."""

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from small_llama import assert_same_bits, draw, small

from fp4jax.interop import InteropError, gguf_tokenizer, initial_params, load_gguf, save_hf
from fp4jax.interop.gguf_file import half_split

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOKENS = ["<|endoftext|>", "<tool>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġthe", "11"]
MERGES = ["t h", "th e", "Ġ the", "1 1"]
TYPES = [3, 4, *[1] * (len(TOKENS) - 2)]
CONFIG = small(head_dim=8, mlp_dim=64, vocab_size=len(TOKENS))
"""Quantized rows are whole blocks of 32."""


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What convert_hf_to_gguf.py does to query and key weights (`LlamaModel.permute`)."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def write(path, config=CONFIG, *, quantization=None, fields=(), drop=(), tensors=(), seed=0):
    """A GGUF of random parameters; gives the parameters."""
    params = draw(config, seed)
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "block_count": config.num_layers, "context_length": config.max_seq_len, "embedding_length": config.embed_dim,
        "feed_forward_length": config.mlp_dim, "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads, "rope.dimension_count": config.head_dim,
        "attention.key_length": config.head_dim, "vocab_size": config.vocab_size,
    }  # fmt: skip
    values = {f"llama.{key}": value for key, value in values.items()} | dict(fields)
    for key, value in values.items():
        if key not in drop:
            (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key, value)
    for key, value in (("rope.freq_base", config.rope_base), ("attention.layer_norm_rms_epsilon", config.norm_eps)):
        writer.add_float32(f"llama.{key}", value)
    writer.add_tokenizer_model(dict(fields).get("model", "gpt2"))
    writer.add_tokenizer_pre(dict(fields).get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    layers = params["layers"]
    flat = {"token_embd.weight": params["embed"]["embedding"], "output_norm.weight": params["norm"]["scale"]}
    if not config.tie_embeddings:
        flat["output.weight"] = params["head"]["kernel"].T
    for i in range(config.num_layers):
        kernels = {"attn_norm": layers["attention_norm"]["scale"], "ffn_norm": layers["mlp_norm"]["scale"]}
        for part, ours in (("attention", {"query": "attn_q", "key": "attn_k", "value": "attn_v",
                                          "output": "attn_output"}),
                           ("mlp", {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"})):  # fmt: skip
            kernels |= {theirs: layers[part][name]["kernel"].swapaxes(1, 2) for name, theirs in ours.items()}
        kernels = {name: stack[i] for name, stack in kernels.items()}
        kernels["attn_q"] = interleaved(kernels["attn_q"], config.num_heads)
        kernels["attn_k"] = interleaved(kernels["attn_k"], config.num_kv_heads)
        flat |= {f"blk.{i}.{name}.weight": value for name, value in kernels.items()}
    for name, value in (flat | dict(tensors)).items():
        if name in drop:
            continue
        value = np.ascontiguousarray(value)
        if quantization is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return params


@pytest.mark.parametrize("tied", [False, True])
def test_weights_come_back_bit_for_bit_in_our_order(tmp_path, tied):
    config = small(head_dim=8, tie_embeddings=tied, vocab_size=len(TOKENS))
    params = write(tmp_path / "a.gguf", config)
    found, loaded = load_gguf(tmp_path / "a.gguf", dtype="float32")
    assert found == config
    assert_same_bits(loaded, params)


def test_half_split_undoes_llama_cpps_permutation():
    rows = np.arange(48 * 3).reshape(48, 3)
    assert np.array_equal(half_split(interleaved(rows, 4), 4), rows)
    assert not np.array_equal(interleaved(rows, 4), rows)


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.5 / 127), ("Q4_1", 0.51 / 15), ("Q4_0", 1.01 / 8)])
def test_quantized_tensors_stand_for_the_numbers_that_gguf_says(tmp_path, kind, error):
    params = write(tmp_path / "a.gguf", quantization=gguf.GGMLQuantizationType[kind])
    _, loaded = load_gguf(tmp_path / "a.gguf")
    for path, original in jax.tree_util.tree_leaves_with_path(params):
        value = loaded
        for key in path:
            value = value[key.key]
        largest = np.abs(original).max() + (original.max() - original.min() if kind == "Q4_1" else 0)
        assert np.abs(value - original).max() <= error * largest + 1e-3, path
    assert np.array_equal(loaded["norm"]["scale"], params["norm"]["scale"])


def test_the_tokenizer_is_rebuilt_and_goes_round_through_hugging_face(tmp_path):
    write(tmp_path / "a.gguf")
    tokenizer = gguf_tokenizer(tmp_path / "a.gguf")
    ids = tokenizer.encode("the the 1911 é<tool>é<|endoftext|>").ids
    # Digits stand alone under "smollm", so the merge "1 1" never applies; added tokens are never split.
    pieces = ["the", "Ġthe", "Ġ", "1", "9", "1", "1", "Ġ", "Ã", "©", "<tool>", "Ã", "©", "<|endoftext|>"]
    assert [tokenizer.id_to_token(i) for i in ids] == pieces
    assert tokenizer.decode(ids) == "the the 1911 é<tool>é"
    assert tokenizer.get_vocab_size() == len(TOKENS)
    config, params, same = initial_params(tmp_path / "a.gguf")
    save_hf(tmp_path / "hf", config, params, tokenizer=same)
    again = initial_params(tmp_path / "hf")
    assert again.tokenizer.encode("the 1911 é<|endoftext|>").ids == tokenizer.encode("the 1911 é<|endoftext|>").ids
    assert_same_bits(again.params, params)
    assert again.config == config


def test_gpt2s_rule_joins_digits(tmp_path):
    write(tmp_path / "a.gguf", fields={"pre": "gpt-2"})
    tokenizer = gguf_tokenizer(tmp_path / "a.gguf")
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("1911").ids] == ["1", "9", "11"]


REFUSED = {
    r"llama.rope.scaling.type='linear' is not supported": {"fields": {"llama.rope.scaling.type": "linear"}},
    r"llama.expert_count=8 is not supported": {"fields": {"llama.expert_count": 8}},
    r"llama.rope.dimension_count=4 should be the head's 8": {"fields": {"llama.rope.dimension_count": 4}},
    r"num_kv_heads=3 must divide num_heads=4": {"fields": {"llama.attention.head_count_kv": 3}},
    r"lacks llama.block_count": {"drop": ["llama.block_count"]},
    r"lacks blk.1.ffn_up.weight": {"drop": ["blk.1.ffn_up.weight"]},
    r"has tensors that our LLaMA does not: rope_freqs.weight": {"tensors": {"rope_freqs.weight": np.ones(4, "f4")}},
    r"output_norm.weight has shape \(31,\), and": {"tensors": {"output_norm.weight": np.ones(31, np.float32)}},
}


@pytest.mark.parametrize(("message", "options"), REFUSED.items(), ids=range(len(REFUSED)))
def test_what_is_not_our_llama_is_refused_by_name(tmp_path, message, options):
    write(tmp_path / "a.gguf", **options)
    with pytest.raises(InteropError, match=rf"a.gguf'.*{message}"):
        load_gguf(tmp_path / "a.gguf")


def test_other_architectures_and_tokenizers_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "qwen2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InteropError, match=r"general.architecture='qwen2' is not 'llama'"):
        load_gguf(tmp_path / "b.gguf")
    for fields, message in (
        ({"model": "llama"}, r"a tokenizer of model 'llama' and rule 'smollm'; .* give the model's tokenizer.json"),
        ({"pre": "llama-bpe"}, r"rule 'llama-bpe'; fp4jax rebuilds model 'gpt2' with 'gpt-2' or 'smollm'"),
    ):
        write(tmp_path / "c.gguf", fields=fields)
        with pytest.raises(InteropError, match=message):
            gguf_tokenizer(tmp_path / "c.gguf")
        load_gguf(tmp_path / "c.gguf")  # the weights can be had all the same


@pytest.mark.parametrize("kept", [0, 3, 20, 400, 3000, -100])
def test_cut_files_are_refused(tmp_path, kept):
    write(tmp_path / "a.gguf")
    path = tmp_path / "b.gguf"
    path.write_bytes((tmp_path / "a.gguf").read_bytes()[:kept])
    with pytest.raises(InteropError, match=r"b.gguf' is not a (whole )?GGUF file: "):
        load_gguf(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(InteropError, match=r"cannot read .*gone.gguf': No such file"):
        load_gguf(tmp_path / "gone.gguf")
    (tmp_path / "text.gguf").write_text("Call me Ishmael.")
    with pytest.raises(InteropError, match=r"is not a GGUF file: it opens with b'Call'"):
        load_gguf(tmp_path / "text.gguf")
