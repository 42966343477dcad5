"""`Checkpointer`: asynchronous, atomic, verified checkpoints over Orbax."""

import logging
import math
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np

from fp4jax.train.checkpoint import leaves as leaf_tools
from fp4jax.train.checkpoint import manifest as manifest_tools
from fp4jax.train.checkpoint.directory import StepDirectory
from fp4jax.train.checkpoint.errors import CheckpointError, PeerProblem, StepProblem
from fp4jax.train.checkpoint.manifest import Manifest
from fp4jax.train.checkpoint.pieces import Box
from fp4jax.train.checkpoint.processes import Exchange, Processes
from fp4jax.train.checkpoint.reading import read_blocks
from fp4jax.train.checkpoint.snapshot import HostLeaf, snapshot
from fp4jax.train.checkpoint.storage import ArrayStore
from fp4jax.train.checkpoint.writing import StepWriter

type _Blocks = dict[str, dict[Box, np.ndarray]]

_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores pytrees of arrays under `directory`, one folder a step.

    `save` copies the state to the host and returns; writing goes on in a background thread. A step is built in a
    hidden folder: arrays (by Orbax), a SHA-256 of every leaf and of every file, and the metadata. It is forced to the
    disk and then renamed to its number, so a process killed at any moment leaves either the whole step or none of it.
    `restore` checks all of it again, and refuses a step that is not bit for bit what was saved.

    The directory is on a POSIX file system, where a rename is atomic, and has one run at a time writing and any
    readers. Close the checkpointer, or use it in a `with` block: a save still running when the interpreter exits may be
    lost.

    Several processes (`jax.distributed`). Each makes a checkpointer of the same directory, which all of them see, and
    calls `save` and `restore` in the same order, with its own view of the same tree. Each writes the shards that it
    owns, and process 0 commits once all are on the disk. If one fails, or gives no sign of life for `timeout` seconds,
    the save fails on all, and the last committed step stays. They agree through JAX's coordination service: the
    background threads start no collective. What a process holds on its own devices alone, or in NumPy, must be equal on
    all. A step restores onto any mesh and any number of processes, each of which reads the parts that it needs.

    Args:
        directory: where the steps go; created at the first save.
        keep: how many of the newest steps to keep, or None for all. Older ones go only after a newer one is committed.
        keep_every: also keep every step divisible by this, forever.
        timeout: seconds after which a process that gives no sign of life is given up by the others. Below the 100 s
            after which JAX itself ends the processes of a run that has lost one (`heartbeat_timeout_seconds`).

    Raises:
        ValueError: `keep`, `keep_every` or `timeout` is not positive.
        RuntimeError: several processes run without `jax.distributed`.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.ones((2, 3)), "step": jnp.int32(7)}
        >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, keep=2) as checkpointer:
        ...     checkpointer.save(7, state, metadata={"tokens": 4096})
        ...     restored, metadata = checkpointer.restore(state)
        >>> restored["w"].shape, metadata
        ((2, 3), {'tokens': 4096})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        keep_every: int | None = None,
        timeout: float = 90.0,
    ):
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout} must be more than 0 seconds")
        self.directory = Path(directory).absolute()
        self._steps = StepDirectory(self.directory)
        self._head: int | None = None  # the step that this run continues from: what it last restored or saved
        self._closed = False
        self._pending: tuple[int, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fp4jax-checkpoint")
        self._store = ArrayStore()
        self._processes = Processes(timeout)
        self._writer = StepWriter(self._steps, self._store, keep, keep_every)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Copies `state` to the host and starts writing it as `step`.

        Waits for the computation of `state`, and for the previous save if that is still being written. When it returns,
        `state` may be donated or changed. Steps grow; the exception is a run that was rewound: once this checkpointer
        has restored step r, saving s > r replaces every step ≥ s in the moment that s is committed.

        With several processes every one calls it. It waits for none of them here; `metadata` is that of process 0.

        Args:
            step: the step's number, ≥ 0.
            state: a pytree of `jax.Array`s, of any dtype and sharding, typed PRNG keys and NumPy arrays.
            metadata: what else a resume needs (config, data position, recipe): dicts with string keys, lists, str, int,
                float, bool and None.

        Raises:
            CheckpointError: the previous save failed in the background (see `wait`). This save is then not started.
            TypeError, ValueError: `step`, a leaf or `metadata` cannot be saved; the message names it.
        """
        self.wait()
        self._require_open()
        try:
            with self._processes.exchange(f"save of step {step}") as exchange:
                self._require_growing(step)
                plain = manifest_tools.plain_metadata(metadata)
                copies = snapshot(state)
                if not any(math.prod(copy.data_shape) for copy in copies):
                    count = len(copies)
                    raise ValueError(f"the state of step {step} holds no values: {count} leaves, none with elements")
        except PeerProblem as problem:
            raise CheckpointError(f"saving step {step} in {self.directory} failed: {problem}") from problem
        self._head = step
        self._pending = (step, self._thread.submit(self._write, exchange, step, copies, plain))

    def restore(self, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads a step, verifies it, and returns it as `(state, metadata)`.

        With several processes every one calls it, and waits for the others: all return the same step, or all raise.
        Each reads and verifies what its own devices need.

        Args:
            target: a pytree of the saved structure. A `jax.Array` or `jax.ShapeDtypeStruct` says where the leaf goes by
                its sharding (None: the default device), whatever devices it was saved from; a NumPy array gives NumPy.
            step: the step, or None for the newest one. Nothing else is ever taken in its place.

        Raises:
            FileNotFoundError: there is no such step, or none at all.
            DamagedCheckpointError: the step is not what was saved. The message names the leaf or file, and the newest
                other step that is.
            CheckpointMismatchError: leaves, shapes or dtypes differ from the target's.
            CheckpointError: a save of this checkpointer failed in the background, or another process failed here.
            TypeError, ValueError: a leaf of `target` is no array, or its sharding or dtype cannot be had here.
        """
        self.wait()
        self._require_open()
        wanted = leaf_tools.wanted_leaves(target)
        name = "newest step" if step is None else f"step {step}"
        try:
            with self._processes.exchange(f"restore of the {name}") as exchange:
                step = self._find(exchange, step)
                manifest, blocks = self._verified(exchange, step, wanted)
        except PeerProblem as problem:
            raise CheckpointError(f"restoring {name} of {self.directory} failed: {problem}") from problem

        def place(path: Any, like: Any) -> Any:
            name = jax.tree_util.keystr(path)
            return leaf_tools.place(blocks.pop(name), manifest.leaves[name], like)

        state = jax.tree_util.tree_map_with_path(place, target)
        self._head = step
        return state, manifest.metadata

    def steps(self) -> list[int]:
        """Committed steps, ascending, whose files are all there with their full sizes (contents are not read)."""
        return [step for step in self._steps.committed() if self._steps.is_sound(self._steps.complete, step)]

    def latest(self) -> int | None:
        """The newest committed step, or None if nothing was ever committed. A save under way does not count.

        Checks that its files are all there with their full sizes; `restore` checks the rest.

        Raises:
            DamagedCheckpointError: it is not complete. (An older step in its place would rewind the run unasked.)
        """
        committed = self._steps.committed()
        if not committed:
            return None
        try:
            self._steps.complete(committed[-1])
        except StepProblem as problem:
            step = committed[-1]
            raise self._steps.damage(step, str(problem), self._steps.last_good(step)) from problem
        return committed[-1]

    def wait(self) -> None:
        """Waits until the last save is committed.

        Raises:
            CheckpointError: it failed; the cause is attached. Raised once, by whichever of `wait`, `save`, `restore`
                and `close` comes first.
        """
        if self._pending is None:
            return
        step, future = self._pending
        error = future.exception()
        self._pending = None
        if error is not None:
            committed = self.steps()
            last = f"the last committed step is {committed[-1]}" if committed else "no step is committed"
            cause = str(error) if isinstance(error, PeerProblem) else repr(error)
            raise CheckpointError(f"saving step {step} in {self.directory} failed: {cause}; {last}") from error

    def close(self) -> None:
        """Waits for the last save and releases the thread. Closing twice is allowed.

        Raises:
            CheckpointError: the last save failed.
        """
        try:
            self.wait()
        finally:
            if not self._closed:
                self._closed = True
                self._thread.shutdown()
                self._store.close()

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(f"Besides, {failed}")  # the error under way stays the one that is raised

    def _write(self, exchange: Exchange, step: int, copies: list[HostLeaf], metadata: dict[str, Any]) -> None:
        """The background thread's work."""
        try:
            self._writer.write(exchange, step, copies, metadata)
        except Exception:
            _log.exception("saving step %d in %s failed", step, self.directory)  # now; `wait` may be an hour away
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"the checkpointer of {self.directory} is closed; make a new one")

    def _require_growing(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"step={step} must be at least 0")
        newest = max(self._steps.committed(), default=-1)
        if newest >= step and (self._head is None or self._head >= step):
            raise ValueError(
                f"step {step} cannot be saved in {self.directory}, which already holds step {newest}: steps grow. "
                f"To rewind the run, restore a step below {step} first (steps from {step} on are then replaced), "
                f"or use another directory"
            )

    def _find(self, exchange: Exchange, step: int | None) -> int:
        """The step to restore, as process 0 sees the directory."""
        committed = exchange.decide("committed", self._steps.committed)
        if not committed:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}")
        if step is None:
            return committed[-1]
        if step not in committed:
            raise FileNotFoundError(
                f"there is no step {step} in {self.directory}; it holds steps {', '.join(map(str, committed))}"
            )
        return step

    def _verified(self, exchange: Exchange, step: int, wanted: Mapping[str, Any]) -> tuple[Manifest, _Blocks]:
        """The manifest of `step` and the wanted values, once every process has found its own to be good.

        Raises:
            DamagedCheckpointError, CheckpointMismatchError: some process has not.
        """
        damage, misfit, manifest, blocks = None, None, None, {}
        try:
            manifest = self._steps.complete(step)
            misfit = leaf_tools.misfit(manifest.leaves, wanted)
            if misfit is None:
                boxes = {name: set(manifest.leaves[name].boxes(like).values()) for name, like in wanted.items()}
                blocks = read_blocks(self._steps.path(step), manifest, boxes, self._store, exchange.beat)
        except StepProblem as problem:
            damage = problem
        found = exchange.gather("found", (None if damage is None else str(damage), misfit))
        damages, misfits = ([text for text in texts if text is not None] for texts in zip(*found))
        if not damages and not misfits:
            assert manifest is not None
            return manifest, blocks
        with exchange.busy():
            last_good = exchange.decide("last good", lambda: self._steps.last_good(step, None if damages else wanted))
        if damages:
            raise self._steps.damage(step, damages[0], last_good) from damage
        raise self._steps.mismatch(step, misfits[0], last_good)
