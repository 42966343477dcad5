"""How a step comes to be, in the background thread: built, committed, and then old steps dropped."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fp4jax.train.checkpoint import manifest as manifest_tools
from fp4jax.train.checkpoint.directory import StepDirectory
from fp4jax.train.checkpoint.errors import PeerProblem
from fp4jax.train.checkpoint.leaves import LeafRecord, encode, fingerprint, stored_name
from fp4jax.train.checkpoint.manifest import STATE_FOLDER, Manifest
from fp4jax.train.checkpoint.parts import Part, merge, write_part
from fp4jax.train.checkpoint.pieces import Piece, whole
from fp4jax.train.checkpoint.processes import Exchange
from fp4jax.train.checkpoint.snapshot import HostLeaf
from fp4jax.train.checkpoint.storage import ArrayStore


class StepWriter:
    """Writes steps into a directory, alone or together with the other processes.

    Process 0 makes the hidden folder and commits it; any others write their parts into it in between. One that fails
    tells process 0, which removes the folder and tells all, so that a save succeeds everywhere or fails everywhere.
    """

    def __init__(self, steps: StepDirectory, store: ArrayStore, keep: int | None, keep_every: int | None):
        self._steps, self._store, self._keep, self._keep_every = steps, store, keep, keep_every
        self._tidied = False

    def write(self, exchange: Exchange, step: int, copies: list[HostLeaf], metadata: dict[str, Any]) -> None:
        """Builds and commits `step`, then drops old steps. Returns once that is done, in every process.

        Raises:
            PeerProblem: another process failed or is silent.
        """
        with exchange:
            if exchange.index == 0:
                self._lead(exchange, step, copies, metadata)
            else:
                self._follow(exchange, copies)

    def _lead(self, exchange: Exchange, step: int, copies: list[HostLeaf], metadata: dict[str, Any]) -> None:
        if not self._tidied:
            with exchange.busy():
                self._steps.remove_leftovers()
            self._tidied = True
        with contextlib.ExitStack() as committing:
            with self._steps.building(step, replaces=lambda old: old >= step) as folder:
                build = self._all_of_it if exchange.count == 1 else _own_part_and_others
                leaves, files = build(exchange, folder, copies)
                committing.enter_context(exchange.busy())
                Manifest(step, leaves, files, metadata).write(folder)
            if self._keep is not None:
                for old in self._steps.committed()[: -self._keep]:
                    if self._keep_every is None or old % self._keep_every:
                        self._steps.discard(old)
        exchange.say("committed", step)

    def _follow(self, exchange: Exchange, copies: list[HostLeaf]) -> None:
        folder = self._steps.root / exchange.hear(0, "folder")
        if not folder.is_dir():
            raise PeerProblem(
                f"process {exchange.index} does not see {folder}, which process 0 made: the directory of checkpoints "
                f"must be on a file system that all processes share"
            )
        part = write_part(folder, copies, exchange.index, exchange.beat)
        exchange.say("part", part.save(folder, exchange.index))
        exchange.hear(0, "committed")

    def _all_of_it(
        self, exchange: Exchange, folder: Path, copies: list[HostLeaf]
    ) -> tuple[Mapping[str, LeafRecord], Mapping[str, tuple[int, str]]]:
        leaves = manifest_tools.in_parallel(lambda item: _merged(*item), enumerate(copies))
        arrays = {Path(piece.stored).name: array for record, array in leaves for piece in record.pieces if piece.stored}
        self._store.save(folder / STATE_FOLDER, arrays)
        files = manifest_tools.hash_files(folder / STATE_FOLDER, folder)
        manifest_tools.sync_tree(folder / STATE_FOLDER)
        return {record.name: record for record, _ in leaves}, files


def _own_part_and_others(
    exchange: Exchange, folder: Path, copies: list[HostLeaf]
) -> tuple[Mapping[str, LeafRecord], Mapping[str, tuple[int, str]]]:
    exchange.say("folder", folder.name)
    parts = [write_part(folder, copies, 0, exchange.beat)]
    parts += [Part.take(folder, other, exchange.hear(other, "part")) for other in range(1, exchange.count)]
    return merge(parts)


def _merged(position: int, leaf: HostLeaf) -> tuple[LeafRecord, np.ndarray]:
    """The manifest's record and the stored form of a leaf that is all here. Uses up its pieces."""
    array = encode(leaf.merged())
    record = LeafRecord(leaf.name, leaf.dtype, leaf.shape, leaf.key_impl, ())
    if not array.size:
        return record, array
    digest = fingerprint(array, leaf.dtype, leaf.shape, leaf.key_impl)
    piece = Piece(f"{STATE_FOLDER}/{stored_name(position, leaf.name)}", whole(leaf.data_shape), digest)
    return LeafRecord(leaf.name, leaf.dtype, leaf.shape, leaf.key_impl, (piece,)), array
