"""The record that makes a directory a checkpoint: leaves and their fingerprints, files and their SHA-256, metadata.

A step that one process wrote looks like this, and any Orbax reader opens `state`:

    150/fp4jax.json            {"manifest": {...}, "sha256": of the manifest's canonical JSON}
    150/state/_METADATA        written by Orbax
    150/state/0003.params.w/   one folder a leaf: .zarray and raw chunks

Where several did, each has a folder `150/part.<process>` of NumPy files instead, one a piece (see `parts`).

Two layers of checksums answer two questions. Those of files: does the disk still hold what was written? They are
checked before a byte reaches a decoder, and since every leaf has folders or files of its own they name the leaf. Those
of pieces: is it what training held? They are taken from the host copy before anybody writes it, so they catch a cast, a
lost chunk, a bug.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from fp4jax.train.checkpoint.errors import StepProblem
from fp4jax.train.checkpoint.leaves import LeafRecord
from fp4jax.train.checkpoint.pieces import Piece, whole

FILE_NAME = "fp4jax.json"
STATE_FOLDER = "state"
_FORMAT = "fp4jax checkpoint, version 2"
_ONE_PIECE_A_LEAF = "fp4jax checkpoint, version 1"  # written before several processes could save


@dataclass(frozen=True)
class Manifest:
    """What one step holds.

    Attributes:
        step: the step; it must equal the directory's name.
        leaves: records by leaf name, in the order of the tree.
        files: path relative to the step's directory -> [bytes, SHA-256].
        metadata: what the caller saved beside the state.
    """

    step: int
    leaves: Mapping[str, LeafRecord]
    files: Mapping[str, tuple[int, str]]
    metadata: dict[str, Any]

    def write(self, step_dir: Path) -> None:
        """Writes the manifest file and forces it and the list of files beside it to the disk."""
        body = {
            "format": _FORMAT,
            "step": self.step,
            "leaves": [asdict(record) for record in self.leaves.values()],
            "files": self.files,
            "metadata": self.metadata,
        }
        text = json.dumps({"manifest": body, "sha256": _canonical_sha256(body)}, indent=1)
        (step_dir / FILE_NAME).write_text(text, encoding="utf-8")
        sync(step_dir / FILE_NAME)
        sync(step_dir)

    @staticmethod
    def read(step_dir: Path) -> "Manifest":
        """Reads the manifest of `step_dir` and checks it against its own checksum.

        Raises:
            StepProblem: it is missing, altered, of another version, or belongs to another step.
        """
        try:
            outer = json.loads((step_dir / FILE_NAME).read_bytes())
            body, digest = outer["manifest"], outer["sha256"]
        except FileNotFoundError as error:
            raise StepProblem(f"file {FILE_NAME} is missing") from error
        except OSError as error:
            raise StepProblem(f"file {FILE_NAME} cannot be read ({error})") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StepProblem(f"file {FILE_NAME} is altered or truncated: it is no manifest ({error})") from error
        if digest != _canonical_sha256(body):
            raise StepProblem(f"file {FILE_NAME} is altered: its checksum differs from the one recorded in it")
        if body["format"] not in (_FORMAT, _ONE_PIECE_A_LEAF):
            raise StepProblem(f"file {FILE_NAME} has format {body['format']!r}; this fp4jax reads {_FORMAT!r}")
        if step_dir.name != str(body["step"]):
            raise StepProblem(f"file {FILE_NAME} belongs to step {body['step']}, not to {step_dir.name}")
        read = record if body["format"] == _FORMAT else _record_of_one_piece
        records = [read(leaf) for leaf in body["leaves"]]
        files = {name: (size, digest) for name, (size, digest) in body["files"].items()}
        return Manifest(body["step"], {record.name: record for record in records}, files, body["metadata"])

    def check_sizes(self, step_dir: Path) -> None:
        """Checks that every file is there in full; reads none of them.

        Raises:
            StepProblem: a file is missing or has another size.
        """
        for name, (size, _) in self.files.items():
            try:
                found = (step_dir / name).stat().st_size
            except OSError as error:
                raise StepProblem(f"{self._blame(name)}file {name} is missing ({error.strerror})") from error
            if found != size:
                raise StepProblem(f"{self._blame(name)}file {name} has {found} bytes, {size} were written")

    def check_contents(
        self, step_dir: Path, pieces: Collection[str] | None = None, beat: Callable[[], None] = lambda: None
    ) -> None:
        """Reads files and checks them against the SHA-256 taken when they were written.

        Args:
            step_dir: the step.
            pieces: where given, of the files that hold pieces only those that hold these (`Piece.stored`).
            beat: called after every file.

        Raises:
            StepProblem: a file is altered or cannot be read.
        """

        def check(name: str) -> None:
            try:
                found = _file_sha256(step_dir / name)
            except OSError as error:
                raise StepProblem(f"{self._blame(name)}file {name} cannot be read ({error.strerror})") from error
            if found != self.files[name][1]:
                raise StepProblem(f"{self._blame(name)}file {name} is altered: its SHA-256 is not the one recorded")
            beat()

        in_parallel(check, [name for name in self.files if pieces is None or self._is_needed(name, pieces)])

    @functools.cached_property
    def _owners(self) -> dict[str, str]:
        return {str(piece.stored): record.name for record in self.leaves.values() for piece in record.pieces}

    def _piece(self, file_name: str) -> str | None:
        """The piece that a file holds or is a part of."""
        candidates = (file_name, *map(str, PurePosixPath(file_name).parents))
        return next((name for name in candidates if name in self._owners), None)

    def _is_needed(self, file_name: str, pieces: Collection[str]) -> bool:
        piece = self._piece(file_name)
        return piece is None or piece in pieces

    def _blame(self, file_name: str) -> str:
        piece = self._piece(file_name)
        return "" if piece is None else f"leaf {self._owners[piece]}: "


def record(leaf: dict[str, Any]) -> LeafRecord:
    """The leaf that `asdict` and JSON made `leaf` of."""
    pieces = tuple(Piece(p["stored"], tuple((a, b) for a, b in p["box"]), p["sha256"]) for p in leaf["pieces"])
    return LeafRecord(**leaf | {"shape": tuple(leaf["shape"]), "pieces": pieces})


def _record_of_one_piece(leaf: dict[str, Any]) -> LeafRecord:
    record = LeafRecord(leaf["name"], leaf["dtype"], tuple(leaf["shape"]), leaf["key_impl"], ())
    if leaf["stored"] is None:
        return record
    piece = Piece(f"{STATE_FOLDER}/{leaf['stored']}", whole(record.data_shape), leaf["sha256"])
    return replace(record, pieces=(piece,))


def hash_files(folder: Path, step_dir: Path, beat: Callable[[], None] = lambda: None) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file under `folder`, by its path relative to `step_dir`, in sorted order."""

    def digest(path: Path) -> tuple[int, str]:
        found = path.stat().st_size, _file_sha256(path)
        beat()
        return found

    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(step_dir).as_posix(): found for path, found in zip(paths, in_parallel(digest, paths))}


def sync_tree(folder: Path) -> None:
    """Forces a folder, with all files and folders in it, to the disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            sync(Path(path, name))
        sync(Path(path))


def plain_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of `metadata`, which must come back from JSON exactly as it went in.

    Raises:
        TypeError: it holds something else than dicts with string keys, lists, str, int, float, bool and None.
    """

    def check(value: Any, where: str) -> None:
        if type(value) is dict:
            for key, item in value.items():
                if type(key) is not str:
                    raise TypeError(f"{where} has the key {key!r}; JSON returns keys as strings, so use {str(key)!r}")
                check(item, f"{where}[{key!r}]")
        elif type(value) is list:
            for index, item in enumerate(value):
                check(item, f"{where}[{index}]")
        elif type(value) not in (str, int, float, bool, type(None)):
            raise TypeError(
                f"{where} is {value!r}, a {type(value).__name__}; metadata holds dicts, lists, str, int, float, bool "
                f"and None, which JSON returns as they were: convert it first, or put arrays into the state"
            )

    plain = {} if metadata is None else dict(metadata)
    check(plain, "metadata")
    return json.loads(json.dumps(plain))


def in_parallel[A, B](function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Maps over threads; hashing and reading release the interpreter lock. The first exception is raised."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="fp4jax-hash") as pool:
        return list(pool.map(function, items))


def sync(path: Path) -> None:
    """Forces a file or a folder's list of names to the disk, so that a power cut finds them there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _canonical_sha256(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
