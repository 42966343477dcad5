"""The values of a step, read and checked: of every leaf the boxes that this process puts somewhere, and no more."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import numpy as np

from fp4jax.train.checkpoint.errors import StepProblem
from fp4jax.train.checkpoint.leaves import LeafRecord, encode, fingerprint, numpy_dtype
from fp4jax.train.checkpoint.manifest import STATE_FOLDER, Manifest, in_parallel
from fp4jax.train.checkpoint.parts import read_piece
from fp4jax.train.checkpoint.pieces import Box, Piece, assemble, overlap, shape_of, size_of
from fp4jax.train.checkpoint.storage import ArrayStore

_IN_STATE = f"{STATE_FOLDER}/"


def read_blocks(
    step_dir: Path,
    manifest: Manifest,
    wanted: Mapping[str, Collection[Box]],
    store: ArrayStore,
    beat: Callable[[], None],
) -> dict[str, dict[Box, np.ndarray]]:
    """The stored form of the wanted boxes of every leaf, by leaf name and box.

    Reads the files that hold them, checks their SHA-256 first, and that of each piece once it is decoded.

    Args:
        step_dir: the step, whose files are all there.
        manifest: the step's.
        wanted: leaf name -> boxes.
        store: reads what Orbax wrote.
        beat: called after every file and every leaf.

    Raises:
        StepProblem: a file or leaf is not what was saved.
    """
    needed = {
        name: [
            piece for piece in manifest.leaves[name].pieces if any(overlap(piece.box, box) is not None for box in boxes)
        ]
        for name, boxes in wanted.items()
    }
    paths = {str(piece.stored) for pieces in needed.values() for piece in pieces}
    manifest.check_contents(step_dir, paths, beat)
    in_state = [path.removeprefix(_IN_STATE) for path in paths if path.startswith(_IN_STATE)]
    arrays = store.restore(step_dir / STATE_FOLDER, in_state)

    def read(record: LeafRecord, piece: Piece) -> np.ndarray:
        path = str(piece.stored)
        array = arrays[path.removeprefix(_IN_STATE)] if path.startswith(_IN_STATE) else read_piece(step_dir, piece)
        shape = shape_of(piece.box)[: len(record.shape)]
        if piece.sha256 != fingerprint(array, record.dtype, shape, record.key_impl):
            raise StepProblem(f"leaf {record.name}: its values are not the ones that were saved")
        return array

    def fill(name: str) -> dict[Box, np.ndarray]:
        record = manifest.leaves[name]
        pieces = [(piece.box, read(record, piece)) for piece in needed[name]]
        try:
            return {box: assemble(box, pieces) if size_of(box) else _empty(record, box) for box in wanted[name]}
        except StepProblem as problem:
            raise StepProblem(f"leaf {name}: {problem}") from problem
        finally:
            beat()

    return dict(zip(wanted, in_parallel(fill, wanted), strict=True))


def _empty(record: LeafRecord, box: Box) -> np.ndarray:
    """The stored form of no values, which no file holds."""
    dtype = np.dtype(np.uint32) if record.key_impl is not None else numpy_dtype(record.dtype)
    return encode(np.empty(shape_of(box), dtype))
