"""Products of LLaMA's linear layers, and the tuner of their configurations."""

import datetime
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from fp4jax.bench.baselines import fp8_operand, xla_bfloat16, xla_fp8, xla_fp8_vectors
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks, environment, normal, seconds
from fp4jax.bench.report import Result, Row
from fp4jax.kernels import GemmConfig, gemm, scaled_matmul
from fp4jax.models import MODELS

type Shape = tuple[int, int, int, str]


def shapes(config: BenchConfig) -> dict[str, Shape]:
    """m, n, k and the dtype of the result of the products in a block: forward, and a weight gradient."""
    found = {}
    for size in config.sizes:
        model, m = MODELS[size], config.tokens
        d, h = model.embed_dim, model.mlp_dim
        found |= {
            f"{size} attention": (m, d, d, "bfloat16"),
            f"{size} up": (m, h, d, "bfloat16"),
            f"{size} down": (m, d, h, "bfloat16"),
            f"{size} up, weight gradient": (d, h, m, "float32"),
        }
    return found


def products(config: BenchConfig, peaks: Peaks) -> Iterator[Result]:
    """A table a shape, and one of geometric means."""
    ratios: dict[str, list[float]] = {}
    for name, shape in shapes(config).items():
        m, n, k, dtype = shape
        result = Result(
            f"{name}: [{m}, {k}] · [{k}, {n}], {dtype} out", tuple(_rows(config, shape)), 2.0 * m * n * k, "FLOP",
            peaks.fp8,
        )  # fmt: skip
        for row in result.rows:
            ratios.setdefault(row.name, []).append(result.rows[0].seconds / row.seconds)
        yield result
    first = next(iter(ratios))
    means = tuple(Row(name, math.exp(-sum(map(math.log, of)) / len(of))) for name, of in ratios.items())
    yield Result(f"geometric mean over {len(ratios[first])} shapes", means, 1.0, "")


def _rows(config: BenchConfig, shape: Shape) -> Iterator[Row]:
    m, n, k, dtype = shape
    lhs, rhs, ones = fp8_operand((m, k)), fp8_operand((n, k), seed=1), (jnp.ones(m), jnp.ones(n))
    half, quick = jnp.bfloat16(0.5), config.quick_baselines
    timed = functools.partial(seconds, iterations=config.iterations)
    if config.baselines:
        yield Row("XLA BF16", timed(xla_bfloat16(dtype, quick=quick), normal((m, k)), normal((n, k), seed=1)))
        yield Row("XLA FP8, a scale a tensor", timed(xla_fp8(dtype, quick=quick), lhs, rhs, half))
        yield Row("XLA FP8, vector scales", timed(xla_fp8_vectors(dtype, quick=quick), lhs, rhs, half, *ones))
    for label, promote in (("fp4jax", gemm.PROMOTE), ("fp4jax, not promoted", None)):
        product = functools.partial(scaled_matmul, out_dtype=jnp.dtype(dtype), promote=promote)
        yield Row(label, timed(product, lhs, rhs, *ones))


# --- tuning ------------------------------------------------------------------------------------------------------


def candidates(dtype: str) -> list[tuple[GemmConfig, int | None]]:
    """The configurations that tuning tries, promoted and not."""
    epilogue = 32 if dtype == "float32" else 64
    found: list[tuple[GemmConfig, int | None]] = [
        (GemmConfig(tile_n, 4, group, minor, epilogue, cluster), gemm.PROMOTE)
        for tile_n, groups in ((192, (4, 8)), (128, (8,)))
        for cluster in ("", "m", "n")
        for group in groups
        for minor in ("m", "n")
    ]
    found += [(GemmConfig(256, 4, 8, "m", epilogue, cluster), None) for cluster in ("", "m", "n")]
    return found


def tune(config: BenchConfig, peaks: Peaks) -> Iterator[Result]:
    """Every candidate at every shape; the fastest go to a file beside ``--out``, as ``fp4jax.kernels`` reads them."""
    entries = []
    for name, (m, n, k, dtype) in shapes(config).items():
        lhs, rhs, ones = fp8_operand((m, k)), fp8_operand((n, k), seed=1), (jnp.ones(m), jnp.ones(n))
        rows, best = [], {}
        for candidate, promote in candidates(dtype):
            product = functools.partial(scaled_matmul, out_dtype=jnp.dtype(dtype), promote=promote, config=candidate)
            time = seconds(product, lhs, rhs, *ones, iterations=config.iterations)
            rows.append(Row(f"promote {promote}, {describe(candidate)}", time))
            if promote not in best or time < best[promote]["microseconds"] * 1e-6:
                best[promote] = {
                    "m": m, "n": n, "k": k, "out_dtype": dtype, "promote": promote or 0,
                    "microseconds": round(1e6 * time, 1), "config": vars(candidate),
                }  # fmt: skip
        entries += best.values()
        yield Result(f"{name}: [{m}, {k}] · [{k}, {n}], {dtype} out", tuple(rows), 2.0 * m * n * k, "FLOP", peaks.fp8)
    if config.out is not None:
        write_tuned(config.out.with_suffix(".tuned.json"), entries)


def describe(config: GemmConfig) -> str:
    """A configuration in a few words."""
    shared = f", pairs along {config.cluster}" if config.cluster else ""
    return f"{config.tile_n} × {config.stages}, {config.group} along {config.minor}{shared}"


def write_tuned(path: Path, entries: list[dict]) -> None:
    """A file for ``fp4jax/kernels/tuned``."""
    about = environment()
    measured = (
        f"{datetime.date.today()}, {about.get('card', '?')}, driver {about.get('driver', '?')}, jax {jax.__version__}"
    )
    lines = ",\n  ".join(json.dumps(entry) for entry in entries)
    path.write_text(f'{{\n "measured": {json.dumps(measured)},\n "gemm": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
