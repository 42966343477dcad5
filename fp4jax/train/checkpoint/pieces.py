"""Where parts of an array lie in the whole: boxes, their overlaps, and a box put together from pieces.

A box is a (start, stop) pair for each axis. Boxes of one leaf lie in its *data*: the leaf itself, or the uint32 words
of a typed key, whose axis comes last and is never split.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp4jax.train.checkpoint.errors import StepProblem

type Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """What the manifest says of one stored part of a leaf.

    Attributes:
        stored: its path in the step: a folder of Orbax's (`state/0003.params.w`) or a NumPy file
            (`part.1/0003.params.w.0.npy`). While a save is under way also None: held in equal copies by several
            processes, and written by another one.
        box: where it lies in the leaf's data.
        sha256: fingerprint of dtype, shape and bytes (see `leaves.fingerprint`).
    """

    stored: str | None
    box: Box
    sha256: str


def whole(shape: tuple[int, ...]) -> Box:
    """The box of an entire array."""
    return tuple((0, size) for size in shape)


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of a shard's `index` in data of `shape`, which may have more axes than the index."""
    full = (*index, *[slice(None)] * (len(shape) - len(index)))
    return tuple(part.indices(size)[:2] for part, size in zip(full, shape, strict=True))


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of what fills a box."""
    return tuple(stop - start for start, stop in box)


def size_of(box: Box) -> int:
    """The number of elements in a box."""
    return math.prod(shape_of(box))


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes share, or None."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def slices(box: Box, within: Box) -> tuple[Any, ...]:
    """The index of `box` in an array that fills `within`; it gives an array, also of a scalar."""
    axes = [slice(start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, within, strict=True)]
    return (*axes, ...)


def cut(box: Box, most: int) -> Iterator[Box]:
    """Cuts a box along its longest axis into boxes of at most `most` elements, or of one row where rows are longer."""
    count = -(-size_of(box) // most)
    if count <= 1:
        yield box
        return
    axis = max(range(len(box)), key=lambda axis: box[axis][1] - box[axis][0])
    start, stop = box[axis]
    rows = max(1, (stop - start) // count)
    for first in range(start, stop, rows):
        yield (*box[:axis], (first, min(first + rows, stop)), *box[axis + 1 :])


def assemble(box: Box, pieces: Iterable[tuple[Box, np.ndarray]]) -> np.ndarray:
    """The array that fills `box`, from disjoint pieces; a view where one piece holds all of it.

    Raises:
        StepProblem: the pieces leave a part of the box open.
    """
    pieces = list(pieces)
    for where, piece in pieces:
        if overlap(box, where) == box:
            return piece[slices(box, where)]
    filled, array = 0, np.empty(shape_of(box), pieces[0][1].dtype if pieces else np.uint8)
    for where, piece in pieces:
        shared = overlap(box, where)
        if shared is not None:
            array[slices(shared, box)] = piece[slices(shared, where)]
            filled += size_of(shared)
    if filled != array.size:
        raise StepProblem(f"{filled} of {array.size} values of {list(box)} are there")
    return array
