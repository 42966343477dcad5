"""A small LLaMA with every freedom of the shape, as parameters and as files, for the tests of this folder."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from fp4jax.interop import save_hf
from fp4jax.models import Llama, LlamaConfig

SMALL = LlamaConfig(
    vocab_size=61, num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=10, mlp_dim=44, max_seq_len=24,
    rope_base=1e5, norm_eps=3e-6, dtype="float32",
)  # fmt: skip
"""head_dim is not embed_dim / num_heads, and no default of Hugging Face's is right for it."""

TOKENS = np.random.default_rng(7).integers(0, SMALL.vocab_size, (2, 17)).astype(np.int32)


def small(**changes) -> LlamaConfig:
    """`SMALL` with other fields."""
    return dataclasses.replace(SMALL, **changes)


def draw(config: LlamaConfig = SMALL, seed: int = 0) -> dict:
    """Random parameters on the host. Norms are drawn as well, so that a swap of two is seen."""
    params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))), nnx.Param))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0.3, 0.2, leaf.shape).astype(np.float32), params)


def saved(folder: Path, config: LlamaConfig = SMALL, **options) -> tuple[Path, dict]:
    """A Hugging Face folder of random parameters, and the parameters."""
    params = draw(config)
    save_hf(folder, config, params, **options)
    return folder, params


def edit_config(folder: Path, **values) -> None:
    """Change config.json; a value of ... takes the key out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def assert_same_bits(actual, expected) -> None:
    """Two trees hold the same leaves, in the same dtypes, bit for bit."""
    actual, expected = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, expected))
    assert [path for path, _ in actual] == [path for path, _ in expected]
    for (path, a), (_, e) in zip(actual, expected, strict=True):
        a, e = np.asarray(a), np.asarray(e)
        assert (a.dtype, a.shape) == (e.dtype, e.shape), path
        assert a.tobytes() == e.tobytes(), path
