"""`fp4jax plan`: what a training run would take of each device, before there is one.

The real train step is traced and compiled for virtual CPU devices, from shapes alone: nothing is allocated, whatever
the size of the model. Its arguments are exact; so is what the partitioned program sends (`fp4jax.train.traffic`).
Activations follow a model (`fp4jax.train.memory`), and so does the speed-up (`fp4jax.costs`).
"""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import jax
from rich.console import Console

from fp4jax.parallel.mesh import parse_mesh
from fp4jax.train.config import (
    DistributedOptions,
    LoopOptions,
    ModelOptions,
    OptimizerOptions,
    QuantizationOptions,
    TrainConfig,
)
from fp4jax.train.errors import ConfigError

if TYPE_CHECKING:
    from fp4jax.train.step_report import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """Memory and traffic of a training run on a mesh of any size, from its compiled step. Needs no GPU."""

    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    recipe: str = "fp4"
    """A recipe that `fp4jax recipes` lists, with knobs if need be: fp4, or fp4:alpha=0.999,k=3."""
    quantization: QuantizationOptions = dataclasses.field(default_factory=QuantizationOptions)
    optimizer: str = "adamw"
    """adamw: Optax's, in float32 throughout. fp8_adamw: the paper's, gradients and m in FP8, v in FP16."""
    mesh: str | None = None
    """The devices: data=2,fsdp=16,tensor=2, or some of these (docs/distributed.md). By default one, without a mesh."""
    reduction: Literal["float32", "bfloat16", "fp8"] = "float32"
    """What gradients are sent in when they are averaged over the mesh axis data."""
    batch_size: int | None = None
    """Sequences in a step. By default the model's preset, as for the next one."""
    seq_len: int | None = None
    """Tokens in a sequence."""
    accumulate: int = 1
    """Split a step's batch into so many parts, one after another, to save memory."""
    out: Path | None = None
    """Also write the numbers to this file, as JSON."""

    def training(self) -> TrainConfig:
        """The settings of the run that is planned, checked.

        Raises:
            ConfigError: settings that `fp4jax train` would not take either.
        """
        return TrainConfig(
            model=self.model,
            quantization=self.quantization,
            optimizer=OptimizerOptions(optimizer=self.optimizer, reduction=self.reduction),
            loop=LoopOptions(batch_size=self.batch_size, seq_len=self.seq_len, accumulate=self.accumulate),
            recipe=self.recipe,
            devices=DistributedOptions(mesh=self.mesh),
        ).resolved()


def plan(config: PlanConfig, console: Console) -> "Report":
    """Trace, compile and count; print the tables, and write them to `config.out`.

    Args:
        config: the run.
        console: for progress and tables.

    Raises:
        ConfigError: settings that cannot be used, or a JAX that has already started with other devices.

    Example:
        >>> report = plan(PlanConfig(mesh="fsdp=64", model=ModelOptions(model="7b")), Console())  # doctest: +SKIP
    """
    training = config.training()
    if config.out is not None and not config.out.absolute().parent.is_dir():
        raise ConfigError(f"out={str(config.out)!r}: there is no folder {str(config.out.absolute().parent)!r}")
    use_virtual_devices(config.mesh)
    from fp4jax.train.plan_tables import print_report, write_report
    from fp4jax.train.step_report import make_report

    report = make_report(training, console)
    print_report(report, console)
    if config.out is not None:
        write_report(report, config.out)
        console.print(f"written to {config.out}", highlight=False, soft_wrap=True)
    return report


def use_virtual_devices(mesh: str | None) -> None:
    """Give JAX as many virtual CPU devices as the mesh has, or one. They cost nothing, but JAX must not have started.

    Raises:
        ConfigError: it has, with other devices.
    """
    count = 1 if mesh is None else math.prod(parse_mesh(mesh).values())
    try:
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
        # A program out of the persistent cache is not partitioned again, and its text is what is read.
        jax.config.update("jax_enable_compilation_cache", False)
    except RuntimeError:  # JAX has started
        pass
    if jax.default_backend() != "cpu" or (mesh is not None and jax.device_count() != count):
        raise ConfigError(
            f"mesh={mesh!r} takes {count} virtual CPU devices, and JAX has started with {jax.device_count()} of "
            f"{jax.default_backend()!r}: run fp4jax plan in a process of its own"
        )
