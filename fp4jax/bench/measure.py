"""Time on the device's own clock, and the peaks that it is compared with."""

import dataclasses
import functools
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.train.rundir import circumstances
from fp4jax.typing import Array

K_MAJOR = (((1,), (1,)), ((), ()))


def seconds(function: Callable, *args: Any, iterations: int) -> float:
    """Median time of a call, compiled and warm.

    On an NVIDIA GPU that of its kernels, by CUPTI, so that neither launches nor the host count; elsewhere by the wall
    clock.

    Args:
        function: of arrays to arrays; a compiled one is taken as it is.
        args: its arguments.
        iterations: calls.
    """
    compiled = function if hasattr(function, "lower") else jax.jit(function)
    jax.block_until_ready(compiled(*args))
    if jax.default_backend() == "gpu":
        from jax.experimental.mosaic.gpu import profiler

        _, runs = profiler.measure(compiled, iterations=iterations)(*args)
        if runs is None:
            raise RuntimeError("CUPTI saw no kernel; fp4jax bench needs an NVIDIA GPU and no other profiler")
        return 1e-3 * statistics.median(runs if isinstance(runs, list) else [runs])
    return statistics.median(_wall(lambda: compiled(*args)) for _ in range(iterations))


def seconds_a_step(step: Callable, state: Any, batch: Array, *, iterations: int) -> float:
    """Median wall time of ``state, _ = step(state, batch)``, each awaited; ``step`` may donate the state."""
    times = []
    for _ in range(iterations + 2):  # the first compiles, the second fills caches
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes that a device holds while it runs a program: arguments, results that do not replace them, and the rest.

    Raises:
        RuntimeError: on a device that does not tell.
    """
    held = compiled.memory_analysis()
    if held is None:
        raise RuntimeError(f"{jax.default_backend()} does not tell what memory a program takes")
    return (
        held.argument_size_in_bytes
        + held.output_size_in_bytes
        - held.alias_size_in_bytes
        + held.temp_size_in_bytes
        + held.generated_code_size_in_bytes
    )


def peak_bytes() -> int | None:
    """Bytes that the first device has held at most since this process began; None where it does not count them."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")


def _wall(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def normal(shape: tuple[int, ...], dtype=jnp.bfloat16, seed: int = 0) -> Array:
    """Normal values: a product of zeros, or of few distinct bits, runs faster than one of data."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What the device reached in this run.

    Args:
        bfloat16: operations a second of an 8192³ product.
        fp8: the same in FP8, or None where there is none.
        memory: bytes a second, read and written, of a copy.
    """

    bfloat16: float
    fp8: float | None
    memory: float


def measure_peaks(iterations: int) -> Peaks:
    """The peaks of a GPU: large products and a large copy through XLA."""
    from fp4jax.bench.baselines import fp8_operand, xla_bfloat16, xla_fp8

    n, bytes_ = 8192, 2**32
    timed = functools.partial(seconds, iterations=iterations)
    operations = 2.0 * n**3
    bfloat16 = timed(xla_bfloat16(jnp.bfloat16), normal((n, n)), normal((n, n), seed=1))
    lhs, rhs = fp8_operand((n, n)), fp8_operand((n, n), seed=1)
    fp8 = timed(xla_fp8(jnp.bfloat16), lhs, rhs, jnp.bfloat16(0.5))
    copy = timed(lambda x: -x, jnp.ones(bytes_ // 4, jnp.float32))
    return Peaks(operations / bfloat16, operations / fp8, 2.0 * bytes_ / copy)


def environment() -> dict[str, str]:
    """What a number needs beside it: command, date, hardware, versions, and the driver of an NVIDIA GPU."""
    found = circumstances()
    if jax.default_backend() == "gpu":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
        found["card"], found["driver"] = lines[0].split(", ")
    return found
