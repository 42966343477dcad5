"""The command itself: one table after another."""

import dataclasses
import time

import jax
from rich.console import Console

from fp4jax.bench import least, networks, products, profile, quantizers
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.measure import Peaks, environment, measure_peaks
from fp4jax.bench.report import Reported, write
from fp4jax.train.config import to_json

TABLES = {
    "products": products.products,
    "quantizers": quantizers.quantizers,
    "quantile": quantizers.quantile,
    "layer": networks.layers,
    "step": networks.steps,
    "profile": profile.profile,
    "least": least.least,
    "tune": products.tune,
}


WITHOUT_PEAKS = ("profile", "least")
"""Tables before which no peaks are measured: two users of CUPTI in a process may get into each other's way."""


def bench(config: BenchConfig, console: Console) -> list[Reported]:
    """Measure and print the tables of ``config``, and write them to ``config.out`` after each.

    Args:
        config: resolved or not.
        console: for tables and progress.

    Raises:
        ConfigError: settings that cannot be used here.

    Example:
        >>> results = bench(BenchConfig(iterations=1, seq_len=8, batch_size=1), Console())  # doctest: +SKIP
    """
    config, began = config.resolved(), time.monotonic()
    about = environment()
    console.print(", ".join(f"{name}: {value}" for name, value in about.items()), highlight=False, soft_wrap=True)
    peaks, results = None, dict[str, Reported]()
    for name in config.tables:
        if peaks is None and name not in WITHOUT_PEAKS and jax.default_backend() == "gpu":
            peaks = _peaks(config, console)
        tables = iter(TABLES[name](config, peaks))  # pyright: ignore[reportArgumentType]  (peaks are there on a GPU)
        shown = None
        while not (spent := config.budget is not None and time.monotonic() - began > config.budget):
            with console.status(f"{name}: compiling and measuring …"):
                result = next(tables, None)
            if shown is not None and (result is None or result.title != shown.title):  # it will not come anew
                console.print(shown.table())
            if (shown := result) is None:
                break
            results[result.title] = result
            if config.out is not None:
                found = None if peaks is None else dataclasses.asdict(peaks)
                write(config.out, about, list(results.values()), peaks=found, settings=to_json(config))
        if spent:
            if shown is not None:
                console.print(shown.table())
            console.print(f"budget={config.budget} seconds are over: {name} is not complete", highlight=False)
            break
    if config.out is not None:
        console.print(f"written to {config.out}", highlight=False, soft_wrap=True)
    return list(results.values())


def _peaks(config: BenchConfig, console: Console) -> Peaks:
    with console.status("measuring what this GPU can do …"):
        peaks = measure_peaks(config.iterations)
    console.print(
        f"peaks of this run: BF16 {peaks.bfloat16 / 1e12:.0f} TFLOP/s, FP8 {(peaks.fp8 or 0) / 1e12:.0f} TFLOP/s, "
        f"memory {peaks.memory / 1e12:.2f} TB/s",
        highlight=False,
    )
    return peaks
