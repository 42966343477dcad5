"""The command itself: one table after another."""

import dataclasses

import jax
from rich.console import Console

from fp4jax.bench import networks, products, quantizers
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import environment, measure_peaks
from fp4jax.bench.report import Result, write
from fp4jax.train.config import to_json

TABLES = {
    "products": products.products,
    "quantizers": quantizers.quantizers,
    "quantile": quantizers.quantile,
    "layer": networks.layers,
    "step": networks.steps,
    "tune": products.tune,
}


def bench(config: BenchConfig, console: Console) -> list[Result]:
    """Measure and print the tables of ``config``, and write them to ``config.out``.

    Args:
        config: resolved or not.
        console: for tables and progress.

    Raises:
        ConfigError: settings that cannot be used here.

    Example:
        >>> results = bench(BenchConfig(iterations=1, seq_len=8, batch_size=1), Console())  # doctest: +SKIP
    """
    config = config.resolved()
    about = environment()
    console.print(", ".join(f"{name}: {value}" for name, value in about.items()), highlight=False, soft_wrap=True)
    peaks, results = None, []
    if jax.default_backend() == "gpu":
        with console.status("measuring what this GPU can do …"):
            peaks = measure_peaks(config.iterations)
        console.print(
            f"peaks of this run: BF16 {peaks.bfloat16 / 1e12:.0f} TFLOP/s, FP8 {(peaks.fp8 or 0) / 1e12:.0f} TFLOP/s, "
            f"memory {peaks.memory / 1e12:.2f} TB/s",
            highlight=False,
        )
    for name in config.tables:
        tables = iter(TABLES[name](config, peaks))  # pyright: ignore[reportArgumentType]  (peaks are there on a GPU)
        while True:
            with console.status(f"{name}: compiling and measuring …"):
                result = next(tables, None)
            if result is None:
                break
            console.print(result.table())
            results.append(result)
            if config.out is not None:
                found = None if peaks is None else dataclasses.asdict(peaks)
                write(config.out, about, results, peaks=found, settings=to_json(config))
    if config.out is not None:
        console.print(f"written to {config.out}", highlight=False, soft_wrap=True)
    return results
