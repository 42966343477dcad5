"""Hugging Face's LLaMA written anew in NumPy, from its own tensors and its own config.json: the oracle of the layout.

After transformers' modeling_llama.py: `rotate_half`, `repeat_kv`, weights as [out, in]. float64 throughout.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


def logits(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """Float64 logits [b, t, v] of integer tokens [b, t]."""
    weights = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, length = config["head_dim"], tokens.shape[1]
    frequencies = config["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(length)[:, None] * frequencies
    cos, sin = (np.concatenate([f(angles), f(angles)], axis=-1) for f in (np.cos, np.sin))
    causal = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def split_heads(x: np.ndarray, name: str, count: int) -> np.ndarray:
        return (x @ weights[name].T).reshape(*x.shape[:2], count, head_dim).swapaxes(1, 2)

    def rotate(x: np.ndarray) -> np.ndarray:
        half = head_dim // 2
        return x * cos + np.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        y = norm(x, f"{at}input_layernorm.weight")
        q = rotate(split_heads(y, f"{at}self_attn.q_proj.weight", heads))
        k = rotate(split_heads(y, f"{at}self_attn.k_proj.weight", kv_heads)).repeat(heads // kv_heads, axis=1)
        v = split_heads(y, f"{at}self_attn.v_proj.weight", kv_heads).repeat(heads // kv_heads, axis=1)
        scores = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(head_dim) + causal)
        attended = scores / scores.sum(axis=-1, keepdims=True) @ v
        x = x + attended.swapaxes(1, 2).reshape(*tokens.shape, -1) @ weights[f"{at}self_attn.o_proj.weight"].T
        y = norm(x, f"{at}post_attention_layernorm.weight")
        gate = y @ weights[f"{at}mlp.gate_proj.weight"].T
        up = y @ weights[f"{at}mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T
