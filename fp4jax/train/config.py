"""Settings of a run: frozen dataclasses from which the command line takes its flags and the run folder its record.

A field that is None by default is filled in from the preset of the model (`fp4jax.train.presets`) by `resolved`.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, Literal, Self

from fp4jax.parallel.mesh import parse_mesh
from fp4jax.train.data.load import DataOptions
from fp4jax.train.errors import ConfigError
from fp4jax.train.model_options import ModelOptions as ModelOptions
from fp4jax.train.naming import check_choice, parse_recipe
from fp4jax.train.presets import DEFAULT_MODEL, PRESETS


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """Which linear layers follow the recipe."""

    high_precision: str = "embed|head"
    """Layers to leave in high precision: a regular expression over their paths. '' quantizes all, the head too."""
    backend: str | None = None
    """Who computes the recipe's products. By default the best that supports them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Optimizer and learning rate. The defaults are the paper's (arXiv:2501.17116, §4.1)."""

    optimizer: str = "adamw"
    """adamw: Optax's, in float32 throughout. fp8_adamw: the paper's, gradients and m in FP8, v in FP16."""
    learning_rate: float | None = None
    """Peak learning rate. By default the model's preset."""
    warmup: float = 0.05
    """Share of the steps in which the learning rate rises linearly to its peak."""
    final_learning_rate: float = 0.1
    """Where the cosine ends, as a share of the peak."""
    b1: float = 0.9
    """Decay of Adam's first moment."""
    b2: float = 0.95
    """Decay of Adam's second moment."""
    eps: float = 1e-8
    """Adam's ε."""
    weight_decay: float = 0.1
    """Decoupled decay of every matrix: kernels, embedding table and head, not the scales of norms."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it. 0 clips nothing."""
    reduction: Literal["float32", "bfloat16", "fp8"] = "float32"
    """What gradients are sent in when they are averaged over the mesh axis data (fp4jax train --mesh)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How long, in which portions, and what is measured on the way."""

    steps: int | None = None
    """Optimizer steps. By default the model's preset, as for the next two."""
    batch_size: int | None = None
    """Sequences in a step."""
    seq_len: int | None = None
    """Tokens in a sequence."""
    accumulate: int = 1
    """Split a step's batch into so many parts, one after another, to save memory; gradients are averaged in float32."""
    eval_every: int | None = None
    """Steps between validations; one follows the last step. By default the preset, or a tenth of a shorter run."""
    eval_batches: int | None = None
    """Batches of a validation, spread over the validation split. 0 takes all of it. By default the preset."""
    deterministic: bool = False
    """Compile with XLA's flags for bit-equal repetition: no excess precision, atomics or autotuning. Slower on GPUs."""
    tensorboard: bool = True
    """Also write TensorBoard event files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedOptions:
    """Several devices, and several processes."""

    mesh: str | None = None
    """How to use all devices: data=2,fsdp=2,tensor=2, or some of these (docs/distributed.md). By default the first."""
    distributed: bool = False
    """One of several processes, started by SLURM, Open MPI or Kubernetes, which JAX asks for addresses and ranks."""
    coordinator: str | None = None
    """The same where none of them started it: host:port of process 0, with the next two."""
    num_processes: int | None = None
    """How many processes."""
    process_id: int | None = None
    """Which of them this is, from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """`LoopOptions` with nothing left open."""

    steps: int
    batch_size: int
    seq_len: int
    accumulate: int
    eval_every: int
    eval_batches: int
    deterministic: bool
    tensorboard: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What two runs that are to be compared have in common."""

    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    quantization: QuantizationOptions = dataclasses.field(default_factory=QuantizationOptions)
    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    optimizer: OptimizerOptions = dataclasses.field(default_factory=OptimizerOptions)
    loop: LoopOptions = dataclasses.field(default_factory=LoopOptions)

    def resolved(self) -> Self:
        """These settings with the preset of the model in place of None, checked.

        Raises:
            ConfigError: a value out of range, or an unknown name.
        """
        name = self.model.model or DEFAULT_MODEL
        preset = PRESETS[check_choice("model", name, PRESETS)]
        model = dataclasses.replace(self.model, model=name, tie_embeddings=bool(self.model.tie_embeddings))
        loop = _filled(self.loop, preset)
        if self.loop.eval_every is None and self.loop.steps is not None:
            loop = dataclasses.replace(loop, eval_every=preset.eval_every_of(self.loop.steps))
        settings = dataclasses.replace(self, model=model, loop=loop, optimizer=_filled(self.optimizer, preset))
        _check(settings)
        return settings

    @property
    def plan(self) -> Plan:
        """The loop's settings.

        Raises:
            ConfigError: they are not resolved.
        """
        values = {field.name: getattr(self.loop, field.name) for field in dataclasses.fields(Plan)}
        if missing := [name for name, value in values.items() if value is None]:
            raise ConfigError(f"{', '.join(missing)} not given: take the preset's with Settings.resolved()")
        return Plan(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints, from which `--resume` goes on bit for bit."""

    save_every: int | None = None
    """Steps between checkpoints. By default ten in a run. The last step, and Ctrl-C, always save."""
    keep: int = 3
    """How many of the newest checkpoints to keep."""
    resume: bool = False
    """Go on from the newest checkpoint in --out, or start where there is none. All other settings must be the same."""
    resume_step: int | None = None
    """Go on from the checkpoint of this step instead, such as the last good one; later steps are made again."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """Train a LLaMA under one recipe, on the novels in the package or on your own text."""

    recipe: str = "fp4"
    """A recipe that `fp4jax recipes` lists, with knobs if need be: fp4, or fp4:alpha=0.999,k=3."""
    init: str | None = None
    """Start from the weights, shape and tokenizer of another run, a Hugging Face folder, a .gguf file, or smollm2."""
    init_step: int | None = None
    """Of that run's checkpoint. By default the newest."""
    telemetry_every: int = 0
    """Steps between measurements of what the 4 bits do, by layer and operand (docs/telemetry.md). 0 makes none."""
    devices: DistributedOptions = dataclasses.field(default_factory=DistributedOptions)
    seed: int = 0
    """Seed of initial weights, order of the data, and rounding noise."""
    out: Path | None = None
    """Folder to write. By default runs/train-<date>-<time>."""
    checkpoint: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)

    def resolved(self) -> Self:
        """See `Settings.resolved`."""
        if self.init is None and self.init_step is not None:
            raise ConfigError(f"init_step={self.init_step} needs init=FOLDER, the run that has a checkpoint of it")
        if self.init is not None and not self.model.is_whole:
            from fp4jax.train.initial import follow  # here, so that --help need not wait for Flax

            return follow(self).resolved()
        config = super().resolved()
        _check_telemetry(config, parse_recipe(config.recipe).quantizes)
        _check_seed(config.seed)
        _positive("keep", config.checkpoint.keep)
        if config.checkpoint.save_every is not None:
            _positive("save_every", config.checkpoint.save_every)
        _check_devices(config)
        step = config.checkpoint.resume_step
        if step is not None:
            _positive("resume_step", step)
            config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, resume=True))
        if config.checkpoint.resume and config.out is None:
            name = "resume" if step is None else f"resume_step={step}"
            raise ConfigError(f"{name} needs out=FOLDER, the run to go on with")
        return config


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig(Settings):
    """Train the same LLaMA on the same text under several recipes, and show what the 4 bits cost."""

    recipes: tuple[str, ...] = ("bf16", "fp4", "fp4_direct")
    """Recipes to train, with knobs if need be: fp4:alpha=0.999,k=3. The gap is that to bf16, or else to the first."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of initial weights and data order, the same for every recipe. Several give mean and spread."""
    side_by_side: bool | None = None
    """Train the seeds of a recipe at once, in one program. By default on GPUs; a CPU is as quick one after another."""
    out: Path | None = None
    """Folder to write. By default runs/compare-<date>-<time>."""

    @property
    def baseline(self) -> str:
        """The recipe that the gap is measured to."""
        return "bf16" if "bf16" in self.recipes else self.recipes[0]

    def resolved(self) -> Self:
        """See `Settings.resolved`."""
        config = super().resolved()
        if config.optimizer.reduction != "float32":
            raise ConfigError(
                f"reduction={config.optimizer.reduction!r} is for fp4jax train --mesh: compare uses a device"
            )
        for name, values in (("recipes", config.recipes), ("seeds", config.seeds)):
            if not values or len(set(values)) != len(values):
                raise ConfigError(f"{name}={values} must name at least one, and none twice")
        for recipe in config.recipes:
            parse_recipe(recipe)
        for seed in config.seeds:
            _check_seed(seed)
        return config


def to_json(config: Any) -> Any:
    """A configuration as JSON values: dataclasses as objects, tuples as lists, paths as strings."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, tuple | list):
        return [to_json(item) for item in config]
    return str(config) if isinstance(config, Path) else config


def _filled(options: Any, preset: Any) -> Any:
    """`options` with the preset's value for every field of its name that is None."""
    missing = {
        field.name: getattr(preset, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) is None and hasattr(preset, field.name)
    }
    return dataclasses.replace(options, **missing)


def _check(settings: Settings) -> None:
    loop, optimizer = settings.loop, settings.optimizer
    for name in ("steps", "batch_size", "seq_len", "accumulate", "eval_every"):
        _positive(name, getattr(loop, name))
    settings.model.check()
    if loop.eval_batches is not None and loop.eval_batches < 0:
        raise ConfigError(f"eval_batches={loop.eval_batches} must be positive, or 0 for the whole validation split")
    if (loop.batch_size or 0) % loop.accumulate:
        raise ConfigError(f"batch_size={loop.batch_size} must be a multiple of accumulate={loop.accumulate}")
    if not 0 < settings.data.validation_fraction < 1:
        raise ConfigError(f"validation_fraction={settings.data.validation_fraction} must be above 0 and below 1")
    for name, (holds, wanted) in _OPTIMIZER_RANGES.items():
        value = getattr(optimizer, name)
        if value is not None and not holds(value):
            raise ConfigError(f"{name}={value} must be {wanted}")


def _check_devices(config: TrainConfig) -> None:
    options = config.devices
    given = [name for name in ("coordinator", "num_processes", "process_id") if getattr(options, name) is not None]
    if given and len(given) < 3:
        raise ConfigError(f"{given[0]} needs all of coordinator, num_processes and process_id")
    if given and options.distributed:
        raise ConfigError(f"distributed asks the launcher, and {given[0]} says it: give one of the two")
    if (options.num_processes or 1) < 1 or not 0 <= (options.process_id or 0) < (options.num_processes or 1):
        raise ConfigError(f"process_id={options.process_id} must be in [0, num_processes={options.num_processes})")
    sizes = {"data": 1, "fsdp": 1, "tensor": 1}
    if options.mesh is not None:
        try:
            sizes = parse_mesh(options.mesh)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    shards = sizes["data"] * sizes["fsdp"]
    rows = (config.loop.batch_size or 0) // config.loop.accumulate
    if rows % shards:
        raise ConfigError(
            f"batch_size={config.loop.batch_size} / accumulate={config.loop.accumulate} must be a multiple of "
            f"data · fsdp = {shards}, the devices that share a batch"
        )
    if (reduction := config.optimizer.reduction) != "float32":
        if sizes["data"] == 1:
            raise ConfigError(f"reduction={reduction!r} needs several devices along data: --mesh data=2, say")
        if sizes["fsdp"] > 1 and sizes["tensor"] > 1:
            # XLA's partitioner aborts on the mixture of manual and automatic axes (jaxlib 0.11.2).
            raise ConfigError(
                f"reduction={reduction!r} goes with data and one of fsdp and tensor, not with "
                f"mesh={options.mesh!r}: take --reduction float32"
            )


def _check_telemetry(config: TrainConfig, quantizes: bool) -> None:
    every = config.telemetry_every
    if every < 0:
        raise ConfigError(f"telemetry_every={every} must be positive, or 0 to measure nothing")
    if every > config.plan.steps:
        raise ConfigError(f"telemetry_every={every} would measure nothing in {config.plan.steps} steps: give fewer")
    if every and not quantizes:
        raise ConfigError(f"telemetry_every={every}: recipe {config.recipe!r} quantizes nothing to be measured")


_POSITIVE = (lambda value: 0 < value < math.inf, "positive and finite")
_SHARE = (lambda value: 0 <= value < 1, "at least 0 and below 1")
_OPTIMIZER_RANGES = {
    "learning_rate": _POSITIVE,
    "warmup": _SHARE,
    "final_learning_rate": (lambda value: 0 <= value <= 1, "at least 0 and at most 1"),
    "b1": _SHARE,
    "b2": _SHARE,
    "eps": _POSITIVE,
    "weight_decay": (lambda value: 0 <= value < math.inf, "at least 0"),
    "clip_norm": (lambda value: 0 <= value < math.inf, "at least 0"),
}


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value} must be a positive integer")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise ConfigError(f"seed={seed} must be at least 0 and below 2**31")
