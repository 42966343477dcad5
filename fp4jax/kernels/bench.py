"""Times the kernels against XLA on one GPU: ``python -m fp4jax.kernels.bench [gemm|tune|quantizers] [--out FILE]``.

Times are medians of CUPTI kernel times, summed over the kernels of a call; those that are compared are taken in one
run. FP8 operands hold E2M1 values of a normal tensor, BF16 operands are normal: a product of zeros, or of few distinct
bits, runs faster than one of data.
"""

import argparse
import datetime
import functools
import json
import pathlib
import statistics
import subprocess
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import profiler

from fp4jax.formats import E2M1, E5M2
from fp4jax.kernels.gemm import GemmConfig, scaled_matmul
from fp4jax.kernels.quantile import order_statistics
from fp4jax.kernels.quantizer import Wanted, quantize_rows, quantize_tiles
from fp4jax.outliers import OCC, thresholds
from fp4jax.quantize import QuantSpec, quantize
from fp4jax.scaling import PerTensor
from fp4jax.typing import Array

# m, n, k and dtype of the result: forward products of LLaMA 7B and 13B, and a weight gradient.
SHAPES = {
    "7B attention": (8192, 4096, 4096, "bfloat16"),
    "7B up": (16384, 11008, 4096, "bfloat16"),
    "7B down": (16384, 4096, 11008, "bfloat16"),
    "7B up, weight gradient": (4096, 11008, 16384, "float32"),
    "13B attention": (16384, 5120, 5120, "bfloat16"),
    "13B up": (8192, 13824, 5120, "bfloat16"),
    "13B down": (8192, 5120, 13824, "bfloat16"),
}
SPEC, GRADIENT = QuantSpec(E2M1), QuantSpec(E5M2, PerTensor())
_K_MAJOR = (((1,), (1,)), ((), ()))
_ITERATIONS = 10


def microseconds(f: Callable, *args) -> float:
    """Median time of ``f(*args)`` on the GPU."""
    _, times = profiler.measure(jax.jit(f), iterations=_ITERATIONS)(*args)
    if times is None:
        raise RuntimeError("CUPTI saw no kernel; the benchmark needs an NVIDIA GPU and no other profiler")
    return 1e3 * statistics.median(times)


def _normal(shape: tuple[int, ...], dtype=jnp.bfloat16) -> Array:
    return jax.random.normal(jax.random.key(0), shape, dtype)


def _fp8(shape: tuple[int, ...]) -> Array:
    values = quantize_rows(_normal(shape), SPEC).values
    assert values is not None
    return values


def _xla_fp8(lhs: Array, rhs: Array, scale: Array, dtype) -> Array:
    lhs, rhs = (x.astype(jnp.bfloat16) * scale for x in (lhs, rhs))
    return lax.dot_general(lhs, rhs, _K_MAJOR, preferred_element_type=dtype)


def gemm(
    shape: tuple[int, int, int, str], configs: dict[str, tuple[GemmConfig | None, int | None]]
) -> dict[str, float]:
    """Microseconds of the baselines and of ``scaled_matmul`` under each (config, promote)."""
    m, n, k, dtype = shape
    lhs, rhs = _fp8((m, k)), _fp8((n, k))
    ones, scale = (jnp.ones(m), jnp.ones(n)), jnp.bfloat16(0.5)

    def vectors(a, b, s, u, v):
        return (_xla_fp8(a, b, s, jnp.float32) * u[:, None] * v).astype(dtype)

    def bfloat16(a, b):
        return lax.dot_general(a, b, _K_MAJOR, preferred_element_type=jnp.dtype(dtype))

    times = {
        "XLA BF16": microseconds(bfloat16, _normal((m, k)), _normal((n, k))),
        "XLA FP8, a scale a tensor": microseconds(functools.partial(_xla_fp8, dtype=jnp.dtype(dtype)), lhs, rhs, scale),
        "XLA FP8, vector scales": microseconds(vectors, lhs, rhs, scale, *ones),
    }
    for name, (config, promote) in configs.items():
        product = functools.partial(scaled_matmul, out_dtype=jnp.dtype(dtype), promote=promote, config=config)
        times[name] = microseconds(product, lhs, rhs, *ones)
    return times


def candidates(dtype: str) -> dict[str, tuple[GemmConfig | None, int | None]]:
    """The configurations that tuning tries, promoted and not."""
    epilogue = 32 if dtype == "float32" else 64
    configs: list[tuple[GemmConfig, int | None]] = [
        (GemmConfig(tile_n, 4, group, minor, epilogue), 256)
        for tile_n in (128, 192)
        for group, minor in ((4, "m"), (8, "m"), (8, "n"), (16, "m"))
    ]
    configs.append((GemmConfig(256, 4, 8, "m", epilogue), None))
    return {f"{c.tile_n} × {c.stages}, {c.group} along {c.minor}, promote {p}": (c, p) for c, p in configs}


def quantizers(m: int, n: int) -> dict[str, float]:
    """Microseconds of the quantizers and the quantile on a BF16 tensor [m, n], beside XLA's."""
    x, rows, cols = _normal((m, n)), jnp.ones(m), jnp.ones(n)
    occ, ranks = OCC(), (int(0.01 * m * n), int(0.99 * m * n))
    bounds = jnp.float32(-2.3), jnp.float32(2.3)
    gradient = (Wanted(None, cols, 1), Wanted(None, rows, 0, plain=False, transposed=True))
    return {
        "XLA rows": microseconds(lambda x: quantize(x, SPEC, axis=-1), x),
        "rows": microseconds(lambda x: quantize_rows(x, SPEC), x),
        "rows and transpose": microseconds(lambda x: quantize_rows(x, SPEC, transpose=True), x),
        "rows and transpose, outliers carried": microseconds(
            lambda x: quantize_rows(x, SPEC, thresholds=bounds, occ=occ, transpose=True), x
        ),
        "gradient, both ways": microseconds(lambda x: quantize_tiles(x, GRADIENT, gradient), x),
        "XLA exact quantile": microseconds(lambda x: thresholds(x, occ, (-1,)), x),
        "exact quantile": microseconds(lambda x: order_statistics(x, ranks), x),
    }


def _environment() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card, driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()[0].split(", ")
    return {"card": card, "driver": driver, "jax": jax.__version__, "date": datetime.date.today().isoformat()}


def _print(title: str, times: dict[str, float], operations: float | None) -> None:
    print(title, flush=True)
    for name, time in sorted(times.items(), key=lambda item: item[1]):
        rate = f"{operations / time / 1e6:8.0f} TFLOP/s" if operations else ""
        print(f"  {time:9.1f} µs {rate}  {name}", flush=True)


def main() -> None:
    """Prints a table for each shape and writes everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("gemm", "tune", "quantizers"))
    parser.add_argument("--out", type=pathlib.Path, help="where to write the results as JSON")
    parser.add_argument("--shapes", nargs="*", choices=tuple(SHAPES), default=tuple(SHAPES))
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    if args.what == "quantizers":
        for m, n in ((16384, 4096), (16384, 11008)):
            results[f"{m} × {n}"] = quantizers(m, n)
            _print(f"{m} × {n} BF16", results[f"{m} × {n}"], None)
    else:
        for name in args.shapes:
            m, n, k, dtype = SHAPES[name]
            shipped: dict[str, tuple[GemmConfig | None, int | None]] = {
                "fp4jax, promoted": (None, 256), "fp4jax, not promoted": (None, None)
            }  # fmt: skip
            results[name] = gemm(SHAPES[name], candidates(dtype) if args.what == "tune" else shipped)
            _print(f"{name}: {m} × {n} × {k}, {dtype}", results[name], 2.0 * m * n * k)
    if args.out:
        args.out.write_text(
            json.dumps({**_environment(), "microseconds": results}, indent=1, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    main()
