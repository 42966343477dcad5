"""Trains one LLaMA over two devices with each reduction of gradients, and writes curves, speed and bytes as JSON.

    python -m experiments.reduction.run --text data/english --out experiments/reduction/results.json

Everything but the reduction is the same: seed, data, recipe, mesh. The bytes on the wire are read from the program as
partitioned for the mesh (`fp4jax.train.traffic`).
"""

import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import tyro
from rich.console import Console

from fp4jax.train.arm import Arm, Text
from fp4jax.train.config import (
    CheckpointOptions,
    DistributedOptions,
    LoopOptions,
    ModelOptions,
    OptimizerOptions,
    QuantizationOptions,
    TrainConfig,
)
from fp4jax.train.data import DataOptions
from fp4jax.train.job import train
from fp4jax.train.metrics import read_metrics
from fp4jax.train.placement import OnMesh
from fp4jax.train.rundir import circumstances, write_json
from fp4jax.train.traffic import compile_partitioned, read_traffic

THINNED = 10
"""One training step of so many is kept of the curves."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Compare reductions of gradients over the mesh axis data."""

    out: Path
    """JSON file to write; what it holds of other reductions is kept."""
    text: tuple[Path, ...] = ()
    """Prepared text (fp4jax data prepare), or the novels in the package."""
    model: str = "125m"
    """Model size."""
    recipe: str = "bf16"
    """Recipe of the linear layers."""
    backend: str | None = None
    """Who computes its products. By default the best that supports them."""
    optimizer: str = "fp8_adamw"
    """Optimizer."""
    mesh: str = "data=2"
    """Mesh."""
    reductions: tuple[str, ...] = ("bfloat16", "fp8", "float32")
    """What to compare."""
    steps: int = 500
    """Optimizer steps."""
    batch_size: int = 32
    """Sequences a step."""
    seq_len: int = 1024
    """Tokens a sequence."""
    learning_rate: float = 6e-4
    """Peak learning rate."""
    count_bytes: bool = False
    """Only count the bytes on the wire, here and now, and train nothing."""


def config(options: Options, reduction: str, out: Path) -> TrainConfig:
    """The settings of one run."""
    return TrainConfig(
        model=ModelOptions(model=options.model),
        data=DataOptions(text=options.text),
        devices=DistributedOptions(mesh=options.mesh),
        quantization=QuantizationOptions(backend=options.backend),
        optimizer=OptimizerOptions(
            optimizer=options.optimizer,
            learning_rate=options.learning_rate,
            reduction=reduction,  # pyright: ignore[reportArgumentType]  (checked when the settings are resolved)
        ),
        loop=LoopOptions(
            steps=options.steps,
            batch_size=options.batch_size,
            seq_len=options.seq_len,
            eval_every=max(1, options.steps // 5),
            eval_batches=16,
            tensorboard=False,
        ),
        checkpoint=CheckpointOptions(save_every=options.steps),
        recipe=options.recipe,
        out=out,
    )


def measured(options: Options, reduction: str, console: Console) -> dict:
    """One training: its curve, its final loss, its speed."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        path, result = train(config(options, reduction, Path(folder) / "run"), console)
        rows = read_metrics(path)
    steps = [row for row in rows if row["kind"] == "train"]
    validation = [row for row in rows if row["kind"] == "validation"]
    return {
        "loss": result.loss,
        "tokens_per_second": result.tokens_per_second,
        "tokens_per_second_between_validations": [row["tokens_per_second"] for row in validation[1:]],
        "skipped": result.skipped,
        "clip_fraction": result.clip_fraction,
        "mean_loss_of_last_50_steps": statistics.fmean(row["loss"] for row in steps[-50:]),
        "train": [[row["step"], row["loss"]] for row in steps if row["step"] % THINNED == 0],
        "validation": [[row["step"], row["loss"]] for row in validation],
        "seconds": time.perf_counter() - begun,
        **circumstances(),
    }


def counted(options: Options, reduction: str) -> list[dict]:
    """What a device sends in a step, by collective."""
    settings = config(options, reduction, Path("unused")).resolved()
    placement = OnMesh(options.mesh)
    with placement.active():
        arm = Arm(settings, options.recipe, (0,), Text.load(settings.data), placement)
        batches = arm.batches(0)
        tokens = next(batches)
        batches.close()
        _, text = compile_partitioned(arm.train_step.lower(arm.abstract_state, tokens))
    return [dataclasses.asdict(transfer) for transfer in read_traffic(text, placement.mesh.shape).transfers]


def draw(record: dict, path: Path) -> None:
    """Loss curves, and how far each stands from that of the first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, (curves, gaps) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    runs = record["runs"]
    base = np.array(next(iter(runs.values()))["train"])
    for name, run in runs.items():
        step, loss = np.array(run["train"]).T
        curves.plot(step, loss, label=name, linewidth=1.2)
        if run is not next(iter(runs.values())):
            gaps.plot(step, 100 * (loss / base[:, 1] - 1), label=f"{name} against {next(iter(runs))}", linewidth=1.2)
    gaps.axhline(0, color="gray", linewidth=0.8)
    for axes, label in ((curves, "training loss, nats a token"), (gaps, "difference of the loss, %")):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(options: Options) -> None:
    """Run every reduction; write after each, and draw what there is."""
    console = Console(width=100)
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    apart = ("out", "text", "reductions", "count_bytes")
    record["settings"] = {k: v for k, v in dataclasses.asdict(options).items() if k not in apart}
    for reduction in options.reductions:
        name = "wire" if options.count_bytes else "runs"
        value = counted(options, reduction) if options.count_bytes else measured(options, reduction, console)
        record.setdefault(name, {})[reduction] = value
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, record)
        jax.clear_caches()
    if len(record.get("runs", {})) > 1:
        draw(record, options.out.with_name("figure.png"))


if __name__ == "__main__":
    main(tyro.cli(Options))
