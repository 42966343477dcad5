"""What a run measured, as JSON lines and TensorBoard events, and how a resume keeps both free of duplicates.

Rows of metrics.jsonl, one object a line:

    {"kind": "train", "step": 7, "loss": 3.1, "grad_norm": 0.9, "clipped": 0, "skipped": 0, "learning_rate": 0.001}
    {"kind": "validation", "step": 10, "loss": 3.0, "bits_per_byte": 4.3, "tokens": 32768, "tokens_per_second": 9000,
     "sources": {"emma": 2.9, …}}

`step` counts from 1: the row of step 7 tells of the seventh batch. `loss` is in nats a token. A number that is not
finite is null, for JSON has no NaN.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from fp4jax.train.errors import ConfigError, require

FILE = "metrics.jsonl"

type Row = dict[str, Any]


class MetricsLog:
    """Writes the metrics of one training into a folder.

    Args:
        folder: where metrics.jsonl and the event files go; created if absent.
        tensorboard: also write event files, by tensorboardX.
        resume_at: the step that training goes on from. Rows of later steps are removed, and TensorBoard is told to
            forget them. None starts a new file.

    Raises:
        MissingPackageError: `tensorboard` without tensorboardX.
        ConfigError: the metrics.jsonl to go on with is damaged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, MetricsLog(Path(folder), tensorboard=False) as log:
        ...     log.write("train", 1, {"loss": 5.5})
        ...     log.flush()
        ...     read_metrics(Path(folder))
        [{'kind': 'train', 'step': 1, 'loss': 5.5}]
    """

    def __init__(self, folder: Path, *, tensorboard: bool, resume_at: int | None = None):
        writers = require_tensorboard() if tensorboard else None
        folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            truncate_metrics(folder, resume_at)
        self._file = (folder / FILE).open("w" if resume_at is None else "a", encoding="utf-8")
        purge = None if resume_at is None else resume_at + 1
        self._events = writers and writers.SummaryWriter(str(folder), purge_step=purge, write_to_disk=True)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Append a row. Values are numbers, or dicts of numbers."""
        self._file.write(json.dumps({"kind": kind, "step": step, **_plain(values)}, allow_nan=False) + "\n")
        if self._events is not None:
            for name, value in _flat(values, kind):
                if math.isfinite(value):  # TensorBoard has no place for the loss of a skipped step
                    self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Hand all rows to the operating system, so that they outlive this process."""
        self._file.flush()
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def require_tensorboard() -> ModuleType:
    """Import tensorboardX.

    Raises:
        MissingPackageError: it is not installed.
    """
    return require("tensorboardX", "writing TensorBoard events", instead="pass --no-tensorboard")


def read_metrics(folder: Path, kind: str | None = None) -> list[Row]:
    """The rows of a folder's metrics.jsonl, in order; only those of `kind`, if given. null becomes NaN.

    A last line without its end, as a killed process leaves it, is no row.

    Raises:
        ConfigError: a line is no row.
    """
    path = folder / FILE
    *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            _ = row["kind"], row["step"]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"line {number} of {str(path)!r} is not a row of metrics: {line[:60]!r}") from None
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return [row for row in rows if kind in (None, row["kind"])]


def truncate_metrics(folder: Path, step: int) -> None:
    """Remove the rows of steps after `step` from metrics.jsonl, in one atomic replacement. No file is no rows.

    Raises:
        ConfigError: a line is no row.
    """
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    scratch = folder / f".{FILE}.new"
    scratch.write_text("".join(json.dumps(_plain(row), allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(scratch, folder / FILE)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON: a float32 with the digits that tell it from its neighbors, null where not finite."""
    return {name: _plain(value) if isinstance(value, Mapping) else _number(value) for name, value in values.items()}


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = float(str(value)) if isinstance(value, np.floating) else value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """TensorBoard's tags: kind/name, or kind/name/key for dicts."""
    pairs = []
    for name, value in values.items():
        tag = f"{prefix}/{name}"
        pairs += _flat(value, tag) if isinstance(value, Mapping) else [(tag, value)]
    return pairs
