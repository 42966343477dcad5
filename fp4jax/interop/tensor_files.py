"""Folders of safetensors files: one file, or several with an index, as Hugging Face writes them."""

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the bfloat16 that safetensors asks it for)
import numpy as np

from fp4jax.interop.errors import InteropError, require
from fp4jax.interop.layout import listing

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
"""The most that goes into one file, unless a single tensor is larger."""


class TensorFiles:
    """The tensors of a folder, read one at a time.

    Args:
        folder: holds `model.safetensors`, or `model.safetensors.index.json` and the files it names.

    Raises:
        InteropError: no such folder, no safetensors in it, or a file that is cut or damaged; the message names it.
        MissingPackageError: the package `safetensors` is not installed.
    """

    def __init__(self, folder: Path):
        self._library = require("safetensors", "reading safetensors")
        if not folder.is_dir():
            raise InteropError(f"no such folder: {str(folder)!r}")
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        for file in _index(folder) if (folder / INDEX).exists() else {SINGLE: None}:
            path = folder / file
            if not path.is_file():
                raise InteropError(_nothing_to_read(folder, file))
            self._open[path] = self._call(path, lambda path=path: self._library.safe_open(path, framework="np"))
            for name in self._open[path].keys():  # noqa: SIM118  (not a dict)
                if name in self._files:
                    raise InteropError(f"{str(folder)!r} holds {name} twice: in {self._files[name].name} and {file}")
                self._files[name] = path

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._files)

    def metadata(self) -> Mapping[str, str]:
        """The text that the first file carries beside its tensors."""
        return next(iter(self._open.values())).metadata() or {}

    def read(self, name: str, shape: tuple[int, ...], dtypes: Iterable[str]) -> np.ndarray:
        """A tensor, on the host.

        Args:
            name: of the tensor.
            shape: that it must have.
            dtypes: of which it must have one, as safetensors calls them: "F32", "BF16", "U8".

        Raises:
            InteropError: absent, or of another shape or dtype.
        """
        path = self._files.get(name)
        if path is None:
            raise InteropError(f"there is no tensor {name}")
        view = self._call(path, lambda: self._open[path].get_slice(name))
        if (found := tuple(view.get_shape())) != shape:
            raise InteropError(f"{str(path)!r}: {name} has shape {found}, and the configuration says {shape}")
        if (dtype := view.get_dtype()) not in (dtypes := tuple(dtypes)):
            raise InteropError(f"{str(path)!r}: {name} has dtype {dtype}, and should be {' or '.join(dtypes)}")
        return self._call(path, lambda: self._open[path].get_tensor(name))

    def _call(self, path: Path, function: Any) -> Any:
        try:
            return function()
        except (self._library.SafetensorError, OSError) as error:
            raise InteropError(f"{str(path)!r} is not a whole safetensors file: {error}") from error


def write_tensors(folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write tensors into one file, or several with an index, holding one file's tensors in memory at a time.

    Args:
        folder: exists.
        tensors: names and contiguous host arrays of dtypes that safetensors knows.
        shard_bytes: the most that goes into a file.

    Raises:
        MissingPackageError: the package `safetensors` is not installed.
    """
    library = require("safetensors.numpy", "writing safetensors")
    places: dict[str, int] = {}
    total, number = 0, 0
    for number, shard in enumerate(_shards(tensors, shard_bytes), start=1):
        # transformers refuses a file that does not say which framework's conventions it follows.
        part = folder / f"part-{number}"
        part.touch()
        mode = part.stat().st_mode  # safetensors renames a file to this that its owner alone may read
        library.save_file(shard, part, metadata={"format": "pt"})
        part.chmod(mode)
        total += sum(tensor.nbytes for tensor in shard.values())
        places |= dict.fromkeys(shard, number)
    if number == 1:
        (folder / "part-1").rename(folder / SINGLE)
        return
    files = {i: f"model-{i:05}-of-{number:05}.safetensors" for i in range(1, number + 1)}
    for i, file in files.items():
        (folder / f"part-{i}").rename(folder / file)
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[i] for name, i in places.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A scratch folder that becomes `folder` if the block ends well, so that no half of a model is ever found there.

    Raises:
        InteropError: `folder` is a file, or holds something already, or cannot be made.
    """
    import shutil
    import tempfile

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InteropError(f"{str(folder)!r} {'is not empty' if folder.is_dir() else 'is a file'}: give a new folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise InteropError(f"cannot write {str(folder)!r}: {error.strerror}") from error
    try:
        yield scratch
        scratch.chmod(0o755)  # mkdtemp's folders are for their owner alone
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)  # nothing is there once it is renamed


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InteropError: no such file, not JSON, or not an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InteropError(f"no such file: {str(path)!r}") from None
    except (OSError, ValueError) as error:
        raise InteropError(f"cannot read {str(path)!r}: {error}") from None
    if not isinstance(values, dict):
        raise InteropError(f"{str(path)!r} holds {type(values).__name__}, and should hold a JSON object")
    return values


def _index(folder: Path) -> dict[str, None]:
    """The files that an index names, in order."""
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise InteropError(f"{str(folder / INDEX)!r} has no weight_map")
    if odd := [file for file in places.values() if not isinstance(file, str) or Path(file).name != file]:
        raise InteropError(f"{str(folder / INDEX)!r}: {odd[0]!r} should name a file of the same folder")
    return dict.fromkeys(places.values())


def _nothing_to_read(folder: Path, file: str) -> str:
    old = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
    if old and file == SINGLE:
        return f"{str(folder)!r} holds {listing(old)} and no {SINGLE}: save it with safe_serialization=True"
    return f"there is no {file} in {str(folder)!r}"


def _shards(tensors: Iterable[tuple[str, np.ndarray]], limit: int) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
