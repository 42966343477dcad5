"""Results on disk: a JSON file a piece, found again by the hash of what was run."""

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.base import DEFAULT_SIZE, ROOT
from experiments.experiment import Experiment, Piece
from fp4jax.train.errors import ConfigError
from fp4jax.train.metrics import read_metrics

CURVE_POINTS = 60
"""Points that a curve is thinned to, each the mean of its stretch of steps."""

type Record = dict[str, Any]


def find(piece: Piece, root: Path = ROOT) -> Record | None:
    """The stored results of a piece, whichever experiment ran it; None if it has not run.

    Raises:
        ConfigError: a file of that name is no record.
    """
    for path in sorted(root.glob(f"*/results/**/*-{piece.key[:8]}.json")):
        record = read(path)
        if record["key"] == piece.key:
            return record
    return None


@contextlib.contextmanager
def claim(piece: Piece, root: Path = ROOT) -> Iterator[bool]:
    """Take a piece for this process; False if another process that is alive has it.

    A claim is a file that holds a process id. One whose process is gone counts for nothing.
    """
    path = root / f".{piece.key[:16]}.claim"
    taken = _take(path)
    if not taken and not _alive(path):
        path.unlink(missing_ok=True)
        taken = _take(path)
    try:
        yield taken
    finally:
        if taken:
            path.unlink()


def _take(path: Path) -> bool:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True


def _alive(path: Path) -> bool:
    """Whether the process of a claim runs. A claim without a number is being written at this moment."""
    try:
        text = path.read_text(encoding="utf-8")
        if text:
            os.kill(int(text), 0)
    except (FileNotFoundError, ProcessLookupError):
        return False
    except PermissionError:  # it runs as somebody else
        return True
    return True


def read(path: Path) -> Record:
    """A record.

    Raises:
        ConfigError: it is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _ = record["key"], record["lanes"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path.name} in {path.parent} is no record of results: {error}") from None
    return record


def save(piece: Piece, record: Record, root: Path = ROOT) -> Path:
    """Write a record in one atomic replacement."""
    path = root / piece.path
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(compact(record), allow_nan=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path


def compact(value: Any) -> Any:
    """JSON values: floats to six digits, NaN and infinity as null."""
    if isinstance(value, dict):
        return {key: compact(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [compact(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def lane_record(folder: Path, seed: int, learning_rate: float) -> Record:
    """What one lane came to, from its metrics.jsonl: thinned training curves, and every validation whole."""
    train, validation = read_metrics(folder, "train"), read_metrics(folder, "validation")
    curves = {name: np.array([row[name] for row in train], float) for name in ("loss", "grad_norm", "clipped")}
    stretches = np.array_split(np.arange(len(train)), min(CURVE_POINTS, len(train)))
    return {
        "seed": seed,
        "learning_rate": learning_rate,
        "skipped": int(sum(row["skipped"] for row in train)),
        "clip_fraction": float(np.mean(curves["clipped"])),
        "train": {
            "step": [int(part[-1]) + 1 for part in stretches],
            **{name: [_mean(curve[part]) for part in stretches] for name, curve in curves.items()},
        },
        "validation": [
            {"step": row["step"], "loss": row["loss"], "sources": row.get("sources", {})} for row in validation
        ],
    }


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


class Lanes:
    """The lanes of a record as arrays, for tables and figures; null is NaN.

    Args:
        record: from `find`.
    """

    def __init__(self, record: Record):
        self.record: Record = record
        self.lanes: list[Record] = record["lanes"]

    @property
    def seeds(self) -> tuple[int, ...]:
        """[S]."""
        return tuple(lane["seed"] for lane in self.lanes)

    def final(self, sources: Sequence[str] = ()) -> np.ndarray:
        """Final validation loss, [S]: of all, or of the sources, weighted by their tokens."""
        return self.validation(sources)[:, -1]

    def validation(self, sources: Sequence[str] = ()) -> np.ndarray:
        """Validation losses [S, V], as `final`. Sources that the text does not have are left out."""
        tokens = {name: self.record["validation_tokens"][name] for name in sources_of(self.record, sources)}
        if not tokens:
            return self._rows(row["loss"] for row in self._validations)
        total = sum(tokens.values())
        return self._rows(
            sum(_number(row["sources"][name]) * count for name, count in tokens.items()) / total
            for row in self._validations
        )

    @property
    def validation_steps(self) -> np.ndarray:
        """[V]."""
        return np.array([row["step"] for row in self.lanes[0]["validation"]])

    def curve(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [P], and a training metric [S, P]."""
        values = [[_number(value) for value in lane["train"][name]] for lane in self.lanes]
        return np.array(self.lanes[0]["train"]["step"]), np.array(values)

    def probe(self, *path: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [V], and a measurement [V, S, …]; rows that lack it are left out."""
        found = [(row["step"], leaf) for row in self.record["measured"] if (leaf := _leaf(row, path)) is not None]
        return np.array([step for step, _ in found]), np.array([np.array(leaf, float) for _, leaf in found])

    @property
    def _validations(self) -> list[Record]:
        return [row for lane in self.lanes for row in lane["validation"]]

    def _rows(self, values: Iterable[float | None]) -> np.ndarray:
        return np.array([_number(value) for value in values]).reshape(len(self.lanes), -1)


def sources_of(record: Record, sources: Sequence[str]) -> list[str]:
    """Those of `sources` that the record's text has."""
    return [name for name in sources if record["validation_tokens"].get(name)]


def stored(experiment: Experiment, size: str = DEFAULT_SIZE, root: Path = ROOT) -> dict[str, Lanes]:
    """What has run of an experiment at a size, by label.

    Raises:
        ConfigError: its pieces were trained on different texts.
    """
    records = {piece.arm.label: find(piece, root) for piece in experiment.pieces(size)}
    found = {label: Lanes(record) for label, record in records.items() if record is not None}
    if len({lanes.record["corpus"] for lanes in found.values()}) > 1:
        raise ConfigError(f"experiment {experiment.name!r}: its results are of different texts and do not compare")
    return found


def _leaf(row: Any, path: Sequence[str]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def _number(value: float | None) -> float:
    return math.nan if value is None else value
