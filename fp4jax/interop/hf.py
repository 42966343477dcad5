"""Hugging Face LLaMA folders (config.json and safetensors) <-> `LlamaConfig` and parameters, bit for bit."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fp4jax.interop import layout
from fp4jax.interop.errors import InteropError
from fp4jax.interop.hf_config import from_hf_config, to_hf_config
from fp4jax.interop.layout import Params
from fp4jax.interop.tensor_files import SHARD_BYTES, TensorFiles, new_folder, read_json, write_tensors
from fp4jax.models import LlamaConfig

CONFIG = "config.json"
_READS = ("F32", "BF16", "F16")
_WRITES = (np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16))
_BUFFERS = ".rotary_emb.inv_freq"
"""End of the names of buffers that old checkpoints carry and every implementation computes itself."""


def load_hf(folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16) -> tuple[LlamaConfig, Params]:
    """Read a Hugging Face LLaMA.

    Weights in bfloat16 and float16 are widened to float32 master weights, exactly; `save_hf` with the dtype they had
    gives the same bits again.

    Args:
        folder: holds config.json and safetensors, whole or in parts with an index.
        dtype: of the activations of our model.

    Returns:
        The configuration, and the parameters: nested dicts of NumPy float32 arrays, blocks stacked. Merge them into a
        model with `build_model`, or place them with `jax.device_put`.

    Raises:
        InteropError: missing, cut or damaged files; a model that is not a LLaMA as ours is; tensors that are missing,
            unknown, or of another shape or dtype. The message names them.
        MissingPackageError: the package `safetensors` is not installed.

    Example:
        >>> from fp4jax.models import MODELS, Llama
        >>> from flax import nnx
        >>> save_hf("tiny", MODELS["tiny"], Llama(MODELS["tiny"], rngs=nnx.Rngs(0)))
        >>> config, params = load_hf("tiny")
        >>> config == MODELS["tiny"], params["layers"]["mlp"]["up"]["kernel"].shape
        (True, (4, 128, 352))
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InteropError(f"no such folder: {str(folder)!r}")
    config = from_hf_config(read_json(folder / CONFIG), where=str(folder / CONFIG), dtype=dtype)
    files = TensorFiles(folder)
    wanted = layout.entries(config)
    if missing := wanted.keys() - files.names:
        hint = ""
        if missing == {layout.HEAD}:
            hint = ": the head is tied to the embedding, and config.json should say tie_word_embeddings=true"
        raise InteropError(f"{str(folder)!r} lacks {layout.listing(missing)}{hint}")
    extra = {name for name in files.names - wanted.keys() if not name.endswith(_BUFFERS)}
    if config.tie_embeddings and layout.HEAD in extra:
        _check_tied(files, config)
        extra.remove(layout.HEAD)
    if extra:
        raise InteropError(f"{str(folder)!r} has tensors that our LLaMA does not: {layout.listing(extra)}")
    return config, layout.from_tensors(config, lambda name: files.read(name, wanted[name].shape, _READS))


def save_hf(
    folder: str | Path,
    config: LlamaConfig,
    params: Any,
    *,
    dtype: DTypeLike | None = None,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face LLaMA that `transformers` loads: config.json, safetensors, and a tokenizer if given.

    Args:
        folder: a new or empty folder. It appears whole or not at all.
        config: the model's shape.
        params: nested dicts of arrays, an `nnx.State`, or a `Llama`.
        dtype: float32, bfloat16 or float16, rounded to nearest even once; None keeps that of the parameters.
        tokenizer: a `tokenizers.Tokenizer`, written as tokenizer.json.
        shard_bytes: the most that goes into one safetensors file.

    Raises:
        InteropError: a folder that holds something, parameters that are not this model's, another dtype, or a value
            that does not fit into float16.
        MissingPackageError: the package `safetensors` is not installed.
    """
    leaves = layout.flat(params, config)
    dtypes = {np.dtype(leaf.dtype).name for leaf in leaves.values()}
    if dtype is None and len(dtypes) > 1:
        raise InteropError(
            f"the parameters have dtypes {', '.join(sorted(dtypes))}: say in which to write them, dtype="
        )
    stored = np.dtype(leaves["embed", "embedding"].dtype if dtype is None else dtype)
    if stored not in _WRITES:
        raise InteropError(f"dtype={stored.name} is not one of {', '.join(each.name for each in _WRITES)}")

    def tensors():
        for name, entry in layout.entries(config).items():
            with np.errstate(over="ignore"):
                tensor = layout.to_tensor(entry, leaves, stored)
            if stored == np.float16 and np.isinf(tensor).any() and np.isfinite(entry.ours(leaves)).all():
                raise InteropError(f"{name} holds values beyond float16's 65504: give dtype=bfloat16 or float32")
            yield name, tensor

    with new_folder(Path(folder)) as scratch:
        write_tensors(scratch, tensors(), shard_bytes=shard_bytes)
        text = json.dumps(to_hf_config(config, dtype=stored), indent=2) + "\n"
        (scratch / CONFIG).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(str(scratch / "tokenizer.json"))
            # The class that takes any tokenizer.json; AutoTokenizer asks for it by name.
            kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_seq_len}
            (scratch / "tokenizer_config.json").write_text(json.dumps(kind, indent=2) + "\n", encoding="utf-8")


def _check_tied(files: TensorFiles, config: LlamaConfig) -> None:
    """A tied model's file may carry the table a second time; another head there would be dropped in silence."""
    shape = (config.vocab_size, config.embed_dim)
    table, head = (files.read(name, shape, _READS) for name in (layout.EMBEDDING, layout.HEAD))
    if table.dtype != head.dtype or table.tobytes() != head.tobytes():
        raise InteropError(
            f"config.json says tie_word_embeddings=true, and {layout.HEAD} differs from {layout.EMBEDDING}: "
            "say tie_word_embeddings=false to keep the head"
        )
