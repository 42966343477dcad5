"""Snapshots on disk: JSON lines, and TensorBoard events beside them.

A row of telemetry.jsonl is one operand of one layer at one step:

    {"step": 100, "layer": "layers.mlp.down", "index": [3], "place": "fprop.lhs", "calls": 1, "snr_db": 19.1, …}

so that `pandas.read_json(path, lines=True)` is a table to pivot. JSON has no infinity and no NaN: `snr_db` is "inf"
where nothing was lost, and a number that means nothing is null.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fp4jax.packages import require
from fp4jax.telemetry.snapshot import Snapshot

FILE = "telemetry.jsonl"
EVENTS = "telemetry"


class Log:
    """Writes snapshots into a folder, by step.

    Args:
        folder: where telemetry.jsonl goes; created if absent.
        tensorboard: also write event files, by tensorboardX: the tag of a number is telemetry/<place>/<name>/<layer>.
            They go into a folder `telemetry` beside the rows: of two event files in one folder, as the metrics of a run
            may write another, TensorBoard reads one.
        resume_at: the step that training goes on from: rows of later steps are removed. None starts a new file.

    Raises:
        ModuleNotFoundError: `tensorboard` without tensorboardX.
        ValueError: the telemetry.jsonl to go on with is damaged.

    Example:
        >>> import tempfile
        >>> from fp4jax.telemetry import Record, STATISTICS
        >>> record = Record("mlp", (), "fprop.lhs", dict.fromkeys(STATISTICS, 1.0))
        >>> with tempfile.TemporaryDirectory() as folder, Log(folder) as log:
        ...     log.write(100, Snapshot((record,)))
        ...     log.flush()
        ...     [(step, snapshot.layers) for step, snapshot in read(folder)]
        [(100, ('mlp',))]
    """

    def __init__(self, folder: str | os.PathLike[str], *, tensorboard: bool = False, resume_at: int | None = None):
        writers = require("tensorboardX", "writing TensorBoard events") if tensorboard else None
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if resume_at is not None:
            _truncate(folder / FILE, resume_at)
        self._file = (folder / FILE).open("w" if resume_at is None else "a", encoding="utf-8")
        purge = None if resume_at is None else resume_at + 1
        self._events = writers and writers.SummaryWriter(str(folder / EVENTS), purge_step=purge, write_to_disk=True)

    def write(self, step: int, snapshot: Snapshot) -> None:
        """Append a row for each record."""
        for row in snapshot.rows():
            self._file.write(json.dumps({"step": step} | _to_json(row), allow_nan=False) + "\n")
        if self._events is not None:
            for record in snapshot.records:
                for name, value in record.values.items():
                    if math.isfinite(value):
                        self._events.add_scalar(f"telemetry/{record.place}/{name}/{record.label}", value, step)

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        self._file.flush()
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read(folder: str | os.PathLike[str]) -> Iterator[tuple[int, Snapshot]]:
    """(step, snapshot) of a folder's telemetry.jsonl, in order. A last line without its end is no row.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a line is no row.
    """
    rows: dict[int, list[Mapping[str, Any]]] = {}
    for row in _rows(Path(folder) / FILE):
        rows.setdefault(row["step"], []).append(row)
    for step, group in rows.items():
        yield step, Snapshot.from_rows(group)


def _rows(path: Path) -> list[dict[str, Any]]:
    *lines, _ = path.read_text(encoding="utf-8").split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            _ = row["step"], row["layer"], row["index"], row["place"], row["calls"], row["snr_db"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"line {number} of {str(path)!r} is not a row of telemetry: {line[:60]!r}") from None
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def _truncate(path: Path, step: int) -> None:
    if not path.exists():
        return
    rows = [row for row in _rows(path) if row["step"] <= step]
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text("".join(json.dumps(_to_json(row), allow_nan=False) + "\n" for row in rows), encoding="utf-8")
    os.replace(scratch, path)


def _to_json(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """Seven digits, which is what float32 holds; null for NaN, "inf" for infinity."""
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return None
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)
