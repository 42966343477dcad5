"""Checks and times the kernels and what is made of them on one H200, in runs of at most ten minutes:

    python experiments/kernels/h200.py a.json --limit 570 --sections checks quantile quantizers clusters layer
    python experiments/kernels/h200.py b.json --limit 570 --sections profile step unrolled
    python experiments/kernels/h200.py d.json --limit 300 --sections products
    python experiments/kernels/h200.py c.json --micro         # on a CPU: tiny sizes, kernels interpreted

Every section runs in a process of its own and has a limit of its own, so that neither an error of CUDA nor a compiler
that does not end costs the others anything. Its findings go to OUT.SECTION.json as they come, and to OUT.json when it
ends. Times are medians of CUPTI kernel times, in microseconds. The exit status is 1 if a section failed or a check
found a difference.
"""

import argparse
import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from apart import Report, run_apart, section_file
from rich.console import Console

import fp4jax
from fp4jax import kernels, outliers
from fp4jax.bench.baselines import fp8_operand, xla_bfloat16, xla_fp8
from fp4jax.bench.config import BenchConfig, TableName
from fp4jax.bench.measure import normal
from fp4jax.bench.run import bench
from fp4jax.dot.xla import quantize_activation
from fp4jax.exact import as_float32, multiply
from fp4jax.kernels import (
    Factor,
    GemmConfig,
    QuantizerConfig,
    Wanted,
    order_statistics,
    quantile,
    quantile_device,
    quantize_rows,
    quantize_tiles,
    scaled_matmul,
)
from fp4jax.models import MODELS
from fp4jax.outliers import thresholds

E2M1 = fp4jax.QuantSpec(fp4jax.E2M1)
GRADIENT = fp4jax.QuantSpec(fp4jax.E5M2, fp4jax.PerTensor())
NOISY = fp4jax.QuantSpec(fp4jax.E2M1, rounding=fp4jax.STOCHASTIC)
OCC = fp4jax.OCC()


class Sizes(NamedTuple):
    """Shapes of a run.

    Attributes:
        matrix: of the timed quantizers and quantiles.
        matrices: of the checks.
        products: m, n, k and the dtype of the result of the checks.
        iterations: calls a timing.
    """

    matrix: tuple[int, int]
    matrices: tuple[tuple[int, int], ...]
    products: tuple[tuple[int, int, int, str], ...]
    iterations: int


FULL = Sizes(
    (16384, 4096),
    ((40, 129), (16384, 4096)),
    (
        (129, 385, 300, "bfloat16"),
        (16384, 11008, 4096, "bfloat16"),
        (16384, 4096, 11008, "bfloat16"),
        (4096, 11008, 16384, "float32"),
    ),
    10,
)
MICRO = Sizes((32, 128), ((16, 72),), ((33, 40, 129, "float32"),), 1)


# --- against the reference ---------------------------------------------------------------------------------------


def checks(report: Report) -> None:
    """Every kernel against what it must equal, at small and odd and at large sizes."""
    for shape in report.sizes.matrices:
        _check_quantile(report, shape)
        _check_quantizers(report, normal(shape))
    for shape in report.sizes.products:
        _check_products(report, *shape)


def _activations(shape: tuple[int, int]) -> dict[str, jax.Array]:
    heavy = jax.random.t(jax.random.key(1), 2.0, shape, jnp.float32)
    few = jnp.round(normal(shape, jnp.float32))  # a handful of distinct values, so that thousands share a rank
    return {
        "normal": normal(shape),
        "heavy": heavy.astype(jnp.bfloat16),
        "few": few.astype(jnp.bfloat16),
        "float16": heavy.astype(jnp.float16),
        "float32": heavy,
    }


def _check_quantile(report: Report, shape: tuple[int, int]) -> None:
    find, ranks = _quantile(math.prod(shape))
    for name, x in _activations(shape).items():
        ordered = jnp.sort(x.reshape(-1))
        report.check(f"quantile, {name}, {list(shape)}", find(x), tuple(ordered[rank] for rank in ranks))


def _quantile(n: int) -> tuple[Callable, tuple[int, int]]:
    ranks = outliers.ranks(0.99, n)
    return jax.jit(functools.partial(order_statistics, ranks=ranks)), ranks


def _check_quantizers(report: Report, x: jax.Array) -> None:
    where = f"{list(x.shape)}"
    for name, function, reference in row_quantizers(x):
        values = jax.jit(reference)(x)
        report.check(f"{name}, {where}", jax.jit(function)(x).values, values)
        for config in (None, *TRANSPOSING[:1]):
            both = jax.jit(functools.partial(function, transpose=True, config=config))(x)
            report.check(f"{name} and transpose, {config}, {where}", (both.values, both.transposed), (values, values.T))
    m, n = x.shape
    rows, cols = (jnp.exp2(jnp.round(4 * normal((size,), jnp.float32, seed=2))) for size in (m, n))
    first, second = jax.jit(lambda x, rows, cols: quantize_tiles(x, GRADIENT, gradient_ways(rows, cols)))(x, rows, cols)
    want = jax.jit(lambda x, fold: held(fp4jax.quantize(multiply(as_float32(x), fold), GRADIENT, axis=-1)))
    report.check(f"gradient, {where}", (first.values, second.transposed), (want(x, cols), want(x, rows[:, None]).T))
    w = normal(x.shape, jnp.float32)
    got = jax.jit(lambda w: quantize_tiles(w, E2M1, COLUMNS)[0])(w)
    values = jax.jit(lambda w: held(fp4jax.quantize(w, E2M1, axis=-2), jnp.float8_e4m3fn))(w)
    report.check(f"weight, {where}", (got.values, got.transposed), (values, values.T))


def _check_products(report: Report, m: int, n: int, k: int, dtype: str) -> None:
    """Sums of E2M1 products are exact in float32; all positive, and times the largest, they are the hardest."""
    rows, cols = jnp.exp2(jnp.arange(m) % 5 - 2.0), jnp.exp2(jnp.arange(n) % 3 - 1.0)
    signed, reference = (fp8_operand((m, k)), fp8_operand((n, k), seed=1)), xla_bfloat16(jnp.float32)
    for config in (None, GemmConfig(128, cluster="m"), GemmConfig(128, cluster="n")):
        product = jax.jit(functools.partial(scaled_matmul, out_dtype=jnp.dtype(dtype), config=config))
        for signs, (lhs, rhs) in {"both signs": signed, "positive": tuple(map(_positive, signed))}.items():
            exact = reference(lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16))
            want = (exact * rows[:, None] * cols).astype(dtype)
            report.check(
                f"product {m} × {n} × {k}, {dtype}, {signs}, {_short(config)}", product(lhs, rhs, rows, cols), want
            )


def _positive(x: jax.Array) -> jax.Array:
    return jnp.abs(x.astype(jnp.float32)).astype(x.dtype)


def _short(config: Any) -> str:
    return (
        "default" if config is None else ", ".join(f"{k} {v}" for k, v in vars(config).items() if v not in ("", None))
    )


# --- quantizers and the quantile ---------------------------------------------------------------------------------

COLUMNS = (Wanted(1, transposed=True),)
TRANSPOSING = (
    QuantizerConfig(64, 128, 4),
    QuantizerConfig(64, 128, 8, packed=4),
    QuantizerConfig(128, 64, 4, packed=4),
    QuantizerConfig(32, 128, 4),
)
"""Tiles that might be faster than the default."""


def gradient_ways(rows: jax.Array, cols: jax.Array) -> tuple[Wanted, ...]:
    """Both ways in which backward wants a gradient."""
    return Wanted(None, cols, 1), Wanted(None, rows, 0, plain=False, transposed=True)


def held(q: fp4jax.QTensor, dtype: Any = jnp.float8_e5m2) -> jax.Array:
    """Values of a reference as the kernels hold them."""
    return q.values.astype(jnp.float32).astype(dtype)


def row_quantizers(x: jax.Array) -> list[tuple[str, Callable, Callable]]:
    """Name, kernel and reference of the ways to quantize rows."""
    e4m3, key = jnp.float8_e4m3fn, jax.random.key(7)
    lo, hi = (t.reshape(()) for t in jax.jit(lambda x: thresholds(x, OCC, (-1,)))(x))
    carried = functools.partial(quantize_rows, spec=E2M1, thresholds=(lo, hi), occ=OCC)
    return [
        (
            "rows",
            functools.partial(quantize_rows, spec=E2M1),
            lambda x: held(fp4jax.quantize(x, E2M1, axis=-1), e4m3),
        ),
        (
            "rows, outliers",
            carried,
            lambda x: quantize_activation(x, E2M1, (-1,), OCC, None)[0].astype(e4m3),
        ),
        (
            "rows, stochastic",
            functools.partial(quantize_rows, spec=NOISY, key=key),
            lambda x: held(fp4jax.quantize(x, NOISY, axis=-1, key=key), e4m3),
        ),
    ]  # fmt: skip


def quantiles(report: Report) -> None:
    """The exact quantile, under several samples and numbers of thresholds, beside sampling and bisection by XLA."""
    tensors = _activations(report.sizes.matrix)
    heavy = tensors["heavy"]
    find, _ = _quantile(heavy.size)
    for name, x in tensors.items():
        report.time(f"exact, {name}", find, x)
    default = quantile.SAMPLES
    for log in (14, 16):
        quantile.SAMPLES = 2**log
        find, _ = _quantile(heavy.size)
        report.time(f"exact, heavy, 2^{log} samples", find, heavy)
    quantile.SAMPLES = default
    default = quantile_device.THRESHOLDS
    for count in (5, 6, 8):
        quantile_device.THRESHOLDS, quantile_device.INNER = count, count - 1
        find, _ = _quantile(heavy.size)
        for name in ("normal", "heavy"):
            report.time(f"exact, {name}, {count} thresholds", find, tensors[name])
    quantile_device.THRESHOLDS, quantile_device.INNER = default, default - 1
    report.time("XLA, exact, heavy", lambda x: thresholds(x, OCC, (-1,)), heavy)
    report.time("XLA, sampled, heavy", lambda x: thresholds(x, fp4jax.OCC(quantile="sampled"), (-1,)), heavy)


def quantizers(report: Report) -> None:
    """Rows, with outliers and noise; gradients both ways; weights: the default and other tiles."""
    m, n = report.sizes.matrix
    x, rows, cols = normal((m, n)), jnp.ones(m), jnp.ones(n)
    weight = normal((n, MODELS["7b"].mlp_dim if m > 1000 else m), jnp.float32)
    for name, function, _ in row_quantizers(x):
        report.time(name, function, x)
        for config in (None, *TRANSPOSING):
            both = functools.partial(function, transpose=True, config=config)
            report.time(f"{name} and transpose, {_short(config)}", both, x)
    for config in (None, *TRANSPOSING):
        tiles = functools.partial(quantize_tiles, config=config)
        both = functools.partial(tiles, spec=GRADIENT, wanted=gradient_ways(rows, cols))
        report.time(f"gradient both ways, {_short(config)}", both, x)
        report.time(f"weight, {_short(config)}", functools.partial(tiles, spec=E2M1, wanted=COLUMNS), weight)
    for width in (n, MODELS["7b"].mlp_dim if m > 1000 else 2 * n):
        _with_extremes(report, normal((m, width)))


def _with_extremes(report: Report, x: jax.Array) -> None:
    """Rows and their transpose where the reading that counts quantiles has found the extremes of rows."""
    lo, hi = (t.reshape(()) for t in jax.jit(lambda x: thresholds(x, OCC, (-1,)))(x))
    extremes = jax.jit(quantile.row_extremes)(x)
    report.time(f"extremes of rows, {list(x.shape)}", quantile.row_extremes, x)
    both = functools.partial(quantize_rows, spec=E2M1, transpose=True)
    carried = functools.partial(both, thresholds=(lo, hi), occ=OCC)
    for config in (None, *TRANSPOSING):
        name = f"given extremes, {list(x.shape)}, {_short(config)}"
        for kind, function in (("rows", both), ("rows, outliers", carried)):
            given = functools.partial(function, config=config)
            report.time(f"{kind} and transpose, {name}", lambda x, e, f=given: f(x, extremes=e), x, extremes)


# --- products ----------------------------------------------------------------------------------------------------


def clusters(report: Report) -> None:
    """The product by itself, in clusters and not, at the shapes of LLaMA 1.3B, 7B and 13B, and for weight gradients."""
    for m, n, k, dtype in _product_shapes(report.sizes):
        lhs, rhs, ones = fp8_operand((m, k)), fp8_operand((n, k), seed=1), (jnp.ones(m), jnp.ones(n))
        name, epilogue = f"{m} × {n} × {k}, {dtype}", 32 if dtype == "float32" else 64
        configs: dict[str, tuple[GemmConfig | None, int | None]] = {"default": (None, 256)}
        for cluster in ("", "m", "n"):
            tile = GemmConfig(192, 4, 8, "m", epilogue, cluster)
            configs[_short(tile)] = tile, 256
        configs["not promoted, 256 × 4 along m"] = GemmConfig(256, 4, 8, "m", epilogue, "m"), None
        for label, (config, promote) in configs.items():
            product = functools.partial(scaled_matmul, out_dtype=jnp.dtype(dtype), promote=promote, config=config)
            report.time(f"{name}: {label}", product, lhs, rhs, *ones)
        report.time(f"{name}: cuBLASLt", xla_fp8(dtype), lhs, rhs, jnp.bfloat16(0.5))


def factor(report: Report) -> None:
    """Weight gradients alone, times DGE's factor by XLA, and with it inside the product."""
    dge, one = fp4jax.DGE(), jnp.float32(1)
    product = functools.partial(scaled_matmul, lhs_scale=one, rhs_scale=one, out_dtype=jnp.float32)

    def after(lhs, rhs, weight, reciprocal):
        return product(lhs, rhs) * dge.factor(multiply(weight, reciprocal), fp4jax.E2M1)

    def inside(lhs, rhs, weight, reciprocal):
        return product(lhs, rhs, factor=Factor(weight, reciprocal, dge, fp4jax.E2M1))

    large = report.sizes is not MICRO
    for m, n, k in ((2048, 5504, 16384), (5504, 2048, 16384), (2048, 2048, 16384)) if large else ((33, 40, 129),):
        lhs, rhs, weight = fp8_operand((m, k)), fp8_operand((n, k), seed=1), normal((m, n), jnp.float32, seed=2)
        reciprocal = fp4jax.AbsMax()(jnp.max(jnp.abs(weight), axis=0), fp4jax.E2M1).reciprocal
        report.time(f"{m} × {n} × {k}: product alone", product, lhs, rhs)
        for name, function in (("by XLA", after), ("inside", inside)):
            report.time(f"{m} × {n} × {k}: factor {name}", function, lhs, rhs, weight, reciprocal)


def _product_shapes(sizes: Sizes) -> list[tuple[int, int, int, str]]:
    if sizes is MICRO:
        return [(40, 24, 129, "bfloat16")]
    m, found = sizes.matrix[0], []
    for model in (MODELS["1.3b"], MODELS["7b"], MODELS["13b"]):
        d, h = model.embed_dim, model.mlp_dim
        found += [(m, d, d, "bfloat16"), (m, h, d, "bfloat16"), (m, d, h, "bfloat16"), (d, h, m, "float32")]
    return found


# --- what is made of them ----------------------------------------------------------------------------------------

RECIPES = ("fp4", "fp4:quantile=sampled", "fp4:alpha=none", "fp4_vector")


def by_bench(table: TableName, **settings: Any) -> Callable[[Report], None]:
    """A section that is a table of `fp4jax bench`, which writes the file of the section itself."""

    def run(report: Report) -> None:
        small: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "recipes": ()} if report.sizes is MICRO else {}
        iterations = min(5, report.sizes.iterations)
        bench(BenchConfig(tables=(table,), out=report.out, iterations=iterations, **settings | small), Console())

    return run


class Section(NamedTuple):
    """What to run, and for how many seconds at most."""

    run: Callable[[Report], None]
    limit: float


SECTIONS: Mapping[str, Section] = {
    "checks": Section(checks, 150),
    "profile": Section(by_bench("profile", recipes=("fp4", "fp4_vector")), 150),
    "step": Section(by_bench("step", recipes=RECIPES, baselines=False), 180),
    "unrolled": Section(by_bench("step", recipes=("fp4", "fp4_vector"), baselines=False, scan_layers=False), 280),
    "layer": Section(by_bench("layer", recipes=RECIPES), 90),
    "quantile": Section(quantiles, 90),
    "quantizers": Section(quantizers, 120),
    "clusters": Section(clusters, 180),
    "factor": Section(factor, 60),
    "products": Section(by_bench("products"), 240),
}
"""In the order in which they run: what is asked most first."""
HOPPER_ONLY = ("layer", "products")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="JSON file for all findings")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, help="by default all; with --micro those for a CPU")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all sections together")
    parser.add_argument("--micro", action="store_true", help="tiny sizes, and kernels interpreted on a CPU")
    parser.add_argument("--here", action="store_true", help="one section, in this process")
    parsed = parser.parse_args(arguments)
    parsed.out.parent.mkdir(parents=True, exist_ok=True)
    if parsed.here:
        return _here(parsed)
    names = parsed.sections or [name for name in SECTIONS if not (parsed.micro and name in HOPPER_ONLY)]
    commands = {name: (_command(name, parsed), SECTIONS[name].limit) for name in names}
    ended = run_apart(commands, parsed.out, parsed.limit)
    for name, how in ended.items():
        print(f"{name}: {how}")
    return int(any(how != "done" for how in ended.values()))


def _command(section: str, parsed: argparse.Namespace) -> list[str]:
    command = [sys.executable, __file__, str(parsed.out), "--sections", section, "--here"]
    if parsed.micro:
        command.append("--micro")
    if section != "profile":
        return command
    # Inside CUDA graphs the profiler does not see which instruction a kernel is of.
    return ["env", f"XLA_FLAGS={os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer=", *command]


def _here(parsed: argparse.Namespace) -> int:
    (name,) = parsed.sections
    report = Report(section_file(parsed.out, name), MICRO if parsed.micro else FULL)
    if parsed.micro:
        with kernels.interpret():
            SECTIONS[name].run(report)
    else:
        SECTIONS[name].run(report)
    return int(any(found != "none" for found in report.record["differences"].values()))


if __name__ == "__main__":
    sys.exit(main())
