"""The numbers of `fp4jax plan`: a train step traced from shapes, compiled, and counted."""

import dataclasses
import math
import time
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from fp4jax.models import MODELS, LlamaConfig, count_parameters
from fp4jax.models.llama import LINEAR_PATHS
from fp4jax.nn import describe_model
from fp4jax.parallel import AXES, batch_sharding
from fp4jax.recipe import Recipe
from fp4jax.train.compose import Parts
from fp4jax.train.config import TrainConfig
from fp4jax.train.errors import naming_high_precision
from fp4jax.train.memory import Share, block_activations, head_activations
from fp4jax.train.optimizer import OPTIMIZERS, make_optimizer
from fp4jax.train.placement import OnMesh, Placement, SingleDevice, make_placement
from fp4jax.train.presets import DEFAULT_MODEL
from fp4jax.train.step import TrainState
from fp4jax.train.traffic import Traffic, compile_partitioned, read_traffic


@dataclasses.dataclass(frozen=True)
class StatePart:
    """Arrays of the train state that serve one purpose.

    Args:
        name: "parameters", or that of the optimizer's field.
        dtypes: their dtypes.
        per_parameter: bytes of all of them over the number of the model's parameters.
        per_device: bytes on one device.
    """

    name: str
    dtypes: tuple[str, ...]
    per_parameter: float
    per_device: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A train step, traced under its mesh.

    Args:
        model: its configuration.
        recipes: of each block, by layer path.
        placement: the mesh, or one device.
        state: shapes, dtypes and shardings of the train state.
        tokens: those of a batch.
        lowered: the step, ready to be compiled.
    """

    model: LlamaConfig
    recipes: tuple[dict[str, Recipe | None], ...]
    placement: Placement
    state: TrainState
    tokens: jax.ShapeDtypeStruct
    lowered: Any

    @classmethod
    def trace(cls, config: TrainConfig) -> Self:
        """Trace the step that `fp4jax train` compiles, on devices that JAX must have by now.

        Raises:
            ConfigError: a mesh that the devices do not make, or that does not divide the model.
        """
        plan, placement = config.plan, make_placement(config.devices)
        vocab_size = config.model.vocab_size or _own_vocabulary(config.model.model or DEFAULT_MODEL)
        with placement.active():
            with naming_high_precision(config.quantization.high_precision):
                parts = Parts.compose(config, config.recipe, vocab_size, placement)
            state = placement.state(jax.eval_shape(parts.init, np.uint32(0)))
            shape, sharding = (plan.batch_size, plan.seq_len + 1), _batch_sharding(placement)
            tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
            lowered = jax.jit(parts.step, donate_argnums=0).lower(state, tokens)
        return cls(parts.model, recipes_of_blocks(parts), placement, state, tokens, lowered)

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of the mesh axes, all 1 off a mesh."""
        return dict(self.placement.mesh.shape) if isinstance(self.placement, OnMesh) else dict.fromkeys(AXES, 1)


@dataclasses.dataclass(frozen=True)
class Report:
    """What `fp4jax plan` prints.

    Args:
        config: of the run.
        model: its model.
        parameters: how many.
        mesh: sizes of the mesh axes.
        share: what a device has of a microbatch.
        argument_bytes: of state and batch on a device, as the compiled program has it.
        sharded_bytes: the same, summed over the shardings of all arrays. The two are equal.
        state: by part.
        optimizers: parts of the state of each optimizer there is.
        traffic: what devices send each other in a step.
        activations: bytes on a device that all blocks keep, by what they hold.
        recomputed: bytes of the block that is recomputed at the moment, of the largest; 0 without remat.
        head: bytes around the head, by what they hold.
        gradients: bytes of float32 gradients; with `accumulate`, of the sum beside those of a microbatch.
        seconds: of tracing and of compiling.
    """

    config: TrainConfig
    model: LlamaConfig
    parameters: int
    mesh: dict[str, int]
    share: Share
    argument_bytes: int
    sharded_bytes: int
    state: tuple[StatePart, ...]
    optimizers: dict[str, tuple[StatePart, ...]]
    traffic: Traffic
    activations: dict[str, int]
    recomputed: int
    head: dict[str, int]
    gradients: int
    seconds: dict[str, float]

    @property
    def total_bytes(self) -> int:
        """Arguments and what training adds to them, on a device."""
        return (
            self.argument_bytes
            + self.gradients
            + sum(self.activations.values())
            + self.recomputed
            + sum(self.head.values())
        )


def make_report(config: TrainConfig, console: Console) -> Report:
    """Trace, compile and count the step of a run, on devices that JAX must have by now.

    Args:
        config: resolved. Without a vocabulary the model has its own: LLaMA's 32,000 tokens, and 256 for tiny.
        console: for progress.

    Raises:
        ConfigError: see `Step.trace`.
    """
    started = time.perf_counter()
    console.print(
        f"tracing the step of {config.model.model!r} on {config.devices.mesh or 'one device'}", highlight=False
    )
    step = Step.trace(config)
    traced = time.perf_counter()
    lines = step.lowered.as_text().count("\n")
    console.print(f"traced in {traced - started:.0f} s; compiling {lines:,} lines of StableHLO", highlight=False)
    compiled, text = compile_partitioned(step.lowered)
    seconds = {"tracing": traced - started, "compiling": time.perf_counter() - traced}
    console.print(f"compiled in {seconds['compiling']:.0f} s", highlight=False)

    plan_, mesh = config.plan, step.mesh
    rows = plan_.batch_size // plan_.accumulate // (mesh["data"] * mesh["fsdp"])
    share = Share(rows * plan_.seq_len, mesh["tensor"], mesh["fsdp"], gathered=isinstance(step.placement, OnMesh))
    kept = [block_activations(step.model, recipes, share) for recipes in step.recipes]
    whole = [block_activations(step.model, recipes, share, remat="none") for recipes in step.recipes]
    again = max(sum(all_.values()) - sum(some.values()) for all_, some in zip(whole, kept, strict=True))
    number = count_parameters(step.model)
    gradients = sum(_on_device(x) for x in jax.tree.leaves(step.state.params))
    return Report(
        config=config,
        model=step.model,
        parameters=number,
        mesh=mesh,
        share=share,
        argument_bytes=compiled.memory_analysis().argument_size_in_bytes,
        sharded_bytes=sum(_on_device(x) for x in jax.tree.leaves((step.state, step.tokens))),
        state=(_part("parameters", jax.tree.leaves(step.state.params), number), *_parts(step.state.opt_state, number)),
        optimizers={name: optimizer_parts(config, step, name) for name in OPTIMIZERS},
        traffic=read_traffic(text, mesh),
        activations={what: sum(block[what] for block in kept) for what in kept[0]},
        recomputed=0 if step.model.remat == "none" else max(0, again),
        head=head_activations(step.model, share),
        gradients=gradients * (1 if plan_.accumulate == 1 else 2),
        seconds=seconds,
    )


def recipes_of_blocks(parts: Parts) -> tuple[dict[str, Recipe | None], ...]:
    """What each block's layers follow, in the model as it is built."""
    model = nnx.eval_shape(lambda: parts.architecture.create(nnx.Rngs(params=0, noise=0)))
    found = [layer for layer in describe_model(model).layers if layer.path in LINEAR_PATHS]
    return tuple(
        {layer.path: layer.recipe[block] if isinstance(layer.recipe, tuple) else layer.recipe for layer in found}
        for block in range(parts.model.num_layers)
    )


def optimizer_parts(config: TrainConfig, step: Step, name: str) -> tuple[StatePart, ...]:
    """What the optimizer called `name` would hold for the parameters of the step."""
    options = dataclasses.replace(config.optimizer, optimizer=name)
    with step.placement.active():
        state = step.placement.state(jax.eval_shape(make_optimizer(options, config.plan.steps).init, step.state.params))
    return _parts(state, count_parameters(step.model))


def _batch_sharding(placement: Placement) -> jax.sharding.Sharding:
    if isinstance(placement, OnMesh):
        return batch_sharding(placement.mesh)
    assert isinstance(placement, SingleDevice)  # there is no third
    return placement.sharding


def _own_vocabulary(model: str) -> int:
    return MODELS[model].vocab_size


def _parts(opt_state: Any, parameters: int) -> tuple[StatePart, ...]:
    """The optimizer's arrays by the field of the state that they are in, the largest first."""
    groups: dict[str, list[Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
        groups.setdefault(fields[-1] if fields else "other", []).append(leaf)
    parts = [_part(name, leaves, parameters) for name, leaves in groups.items()]
    return tuple(sorted(parts, key=lambda part: -part.per_device))


def _part(name: str, leaves: list[Any], parameters: int) -> StatePart:
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    dtypes = tuple(dict.fromkeys(x.dtype.name for x in leaves))
    return StatePart(name, dtypes, whole / parameters, sum(_on_device(x) for x in leaves))


def _on_device(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
