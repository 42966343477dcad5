"""Runs pieces one after another, each saved as soon as it is done, and stops before one that would not fit."""

import contextlib
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from experiments import optimizers, store
from experiments.base import ROOT
from experiments.experiment import Experiment, Piece
from experiments.probes import MeasuredArm
from fp4jax.recipes import RECIPES
from fp4jax.train.arm import Text
from fp4jax.train.data import DataOptions, validation_batches
from fp4jax.train.display import Progress
from fp4jax.train.errors import ConfigError
from fp4jax.train.loop import Interrupted, StopSignal, train_arm
from fp4jax.train.metrics import MetricsLog
from fp4jax.train.optimizer import OPTIMIZERS
from fp4jax.train.rundir import circumstances


@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds a call.

    Args:
        seconds: of the whole call; None for no limit.
        tokens_per_second: assumed until a piece has been measured, compilation included.
    """

    seconds: float | None = None
    tokens_per_second: float = 5e5


def run(pieces: Sequence[Piece], console: Console, limits: Limits = Limits(), root: Path = ROOT) -> list[Piece]:
    """Run the pieces that have no results yet and that no other process is running.

    Several processes may work on the same pieces: on a GPU, some compile while others train.

    Args:
        pieces: in order.
        console: told of every piece.
        limits: of this call.
        root: folder of the experiments, for their results.

    Returns:
        The pieces that still have no results, in order: not started for lack of time, cut short by a signal, or under
        way in another process.

    Raises:
        ConfigError, DataError: settings or text that cannot be used.
    """
    began = time.monotonic()
    firsts: dict[str, Piece] = {}
    for piece in pieces:
        firsts.setdefault(piece.key, piece)
    unique = list(firsts.values())
    texts: dict[DataOptions, Text] = {}
    paces: list[float] = []  # seconds a token of the pieces so far
    with StopSignal() as stop:
        for piece in unique:
            with store.claim(piece, root) as claimed:
                if not claimed or store.find(piece, root) is not None:
                    continue
                needed = piece.tokens * max(paces, default=1 / limits.tokens_per_second)
                left = _left(limits, began)
                if needed > left:
                    console.print(f"{_name(piece)}: needs about {needed:.0f} s, {left:.0f} s are left")
                    break
                data = piece.settings.data
                if data not in texts:
                    texts[data] = _text(data)
                start = time.monotonic()
                try:
                    record = train(piece, texts[data], stop)
                except Interrupted as interrupted:
                    console.print(f"{interrupted}: this piece starts again the next time")
                    break
                path = store.save(piece, record, root)
                paces.append((time.monotonic() - start) / piece.tokens)
                console.print(_line(piece, record, path, time.monotonic() - began))
    return [piece for piece in unique if store.find(piece, root) is None]


def build(piece: Piece, text: Text) -> MeasuredArm:
    """The arm of a piece, with nothing compiled yet.

    Raises:
        ConfigError: its settings do not fit together.
    """
    with _registered([piece.experiment]):
        return MeasuredArm(piece.settings, piece.arm.recipe, tuple(seed for seed, _ in piece.lanes), text)


def train(piece: Piece, text: Text, stop: StopSignal) -> store.Record:
    """Compile and train a piece, and return its record.

    Raises:
        Interrupted: `stop` was requested.
    """
    with _registered([piece.experiment]):
        start = time.monotonic()
        arm = build(piece, text)
        arm.warm_up()
        compiled = time.monotonic()
        reference = piece.settings.optimizer.learning_rate
        assert reference is not None  # configs leave nothing open
        state = optimizers.set_lanes(arm.init(), [rate / reference for _, rate in piece.lanes])
        with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
            folders = [Path(scratch) / str(lane) for lane in range(len(piece.lanes))]
            logs = [stack.enter_context(MetricsLog(folder, tensorboard=False)) for folder in folders]
            progress = Progress(piece.arm.label, arm.plan.steps)
            results = train_arm(arm, state, logs, progress, stop, folder=Path(scratch))
            stack.close()
            lanes = [store.lane_record(folder, *lane) for folder, lane in zip(folders, piece.lanes, strict=True)]
    return {
        "key": piece.key,
        "identity": piece.identity,
        **circumstances(),
        "command": shlex.join(["python", "-m", "experiments", *sys.argv[1:]]),
        "corpus": arm.text.fingerprint,
        "parameters": arm.num_parameters,
        "tokens_per_lane": arm.plan.steps * arm.plan.batch_size * arm.plan.seq_len,
        "tokens_per_step": arm.plan.batch_size * arm.plan.seq_len,
        "tokens_per_second": results[0].tokens_per_second,
        "memory": arm.memory,
        "seconds": {"compile": compiled - start, "train": time.monotonic() - compiled},
        "validation_tokens": validation_tokens(arm),
        "lanes": lanes,
        "measured": arm.measurements(),
    }


def validation_tokens(arm: MeasuredArm) -> dict[str, int]:
    """How many tokens of each source a validation predicts."""
    plan, counts = arm.plan, np.zeros(len(arm.text.sources))
    limit = plan.eval_batches or None
    for batch in validation_batches(arm.text.split.validation, plan.seq_len, plan.batch_size, limit=limit):
        np.add.at(counts, batch["source"], batch["weights"].sum(axis=1))
    return {name: int(count) for name, count in zip(arm.text.sources, counts, strict=True)}


@contextlib.contextmanager
def _registered(experiments: Sequence[Experiment]) -> Iterator[None]:
    """Add the recipes and optimizers of experiments to the registries, and take out what was added."""
    added_recipes = {name: f for experiment in experiments for name, f in experiment.recipes.items()}
    additions = [(RECIPES, added_recipes), (OPTIMIZERS, optimizers.OPTIMIZERS)]
    new = [(registry, {k: v for k, v in rows.items() if k not in registry}) for registry, rows in additions]
    for registry, rows in new:
        registry.update(rows)
    try:
        yield
    finally:
        for registry, rows in new:
            for name in rows:
                del registry[name]


def _text(options: DataOptions) -> Text:
    if missing := [path for path in options.text if not path.exists()]:
        raise ConfigError(f"no text at {str(missing[0])!r}: prepare it as docs/experiments.md says")
    return Text.load(options)


def _line(piece: Piece, record: store.Record, path: Path, elapsed: float) -> str:
    losses = ", ".join(f"{lane['validation'][-1]['loss']:.4f}" for lane in record["lanes"])
    seconds = record["seconds"]
    return (
        f"{_name(piece)}: {losses}; compiled in {seconds['compile']:.0f} s, trained in {seconds['train']:.0f} s at "
        f"{record['tokens_per_second']:,.0f} tokens/s; {elapsed:.0f} s in all; {path.name}"
    )


def _left(limits: Limits, began: float) -> float:
    return float("inf") if limits.seconds is None else limits.seconds - (time.monotonic() - began)


def _name(piece: Piece) -> str:
    return f"{piece.experiment.name}/{piece.arm.label} at {piece.size}"
