"""Which LLaMA to train: a named size with some dimensions changed, or all of them, as `--init` fills them in."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from fp4jax.train.errors import ConfigError
from fp4jax.train.naming import check_choice
from fp4jax.train.presets import DEFAULT_MODEL

if TYPE_CHECKING:
    from fp4jax.models import LlamaConfig

SHAPE = (
    "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "max_seq_len",
    "rope_base", "norm_eps", "tie_embeddings",
)  # fmt: skip
"""Fields of `ModelOptions` that say which parameters there are and what they mean; `LlamaConfig` has the same."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which LLaMA. Its vocabulary is that of the text."""

    model: str | None = None
    """Size: tiny (the default), 30m, 60m, 125m, 400m, 1.3b, 7b or 13b. Each flag below changes one thing of it."""
    vocab_size: int | None = None
    """Tokens that the model knows, if more than the text has. fp4jax plan: by default 32,000, and 256 for tiny."""
    num_layers: int | None = None
    """Transformer blocks."""
    embed_dim: int | None = None
    """Width of the residual stream."""
    num_heads: int | None = None
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads, a divisor of num_heads. By default as many."""
    head_dim: int | None = None
    """Width of a head. By default embed_dim / num_heads."""
    mlp_dim: int | None = None
    """Width of the SwiGLU. With embed_dim alone: 8/3 of it, rounded up to a multiple of 32."""
    max_seq_len: int | None = None
    """Longest sequence that the model takes. By default 2048, or seq_len if that is more."""
    rope_base: float | None = None
    """Base of the rotary embedding. By default 10,000."""
    norm_eps: float | None = None
    """ε of the norms. By default 1e-5."""
    tie_embeddings: bool | None = None
    """The head reuses the embedding table. By default it does not."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the activations. Parameters are float32 master weights either way."""
    remat: Literal["none", "full", "dots", "quantized"] = "none"
    """What the backward pass recomputes to save memory (docs/model.md)."""
    scan_layers: bool = True
    """Compile one block and loop over it. Without it XLA compiles every block, which takes several times as long and
    spares a GPU the copies of what the loop keeps for the backward pass (docs/kernels.md)."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing of the shape is left open."""
        return all(getattr(self, name) is not None for name in SHAPE)

    def check(self) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: it names the value.
        """
        for name in SHAPE[: SHAPE.index("rope_base")]:
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name}={value} must be a positive integer")
        for name in ("rope_base", "norm_eps"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} must be positive and finite")

    def build(self, vocab_size: int, seq_len: int) -> LlamaConfig:
        """The model's configuration, for a text of `vocab_size` different tokens in sequences of `seq_len`.

        Raises:
            ConfigError: an unknown model, dimensions that do not fit each other, or a text that does not fit them.
        """
        from fp4jax.models import MODELS  # here, so that --help need not wait for Flax

        name = self.model or DEFAULT_MODEL
        base = MODELS[check_choice("model", name, MODELS)]
        if self.vocab_size is not None and self.vocab_size < vocab_size:
            raise ConfigError(f"vocab_size={self.vocab_size} is less than the text's {vocab_size} different tokens")
        if self.max_seq_len is not None and self.max_seq_len < seq_len:
            raise ConfigError(f"seq_len={seq_len} is more than max_seq_len={self.max_seq_len}, which the model takes")
        embed_dim = self.embed_dim or base.embed_dim
        num_heads = self.num_heads or base.num_heads
        if self.head_dim is None and embed_dim % num_heads:
            raise ConfigError(f"embed_dim={embed_dim} must be a multiple of num_heads={num_heads}")
        mlp_dim = base.mlp_dim if self.embed_dim is None else -(-8 * embed_dim // 3 // 32) * 32
        try:
            return dataclasses.replace(
                base,
                vocab_size=self.vocab_size or vocab_size,
                num_layers=self.num_layers or base.num_layers,
                embed_dim=embed_dim,
                num_heads=num_heads,
                num_kv_heads=self.num_kv_heads or num_heads,
                head_dim=self.head_dim or embed_dim // num_heads,
                mlp_dim=self.mlp_dim or mlp_dim,
                max_seq_len=self.max_seq_len or max(base.max_seq_len, seq_len),
                rope_base=self.rope_base or base.rope_base,
                norm_eps=self.norm_eps or base.norm_eps,
                tie_embeddings=bool(self.tie_embeddings),
                dtype=self.dtype,
                remat=self.remat,
                scan_layers=self.scan_layers,
            )
        except ValueError as error:
            raise ConfigError(f"model {name!r}: {error}") from error
