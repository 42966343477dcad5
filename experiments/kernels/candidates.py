"""Checks and times the choices behind the kernels' defaults on one H200, in one run of about four minutes:

    python experiments/kernels/candidates.py OUT.json

Everything is compared with the reference first. Times are medians of CUPTI kernel times, in microseconds.
"""

import functools
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import fp4jax
from fp4jax.bench.baselines import fp8_operand, xla_fp8
from fp4jax.bench.measure import environment, normal, seconds
from fp4jax.dot.xla import quantize_activation
from fp4jax.kernels import (
    GemmConfig,
    QuantizerConfig,
    Wanted,
    order_statistics,
    quantize_rows,
    quantize_tiles,
    quantizer,
    scaled_matmul,
)
from fp4jax.outliers import thresholds

E2M1 = fp4jax.QuantSpec(fp4jax.E2M1)
GRADIENT = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())
NOISY = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
M, N = 16384, 4096
RANKS = int((1 - 0.99) * M * N), int(0.99 * M * N)


class Report:
    """Results, printed as they come and written after each."""

    def __init__(self, out: pathlib.Path):
        self.out, self.record = out, {**environment(), "equal": {}, "microseconds": {}}

    def check(self, name: str, got, want) -> None:
        """Whether all arrays are equal bit for bit."""
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        equal = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
        self._add("equal", name, equal)

    def time(self, name: str, function, *args) -> None:
        """Median time of a call."""
        self._add("microseconds", name, round(1e6 * seconds(function, *args, iterations=10), 2))

    def _add(self, kind: str, name: str, value) -> None:
        print(f"{kind}: {name}: {value}", flush=True)
        self.record[kind][name] = value
        self.out.write_text(json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")


def quantiles(report: Report) -> None:
    """Exactness, and time."""
    heavy = jax.random.t(jax.random.key(1), 2.0, (M, N), jnp.float32)
    for name, x in {"normal": normal((M, N)), "heavy": heavy.astype(jnp.bfloat16), "float32": heavy}.items():
        ordered = jnp.sort(x.reshape(-1))
        find = jax.jit(lambda x: order_statistics(x, RANKS))
        report.check(f"quantile, {name}", find(x), (ordered[RANKS[0]], ordered[RANKS[1]]))
        report.time(f"quantile, {name}", find, x)


def products(report: Report) -> None:
    """Pairs of multiprocessors, tiles and orders of the product."""
    for m, n, k in ((16384, 11008, 4096), (8192, 4096, 4096), (16384, 4096, 11008)):
        lhs, rhs, ones = fp8_operand((m, k)), fp8_operand((n, k), seed=1), (jnp.ones(m), jnp.ones(n))
        configs = [(GemmConfig(192), 256), (GemmConfig(256), None)]
        configs += [(GemmConfig(192, 4, g, a, 64, c), 256) for c in "mn" for g, a in ((4, "m"), (8, "m"), (4, "n"))]
        configs += [(GemmConfig(256, cluster=c), None) for c in "mn"] + [(GemmConfig(128, 5, cluster="m"), 256)]
        for config, promote in configs:
            product = functools.partial(scaled_matmul, promote=promote, config=config)
            report.time(f"product {m} × {n} × {k}, promote {promote}, {config}", product, lhs, rhs, *ones)
        report.time(f"product {m} × {n} × {k}, cuBLASLt", xla_fp8(jnp.bfloat16), lhs, rhs, jnp.bfloat16(0.5))


def quantizers(report: Report) -> None:
    """Exactness and tiles."""
    x, occ, key = normal((M, N)), fp4jax.OCC(), jax.random.key(7)
    lo, hi = (t.reshape(()) for t in jax.jit(lambda x: thresholds(x, occ, (-1,)))(x))
    carried = functools.partial(quantize_rows, spec=E2M1, thresholds=(lo, hi), occ=occ)

    def held(values):
        return values.astype(jnp.float32).astype(jnp.float8_e4m3fn)

    want = held(jax.jit(lambda x: fp4jax.quantize(x, E2M1, axis=-1))(x).values)
    want_carried = held(jax.jit(lambda x: quantize_activation(x, E2M1, (-1,), occ, None)[0])(x))
    want_noisy = held(jax.jit(lambda x: fp4jax.quantize(x, NOISY, axis=-1, key=key))(x).values)
    noisy = functools.partial(quantize_rows, spec=NOISY, key=key)
    plain = functools.partial(quantize_rows, spec=E2M1)
    for name, function, values in (
        ("rows", plain, want), ("outliers", carried, want_carried), ("noise", noisy, want_noisy)
    ):  # fmt: skip
        report.check(name, jax.jit(function)(x).values, values)
        report.time(name, function, x)
        both = functools.partial(function, transpose=True)
        got = jax.jit(both)(x)
        report.check(f"{name} and transpose", (got.values, got.transposed), (values, values.T))
        report.time(f"{name} and transpose", both, x)
    for tile in ((32, 128, 4), (64, 64, 4), (128, 64, 4), (64, 128, 8), (128, 128, 8)):
        both = functools.partial(plain, transpose=True, config=QuantizerConfig(*tile))
        report.time(f"rows and transpose, tile {tile}", both, x)
    for megabytes in (4, 8, 20, 32):
        quantizer.IN_FLIGHT = megabytes * 2**20
        report.time(f"rows and transpose, {megabytes} MB ahead", lambda x: plain(x, transpose=True), x)
    quantizer.IN_FLIGHT = 12 * 2**20
    rows, cols = jnp.ones(M), jnp.ones(N)
    ways = (Wanted(None, cols, 1), Wanted(None, rows, 0, plain=False, transposed=True))
    weight, columns = normal((4096, 11008), jnp.float32), (Wanted(1, transposed=True),)
    for tile in ((64, 128, 4), (64, 128, 8), (64, 64, 4)):
        config = QuantizerConfig(*tile)
        report.time(f"gradient, tile {tile}", lambda g, c=config: quantize_tiles(g, GRADIENT, ways, config=c), x)
        report.time(f"weight, tile {tile}", lambda w, c=config: quantize_tiles(w, E2M1, columns, config=c), weight)


if __name__ == "__main__":
    REPORT = Report(pathlib.Path(sys.argv[1]))
    for part in (quantiles, products, quantizers):
        part(REPORT)
