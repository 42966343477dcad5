"""How well E2M1 keeps the activations of SmolLM2, by outlier treatment: Table 1 of arXiv:2501.17116 on another model.

python -m experiments.smollm2_table1.table1 --text FILE --out results.json
"""

import dataclasses
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

import fp4jax
from fp4jax.interop import build_model
from fp4jax.models import Llama
from fp4jax.models.llama import LINEAR_PATHS
from fp4jax.train.data import DataOptions, validation_batches
from fp4jax.train.model_files import open_model, read_text
from fp4jax.train.rundir import circumstances, write_json

INPUTS = ("layers.attention.query", "layers.attention.output", "layers.mlp.gate", "layers.mlp.down")
"""One linear layer for each input that several share: query, key and value; gate and up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Table 1 on the activations of a model."""

    out: Path
    """The JSON file to write."""
    text: Path | None = None
    """UTF-8 text, .xz too. By default the novels in the package."""
    model: str = "smollm2"
    """What `fp4jax eval` takes."""
    seq_len: int = 512
    """Tokens in a window."""
    windows: int = 4
    """Windows, spread evenly over the text. All go through the model at once."""


@dataclasses.dataclass(frozen=True)
class Treatment:
    """A row of the table.

    Args:
        alpha: of the clamp; None leaves outliers alone.
        compensation: "none", "exact" (ΔX in float32, as in the paper's table), or "carried" (ΔX in E4M3 inside the
            operand, as the recipe `fp4` has it).
        scope: who shares the thresholds: "tensor" or "vector" (a token).
    """

    alpha: float | None
    compensation: str = "none"
    scope: str = "tensor"

    def __call__(self, x: jax.Array) -> jax.Array:
        """What the product sees of x [m, k], in float32."""
        spec = fp4jax.QuantSpec(fp4jax.E2M1)
        if self.compensation == "carried":
            # x · I: each sum has one term, so that the product gives its quantized operand.
            occ = fp4jax.OCC(self.alpha, scope=self.scope)
            plain = fp4jax.recipes.bf16()
            recipe = dataclasses.replace(plain, name="table1", fprop=fp4jax.Gemm(spec, None), outliers=occ)
            eye = jnp.eye(x.shape[1], dtype=jnp.float32)
            return fp4jax.dot_general(x.astype(jnp.float32), eye, (((1,), (0,)), ((), ())), recipe=recipe)
        if self.alpha is None:
            return fp4jax.quantize(x, spec, axis=-1).dequantize()
        occ = fp4jax.OCC(self.alpha, scope=self.scope)
        clamped, residual = fp4jax.clamp_outliers(x.astype(jnp.float32), occ, axis=-1)
        kept = residual if self.compensation == "exact" else 0
        return fp4jax.quantize(clamped, spec, axis=-1).dequantize() + kept


ROWS = (
    Treatment(None),
    *(
        Treatment(alpha, compensation, scope)
        for scope in ("tensor", "vector")
        for alpha, compensation in (
            (0.999, "none"), (0.99, "none"), (0.999, "exact"), (0.99, "exact"), (0.97, "exact"),
            (0.999, "carried"), (0.99, "carried"), (0.97, "carried"),
        )
    ),
)  # fmt: skip


def linear_inputs(model: Llama, tokens: jax.Array) -> Iterator[tuple[str, int, jax.Array]]:
    """(path, block, input [tokens, d]) of the layers of `INPUTS`, in the order of the forward pass.

    The blocks run one operation at a time, unrolled, with a product that remembers its left operand.
    """
    seen: list[jax.Array] = []

    def remember(lhs: jax.Array, rhs: jax.Array, *arguments, **options) -> jax.Array:
        seen.append(lhs)
        return lax.dot_general(lhs, rhs, *arguments, **options)

    blocks = model.layers
    layers = [blocks.attention.query, blocks.attention.key, blocks.attention.value, blocks.attention.output,
              blocks.mlp.gate, blocks.mlp.up, blocks.mlp.down]  # fmt: skip
    for layer in layers:
        layer.dot_general = remember
    model(tokens)
    paths = LINEAR_PATHS[: len(layers)]
    for call, (block, path) in enumerate(itertools.product(range(model.config.num_layers), paths)):
        if path in INPUTS:
            yield path, block, seen[call]


def measure(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Cosine similarity in %, mean squared error, and SNR in dB of y as x, in float64."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    signal, noise = np.sum(x**2), np.sum((x - y) ** 2)
    return {
        "sim": 100 * float(np.sum(x * y) / np.sqrt(signal * np.sum(y**2))),
        "mse": float(noise / x.size),
        "snr": 10 * float(np.log10(signal / noise)),
    }


def outlier_energy(x: jax.Array, alpha: float) -> float:
    """Share of Σx² that lies in ΔX of a clamp over the tensor, in %."""
    _, residual = fp4jax.clamp_outliers(x.astype(jnp.float32), fp4jax.OCC(alpha), axis=-1)
    return 100 * float(jnp.sum(residual**2) / jnp.sum(x.astype(jnp.float32) ** 2))


def main(options: Options) -> None:
    """Measure, print, and write JSON."""
    start = time.perf_counter()
    opened = open_model(options.model)
    config = dataclasses.replace(opened.config, scan_layers=False)
    corpus = read_text(opened, DataOptions(text=(options.text,) if options.text else ()))
    (batch,) = validation_batches(corpus, options.seq_len, options.windows, limit=1)
    tokens = jnp.asarray(batch["tokens"][:, :-1])
    later = np.arange(tokens.size) % options.seq_len != 0
    parts = {"all tokens": np.ones(tokens.size, bool), "without the first token of a window": later}
    compiled = [jax.jit(row) for row in ROWS]
    scores, energy = defaultdict(list), defaultdict(list)
    for path, block, x in linear_inputs(build_model(config, opened.params), tokens):
        host = np.asarray(x, np.float32)
        for alpha in (0.999, 0.99, 0.97):
            energy[alpha].append(outlier_energy(x, alpha))
        for row, treat in zip(ROWS, compiled, strict=True):
            y = np.asarray(treat(x), np.float32)
            for part, chosen in parts.items():
                scores[part, row].append({"path": path, "block": block, **measure(host[chosen], y[chosen])})
    tables = {part: [summarize(row, scores[part, row]) for row in ROWS] for part in parts}
    for part, rows in tables.items():
        for row in rows:
            print(f"{part:36} {row}")
    write_json(
        options.out,
        {
            **circumstances(),
            "command": "python -m experiments.smollm2_table1.table1",
            "text": "the novels in the package" if options.text is None else options.text.name,
            "seconds": round(time.perf_counter() - start),
            "windows": f"{options.windows} × {options.seq_len}",
            "tensors": len(scores["all tokens", ROWS[0]]),
            "outlier_energy_percent": {str(a): round(float(np.mean(values)), 2) for a, values in energy.items()},
            "tables": tables,
        },
    )


def summarize(row: Treatment, entries: list[dict]) -> dict:
    """A treatment and its means over tensors."""
    means = {name: round(float(np.mean([e[name] for e in entries])), 4) for name in ("sim", "mse", "snr")}
    by_input = {path: round(float(np.mean([e["snr"] for e in entries if e["path"] == path])), 2) for path in INPUTS}
    return {**dataclasses.asdict(row), **means, "snr_by_input": by_input}


if __name__ == "__main__":
    main(tyro.cli(Options))
