"""The part of a step that one of several processes writes: NumPy files, one a piece, and a list of them.

Orbax does not write here: it takes host arrays from process 0 only, and would need the devices for all others. Each
process has a folder of its own, so that no two write one file:

    150/part.1/0003.params.w.0.npy   the first piece that process 1 owns of leaf 3
    150/part.1.json                  its list of pieces and files, gone once process 0 has put it into the manifest

Values whose dtype a NumPy file cannot name (bfloat16) are there as unsigned integers of the same width, as others are
in every step (see `leaves`).
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fp4jax.train.checkpoint import manifest as manifest_tools
from fp4jax.train.checkpoint.errors import PeerProblem
from fp4jax.train.checkpoint.leaves import LeafRecord, encode, fingerprint, stored_name
from fp4jax.train.checkpoint.pieces import Box, Piece, cut, shape_of, size_of, slices, whole
from fp4jax.train.checkpoint.snapshot import HostLeaf

# Larger pieces are cut into several files, which are written and hashed in parallel.
_FILE_BYTES = 1 << 30


@dataclass(frozen=True)
class Part:
    """What one process adds to a step: its pieces of every leaf, in the order of the tree, and its files."""

    leaves: Sequence[LeafRecord]
    files: dict[str, tuple[int, str]]

    def save(self, folder: Path, process: int) -> str:
        """Writes the list of process `process` into the step's folder; returns its SHA-256."""
        text = json.dumps({"leaves": [asdict(record) for record in self.leaves], "files": self.files}).encode()
        (folder / f"part.{process}.json").write_bytes(text)
        return hashlib.sha256(text).hexdigest()

    @staticmethod
    def take(folder: Path, process: int, sha256: str) -> "Part":
        """Reads the list of process `process` and removes it.

        Raises:
            PeerProblem: it is not the one that was written.
        """
        path = folder / f"part.{process}.json"
        text = path.read_bytes()
        if hashlib.sha256(text).hexdigest() != sha256:
            raise PeerProblem(f"{path} is not what process {process} wrote: do all processes see one file system?")
        path.unlink()
        body = json.loads(text)
        files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
        return Part([manifest_tools.record(leaf) for leaf in body["leaves"]], files)


def write_part(folder: Path, copies: Sequence[HostLeaf], process: int, beat: Callable[[], None]) -> Part:
    """Writes the pieces that this process owns under `folder` and forces them to the disk.

    Args:
        folder: the step's, on a file system that all processes share.
        copies: every leaf of the state, with the pieces of this process.
        process: which one this is. What each holds on its own is written by process 0; the others add fingerprints.
        beat: called after every file.
    """
    own = folder / f"part.{process}"
    own.mkdir()

    def write(item: tuple[int, int, HostLeaf, Box, np.ndarray]) -> tuple[int, Piece]:
        position, number, leaf, box, values = item
        array = encode(np.ascontiguousarray(values).reshape(values.shape))
        digest = fingerprint(array, leaf.dtype, shape_of(box)[: len(leaf.shape)], leaf.key_impl)
        stored = None
        if process == 0 or not leaf.on_its_own:
            stored = f"{own.name}/{stored_name(position, leaf.name)}.{number}.npy"
            with (folder / stored).open("wb") as file:
                np.save(file, _plain(array))
                file.flush()
                os.fsync(file.fileno())
        beat()
        return position, Piece(stored, box, digest)

    work = []
    for position, leaf in enumerate(copies):
        parts = [
            (small, piece[slices(small, box)])
            for box, piece in leaf.pieces
            if piece.size
            for small in cut(box, _FILE_BYTES // piece.dtype.itemsize)
        ]
        work += [(position, number, leaf, box, values) for number, (box, values) in enumerate(parts)]
    pieces: list[list[Piece]] = [[] for _ in copies]
    for position, piece in manifest_tools.in_parallel(write, work):
        pieces[position].append(piece)
    manifest_tools.sync(own)
    leaves = [
        LeafRecord(leaf.name, leaf.dtype, leaf.shape, leaf.key_impl, tuple(found))
        for leaf, found in zip(copies, pieces, strict=True)
    ]
    return Part(leaves, manifest_tools.hash_files(own, folder, beat))


def merge(parts: Sequence[Part]) -> tuple[dict[str, LeafRecord], dict[str, tuple[int, str]]]:
    """The leaves and files of a step out of the parts of all processes, by index.

    Raises:
        PeerProblem: the processes saved different trees, hold different values of a leaf that each has on its own, or
            do not hold all of a leaf.
    """
    first, files = parts[0], {}
    for process, part in enumerate(parts):
        files |= part.files
        if [_description(leaf) for leaf in part.leaves] != [_description(leaf) for leaf in first.leaves]:
            raise PeerProblem(f"process {process} saves another tree than process 0: {_difference(part, first)}")
    leaves = {}
    for same in zip(*(part.leaves for part in parts), strict=True):
        leaf = same[0]
        held = {(piece.box, piece.sha256) for piece in leaf.pieces}
        for process, other in enumerate(same):
            if any(piece.stored is None and (piece.box, piece.sha256) not in held for piece in other.pieces):
                raise PeerProblem(
                    f"leaf {leaf.name} is in process {process} not what it is in process 0: an array on a process's "
                    f"own devices must be equal on all of them; lay out over all devices what differs"
                )
        pieces = tuple(piece for other in same for piece in other.pieces if piece.stored is not None)
        count, size = sum(size_of(piece.box) for piece in pieces), size_of(whole(leaf.data_shape))
        if count != size:
            raise PeerProblem(f"leaf {leaf.name}: {count} of its {size} stored values came from the processes")
        leaves[leaf.name] = replace(leaf, pieces=pieces)
    return leaves, files


def read_piece(step_dir: Path, piece: Piece) -> np.ndarray:
    """The stored form of a piece that `write_part` wrote."""
    return np.load(step_dir / str(piece.stored), allow_pickle=False)


def _plain(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _description(leaf: LeafRecord) -> tuple[Any, ...]:
    return leaf.name, leaf.dtype, leaf.shape, leaf.key_impl


def _difference(part: Part, first: Part) -> str:
    here, there = (Counter(map(_description, leaves)) for leaves in (part.leaves, first.leaves))
    odd = next(iter((here - there) + (there - here)), None)
    if odd is None:
        return "the same leaves in another order"
    name, dtype, shape, _ = odd
    return f"leaf {name}, {dtype}{list(shape)}, is not in both"
