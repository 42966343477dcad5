"""What a train step moves and keeps on an H200, told by XLA's compiler on a machine without a GPU.

    pip install 'jax[cuda13]==0.11.2'       # in an environment that also has fp4jax; no GPU is needed
    python experiments/kernels/deviceless.py out.json --recipes bf16 fp4

XLA compiles the whole step for an H200 that is only described, assigns its buffers and fuses its operations. Counted
are the bytes that each kernel reads and writes, once for every time that it runs, by parts of the step, and the memory
that the program takes. Nothing is timed. cuDNN's attention cannot be compiled without a device: a kernel with the same
operands and results stands for it, so its workspace is missing.
"""

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import re
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.table import Table

from fp4jax import kernels
from fp4jax.bench.parts import CONTROL, GROUPS, Parts
from fp4jax.kernels.device import triton_call
from fp4jax.models import MODELS, Llama
from fp4jax.nn import default_rules
from fp4jax.train.config import OptimizerOptions
from fp4jax.train.hlo import Instruction, Program
from fp4jax.train.naming import parse_recipe
from fp4jax.train.optimizer import make_optimizer, make_schedule
from fp4jax.train.step import Architecture, make_init, make_train_step

BYTES_PER_SECOND = 4.3e12
"""What an H200 was measured to read and write (docs/kernels.md)."""
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "opt-barrier", "fusion-done"}
_WIDTHS = {"pred": 1, "bf16": 2, "f8e4m3fn": 1, "f8e5m2": 1}


# --- what stands for attention, which only a device can compile ---------------------------------------------------


def _placeholder(name: str, outs, *operands):
    def kernel(*refs):
        for ref in refs[len(operands) :]:
            ref[(0,) * len(ref.shape)] = jnp.zeros((), ref.dtype)

    return triton_call(kernel, outs, *operands, name=name, grid=(1,))


@jax.custom_vjp
def _attention(query, key, value):
    return _attention_forward(query, key, value)[0]


def _attention_forward(query, key, value):
    b, t, n, _ = query.shape
    outs = [jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((b, n, t), jnp.float32)]
    out, statistics = _placeholder("cudnn_attention", outs, query, key, value)
    return out, (query, key, value, out, statistics)


def _attention_backward(residuals, g):
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in residuals[:3]]
    return tuple(_placeholder("cudnn_attention_backward", outs, *residuals, g))


_attention.defvjp(_attention_forward, _attention_backward)


# --- compiling -----------------------------------------------------------------------------------------------------


def described_device() -> jax.Device:
    """An H200 to compile for that is not there."""
    # XLA reads these when it first compiles.
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    jax.config.update("jax_platforms", "cpu")
    jax.devices()  # finds the plugin
    return topologies.get_topology_desc("", "cuda", target_config=H200, topology="1x1x1").devices[0]


def about(**more: str) -> dict[str, str]:
    """Under what circumstances a file was made."""
    return more | {"date": f"{datetime.date.today()}", "jax": jax.__version__, "device": "NVIDIA H200, described"}


def compiled(recipe: str, args: argparse.Namespace, scan_layers: bool) -> jax.stages.Compiled:
    """The train step of a recipe, compiled for an H200."""
    sharding = SingleDeviceSharding(described_device())
    config = dataclasses.replace(MODELS[args.model], attention="xla", remat=args.remat, scan_layers=scan_layers)
    rules = None if recipe == "bf16" else default_rules(parse_recipe(recipe))
    options = OptimizerOptions(learning_rate=1e-4)
    optimizer = make_optimizer(options, steps=1000)
    architecture = Architecture(lambda rngs: Llama(config, rules=rules, rngs=rngs))
    step = make_train_step(architecture, optimizer, make_schedule(options, 1000), clip_norm=options.clip_norm)
    state = jax.eval_shape(make_init(architecture, optimizer), 0)
    batch = jax.ShapeDtypeStruct((args.batch_size, args.seq_len + 1), jnp.int32)
    put = functools.partial(jax.tree.map, lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding))
    jax.nn.dot_product_attention = lambda q, k, v, **_: _attention(q, k, v)
    with kernels.lowering_for():
        traced = jax.jit(step, donate_argnums=0).trace(put(state), put(batch))
        return traced.lower(lowering_platforms=("cuda",)).compile()


# --- counting ------------------------------------------------------------------------------------------------------


def _bytes(type_: str) -> int:
    total = 0
    for dtype, shape in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", type_):
        bits = re.search(r"\d+", dtype)
        size = _WIDTHS[dtype] if dtype in _WIDTHS else int(bits[0]) // 8 if bits else 0
        for dimension in filter(None, shape.split(",")):
            size *= int(dimension)
        total += size
    return total


def _operands(instruction: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", instruction.operands)


def moved(instruction: Instruction, program: Program, types: dict[str, str]) -> int:
    """Bytes that a kernel reads and writes; of what a fusion slices, or writes into, that part alone."""
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _bytes(types[_operands(instruction)[1]])
    if instruction.opcode in ("dynamic-slice", "copy-start"):
        return 2 * _bytes(instruction.type)
    if instruction.opcode not in ("fusion", "fusion-start"):
        return _bytes(instruction.type) + sum(_bytes(types[name]) for name in _operands(instruction))
    inner = program.computations[instruction.called("calls")[0]]
    users = collections.defaultdict(list)
    for one in inner.instructions.values():
        for name in _operands(one):
            users[name].append(one)

    def uses(name: str) -> list[tuple[Instruction, bool]]:
        """Users of a value, and whether it is their first operand; past bitcasts."""
        found = []
        for user in users[name]:
            found += uses(user.name) if user.opcode == "bitcast" else [(user, _operands(user)[0] == name)]
        return found

    def written(name: str) -> int:
        one = inner.instructions[name]
        match one.opcode:
            case "bitcast":
                return written(_operands(one)[0])
            case "tuple":
                return sum(map(written, _operands(one)))
            case "dynamic-update-slice":
                return _bytes(inner.instructions[_operands(one)[1]].type)
        return _bytes(one.type)

    total = written(inner.root)
    for one in inner.instructions.values():
        if one.opcode == "parameter":
            of = uses(one.name)
            if of and all(first and user.opcode in ("dynamic-slice", "slice", "gather") for user, first in of):
                total += min(_bytes(one.type), sum(_bytes(user.type) for user, _ in of))
            elif not (of and all(first and user.opcode == "dynamic-update-slice" for user, first in of)):
                total += _bytes(one.type)
    return total


def by_parts(hlo: str) -> dict[str, float]:
    """Bytes that a step moves, by parts (``fp4jax.bench.parts``)."""
    parts, everything = Parts(hlo), Program(hlo, ())
    types = {n: i.type for c in everything.computations.values() for n, i in c.instructions.items()}
    opcodes = {i.opcode for c in everything.computations.values() for i in c.instructions.values()} - CONTROL
    total = collections.Counter()
    for instruction, times in Program(hlo, opcodes).executed():
        if instruction.opcode not in _FREE:
            group = parts.part(instruction.name, "").group
            if instruction.opcode == "fusion-start" or (group == "other" and "broadcast" in instruction.name):
                group = "copies"  # of a layer's slice of a stack, and the zeros that a scan begins with
            total[group] += moved(instruction, everything, types) * times
    return {group: float(total[group]) for group in GROUPS if total[group]}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, help="JSON to write")
    parser.add_argument("--recipes", nargs="*", default=["bf16", "fp4"])
    parser.add_argument("--model", default="1.3b", choices=sorted(MODELS))
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--remat", default="none")
    parser.add_argument("--unrolled", nargs="*", default=[], help="recipes to compile with unrolled layers too; slow")
    args, console, found = parser.parse_args(argv), Console(), {}
    for recipe, scan in [*((r, True) for r in args.recipes), *((r, False) for r in args.unrolled)]:
        started = time.process_time()
        program = compiled(recipe, args, scan)
        memory, text = program.memory_analysis(), program.as_text()
        assert memory is not None
        assert text is not None
        found[recipe if scan else f"{recipe}, unrolled"] = {
            "bytes": by_parts(text),
            "cpu_seconds": round(time.process_time() - started, 1),
            "arguments": memory.argument_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
        }
        settings = about(**{k: str(v) for k, v in vars(args).items() if k != "out"})
        args.out.write_text(json.dumps({"about": settings, "programs": found}, indent=1) + "\n")
    table = Table("part", *(f"{name}, GB" for name in found), title=f"moved by a step of {args.model}")
    for group in [g for g in GROUPS if any(g in f["bytes"] for f in found.values())]:
        table.add_row(group, *(f"{f['bytes'].get(group, 0) / 1e9:.1f}" for f in found.values()))
    sums = [sum(f["bytes"].values()) for f in found.values()]
    table.add_row("all", *(f"{s / 1e9:.1f}" for s in sums))
    table.add_row("ms at 4.3 TB/s", *(f"{1e3 * s / BYTES_PER_SECOND:.1f}" for s in sums))
    table.add_row("CPU seconds to compile", *(f"{f['cpu_seconds']:.0f}" for f in found.values()))
    table.add_row("memory beside the state", *(f"{f['temporary'] / 1e9:.1f}" for f in found.values()))
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
