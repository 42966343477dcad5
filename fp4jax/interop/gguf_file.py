"""GGUF files of LLaMA architecture, as llama.cpp writes them: configuration, dequantized weights, tokenizer."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fp4jax.interop import layout
from fp4jax.interop.errors import InteropError, require
from fp4jax.interop.layout import Params
from fp4jax.models import LlamaConfig

_BLOCK = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    layout.EMBEDDING: "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    layout.HEAD: "output.weight",
}
_MAGIC = b"GGUF"
_SPECIAL = 3
"""Token type of a control token, such as the end of a text (GGUF specification, tokenizer.ggml.token_type)."""
_USER_DEFINED = 4
"""Token type of a token that was added to a trained vocabulary and is never split."""


def load_gguf(path: str | Path, *, dtype: DTypeLike = jnp.bfloat16) -> tuple[LlamaConfig, Params]:
    """Read a GGUF of LLaMA architecture, dequantizing what is quantized.

    llama.cpp rotates the pairs (x[2i], x[2i+1]) of a head, so that its query and key rows are interleaved; they are put
    back into the half-split order of our rotary embedding. Quantized weights become the float32 numbers they stand for
    (`gguf.quants.dequantize`): a file of four-bit weights says nothing about what quantizing them costs.

    Args:
        path: a .gguf file.
        dtype: of the activations of our model.

    Returns:
        The configuration and the parameters, as `fp4jax.interop.load_hf` gives them.

    Raises:
        InteropError: no GGUF, a cut one, another architecture, or a part that our model lacks; the message names it.
        MissingPackageError: the package `gguf` is not installed.
    """
    path = Path(path)
    reader = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _config(reader, path, tied=_WHOLE[layout.HEAD] not in tensors, dtype=dtype)
    wanted = layout.entries(config)
    names = {name: _gguf_name(name) for name in wanted}
    if missing := set(names.values()) - tensors.keys():
        raise InteropError(f"{str(path)!r} lacks {layout.listing(missing)}")
    if extra := tensors.keys() - set(names.values()):
        raise InteropError(f"{str(path)!r} has tensors that our LLaMA does not: {layout.listing(extra)}")
    dequantize = require("gguf.quants", "reading GGUF").dequantize

    def read(name: str) -> np.ndarray:
        tensor, entry = tensors[names[name]], wanted[name]
        try:
            value = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise InteropError(f"{str(path)!r}: {names[name]} is {kind}, which gguf cannot dequantize") from error
        if value.shape != entry.shape:
            raise InteropError(
                f"{str(path)!r}: {names[name]} has shape {value.shape}, and the configuration says {entry.shape}"
            )
        if entry.path[-2] in ("query", "key"):
            heads = config.num_heads if entry.path[-2] == "query" else config.num_kv_heads
            value = half_split(value, heads)
        return value

    return config, layout.from_tensors(config, read)


def half_split(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key weight [n·h, d] from llama.cpp's interleaved pairs to halves: (0, 2, 4, …, 1, 3, 5, …).

    Example:
        >>> half_split(np.arange(8)[:, None], num_heads=2)[:, 0].tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return rows.reshape(num_heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_tokenizer(path: str | Path) -> Any:
    """The tokenizer in a GGUF: a byte-level BPE, rebuilt from its vocabulary and merges.

    Args:
        path: a .gguf file.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        InteropError: no GGUF, or a tokenizer of another kind.
        MissingPackageError: `gguf` or `tokenizers` is not installed.
    """
    path = Path(path)
    reader = _open(path)
    library = require("tokenizers", "a tokenizer")
    kind, rule = (_field(reader, path, f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    splits = _pre_tokenizers(library)
    if kind != "gpt2" or rule not in splits:
        raise InteropError(
            f"{str(path)!r} has a tokenizer of model {kind!r} and rule {rule!r}; fp4jax rebuilds model 'gpt2' with "
            f"{' or '.join(map(repr, splits))}: give the model's tokenizer.json"
        )
    tokens, merges, types = (
        _field(reader, path, f"tokenizer.ggml.{key}") for key in ("tokens", "merges", "token_type")
    )
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = splits[rule]
    tokenizer.decoder = library.decoders.ByteLevel()
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_SPECIAL, _USER_DEFINED)]
    tokenizer.add_special_tokens([library.AddedToken(token, special=True) for token, kind in whole if kind == _SPECIAL])
    tokenizer.add_tokens([library.AddedToken(token) for token, kind in whole if kind == _USER_DEFINED])
    return tokenizer


def _pre_tokenizers(library: Any) -> dict[str, Any]:
    """How a text is cut before merges apply, by the names of llama.cpp (src/llama-vocab.cpp)."""
    pre = library.pre_tokenizers
    words = pre.ByteLevel(add_prefix_space=False)
    return {"gpt-2": words, "smollm": pre.Sequence([pre.Digits(individual_digits=True), words])}


def _open(path: Path) -> Any:
    library = require("gguf", "reading GGUF")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise InteropError(f"cannot read {str(path)!r}: {error.strerror}") from None
    if magic != _MAGIC:
        raise InteropError(f"{str(path)!r} is not a GGUF file: it opens with {magic!r}")
    try:
        return library.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        # What NumPy says of a memory map that ends too early, and the reader of a header that makes no sense.
        raise InteropError(f"{str(path)!r} is not a whole GGUF file: {error}") from error


def _field(reader: Any, path: Path, key: str, *default: Any) -> Any:
    field = reader.get_field(key)
    if field is None:
        if default:
            return default[0]
        raise InteropError(f"{str(path)!r} lacks {key}")
    return field.contents()


def _config(reader: Any, path: Path, *, tied: bool, dtype: DTypeLike) -> LlamaConfig:
    if (kind := _field(reader, path, "general.architecture")) != "llama":
        raise InteropError(f"{str(path)!r}: general.architecture={kind!r} is not 'llama', the one fp4jax has")

    def get(key: str, *default: Any) -> Any:
        return _field(reader, path, f"llama.{key}", *default)

    for key, only in (("rope.scaling.type", "none"), ("expert_count", 0)):
        if (value := get(key, only)) != only:
            raise InteropError(f"{str(path)!r}: llama.{key}={value!r} is not supported: our LLaMA has {only!r}")
    width, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", width // heads)
    rotated = get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise InteropError(f"{str(path)!r}: llama.rope.dimension_count={rotated} should be the head's {head_dim}")
    # Stored as float32: 1e-5 comes back as 9.999999747378752e-06, which the model would hold in float32 anyway.
    epsilon = float(f"{get('attention.layer_norm_rms_epsilon'):.6g}")
    try:
        return LlamaConfig(
            vocab_size=get("vocab_size", len(_field(reader, path, "tokenizer.ggml.tokens", ()))),
            num_layers=get("block_count"),
            embed_dim=width,
            num_heads=heads,
            num_kv_heads=get("attention.head_count_kv", heads),
            head_dim=head_dim,
            mlp_dim=get("feed_forward_length"),
            max_seq_len=get("context_length"),
            rope_base=float(get("rope.freq_base", 10_000.0)),
            norm_eps=epsilon,
            tie_embeddings=tied,
            dtype=dtype,
        )
    except ValueError as error:
        if isinstance(error, InteropError):
            raise
        raise InteropError(f"{str(path)!r}: {error}") from error


def _gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    if name in _WHOLE:
        return _WHOLE[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_BLOCK[rest.removesuffix('.weight')]}.weight"
