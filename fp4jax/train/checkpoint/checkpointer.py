"""`Checkpointer`: asynchronous, atomic, verified checkpoints over Orbax."""

import logging
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
from fp4jax.train.checkpoint.errors import CheckpointError, StepProblem
from fp4jax.train.checkpoint.manifest import Manifest
from fp4jax.train.checkpoint.snapshot import HostLeaf, snapshot
from fp4jax.train.checkpoint.storage import ArrayStore

_log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores pytrees of arrays under `directory`, one folder a step.

    `save` copies the state to the host and returns; writing goes on in a background thread. A step is built in a
    hidden folder: arrays (by Orbax), a SHA-256 of every leaf and of every file, and the metadata. It is forced to the
    disk and then renamed to its number, so a process killed at any moment leaves either the whole step or none of it.
    `restore` checks all of it again, and refuses a step that is not bit for bit what was saved.

    The directory is on a POSIX file system, where a rename is atomic, and has one writer at a time and any readers.
    Close the checkpointer, or use it in a `with` block: a save still running when the interpreter exits may be lost.

    One process. With several (`jax.distributed`) what changes is (1) `HostLeaf.store`, to make a `jax.Array` of host
    shards instead of one NumPy array, which Orbax then writes from every process; (2) `leaves.fingerprint`, to a digest
    that adds up over shards, such as a sum of hashes keyed by position; (3) a barrier before process 0 writes the
    manifest and renames. The layout of a step, its commit and the checks on its files stay.

    Args:
        directory: where the steps go; created at the first save.
        keep: how many of the newest steps to keep, or None for all. Older ones go only after a newer one is committed.
        keep_every: also keep every step divisible by this, forever.

    Raises:
        ValueError: `keep` or `keep_every` is not positive.
        NotImplementedError: more than one process is running.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.ones((2, 3)), "step": jnp.int32(7)}
        >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder, keep=2) as checkpointer:
        ...     checkpointer.save(7, state, metadata={"tokens": 4096})
        ...     restored, metadata = checkpointer.restore(state)
        >>> restored["w"].shape, metadata
        ((2, 3), {'tokens': 4096})
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = 3, keep_every: int | None = None):
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1, or None")
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"Checkpointer writes from one process, and {jax.process_count()} are running: "
                f"run as one process, or save with Orbax's own CheckpointManager"
            )
        self.directory = Path(directory).absolute()
        self._steps = StepDirectory(self.directory)
        self._keep, self._keep_every = keep, keep_every
        self._head: int | None = None  # the step that this run continues from: what it last restored or saved
        self._tidied = False
        self._closed = False
        self._pending: tuple[int, Future[None]] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fp4jax-checkpoint")
        self._store = ArrayStore()

    def save(self, step: int, state: Any, metadata: Mapping[str, Any] | None = None) -> None:
        """Copies `state` to the host and starts writing it as `step`.

        Waits for the computation of `state`, and for the previous save if that is still being written. When it returns,
        `state` may be donated or changed. Steps grow; the exception is a run that was rewound: once this checkpointer
        has restored step r, saving s > r replaces every step ≥ s in the moment that s is committed.

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
        if step < 0:
            raise ValueError(f"step={step} must be at least 0")
        newest = max(self._steps.committed(), default=-1)
        if newest >= step and (self._head is None or self._head >= step):
            raise ValueError(
                f"step {step} cannot be saved in {self.directory}, which already holds step {newest}: steps grow. "
                f"To rewind the run, restore a step below {step} first (steps from {step} on are then replaced), "
                f"or use another directory"
            )
        plain = manifest_tools.plain_metadata(metadata)
        copies = snapshot(state)
        if not any(piece.size for copy in copies for _, piece in copy.pieces):
            raise ValueError(f"the state of step {step} holds no values: {len(copies)} leaves, none with elements")
        self._head = step
        self._pending = (step, self._thread.submit(self._write, step, copies, plain))

    def restore(self, target: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads a step, verifies it, and returns it as `(state, metadata)`.

        Args:
            target: a pytree of the saved structure. A `jax.Array` or `jax.ShapeDtypeStruct` says where the leaf goes by
                its sharding (None: the default device), whatever devices it was saved from; a NumPy array gives NumPy.
            step: the step, or None for the newest one. Nothing else is ever taken in its place.

        Raises:
            FileNotFoundError: there is no such step, or none at all.
            DamagedCheckpointError: the step is not what was saved. The message names the leaf or file, and the newest
                other step that is.
            CheckpointMismatchError: leaves, shapes or dtypes differ from the target's.
            CheckpointError: a save of this checkpointer failed in the background.
            TypeError, ValueError: a leaf of `target` is no array, or its sharding or dtype cannot be had here.
        """
        self.wait()
        self._require_open()
        wanted = leaf_tools.wanted_leaves(target)
        step = self._find(step)
        try:
            manifest = self._steps.verified(step)
            if problem := leaf_tools.misfit(manifest.leaves, wanted):
                raise self._steps.mismatch(step, problem, wanted)
            arrays = self._read(step, manifest)
        except StepProblem as problem:
            raise self._steps.damage(step, problem) from problem

        def place(path: Any, like: Any) -> Any:
            record = manifest.leaves[jax.tree_util.keystr(path)]
            return leaf_tools.place(arrays.pop(record.name), record, like)

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
            raise self._steps.damage(committed[-1], problem) from problem
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
            raise CheckpointError(f"saving step {step} in {self.directory} failed: {error!r}; {last}") from error

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

    def _write(self, step: int, copies: list[HostLeaf], metadata: dict[str, Any]) -> None:
        """The background thread's work: build, commit, then drop old steps."""
        try:
            if not self._tidied:
                self._steps.remove_leftovers()
                self._tidied = True
            with self._steps.building(step, replaces=lambda old: old >= step) as folder:
                leaves = manifest_tools.in_parallel(lambda item: item[1].store(item[0]), enumerate(copies))
                arrays = {record.stored: array for record, array in leaves if record.stored}
                self._store.save(folder / manifest_tools.STATE_FOLDER, arrays)
                files = manifest_tools.hash_files(folder)
                Manifest(step, {record.name: record for record, _ in leaves}, files, metadata).write(folder)
            if self._keep is not None:
                for old in self._steps.committed()[: -self._keep]:
                    if self._keep_every is None or old % self._keep_every:
                        self._steps.discard(old)
        except Exception:
            _log.exception("saving step %d in %s failed", step, self.directory)  # now; `wait` may be an hour away
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"the checkpointer of {self.directory} is closed; make a new one")

    def _find(self, step: int | None) -> int:
        committed = self._steps.committed()
        if not committed:
            raise FileNotFoundError(f"there is no checkpoint in {self.directory}")
        if step is None:
            return committed[-1]
        if step not in committed:
            raise FileNotFoundError(
                f"there is no step {step} in {self.directory}; it holds steps {', '.join(map(str, committed))}"
            )
        return step

    def _read(self, step: int, manifest: Manifest) -> dict[str, np.ndarray]:
        """The stored form of every leaf, checked against its fingerprint."""
        stored = [record.stored for record in manifest.leaves.values() if record.stored]
        found = self._store.restore(self._steps.path(step) / manifest_tools.STATE_FOLDER, stored)
        arrays = {
            record.name: found[record.stored] if record.stored else leaf_tools.empty(record)
            for record in manifest.leaves.values()
        }

        def check(record: leaf_tools.LeafRecord) -> None:
            array = arrays[record.name]
            if record.sha256 != leaf_tools.fingerprint(array, record.dtype, record.shape, record.key_impl):
                raise StepProblem(f"leaf {record.name}: its values are not the ones that were saved")

        manifest_tools.in_parallel(check, manifest.leaves.values())
        return arrays
