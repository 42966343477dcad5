"""Runs pieces one after another, each saved as soon as it is done, and stops before one that would not fit."""

import concurrent.futures
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
from experiments.experiment import ROOT, Experiment, Piece
from experiments.probes import MeasuredArm
from fp4jax.recipes import RECIPES
from fp4jax.train.arm import Text
from fp4jax.train.data import DataOptions, validation_batches
from fp4jax.train.display import Progress
from fp4jax.train.loop import Interrupted, StopSignal, train_arm
from fp4jax.train.metrics import MetricsLog
from fp4jax.train.optimizer import OPTIMIZERS
from fp4jax.train.rundir import circumstances

MARGIN = 1.3
"""A piece is started if this many times its estimate is left."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What bounds a call.

    Args:
        seconds: of the whole call; None for no limit.
        tokens_per_second: assumed until a piece has been measured.
        ahead: how many pieces are compiled while another trains.
    """

    seconds: float | None = None
    tokens_per_second: float = 5e5
    ahead: int = 3


def run(pieces: Sequence[Piece], console: Console, limits: Limits = Limits(), root: Path = ROOT) -> list[Piece]:
    """Run the pieces that have no results yet.

    Args:
        pieces: in order.
        console: told of every piece.
        limits: of this call.
        root: folder of the experiments, for their results.

    Returns:
        What is left, in order: not started for lack of time, or cut short by a signal.

    Raises:
        ConfigError, DataError: settings or text that cannot be used.
    """
    began = time.monotonic()
    todo = list({piece.key: piece for piece in pieces if store.find(piece, root) is None}.values())
    with _registered([piece.experiment for piece in todo]), StopSignal() as stop, _Workshop(todo, limits) as workshop:
        while todo:
            piece, left = todo[0], _left(limits, began)
            needed = MARGIN * workshop.estimate(piece)
            if needed > left:
                console.print(f"{_name(piece)}: needs about {needed:.0f} s, {left:.0f} s are left", highlight=False)
                break
            try:
                record = workshop.train(piece, stop)
            except Interrupted as interrupted:
                console.print(f"{interrupted}: this piece starts again the next time", highlight=False)
                break
            path = store.save(piece, record, root)
            losses = ", ".join(f"{lane['validation'][-1]['loss']:.4f}" for lane in record["lanes"])
            seconds = record["seconds"]
            console.print(
                f"{_name(piece)}: {losses}; waited {seconds['compile']:.0f} s, trained {seconds['train']:.0f} s at "
                f"{record['tokens_per_second']:,.0f} tokens/s; {time.monotonic() - began:.0f} s in all; {path.name}",
                highlight=False,
                soft_wrap=True,
            )
            todo.pop(0)
    return todo


def build(piece: Piece, text: Text) -> MeasuredArm:
    """The arm of a piece, with nothing compiled yet.

    Raises:
        ConfigError: its settings do not fit together.
    """
    with _registered([piece.experiment]):
        return MeasuredArm(piece.settings, piece.arm.recipe, tuple(seed for seed, _ in piece.lanes), text)


def train(piece: Piece, arm: MeasuredArm, stop: StopSignal) -> store.Record:
    """Train an arm, and return its record."""
    reference = piece.settings.optimizer.learning_rate
    state = optimizers.set_lanes(arm.init(), [rate / reference for _, rate in piece.lanes])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folders = [Path(scratch) / str(lane) for lane in range(len(piece.lanes))]
        logs = [stack.enter_context(MetricsLog(folder, tensorboard=False)) for folder in folders]
        results = train_arm(arm, state, logs, Progress(piece.arm.label, arm.plan.steps), stop, folder=Path(scratch))
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
        "seconds": {"train": time.monotonic() - start},
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


class _Workshop:
    """Arms built and compiled ahead by a thread, so that the device trains while the host compiles."""

    def __init__(self, pieces: Sequence[Piece], limits: Limits):
        self._queue, self._limits = list(pieces), limits
        self._texts: dict[DataOptions, Text] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(1, limits.ahead))
        self._ready: dict[str, concurrent.futures.Future[MeasuredArm]] = {}
        self._rates: list[float] = []

    def __enter__(self) -> "_Workshop":
        self._texts = {options: Text.load(options) for options in {piece.settings.data for piece in self._queue}}
        self._fill()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def estimate(self, piece: Piece) -> float:
        """Seconds that a piece will take, by the slowest measured so far."""
        return piece.tokens / min(self._rates, default=self._limits.tokens_per_second)

    def train(self, piece: Piece, stop: StopSignal) -> store.Record:
        start = time.monotonic()
        self._fill()
        arm = self._ready.pop(piece.key).result()
        waited = time.monotonic() - start
        record = train(piece, arm, stop)
        record["seconds"]["compile"] = waited
        self._rates.append(piece.tokens / (time.monotonic() - start))
        return record

    def _fill(self) -> None:
        while self._queue and len(self._ready) < 1 + self._limits.ahead:
            piece = self._queue.pop(0)
            self._ready[piece.key] = self._pool.submit(_prepare, piece, self._texts[piece.settings.data])


def _prepare(piece: Piece, text: Text) -> MeasuredArm:
    arm = build(piece, text)
    arm.warm_up()
    return arm


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


def _left(limits: Limits, began: float) -> float:
    return float("inf") if limits.seconds is None else limits.seconds - (time.monotonic() - began)


def _name(piece: Piece) -> str:
    return f"{piece.experiment.name}/{piece.arm.label}"
