"""Quantizers and the exact quantile, beside XLA's and the floor that memory sets."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks, normal, seconds
from fp4jax.bench.report import Bar, Bars, Result, Row
from fp4jax.formats import E2M1, E5M2
from fp4jax.kernels import Wanted, order_statistics, quantize_rows, quantize_tiles
from fp4jax.kernels.quantile import row_extremes
from fp4jax.models import MODELS
from fp4jax.outliers import OCC, ranks, thresholds
from fp4jax.quantize import QuantSpec, quantize
from fp4jax.rounding import STOCHASTIC
from fp4jax.scaling import PerTensor

SPEC, NOISY, GRADIENT = QuantSpec(E2M1), QuantSpec(E2M1, rounding=STOCHASTIC), QuantSpec(E5M2, PerTensor())
BOUNDS = (-2.3, 2.3)


def quantizers(config: BenchConfig, peaks: Peaks) -> Iterator[Result | Bars]:
    """A table for each number of bytes that must move; the first row is the floor that a copy sets."""
    bars = []
    for n in dict.fromkeys(d for size in config.sizes for d in (MODELS[size].embed_dim, MODELS[size].mlp_dim)):
        for result, aim in zip(_of_width(config, peaks, n), (1.35, 1.5, None), strict=True):
            yield result
            if aim is not None:
                rows, floor = result.row("rows").seconds, result.rows[0].seconds
                bars.append(Bar(f"{result.title}: rows, over the floor", rows / floor, aim, least=False))
    yield Bars("quantizers: aims", tuple(bars))


def _of_width(config: BenchConfig, peaks: Peaks, n: int) -> Iterator[Result]:
    m, occ, key = config.tokens, OCC(), jax.random.key(0)
    x, rows, cols = normal((m, n)), jnp.ones(m), jnp.ones(n)
    lo, hi = (jnp.float32(b) for b in BOUNDS)
    carried = functools.partial(quantize_rows, spec=SPEC, thresholds=(lo, hi), occ=occ)
    values = {
        "XLA, a scale a row": lambda x: quantize(x, SPEC, axis=-1),
        "rows": lambda x: quantize_rows(x, SPEC),
        "rows, outliers carried": carried,
    }
    yield _table(config, peaks, f"[{m}, {n}] BF16: values", 3 * m * n, values, x)
    extremes = row_extremes(x)
    known = functools.partial(carried, transpose=True, extremes=extremes)
    gradient = (Wanted(None, cols, 1), Wanted(None, rows, 0, plain=False, transposed=True))
    both = {
        "rows": lambda x: quantize_rows(x, SPEC, transpose=True),
        "rows, outliers carried": functools.partial(carried, transpose=True),
        **({} if extremes is None else {"rows, outliers carried, extremes known": known}),
        "rows, stochastic": lambda x: quantize_rows(x, NOISY, transpose=True, key=key),
        "gradient, both ways": lambda x: quantize_tiles(x, GRADIENT, gradient),
    }
    notes = (
        "Scales must be known before values are, so all but one of these read the matrix twice: 1.5 floors at best.",
        "Under OCC the reading that counts the quantile has found the extremes of rows as well.",
    )
    yield _table(config, peaks, f"[{m}, {n}] BF16: values and transposed values", 4 * m * n, both, x, notes)
    k = MODELS[config.sizes[0]].embed_dim
    weight = {"columns": lambda w: quantize_tiles(w, SPEC, (Wanted(1, transposed=True),))}
    title = f"weight [{k}, {n}] float32: values and transposed values, a scale a column"
    yield _table(config, peaks, title, 6 * k * n, weight, normal((k, n), jnp.float32))


def quantile(config: BenchConfig, peaks: Peaks) -> Iterator[Result | Bars]:
    """Both thresholds of OCC at α = .99, of normal and of heavy-tailed values."""
    m, n, bars = config.tokens, MODELS[config.sizes[0]].embed_dim, []
    occ = OCC()
    wanted = ranks(occ.alpha, m * n)
    heavy = jax.random.t(jax.random.key(0), 2.0, (m, n), jnp.float32)
    for name, x in (
        ("BF16, normal", normal((m, n))),
        ("BF16, Student's t with 2 degrees of freedom", heavy.astype(jnp.bfloat16)),
        ("float32, Student's t with 2 degrees of freedom", heavy),
    ):
        functions: dict[str, Callable] = {"fp4jax, exact": lambda x: order_statistics(x, wanted)}
        if config.baselines:
            functions |= {
                "XLA, exact": lambda x: thresholds(x, occ, (-1,)),
                "XLA, sampled": lambda x: thresholds(x, OCC(quantile="sampled"), (-1,)),
            }
        result = _table(config, peaks, f"quantiles of [{m}, {n}] {name}", x.nbytes, functions, x)
        yield result
        bars.append(Bar(f"{result.title}, µs", 1e6 * result.row("fp4jax, exact").seconds, 100, least=False))
    yield Bars("exact quantile: aims", tuple(bars))


def _table(config: BenchConfig, peaks: Peaks, title: str, bytes_: int, functions, x, notes=()) -> Result:
    timed = functools.partial(seconds, iterations=config.iterations)
    rows = [Row("floor", bytes_ / peaks.memory)]
    for name, function in functions.items():
        if config.baselines or not name.lower().startswith("xla"):
            rows.append(Row(name, timed(function, x)))
    return Result(title, tuple(rows), float(bytes_), "B", peaks.memory, notes)
