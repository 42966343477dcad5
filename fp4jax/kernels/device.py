"""What kernels need to know of the device they are traced for, and how to run them where there is none."""

import contextlib
import contextvars
from collections.abc import Mapping

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton

H200_CORES = 132
_HOPPER = ("h100", "h200", "h800", "h20", "gh200")  # sm_90
_interpreter: contextvars.ContextVar[plgpu.InterpretGPUParams | None]
_interpreter = contextvars.ContextVar("interpreter", default=None)


def _device():
    """The abstract device of the mesh in scope, else the default device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return abstract if abstract is not None else jax.devices()[0]


def device_kind() -> str:
    """Name of the device as file names spell it, such as ``"nvidia_h200"``."""
    return _device().device_kind.lower().replace(" ", "_")


def core_count() -> int:
    """Multiprocessors of the device; 2 where it is no GPU (interpret mode), so that blocks share the work there too."""
    device = _device()
    if device.platform != "gpu":
        return 2
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or H200_CORES


def is_hopper() -> bool:
    """Whether kernels are traced for a GPU with Hopper's tensor cores."""
    return _device().platform == "gpu" and any(name in device_kind().split("_") for name in _HOPPER)


def interpreter() -> plgpu.InterpretGPUParams | None:
    """How Mosaic GPU kernels are interpreted, where they are traced under ``interpret``; else None."""
    return _interpreter.get()


def interpreting() -> bool:
    """Whether kernels are traced under ``interpret``."""
    return _interpreter.get() is not None


@contextlib.contextmanager
def interpret(*, detect_races: bool = False):
    """Runs the kernels traced inside on the CPU, emulating shared memory, barriers and copies.

    Args:
        detect_races: also watch for unordered accesses to shared memory; ask ``races_found`` afterwards.
    """
    token = _interpreter.set(plgpu.InterpretGPUParams(detect_races=detect_races))
    try:
        yield
    finally:
        _interpreter.reset(token)


def triton_call(
    kernel,
    outs,
    *operands,
    name: str,
    grid: tuple[int, ...] = (),
    warps: int = 4,
    aliases: Mapping[int, int] | None = None,
):
    """Runs a kernel of Pallas on Triton; under ``interpret`` by Pallas's own interpreter.

    ``aliases`` maps operands to the outputs that take over their memory.
    """
    return pl.pallas_call(
        kernel,
        out_shape=outs,
        grid=grid,
        compiler_params=triton.CompilerParams(num_warps=warps),
        input_output_aliases=aliases or {},
        interpret=interpreting(),
        name=name,
    )(*operands)


def races_found() -> bool:
    """Whether the last kernel that ran under ``interpret(detect_races=True)`` had a race."""
    # Not public in jax 0.11.2; this is the only place that knows.
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


@contextlib.contextmanager
def lowering_for(kind: str = "NVIDIA H200", cores: int = H200_CORES):
    """Lets ``jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))`` work on a machine without that device."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield
