"""Products of LLaMA's linear layers, and the tuner of their configurations."""

import dataclasses
import datetime
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.bench.baselines import fp8_operand, xla_bfloat16, xla_fp8, xla_fp8_vectors
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks, environment, normal, seconds
from fp4jax.bench.report import Bar, Bars, Result, Row
from fp4jax.kernels import GemmConfig, gemm, scaled_matmul
from fp4jax.models import MODELS

type Shape = tuple[int, int, int, str]

WGRAD = "weight gradient"
BFLOAT16, FP8, VECTORS = "XLA BF16", "XLA FP8, a scale a tensor", "XLA FP8, vector scales"
OURS, BARE = "fp4jax", "fp4jax, not promoted"


def shapes(config: BenchConfig) -> dict[str, Shape]:
    """m, n, k and the dtype of the result of the products in a block.

    Forward ones are also those of dgrad: of the query with itself, of up with down. Weight gradients contract tokens,
    and are needed at the largest number of them only.
    """
    forward, backward = {}, {}
    for size in config.sizes:
        d, h = MODELS[size].embed_dim, MODELS[size].mlp_dim
        for m in config.product_tokens:
            forward |= {
                f"{size} attention, m = {m}": (m, d, d, "bfloat16"),
                f"{size} up, m = {m}": (m, h, d, "bfloat16"),
                f"{size} down, m = {m}": (m, d, h, "bfloat16"),
            }
        m = max(config.product_tokens)
        backward |= {
            f"{size} attention, {WGRAD}": (d, d, m, "float32"),
            f"{size} up, {WGRAD}": (d, h, m, "float32"),
            f"{size} down, {WGRAD}": (h, d, m, "float32"),
        }
    return forward | backward


def products(config: BenchConfig, peaks: Peaks) -> Iterator[Result | Bars]:
    """A table a shape; after the shapes of each model, geometric means of all so far, and what was aimed at."""
    found: dict[str, list[Result]] = {}
    for (_, wgrad), group in itertools.groupby(shapes(config).items(), lambda item: _group(item[0])):
        what = "weight gradients" if wgrad else "products forward"
        results = found.setdefault(what, [])
        for name, shape in group:
            m, n, k, dtype = shape
            title = f"{name}: [{m}, {k}] · [{k}, {n}], {dtype} out"
            results.append(Result(title, tuple(_rows(config, shape)), 2.0 * m * n * k, "FLOP", peaks.fp8))
            yield results[-1]
        first = results[0].rows
        means = (
            Row(row.name, geometric_mean([of.row(row.name).seconds / of.rows[0].seconds for of in results]))
            for row in first
        )
        over = f"Over {len(results)} shapes."
        yield Result(f"{what}: geometric means", tuple(means), 1.0, "", notes=(over,))
        yield aims(what, results)


def _group(name: str) -> tuple[str, bool]:
    """The model of a shape, and whether it is that of a weight gradient."""
    return name.partition(" ")[0], WGRAD in name


def aims(what: str, results: Sequence[Result]) -> Bars:
    """What the product was meant to reach, over several shapes."""

    def over(name: str) -> list[float] | None:
        if any(row.name == name for row in results[0].rows):
            return [r.row(name).seconds / r.row(OURS).seconds for r in results]
        return None

    def mean(name: str) -> float | None:
        ratios = over(name)
        return None if ratios is None else geometric_mean(ratios)

    bfloat16 = over(BFLOAT16)
    return Bars(
        f"{what}: aims",
        (
            Bar("over cuBLASLt FP8, one scale a tensor, geometric mean", mean(FP8), 0.97),
            Bar("over XLA FP8 with vector scales, geometric mean", mean(VECTORS), 1.15),
            Bar("over XLA BF16, geometric mean", mean(BFLOAT16), 1.8),
            Bar("over XLA BF16, worst shape", None if bfloat16 is None else min(bfloat16), 1.5),
            Bar("price of promotion, worst shape, %", 100 * (max(1 / r for r in over(BARE) or ()) - 1), 5, least=False),
        ),
    )


def geometric_mean(ratios: Sequence[float]) -> float:
    """(Π ratios)^(1/n)."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _rows(config: BenchConfig, shape: Shape) -> Iterator[Row]:
    m, n, k, dtype = shape
    lhs, rhs, ones = fp8_operand((m, k)), fp8_operand((n, k), seed=1), (jnp.ones(m), jnp.ones(n))
    half, quick = jnp.bfloat16(0.5), config.quick_baselines
    timed = functools.partial(seconds, iterations=config.iterations)
    if config.baselines:
        yield Row(BFLOAT16, timed(xla_bfloat16(dtype, quick=quick), normal((m, k)), normal((n, k), seed=1)))
        yield Row(FP8, timed(xla_fp8(dtype, quick=quick), lhs, rhs, half))
        yield Row(VECTORS, timed(xla_fp8_vectors(dtype, quick=quick), lhs, rhs, half, *ones))
    for label, promote in ((OURS, gemm.PROMOTE), (BARE, None)):
        product = functools.partial(scaled_matmul, out_dtype=jnp.dtype(dtype), promote=promote)
        yield Row(label, timed(product, lhs, rhs, *ones))


# --- tuning ------------------------------------------------------------------------------------------------------


def candidates(dtype: str) -> list[tuple[GemmConfig, int | None]]:
    """The configurations that tuning tries, promoted and not."""
    wide = 32 if dtype == "float32" else 64
    found: list[tuple[GemmConfig, int | None]] = []
    for tile_n in (192, 176, 160, 128):
        epilogue_n = next(size for size in (wide, 32, 16) if tile_n % size == 0)
        stages = 4 if tile_n > 160 else 5
        for cluster in ("", "m", "n"):
            found.append((GemmConfig(tile_n, stages, 8, "m", epilogue_n, cluster), gemm.PROMOTE))
    return found + [(GemmConfig(256, 4, 8, "m", wide, cluster), None) for cluster in ("", "m", "n")]


def tune(config: BenchConfig, peaks: Peaks) -> Iterator[Result]:
    """Every candidate at every shape; what they take a wave goes to a file beside ``--out``, for ``fp4jax.kernels``."""
    measured: dict[tuple[str, int | None, GemmConfig], dict[tuple[int, int, int], float]] = {}
    for name, (m, n, k, dtype) in shapes(dataclasses.replace(config, product_tokens=(config.tokens,))).items():
        lhs, rhs, ones = fp8_operand((m, k)), fp8_operand((n, k), seed=1), (jnp.ones(m), jnp.ones(n))
        rows = []
        for candidate, promote in candidates(dtype):
            product = functools.partial(scaled_matmul, out_dtype=jnp.dtype(dtype), promote=promote, config=candidate)
            time = seconds(product, lhs, rhs, *ones, iterations=config.iterations)
            rows.append(Row(f"promote {promote}, {describe(candidate)}", time))
            measured.setdefault((dtype, promote, candidate), {})[m, n, k] = time
        yield Result(f"{name}: [{m}, {k}] · [{k}, {n}], {dtype} out", tuple(rows), 2.0 * m * n * k, "FLOP", peaks.fp8)
    if config.out is not None:
        entries = [tuned_entry(*key, times) for key, times in measured.items()]
        write_tuned(config.out.with_suffix(".tuned.json"), entries)


def tuned_entry(
    dtype: str, promote: int | None, config: GemmConfig, times: Mapping[tuple[int, int, int], float]
) -> dict[str, Any]:
    """What a configuration takes a wave, by least squares of relative errors: see ``fp4jax.kernels.gemm.tuned``.

    Args:
        dtype: of the result.
        promote: how many k a partial sum spans.
        config: the configuration.
        times: seconds by (m, n, k). Where all have one k, nothing is set apart for the wave.
    """
    micro = np.array([1e6 * t for t in times.values()])
    waves = np.array([gemm.waves(m, n, config) for m, n, _ in times], float)
    k_tiles = np.array([-(-k // gemm.TILE_K) for _, _, k in times])
    columns = np.stack([waves * k_tiles, waves], axis=1) / micro[:, None]
    per_k_tile, per_wave = np.linalg.lstsq(columns[:, :1], np.ones(len(micro)))[0][0], 0.0
    if len(set(k_tiles.tolist())) > 1:
        both = np.linalg.lstsq(columns, np.ones(len(micro)))[0]
        if both.min() >= 0:
            per_k_tile, per_wave = both
    return {
        "out_dtype": dtype, "promote": promote or 0, "config": vars(config),
        "per_k_tile": round(float(per_k_tile), 5), "per_wave": round(float(per_wave), 4),
        "measured": [[m, n, k, round(float(t), 1)] for (m, n, k), t in zip(times, micro, strict=True)],
    }  # fmt: skip


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
