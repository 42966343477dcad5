"""The tables of `fp4jax plan`, and its JSON."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fp4jax.costs import (
    VARIANTS,
    Layer,
    dge_flops,
    linear_flops,
    llama_layer,
    llama_model,
    occ_flops,
    paper_layer,
    paper_speedup,
    speedup,
)
from fp4jax.train.config import to_json
from fp4jax.train.naming import parse_recipe
from fp4jax.train.rundir import circumstances, write_json
from fp4jax.train.step_report import Report


def print_report(report: Report, console: Console) -> None:
    """Print all tables."""
    plan, share = report.config.plan, report.share
    mesh = ",".join(f"{name}={size}" for name, size in report.mesh.items() if size > 1) or "one device"
    parts = f" in {plan.accumulate} parts" if plan.accumulate > 1 else ""
    console.print(
        f"\nLLaMA {report.config.model.model}, {report.parameters:,} parameters, on {mesh}; recipe "
        f"{report.config.recipe}, remat {report.model.remat}; {plan.batch_size} × {plan.seq_len} tokens a step"
        f"{parts}, {share.tokens:,} tokens {'of a part ' if parts else ''}on a device",
        highlight=False,
    )
    tables = [memory_table(report), optimizer_table(report)]
    if report.traffic.transfers:
        tables.append(traffic_table(report))
    for table in (*tables, speedup_table(report)):
        console.print(table)
    for line in notes(report):
        console.print(line, highlight=False)


def memory_table(report: Report) -> Table:
    """Bytes on a device."""
    table = Table("memory of a device", "", "how it is known")
    table.columns[1].justify = "right"
    for part in report.state:
        if part.per_device >= report.argument_bytes / 1000:
            table.add_row(
                f"{part.name}, {', '.join(part.dtypes)}", binary(part.per_device), "sharding of the train state"
            )
    agrees = report.argument_bytes == report.sharded_bytes
    source = "the shardings agree" if agrees else f"the shardings say {binary(report.sharded_bytes)}"
    table.add_row("all arguments: state and batch", binary(report.argument_bytes), f"compiled program; {source}")
    table.add_section()
    sums = ", of a part and of all" if report.config.plan.accumulate > 1 else ""
    table.add_row("gradients, float32", binary(report.gradients), f"sharding of the parameters{sums}")
    for what, size in report.activations.items():
        if size == 0:
            continue
        table.add_row(f"{report.model.num_layers} blocks: {what}", binary(size), "model, flash attention")
    if report.recomputed:
        table.add_row("the block that is recomputed", binary(report.recomputed), "model, flash attention")
    for what, size in report.head.items():
        table.add_row(what, binary(size), "model")
    table.add_section()
    table.add_row("total", binary(report.total_bytes), "without buffers of kernels and collectives")
    return table


def optimizer_table(report: Report) -> Table:
    """Bytes a parameter of each optimizer's state."""
    table = Table("optimizer", "part", "dtype", "bytes a parameter")
    table.columns[3].justify = "right"
    for name, parts in report.optimizers.items():
        for part in parts:
            if part.per_parameter >= 1e-3:
                table.add_row(name, part.name, ", ".join(part.dtypes), f"{part.per_parameter:.3f}")
        table.add_row(name, "all", "", f"{sum(part.per_parameter for part in parts):.3f}", end_section=True)
    return table


def traffic_table(report: Report) -> Table:
    """Bytes in a step. Transfers that together send less than a thousandth of all share a row."""
    table = Table("collective", "mesh axes", "dtype", "times a step", "moves", "a device sends")
    for column in table.columns[3:]:
        column.justify = "right"
    transfers = report.traffic.transfers
    small = [t for t in transfers if t.sent < report.traffic.sent / 1000]
    for t in transfers:
        if t not in small:
            table.add_row(t.kind, t.axes, t.dtype, f"{t.times:,}", decimal(t.bytes), decimal(t.sent))
    if small:
        times, size, sent = (sum(getattr(t, name) for t in small) for name in ("times", "bytes", "sent"))
        table.add_row("others", "", "", f"{times:,}", decimal(size), decimal(sent))
    table.add_section()
    table.add_row("all", "", "", f"{sum(t.times for t in transfers):,}", "", decimal(report.traffic.sent))
    return table


def speedups(report: Report) -> dict[str, dict[str, float]]:
    """Upper bounds on the speed-up over BF16, by what the products run in."""
    model, seq_len = report.model, report.config.plan.seq_len
    h, alpha = model.embed_dim, _alpha(report)
    paper, layer, whole = paper_layer(h, seq_len), llama_layer(model, seq_len), llama_model(model, seq_len)
    tokens = report.config.plan.batch_size * seq_len / report.config.plan.accumulate

    def extra(parts: Layer, batch: float) -> dict[str, float]:
        weights = linear_flops(parts) / 2
        return {"dge": dge_flops(weights, batch), "occ": occ_flops(parts, alpha)}

    return {
        name: {
            "paper_layer": speedup(paper, rates),
            "paper_layer_dge_occ": speedup(paper, rates, **extra(paper, h)),
            "layer": speedup(layer, rates),
            "layer_dge_occ": speedup(layer, rates, **extra(layer, tokens)),
            "model_dge_occ": speedup(whole, rates, **extra(whole, tokens)),
        }
        for name, rates in VARIANTS.items()
    }


def speedup_table(report: Report) -> Table:
    """See `speedups`."""
    with_both = "with DGE, OCC"
    table = Table("speed-up", "paper's layer", with_both, "this layer", with_both, "model, with both")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in speedups(report).items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    return table


def notes(report: Report) -> list[str]:
    """What the tables do not say by themselves."""
    h, s, alpha = report.model.embed_dim, report.config.plan.seq_len, _alpha(report)
    lines = [
        "A collective moves whole arrays, as often as the loops around it run (fp4jax.train.traffic), in the program "
        "as XLA partitions it; a device sends its part in a ring. Loops of unknown length, counted once: "
        f"{report.traffic.unknown_loops}.",
        f"Paper (h = 4096, s = 2048): {paper_speedup():.2f} without and {paper_speedup(alpha=0.99):.2f} with DGE and "
        f"OCC; its printed formula gives {paper_speedup(alpha=0.99, occ_rate=2):.2f}. Here h = {h}, s = {s}, "
        f"alpha = {alpha}. Operations only: an upper bound, for hardware with FP4 products.",
    ]
    if gathers := parameters_gathered(report):
        lines.insert(
            0,
            f"Gathers over fsdp bring each device {gathers:.2f} times its tensor shard of the parameters (in float32) "
            "for every part of the batch.",
        )
    return lines


def parameters_gathered(report: Report) -> float:
    """Bytes that all-gathers over "fsdp" bring for a microbatch, over those of a tensor shard in float32."""
    gathered = sum(t.bytes for t in report.traffic.transfers if (t.kind, t.axes) == ("all-gather", "fsdp"))
    return gathered / report.config.plan.accumulate / (4 * report.parameters / report.mesh["tensor"])


def write_report(report: Report, path: Path) -> None:
    """All numbers, in bytes, with command, date and versions."""
    values: dict[str, Any] = {
        field.name: getattr(report, field.name) for field in dataclasses.fields(report) if field.name != "model"
    }
    values |= {name: to_json(values[name]) for name in ("config", "share", "state", "traffic")}
    values["optimizers"] = {name: to_json(parts) for name, parts in report.optimizers.items()}
    values |= {"total_bytes": report.total_bytes, "speedups": speedups(report)}
    write_json(path, {**circumstances(), **values})


def _alpha(report: Report) -> float:
    """The quantile of the recipe's OCC, or the paper's."""
    outliers = parse_recipe(report.config.recipe).outliers
    return 0.99 if outliers is None else outliers.alpha


def binary(size: float) -> str:
    """Bytes of memory: 1.37 GiB."""
    return _in_units(size, ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def decimal(size: float) -> str:
    """Bytes that are sent: 1.37 GB."""
    return _in_units(size, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def _in_units(size: float, units: Sequence[tuple[float, str]]) -> str:
    unit, name = next((pair for pair in units if size >= pair[0]), units[-1])
    return f"{size / unit:,.2f} {name}"
