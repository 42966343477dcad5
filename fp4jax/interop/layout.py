"""Where each tensor of a Hugging Face LLaMA stands among the parameters of `fp4jax.models.Llama`.

Hugging Face keeps a linear weight as [out, in] and every block's apart; we keep kernels [in, out], stacked over blocks.
Queries and keys need no permutation: both rotate the pairs (x[i], x[i + h/2]) of a head.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from fp4jax.interop.errors import InteropError
from fp4jax.models import LlamaConfig

type Path = tuple[str, ...]
"""Keys from the root of the parameters to a leaf, as in ("layers", "mlp", "up", "kernel")."""

type Params = dict[str, Any]
"""Nested dicts of arrays, as `nnx.to_pure_dict(nnx.state(model, nnx.Param))` gives them."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Entry:
    """The place of one Hugging Face tensor.

    Args:
        path: of our leaf.
        layer: index on the leaf's leading axis, or None for a leaf that is not stacked.
        shape: of the Hugging Face tensor.
        transposed: whether ours is its transpose, as every linear weight is.
    """

    path: Path
    layer: int | None
    shape: tuple[int, ...]
    transposed: bool

    @property
    def layer_path(self) -> str:
        """The path that rules see: "layers.mlp.up" for every block's kernel."""
        return ".".join(self.path[:-1])

    def ours(self, leaves: Mapping[Path, Any]) -> Any:
        """The part of our leaves that is the tensor's, in our orientation."""
        leaf = leaves[self.path]
        return leaf if self.layer is None else leaf[self.layer]


def entries(config: LlamaConfig) -> dict[str, Entry]:
    """Every tensor of the Hugging Face model of this shape, by name, in the order of its forward pass.

    Example:
        >>> from fp4jax.models import MODELS
        >>> entry = entries(MODELS["tiny"])["model.layers.3.mlp.up_proj.weight"]
        >>> ".".join(entry.path), entry.layer, entry.shape
        ('layers.mlp.up.kernel', 3, (352, 128))
    """
    d, f, v = config.embed_dim, config.mlp_dim, config.vocab_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block = {
        "input_layernorm": (("attention_norm", "scale"), (d,)),
        "self_attn.q_proj": (("attention", "query", "kernel"), (q, d)),
        "self_attn.k_proj": (("attention", "key", "kernel"), (kv, d)),
        "self_attn.v_proj": (("attention", "value", "kernel"), (kv, d)),
        "self_attn.o_proj": (("attention", "output", "kernel"), (d, q)),
        "post_attention_layernorm": (("mlp_norm", "scale"), (d,)),
        "mlp.gate_proj": (("mlp", "gate", "kernel"), (f, d)),
        "mlp.up_proj": (("mlp", "up", "kernel"), (f, d)),
        "mlp.down_proj": (("mlp", "down", "kernel"), (d, f)),
    }
    found = {EMBEDDING: Entry(("embed", "embedding"), None, (v, d), False)}
    for layer in range(config.num_layers):
        for name, (path, shape) in block.items():
            found[f"model.layers.{layer}.{name}.weight"] = Entry(("layers", *path), layer, shape, len(shape) == 2)
    found["model.norm.weight"] = Entry(("norm", "scale"), None, (d,), False)
    if not config.tie_embeddings:
        found[HEAD] = Entry(("head", "kernel"), None, (v, d), True)
    return found


def from_tensors(config: LlamaConfig, read: Callable[[str], np.ndarray]) -> Params:
    """Our parameters from Hugging Face tensors, on the host, in `config.param_dtype`.

    Args:
        config: the model's shape.
        read: gives the tensor of a name, in the shape of its `Entry`.
    """
    dtype = np.dtype(config.param_dtype)
    leaves: dict[Path, np.ndarray] = {}
    for name, entry in entries(config).items():
        value = read(name)
        value = value.T if entry.transposed else value
        if entry.layer is None:
            leaves[entry.path] = np.array(value, dtype, order="C")
        else:
            stack = leaves.setdefault(entry.path, np.empty((config.num_layers, *value.shape), dtype))
            stack[entry.layer] = value
    return nested(leaves)


def to_tensor(entry: Entry, leaves: Mapping[Path, Any], dtype: DTypeLike | None) -> np.ndarray:
    """The Hugging Face tensor of an entry: contiguous, on the host, in `dtype` or that of our leaf."""
    value = np.asarray(entry.ours(leaves))
    value = value.T if entry.transposed else value
    # safetensors writes the buffer of an array and never asks about its strides.
    return np.ascontiguousarray(value.astype(value.dtype if dtype is None else np.dtype(dtype), copy=False))


def flat(params: Any, config: LlamaConfig) -> dict[Path, Any]:
    """The leaves of parameters by path, checked to be exactly those of a model of this shape.

    Args:
        params: nested dicts, an `nnx.State`, or a `Llama`.
        config: the shape.

    Raises:
        InteropError: a leaf is missing, unknown, or of another shape; the message names it.
    """
    if isinstance(params, nnx.Module):
        params = nnx.state(params, nnx.Param)
    leaves = _leaves(nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params)
    stacked = (config.num_layers,)
    wanted = {
        e.path: (() if e.layer is None else stacked) + (e.shape[::-1] if e.transposed else e.shape)
        for e in entries(config).values()
    }
    for what, paths in (("lack", wanted.keys() - leaves.keys()), ("have the unknown", leaves.keys() - wanted.keys())):
        if paths:
            raise InteropError(f"the parameters {what} {listing('.'.join(path) for path in paths)}")
    for path, shape in wanted.items():
        if leaves[path].shape != shape:
            raise InteropError(f"parameter {'.'.join(path)} has shape {leaves[path].shape}; this model's is {shape}")
    return leaves


def nested(leaves: Mapping[Path, Any]) -> Params:
    """Nested dicts of leaves by path."""
    tree: Params = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = leaf
    return tree


def listing(names: Any, limit: int = 3) -> str:
    """The first few names, and how many more."""
    names = sorted(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _leaves(tree: Mapping[str, Any], prefix: Path = ()) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, (*prefix, key))
        elif value is not None:  # a tied head has no kernel
            found[(*prefix, key)] = value
    return found
