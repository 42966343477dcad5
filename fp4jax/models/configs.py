"""`LlamaConfig`, the shapes we ship, and how many parameters a shape has."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from fp4jax.models.remat import REMAT_POLICIES

ATTENTIONS = ("xla", "cudnn")
"""Implementations of `jax.nn.dot_product_attention` that `LlamaConfig.attention` may name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Shape and numerics of a LLaMA-2 (Touvron et al., arXiv:2307.09288).

    Args:
        vocab_size: v, number of tokens.
        num_layers: number of transformer blocks.
        embed_dim: d, width of the residual stream.
        num_heads: n, number of query heads.
        num_kv_heads: number of key and value heads; n is multi-head attention, less is grouped-query attention.
        head_dim: h, width of a head.
        mlp_dim: f, width of the SwiGLU.
        max_seq_len: longest sequence the model accepts.
        rope_base: θ of the rotary embedding.
        norm_eps: ε of RMSNorm.
        tie_embeddings: the head reuses the embedding table.
        dtype: dtype of activations.
        param_dtype: dtype of parameters (the master weights).
        init_std: standard deviation of the initial weights; None is √(2/(5d)), which at d = 4096 is the .0099 of the
            authors' 6.7B script. The two projections back into the residual stream get 1/√(2·num_layers) of it.
        attention: "xla", "cudnn", or None for cuDNN where it applies (CUDA, 16-bit dtype, head_dim a multiple of 8 up
            to 128, even sequence length) and XLA elsewhere.
        remat: what a block's backward pass recomputes: a name in `fp4jax.models.remat.REMAT_POLICIES`.
        scan_layers: run the blocks under `jax.lax.scan` (compiles one block), else unrolled in Python. Parameters,
            paths, checkpoints and results are the same.

    Raises:
        ValueError: a size is not a positive integer, head_dim is odd, num_kv_heads does not divide num_heads, or a name
            is unknown.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_seq_len: int = 2048
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: DTypeLike = jnp.bfloat16
    param_dtype: DTypeLike = jnp.float32
    init_std: float | None = None
    attention: Literal["xla", "cudnn"] | None = None
    remat: str = "none"
    scan_layers: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{field.name} must be a positive integer, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: RoPE rotates pairs")
        if self.attention not in (None, *ATTENTIONS):
            raise ValueError(f"attention={self.attention!r} must be None or one of {', '.join(ATTENTIONS)}")
        if self.remat not in REMAT_POLICIES:
            raise ValueError(f"remat={self.remat!r} must be one of {', '.join(REMAT_POLICIES)}")
        # Canonical dtypes, so that configurations that mean the same compare and hash the same.
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype))
        object.__setattr__(self, "param_dtype", jnp.dtype(self.param_dtype))

    @property
    def weight_std(self) -> float:
        """Standard deviation of the initial weights."""
        return math.sqrt(2 / (5 * self.embed_dim)) if self.init_std is None else self.init_std

    @property
    def residual_std(self) -> float:
        """Standard deviation of the initial weights of the projections into the residual stream (output, down)."""
        return self.weight_std / math.sqrt(2 * self.num_layers)


def count_parameters(config: LlamaConfig) -> int:
    """Number of parameters, in closed form: 2vd + L(2dh(n + n_kv) + 3df + 2d) + d, or vd where the head is tied.

    Example:
        >>> count_parameters(MODELS["7b"])
        6738415616
    """
    d = config.embed_dim
    attention = 2 * d * config.head_dim * (config.num_heads + config.num_kv_heads)
    block = attention + 3 * d * config.mlp_dim + 2 * d
    tables = 1 if config.tie_embeddings else 2
    return tables * config.vocab_size * d + config.num_layers * block + d


def _llama(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, **other) -> LlamaConfig:
    """LLaMA-2 with multi-head attention and no more freedom than its published sizes use."""
    return LlamaConfig(
        **{"vocab_size": 32_000, **other},
        num_layers=num_layers,
        embed_dim=embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_dim // num_heads,
        mlp_dim=mlp_dim,
    )


MODELS: dict[str, LlamaConfig] = {
    # Bytes as tokens: what `fp4jax compare` trains on a laptop.
    "tiny": _llama(4, 128, 2, 352, vocab_size=256, max_seq_len=512),
    # GaLore's and ReLoRA's LLaMAs (arXiv:2403.03507, arXiv:2307.05695); 30m is their 35M with 4 of its 6 layers,
    # 1.3b their 1B with the MLP rounded up to a multiple of 128 and 16 heads of LLaMA's 128.
    "30m": _llama(4, 384, 6, 1024),
    "60m": _llama(8, 512, 8, 1376),
    "125m": _llama(12, 768, 12, 2048),
    "400m": _llama(24, 1024, 16, 2736),
    "1.3b": _llama(24, 2048, 16, 5504),
    # LLaMA-2.
    "7b": _llama(32, 4096, 32, 11_008, max_seq_len=4096),
    "13b": _llama(40, 5120, 40, 13_824, max_seq_len=4096),
}
"""The models `--model` can name, all with LLaMA's tokenizer size except "tiny"."""
