"""config.json of a Hugging Face LLaMA <-> `LlamaConfig`. What our model does not compute is refused by name."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fp4jax.interop.errors import InteropError
from fp4jax.models import LlamaConfig

_SIZES = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "embed_dim",
    "num_attention_heads": "num_heads",
    "intermediate_size": "mlp_dim",
}
"""Sizes that a config.json must state, and our names for them."""

_MUST_BE = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": None,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
"""Settings that our model has one value of; absent is that value."""


def from_hf_config(
    values: Mapping[str, Any], *, where: str = "config.json", dtype: DTypeLike = jnp.bfloat16
) -> LlamaConfig:
    """The shape of a Hugging Face LLaMA, of transformers 4 (`rope_theta`) or 5 (`rope_parameters`).

    What only training or generation reads (dropout, special tokens, initializer_range) is ignored.

    Args:
        values: what config.json holds.
        where: names it in errors.
        dtype: of our activations. Parameters are float32.

    Raises:
        InteropError: not a LLaMA, or one with a part our model lacks; the message names the key and its value.

    Example:
        >>> from fp4jax.models import MODELS
        >>> from_hf_config(to_hf_config(MODELS["7b"])) == MODELS["7b"]
        True
    """
    if (kind := values.get("model_type")) != "llama":
        raise InteropError(f"{where}: model_type={kind!r} is not 'llama', the one architecture fp4jax has")
    for key, only in _MUST_BE.items():
        if values.get(key, only) != only:
            raise InteropError(f"{where}: {key}={values[key]!r} is not supported: our LLaMA has {key}={only!r}")
    if missing := [key for key in _SIZES if key not in values]:
        raise InteropError(f"{where} lacks {', '.join(missing)}")
    sizes = {ours: values[key] for key, ours in _SIZES.items()}
    heads = sizes["num_heads"]
    head_dim = values.get("head_dim")
    if head_dim is None and not (isinstance(heads, int) and heads > 0 and sizes["embed_dim"] % heads == 0):
        raise InteropError(
            f"{where}: hidden_size={sizes['embed_dim']} is not a multiple of num_attention_heads={heads}, and no "
            "head_dim is given"
        )
    kv = values.get("num_key_value_heads")
    try:
        # Defaults are those of transformers' own LlamaConfig, which its files leave out.
        return LlamaConfig(
            **sizes,
            num_kv_heads=heads if kv is None else kv,
            head_dim=sizes["embed_dim"] // heads if head_dim is None else head_dim,
            max_seq_len=values.get("max_position_embeddings", 2048),
            rope_base=_rope_base(values, where),
            norm_eps=_number(values, "rms_norm_eps", 1e-6, where),
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            dtype=dtype,
        )
    except (TypeError, ValueError) as error:
        if isinstance(error, InteropError):
            raise
        raise InteropError(f"{where}: {error}") from error


def to_hf_config(config: LlamaConfig, *, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """What config.json holds for a model of this shape; transformers 4 and 5 both read it.

    Args:
        config: the shape.
        dtype: of the stored weights.
    """
    sizes = {key: getattr(config, ours) for key, ours in _SIZES.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_seq_len,
        "rope_theta": config.rope_base,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": np.dtype(dtype).name,
    }


def _rope_base(values: Mapping[str, Any], where: str) -> float:
    """θ, from wherever it stands; scaled rotary embeddings are refused."""
    base = _number(values, "rope_theta", 10_000.0, where)
    for key in ("rope_scaling", "rope_parameters"):
        rope = values.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise InteropError(f"{where}: {key}={rope!r} is not supported: our rotary embedding is not scaled")
        base = _number(rope, "rope_theta", base, where)
    return base


def _number(values: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = values.get(key, default)
    if not isinstance(value, int | float) or not value > 0:
        raise InteropError(f"{where}: {key}={value!r} is not a positive number")
    return float(value)
