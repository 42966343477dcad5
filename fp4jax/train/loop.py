"""The loop around the train step: metrics a few steps late, validation, checkpoints, and a clean end on Ctrl-C."""

import collections
import dataclasses
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import numpy as np

from fp4jax.train.arm import Arm, Validation
from fp4jax.train.checkpoint import Checkpointer
from fp4jax.train.display import Progress
from fp4jax.train.distributed import any_process
from fp4jax.train.measuring import Measuring
from fp4jax.train.metrics import MetricsLog
from fp4jax.train.step import METRICS, Metrics, TrainState

LAG = 2
"""Steps between starting a step and reading its metrics, so that the device always has work queued."""


AGREE_EVERY = 20
"""Steps after which several processes ask each other whether one was told to stop."""


class Interrupted(Exception):
    """Training stopped early, on Ctrl-C or SIGTERM.

    Attributes:
        step: steps made.
        folder: of the run.
    """

    def __init__(self, label: str, step: int, folder: Path):
        super().__init__(f"interrupted {label} after step {step}")
        self.step, self.folder = step, folder


class StopSignal:
    """Turns the first Ctrl-C (or SIGTERM) into a wish that the loop asks for. A second Ctrl-C raises as usual.

    Example:
        >>> with StopSignal() as stop:
        ...     stop.requested
        False
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals go to the main thread, and only it may say what they do
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Stopwatch:
    """Tokens a second of training alone: stopped while anything else runs, and while the first step compiles."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0, 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Go on."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stand still."""
        if self._since is not None:
            self._seconds += time.perf_counter() - self._since
            self._since = None

    def add(self, tokens: int) -> None:
        """Count the tokens of a step that is done."""
        if self._since is not None:
            self._tokens += tokens

    @property
    def runs(self) -> bool:
        """Whether it counts."""
        return self._since is not None

    @property
    def tokens_per_second(self) -> float:
        """NaN before the first step is counted."""
        seconds = self._seconds + (time.perf_counter() - self._since if self._since is not None else 0)
        return self._tokens / seconds if self._tokens else float("nan")


@dataclasses.dataclass(frozen=True)
class Result:
    """What one seed of an arm came to.

    Args:
        recipe: the arm's label.
        seed: the seed.
        loss: over the validation split, nats a token.
        by_source: the same for each source.
        tokens_per_second: of training, of all seeds together where they ran side by side; NaN where none was trained.
        skipped: steps that were not finite and changed nothing.
        clip_fraction: share of the other steps whose gradient was clipped.
    """

    recipe: str
    seed: int
    loss: float
    by_source: dict[str, float]
    tokens_per_second: float
    skipped: int
    clip_fraction: float


@dataclasses.dataclass(frozen=True)
class Saving:
    """When to save, where to, and what to write beside the state."""

    checkpointer: Checkpointer
    every: int
    metadata: Mapping[str, Any]


def train_arm(
    arm: Arm,
    state: TrainState,
    logs: Sequence[MetricsLog],
    progress: Progress,
    stop: StopSignal,
    *,
    folder: Path,
    saving: Saving | None = None,
    measuring: Measuring | None = None,
) -> list[Result]:
    """Train an arm from `state` to its last step.

    Args:
        arm: the recipe, its data and compiled functions.
        state: donated. `state.step` says where to begin.
        logs: one a seed.
        progress: shown to the user as it changes.
        stop: asked after every step.
        folder: of the run, for the message of an interruption.
        saving: None saves nothing.
        measuring: None measures nothing of what the 4 bits do.

    Returns:
        The results, one a seed.

    Raises:
        Interrupted: `stop` was requested; the state is saved first.
        CheckpointError: saving failed.
    """
    return _Run(arm, logs, progress, folder, saving, measuring).train(state, stop)


class _Run:
    """The moving parts of one call of `train_arm`."""

    def __init__(
        self,
        arm: Arm,
        logs: Sequence[MetricsLog],
        progress: Progress,
        folder: Path,
        saving: Saving | None,
        measuring: Measuring | None,
    ):
        self.arm, self.logs, self.progress, self.folder = arm, logs, progress, folder
        self.saving, self.measuring = saving, measuring
        self.watch = Stopwatch()
        self.pending: collections.deque[tuple[int, Metrics]] = collections.deque()
        self.validation: tuple[int, Validation] | None = None
        self.saved_step: int | None = None

    def train(self, state: TrainState, stop: StopSignal) -> list[Result]:
        """See `train_arm`."""
        arm, steps = self.arm, self.arm.plan.steps
        start = int(np.ravel(state.step)[0])
        self.saved_step = start if start else None
        self.progress.skipped = _count(state.skipped).mean()
        batches = arm.batches(start)
        try:
            for step in range(start + 1, steps + 1):
                tokens = next(batches)
                self._measure(state, tokens, step)
                if step == start + 1:
                    self.progress.set("compiling", step - 1)
                state, metrics = arm.train_step(state, tokens)
                self._enqueue(step, metrics)
                if step == start + 1:
                    self._drain()
                    self.watch.start()
                self.progress.set("training", step)
                stopping = step < steps and self._stopping(stop, step)  # asked once: a signal may come at any moment
                if step % arm.plan.eval_every == 0 or step == steps:
                    self._validate(state, step)
                if self.saving and (step % self.saving.every == 0 or step == steps or stopping):
                    self._save(state, step)
                if stopping:
                    self._drain()
                    raise Interrupted(self.arm.label, step, self.folder)
        finally:
            self.watch.stop()
            batches.close()
            self._flush()
        if self.validation is None or self.validation[0] != steps:  # a finished run, resumed
            self.validation = steps, arm.validate(state)
            self.progress.validation = float(self.validation[1].loss.mean())
        if self.saving:
            self.saving.checkpointer.wait()
        self.progress.set("done", steps)
        return self._results(state)

    def _stopping(self, stop: StopSignal, step: int) -> bool:
        """Whether to stop after this step. Processes must agree on it, which makes them wait for each other."""
        if jax.process_count() > 1:
            return step % AGREE_EVERY == 0 and any_process(stop.requested)
        return stop.requested

    def _enqueue(self, step: int, metrics: Metrics) -> None:
        for value in metrics.values():
            value.copy_to_host_async()
        self.pending.append((step, metrics))
        while len(self.pending) > LAG:
            self._record(*self.pending.popleft())

    def _drain(self) -> None:
        while self.pending:
            self._record(*self.pending.popleft())

    def _record(self, step: int, metrics: Metrics) -> None:
        """Wait for the metrics of a step, write them, and show them."""
        host = jax.device_get(metrics)
        values = {name: np.atleast_1d(host[name]) for name in METRICS}
        self.watch.add(self.arm.tokens_per_step)
        for i, log in enumerate(self.logs):
            log.write("train", step, {name: value[i] for name, value in values.items()})
        self.progress.loss = float(values["loss"].mean())
        self.progress.skipped += float(values["skipped"].mean())
        self.progress.tokens_per_second = self.watch.tokens_per_second

    def _measure(self, state: TrainState, tokens: jax.Array, step: int) -> None:
        """What the step is about to do to its operands, before its state is donated."""
        if self.measuring is None or not self.measuring.due(step):
            return
        running = self.watch.runs
        self._pause()
        self.progress.set("measuring", step - 1)
        self.measuring(step, state, tokens)
        if running:
            self.watch.start()

    def _validate(self, state: TrainState, step: int) -> None:
        self._pause()
        self.progress.set("validating", step)
        result = self.arm.validate(state)
        bits = result.loss / np.log(2) / self.arm.text.split.validation.bytes_per_token
        for i, log in enumerate(self.logs):
            row = {
                "loss": result.loss[i],
                "bits_per_byte": bits[i],
                "tokens": result.tokens,
                "tokens_per_second": self.watch.tokens_per_second,
            }
            if len(result.by_source) > 1:
                row["sources"] = {name: loss[i] for name, loss in result.by_source.items()}
            log.write("validation", step, row)
        self.validation = step, result
        self.progress.validation = float(result.loss.mean())
        self.progress.set("training", step, event="validation")
        self._flush()
        self.watch.start()

    def _save(self, state: TrainState, step: int) -> None:
        """Metrics first, so that the rows up to a checkpoint are there whenever the checkpoint is."""
        if self.saving is None or self.saved_step == step:
            return
        self._pause()
        self._flush()
        self.progress.set("saving", step)
        self.saving.checkpointer.save(step, state, self.saving.metadata)
        self.saved_step = step
        self.watch.start()

    def _pause(self) -> None:
        self._drain()
        self.watch.stop()

    def _flush(self) -> None:
        for log in self.logs:
            log.flush()
        if self.measuring is not None:
            self.measuring.flush()

    def _results(self, state: TrainState) -> list[Result]:
        assert self.validation is not None
        _, validation = self.validation
        steps, skipped, clipped = (_count(counter) for counter in (state.step, state.skipped, state.clipped))
        return [
            Result(
                recipe=self.arm.label,
                seed=seed,
                loss=float(validation.loss[i]),
                by_source={name: float(loss[i]) for name, loss in validation.by_source.items()},
                tokens_per_second=self.watch.tokens_per_second,
                skipped=int(skipped[i]),
                clip_fraction=float(clipped[i] / max(1, steps[i] - skipped[i])),
            )
            for i, seed in enumerate(self.arm.seeds)
        ]


def _count(counter: jax.Array) -> np.ndarray:
    """A counter of the state on the host, [S]."""
    return np.atleast_1d(jax.device_get(counter))
