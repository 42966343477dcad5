"""A run small enough to compile and train in seconds: model, text and settings shared by the tests of training."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from fp4jax.train.config import (
    CheckpointOptions,
    CompareConfig,
    LoopOptions,
    ModelOptions,
    OptimizerOptions,
    TrainConfig,
)
from fp4jax.train.data import DataOptions, DocumentRule

MODEL = ModelOptions(num_layers=2, embed_dim=32, num_heads=2, mlp_dim=32)
LOOP = LoopOptions(steps=6, batch_size=4, seq_len=16, eval_every=3, eval_batches=2, tensorboard=False)
WORDS = [
    "the", "whale", "sea", "ship", "captain", "old", "white", "deep",
    "men", "boat", "harpoon", "wind", "night", "star", "oil",
]  # fmt: skip


def write_text(folder: Path) -> tuple[Path, ...]:
    """Two files of words in random order, so that there are two sources."""
    rng = np.random.default_rng(0)
    paths = tuple(folder / f"{name}.txt" for name in ("ahab", "ishmael"))
    for path in paths:
        path.write_text("\n\n".join(" ".join(rng.choice(WORDS, 20)) for _ in range(120)), encoding="utf-8")
    return paths


def data(paths: tuple[Path, ...]) -> DataOptions:
    """Short documents, so that the little text has many."""
    return DataOptions(text=paths, documents=DocumentRule(min_chars=50, max_chars=400), validation_fraction=0.1)


def train_config(paths: tuple[Path, ...], out: Path | None = None, *, resume: bool = False, **loop) -> TrainConfig:
    """`fp4jax train` on the micro model, a checkpoint every other step."""
    return TrainConfig(
        model=MODEL,
        data=data(paths),
        loop=dataclasses.replace(LOOP, **loop),
        optimizer=OptimizerOptions(learning_rate=1e-2),
        checkpoint=CheckpointOptions(save_every=2, keep=10, resume=resume),
        out=out,
    )


def compare_config(paths: tuple[Path, ...], out: Path | None = None, **fields) -> CompareConfig:
    """`fp4jax compare` on the micro model."""
    return CompareConfig(
        model=MODEL, data=data(paths), loop=LOOP, optimizer=OptimizerOptions(learning_rate=1e-2), out=out, **fields
    )


def flags(config) -> list[str]:
    """The command line that means the micro model on `config.data`."""
    pairs = {
        "num-layers": 2, "embed-dim": 32, "num-heads": 2, "mlp-dim": 32, "steps": config.loop.steps, "batch-size": 4,
        "seq-len": 16, "eval-every": 3, "eval-batches": 2, "learning-rate": 0.01, "min-chars": 50, "max-chars": 400,
        "validation-fraction": 0.1,
    }  # fmt: skip
    words = [word for name, value in pairs.items() for word in (f"--{name}", str(value))]
    return [*words, "--no-tensorboard", "--text", *map(str, config.data.text)]


def assert_bit_equal(a, b) -> None:
    """Two pytrees hold the same leaves, bit for bit; PRNG keys by their data."""
    leaves_a, leaves_b = (jax.tree_util.tree_leaves_with_path(tree) for tree in (a, b))
    assert [path for path, _ in leaves_a] == [path for path, _ in leaves_b]
    for (path, x), (_, y) in zip(leaves_a, leaves_b, strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), path
        assert x.tobytes() == y.tobytes(), path
