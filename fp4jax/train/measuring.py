"""`fp4jax train --telemetry-every N`: what the 4 bits did to every operand, now and then, beside the train step.

The step does not know of it: its program stays as it is, and so does every number that it computes.
"""

import collections
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from fp4jax import telemetry
from fp4jax.models import cross_entropy
from fp4jax.telemetry.log import FILE
from fp4jax.telemetry.report import WIDTH
from fp4jax.train.arm import Arm
from fp4jax.train.errors import ConfigError
from fp4jax.train.gradient import microbatches
from fp4jax.train.placement import OnMesh
from fp4jax.train.step import TrainState

HEATMAP = "telemetry.png"


class Measuring:
    """Measures the operands of a step before it is made, every so many steps, and writes them down.

    It is the loss and the noise of the step, of its first microbatch: rows 0, A, 2A, … of the batch.

    Args:
        arm: what trains; of one seed.
        folder: of the run. Process 0 writes telemetry.jsonl, and TensorBoard events in the folder telemetry.
        every: steps between measurements.
        tensorboard: whether to write events.
        resume_at: the step that training goes on from; None starts new files.
        writes: whether this process writes.

    Raises:
        ConfigError: nothing to measure.
        MissingPackageError: `tensorboard` without tensorboardX.
    """

    def __init__(
        self,
        arm: Arm,
        folder: Path,
        every: int,
        *,
        tensorboard: bool,
        resume_at: int | None = None,
        writes: bool = True,
    ):
        self.every = every
        self.program = measuring_program(arm)
        """Compiled: (params, noise, step, tokens) -> the sums that `fp4jax.telemetry.collect` takes."""
        self._log = telemetry.Log(folder, tensorboard=tensorboard, resume_at=resume_at) if writes else None

    def due(self, step: int) -> bool:
        """Whether to measure the step of this number, counted from 1."""
        return step % self.every == 0

    def __call__(self, step: int, state: TrainState, tokens: jax.Array) -> None:
        """Measure step number `step`, which `state` and `tokens` are about to make, and write it. Waits for the device.

        All processes of a run call it.
        """
        snapshot = telemetry.collect(self.program(state.params, state.noise, state.step, tokens))
        if self._log is not None:
            self._log.write(step, snapshot)

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        if self._log is not None:
            self._log.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()


def measuring_program(arm: Arm) -> Any:
    """See `Measuring.program`.

    Raises:
        ConfigError: no layer follows a recipe that quantizes.
    """
    architecture, accumulate = arm.architecture, arm.plan.accumulate

    def loss(model: nnx.Module, tokens: jax.Array) -> jax.Array:
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    try:
        meter = telemetry.Meter(nnx.eval_shape(lambda: architecture.create(nnx.Rngs(params=0, noise=0))), loss)
    except ValueError as error:
        raise ConfigError(f"telemetry_every: {error}") from error

    def measure(params: Any, noise: Any, step: jax.Array, tokens: jax.Array) -> Any:
        model = architecture.merge(params, noise, step * accumulate)
        part = tokens if accumulate == 1 else microbatches(tokens, accumulate)[0]
        return meter.sums(*meter.arguments(model), part)

    whole = None
    if isinstance(arm.placement, OnMesh):
        whole = NamedSharding(arm.placement.mesh, PartitionSpec())  # every process reads all of it
    return arm.compiled(measure, out_shardings=whole)


def report_measurements(folder: Path, console: Console) -> None:
    """Print the report of the last measurement of a run, and draw its heat map beside the curves."""
    found = collections.deque(telemetry.read(folder), maxlen=1)
    if not found:  # turned on by a resume, with no step left to measure
        return
    step, snapshot = found.pop()
    telemetry.draw_heatmap(snapshot, folder / HEATMAP, title=f"SNR (dB) by layer and operand, step {step}")
    console.print(f"\nOperands of step {step}", highlight=False)
    console.print(telemetry.report(snapshot), width=None if console.is_terminal else max(console.width, WIDTH))
    console.print(f"all measurements: {folder / FILE}; heat map: {folder / HEATMAP}", highlight=False, soft_wrap=True)
