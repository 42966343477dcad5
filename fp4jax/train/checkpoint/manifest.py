"""The record that makes a directory a checkpoint: fingerprints of leaves, sizes and SHA-256 of files, metadata.

A step looks like this, and any Orbax reader opens `state`:

    150/fp4jax.json            {"manifest": {...}, "sha256": of the manifest's canonical JSON}
    150/state/_METADATA        written by Orbax
    150/state/0003.params.w/   one folder a leaf: .zarray and raw chunks

Two layers of checksums answer two questions. Those of files: does the disk still hold what was written? They are
checked before a byte reaches a decoder, and since every leaf has a folder of its own they name the leaf. Those of
leaves: is it what training held? They are taken from the host copy before Orbax sees it, so they catch a cast, a lost
chunk, a bug.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fp4jax.train.checkpoint.errors import StepProblem
from fp4jax.train.checkpoint.leaves import LeafRecord

FILE_NAME = "fp4jax.json"
STATE_FOLDER = "state"
_FORMAT = "fp4jax checkpoint, version 1"


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
        """Writes the manifest file and forces the whole step, files and folders, to the disk."""
        body = {
            "format": _FORMAT,
            "step": self.step,
            "leaves": [asdict(record) for record in self.leaves.values()],
            "files": self.files,
            "metadata": self.metadata,
        }
        text = json.dumps({"manifest": body, "sha256": _canonical_sha256(body)}, indent=1)
        (step_dir / FILE_NAME).write_text(text, encoding="utf-8")
        for folder, _, names in os.walk(step_dir):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))

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
        if body["format"] != _FORMAT:
            raise StepProblem(f"file {FILE_NAME} has format {body['format']!r}; this fp4jax reads {_FORMAT!r}")
        if step_dir.name != str(body["step"]):
            raise StepProblem(f"file {FILE_NAME} belongs to step {body['step']}, not to {step_dir.name}")
        records = [LeafRecord(**leaf | {"shape": tuple(leaf["shape"])}) for leaf in body["leaves"]]
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

    def check_contents(self, step_dir: Path) -> None:
        """Reads every file and checks it against the SHA-256 taken when it was written.

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

        self.check_sizes(step_dir)
        in_parallel(check, self.files)

    def _blame(self, file_name: str) -> str:
        for record in self.leaves.values():
            if record.stored is not None and file_name.startswith(f"{STATE_FOLDER}/{record.stored}/"):
                return f"leaf {record.name}: "
        return ""


def hash_files(step_dir: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file under `step_dir`, by relative path in sorted order."""
    paths = sorted(path for path in step_dir.rglob("*") if path.is_file())
    digests = in_parallel(_file_sha256, paths)
    return {
        path.relative_to(step_dir).as_posix(): (path.stat().st_size, digest) for path, digest in zip(paths, digests)
    }


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
