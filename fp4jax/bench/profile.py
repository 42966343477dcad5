"""Where the time of a train step goes: what the device ran, by the parts of the step that it was for."""

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from fp4jax.bench import networks, parts, trace
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.least import Rates, least_seconds
from fp4jax.bench.measure import Peaks
from fp4jax.bench.parts import Part, Parts
from fp4jax.bench.report import Bar, Bars, Breakdown
from fp4jax.dot import Explanation, explain
from fp4jax.models import LlamaConfig
from fp4jax.train.hlo import Instruction
from fp4jax.train.naming import parse_recipe

STEPS = 3
"""How many steps are traced, one right after the other."""
STALL = 5e-6
"""Gaps between kernels from here on are called waits."""
# With its kernels in CUDA graphs, XLA does not tell the profiler which instruction a kernel came from.
_NO_GRAPHS = {"xla_gpu_enable_command_buffer": ""}


@dataclasses.dataclass(frozen=True)
class Spent:
    """What a program spent, a step.

    Args:
        seconds: by part, idle time and overlap among them, so that their sum is the length of a step.
        kernels: the longest first: its name and part, launches and microseconds a step, its HLO instruction with the
            type of its result and its name in JAX.
        waits: the longest waits: microseconds, and the kernels before and after.
    """

    seconds: Mapping[Part, float]
    kernels: list[dict[str, Any]]
    waits: list[dict[str, Any]]


def spent(recorded: bytes, hlo: str, steps: int) -> Spent:
    """What a traced program spent.

    Args:
        recorded: from ``trace.record``.
        hlo: of the program.
        steps: how often it ran.

    Raises:
        ValueError: if the trace holds nothing of a device.
    """
    known = Parts(hlo)
    events = []
    for event in trace.read(recorded):
        instruction = known.instruction(event.hlo_op, event.name)
        if instruction is None or instruction.opcode not in parts.CONTROL:
            events.append(event)
    seconds: defaultdict[Part, float] = defaultdict(float)
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        part = known.part(event.hlo_op, event.name)
        seconds[part] += event.seconds / steps
        times[event.hlo_op, event.name].append(event.seconds)
    intervals = trace.busy(events)
    gaps = [(after - before, before, after) for (_, before), (after, _) in itertools.pairwise(intervals)]
    for gap, _, _ in gaps:
        detail = "waits of 5 µs and more" if gap >= STALL else "between kernels"
        seconds[Part(parts.IDLE, detail)] += gap / steps
    overlap = sum(e.seconds for e in events) - sum(end - start for start, end in intervals)
    if overlap > 1e-9:  # else it is rounding
        seconds[Part(parts.OVERLAP)] -= overlap / steps
    ended, started = {e.end: e.name for e in events}, {e.start: e.name for e in events}
    return Spent(
        seconds=seconds,
        kernels=[
            _kernel(known, hlo_op, name, of, steps)
            for (hlo_op, name), of in sorted(times.items(), key=lambda item: -sum(item[1]))
        ],
        waits=[
            {"microseconds": round(1e6 * gap, 1), "after": ended[start], "before": started[end]}
            for gap, start, end in sorted(gaps, reverse=True)[:10]
        ],
    )


def _kernel(known: Parts, hlo_op: str, name: str, seconds: list[float], steps: int) -> dict[str, Any]:
    instruction = known.instruction(hlo_op, name)
    return {
        "kernel": name,
        "part": " / ".join(filter(None, known.part(hlo_op, name))),
        "launches": len(seconds) / steps,
        "microseconds": round(1e6 * sum(seconds) / steps, 2),
        "hlo_op": hlo_op,
        "type": "" if instruction is None else instruction.type,
        "op_name": "" if instruction is None else instruction.op_name,
    }


def side_by_side(title: str, found: Mapping[str, Spent], least: tuple[Mapping[str, float], ...] = ()) -> Breakdown:
    """Several of them in one table; the JSON also has every kernel."""
    every = {part for of in found.values() for part in of.seconds}
    longest = {part: max(of.seconds.get(part, 0.0) for of in found.values()) for part in every}
    ordered = sorted(every, key=lambda part: (parts.GROUPS.index(part.group), -longest[part]))
    notes = ["In parentheses: the least that it could take (see fp4jax.bench.least)."] if least else []
    return Breakdown(
        title,
        tuple(found),
        tuple((part.group, part.detail, tuple(of.seconds.get(part, 0.0) for of in found.values())) for part in ordered),
        least=least,
        notes=tuple(notes),
        others={
            "kernels": {name: of.kernels for name, of in found.items()},
            "waits": {name: of.waits for name, of in found.items()},
        },
    )


def profile(config: BenchConfig, peaks: Peaks | None) -> Iterator[Breakdown | Bars]:
    """The train step in BF16 and under each recipe; the table comes anew with every one of them.

    Its JSON also has the products of each, as ``fp4jax.explain`` lists them.

    Traces and HLO are kept in a folder beside ``config.out``, from which ``of_folder`` makes the table again.
    """
    model, batch = networks.step_inputs(config)
    gpu = jax.default_backend() == "gpu"
    names = {"BF16": None, **{f"fp4jax {name}": parse_recipe(name) for name in config.recipes}}
    creators = networks.models(dataclasses.replace(config, baselines=False), model, batch)
    found, least, products, bars = {}, [], {}, []
    for name, recipe in names.items():
        step, state = networks.compiled_step(creators[name], batch, _NO_GRAPHS if gpu else None)
        recorded, hlo = _record(step, state, batch), step.as_text()
        del state
        assert hlo is not None
        if config.out is not None:
            trace.save(config.out.with_suffix(".profile"), name.replace(" ", "_"), recorded, hlo, STEPS)
        found[name] = spent(recorded, hlo, STEPS)
        if gpu:
            least.append(least_seconds(model, batch[:, :-1].size, batch.shape[1] - 1, recipe, Rates.of(peaks)))
        step, init = networks.step_functions(creators[name])
        explained = explain(step, jax.eval_shape(init, 0), batch)
        products[name] = [dataclasses.asdict(product) for product in explained.products]
        if recipe is not None:
            bars += _aims(name, found[name], explained, Parts(hlo).wide(_widths(model, batch[:, :-1].size)))
        table = side_by_side(networks.step_title(config, "profile of a train step"), found, tuple(least))
        yield dataclasses.replace(table, others={**table.others, "products": dict(products)})
    if gpu:
        yield Bars("profile of a train step: aims", tuple(bars))


def _widths(model: LlamaConfig, tokens: int) -> set[int]:
    """Values of activations that linear layers take and give."""
    queries, keys = (heads * model.head_dim for heads in (model.num_heads, model.num_kv_heads))
    return {tokens * width for width in (model.embed_dim, model.mlp_dim, queries, keys)}


def _aims(name: str, of: Spent, explained: Explanation, wide: list[Instruction]) -> list[Bar]:
    elsewhere = sum(product.count for product in explained.quantized if product.backend != "hopper")
    high = sum(s for part, s in of.seconds.items() if part.group == parts.PRODUCTS and "high" in part.detail)
    return [
        Bar(f"{name}: products not on hopper", elsewhere, 0, least=False),
        Bar(f"{name}: products of linear layers in high precision, ms", 1e3 * high, 0, least=False),
        Bar(f"{name}: float32 [tokens, width] around products", len(wide), 0, least=False),
    ]


def _record(step: jax.stages.Compiled, state: Any, batch: jax.Array) -> bytes:
    def run(state: Any, times: int) -> Any:
        for _ in range(times):  # without waiting, as a training loop would
            state, _ = step(state, batch)
        return jax.block_until_ready(state)

    state = run(state, 2)
    return trace.record(lambda: run(state, STEPS))


def of_folder(folder: Path) -> Breakdown:
    """The table of traces that ``profile`` kept."""
    found = {}
    for about in sorted(folder.glob("*.json")):
        recorded, hlo = trace.load(folder, about.stem)
        found[about.stem] = spent(recorded, hlo, json.loads(about.read_text())["steps"])
    return side_by_side(f"profile of a train step, from {folder.name}", found)
