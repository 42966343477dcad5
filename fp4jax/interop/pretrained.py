"""Any model on the disk as one thing: configuration, parameters and tokenizer, and a `Llama` made of them."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from fp4jax.interop import layout
from fp4jax.interop.errors import InteropError, require
from fp4jax.interop.gguf_file import gguf_tokenizer, load_gguf
from fp4jax.interop.hf import CONFIG, load_hf
from fp4jax.interop.layout import Params
from fp4jax.interop.packed import MANIFEST, dequantize_params, load_packed
from fp4jax.interop.smollm2 import fetch_smollm2
from fp4jax.models import Llama, LlamaConfig
from fp4jax.nn import Rules

SMOLLM2 = "smollm2"
"""The name under which `initial_params` fetches SmolLM2-135M-Instruct."""


class Pretrained(NamedTuple):
    """A model that came from a file.

    Args:
        config: its shape.
        params: nested dicts of NumPy arrays in float32, blocks stacked.
        tokenizer: a `tokenizers.Tokenizer`, or None where none lies beside the weights.
    """

    config: LlamaConfig
    params: Params
    tokenizer: Any


def initial_params(path: str | Path, *, dtype: DTypeLike = jnp.bfloat16) -> Pretrained:
    """The model at `path`, to evaluate, export, or go on training.

    Args:
        path: a Hugging Face folder, a folder that `save_packed` wrote, a .gguf file, or "smollm2", which is fetched.
        dtype: of the activations of our model.

    Raises:
        InteropError: none of these, or one that cannot be used; the message says why.
        MissingPackageError: `safetensors`, `gguf` or `tokenizers` is needed and not installed.

    Example:
        >>> from fp4jax.interop import save_hf
        >>> from fp4jax.models import MODELS
        >>> save_hf("tiny", MODELS["tiny"], Llama(MODELS["tiny"], rngs=nnx.Rngs(0)))
        >>> config, params, tokenizer = initial_params("tiny")
        >>> model = build_model(config, params, rules=fp4jax.nn.default_rules(fp4jax.recipes.fp4()))
        >>> model.layers.mlp.up.kernel.shape, tokenizer
        ((4, 128, 352), None)
    """
    if str(path) == SMOLLM2 and not Path(path).exists():
        path = fetch_smollm2()
    path = Path(path)
    if path.is_file():
        return Pretrained(*load_gguf(path, dtype=dtype), gguf_tokenizer(path))
    if not path.exists():
        raise InteropError(f"no such model: {str(path)!r} is neither a file nor a folder, nor is it {SMOLLM2!r}")
    if (path / MANIFEST).exists():
        config, params = load_packed(path, dtype=dtype)
        return Pretrained(config, dequantize_params(params), _tokenizer_beside(path))
    if not (path / CONFIG).exists():
        raise InteropError(f"{str(path)!r} holds neither {CONFIG} (Hugging Face) nor {MANIFEST} (packed by fp4jax)")
    return Pretrained(*load_hf(path, dtype=dtype), _tokenizer_beside(path))


def load_tokenizer(path: str | Path) -> Any:
    """The `tokenizers.Tokenizer` in a tokenizer.json.

    Raises:
        InteropError: no such file, or no tokenizer.
        MissingPackageError: the package `tokenizers` is not installed.
    """
    path = Path(path)
    library = require("tokenizers", f"the tokenizer {str(path)!r}")
    try:
        return library.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InteropError(f"cannot read the tokenizer {str(path)!r}: {error.strerror}") from None
    except Exception as error:  # tokenizers raises bare Exception for every fault of the file
        raise InteropError(f"{str(path)!r} is not a tokenizer file: {error}") from None


def _tokenizer_beside(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    return load_tokenizer(path) if path.exists() else None


def build_model(
    config: LlamaConfig, params: Any, *, rules: Rules | None = None, backend: str | None = None, seed: int = 0
) -> Llama:
    """A `Llama` that holds `params`; none are drawn.

    Args:
        config: the shape.
        params: nested dicts of arrays, or an `nnx.State`; NumPy arrays go to the default device.
        rules: which linear layer follows which recipe, as `Llama` takes them.
        backend: of the recipes, None to choose.
        seed: of the noise of stochastic recipes.

    Raises:
        InteropError: `params` are not those of a model of this shape.
    """
    leaves = layout.flat(params, config)

    def create() -> Llama:
        return Llama(config, rules=rules, backend=backend, rngs=nnx.Rngs(params=0, noise=seed))

    graphdef = nnx.graphdef(nnx.eval_shape(create))

    def noise_of_new() -> Params:
        _, _, noise = nnx.split(create(), nnx.Param, ...)
        return nnx.to_pure_dict(noise)

    noise = jax.jit(noise_of_new)()  # compiled, so that parameters, for which nobody asks, are not drawn
    device = {path: jnp.asarray(leaf, config.param_dtype) for path, leaf in leaves.items()}
    return nnx.merge(graphdef, layout.nested(device), noise)
