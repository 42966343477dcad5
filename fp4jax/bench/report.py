"""Tables of `fp4jax bench`: on the terminal, and as JSON."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.table import Table


class Reported(Protocol):
    """What can be shown and written."""

    @property
    def title(self) -> str: ...

    def table(self) -> Table: ...

    def json(self) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Row:
    """One alternative.

    Args:
        name: what it is.
        seconds: median time.
        memory: bytes that the device must hold, or None if not looked at.
        in_use: bytes that it held at most so far in this process, or None where it does not tell.
    """

    name: str
    seconds: float
    memory: int | None = None
    in_use: int | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """Alternatives that do the same.

    Args:
        title: what they do, and at which size.
        rows: the alternatives; ratios are to the first.
        work: operations, bytes or tokens of each.
        unit: of the work: "FLOP", "B" or "tokens"; "" where times are relative, and ratios all there is to say.
        peak: work a second that the device reaches, or None.
        notes: what the reader must know, a sentence each.
    """

    title: str
    rows: tuple[Row, ...]
    work: float
    unit: str
    peak: float | None = None
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of that name.

        Raises:
            KeyError: if there is none.
        """
        return {row.name: row for row in self.rows}[name]

    def ratio(self, name: str) -> float | None:
        """How many times as fast as the first a row is; None if there is none of that name."""
        return self.rows[0].seconds / self.row(name).seconds if any(row.name == name for row in self.rows) else None

    def table(self) -> Table:
        """For the terminal."""
        if not self.unit:
            return self._ratios()
        rate, scale = {"FLOP": ("TFLOP/s", 1e12), "B": ("TB/s", 1e12), "tokens": ("tokens/s", 1.0)}[self.unit]
        table = Table(title=self.title, title_justify="left", caption=" ".join(self.notes) or None)
        table.caption_justify = "left"
        table.add_column("")
        memory = ["peak GB", f"× {self.rows[0].name}"] if self.rows[0].memory else []
        for header in ("µs", rate, *(["% of peak"] if self.peak else []), f"× {self.rows[0].name}", *memory):
            table.add_column(header, justify="right")
        for row in self.rows:
            speed = self.work / row.seconds
            shown = f"{speed / scale:,.0f}" if self.unit != "B" else f"{speed / scale:.2f}"
            share = [f"{100 * speed / self.peak:.0f}"] if self.peak else []
            ratio = self.rows[0].seconds / row.seconds
            held = []
            if self.rows[0].memory and row.memory is not None:
                held = [f"{1e-9 * row.memory:.3g}", f"{row.memory / self.rows[0].memory:.2f}"]
            table.add_row(row.name, f"{1e6 * row.seconds:,.1f}", shown, *share, f"{ratio:.2f}", *held)
        return table

    def _ratios(self) -> Table:
        table = Table("", f"× {self.rows[0].name}", title=self.title, title_justify="left")
        table.caption, table.caption_justify = " ".join(self.notes) or None, "left"
        for row in self.rows:
            table.add_row(row.name, f"{self.rows[0].seconds / row.seconds:.3f}")
        return table

    def json(self) -> dict[str, Any]:
        """Seconds, and what follows from them."""
        first = self.rows[0].seconds
        return {
            "title": self.title,
            "unit": self.unit,
            "work": self.work,
            "peak_a_second": self.peak,
            "notes": list(self.notes),
            "rows": [
                {
                    "name": row.name,
                    **(
                        {"microseconds": round(1e6 * row.seconds, 2), "a_second": self.work / row.seconds}
                        if self.unit
                        else {}
                    ),
                    "ratio_to_first": first / row.seconds,
                    **({} if row.memory is None else {"peak_bytes": row.memory}),
                    **({} if row.in_use is None else {"peak_bytes_in_use_so_far": row.in_use}),
                }
                for row in self.rows
            ],
        }


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Times by what they were spent on, side by side.

    Args:
        title: of what.
        columns: what is compared; ratios are to the first.
        rows: group and detail ("" for none) with seconds for each column, 0 where nothing was spent. Details of a group
            follow one another.
        least: for each column, the least seconds of some groups; () for none.
        notes: what the reader must know, a sentence each.
        others: what else goes into the JSON.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, str, tuple[float, ...]], ...]
    least: tuple[Mapping[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def total(self, group: str | None = None) -> tuple[float, ...]:
        """Sums of a group, or of all."""
        return tuple(map(sum, zip(*(s for name, _, s in self.rows if group in (None, name)), strict=True)))

    def table(self) -> Table:
        """For the terminal, in milliseconds, with the least in parentheses."""
        table = Table(title=self.title, title_justify="left", caption=" ".join(self.notes) or None)
        table.caption_justify = "left"
        table.add_column("ms")
        for column in self.columns:
            table.add_column(column, justify="right")
        for group in dict.fromkeys(name for name, _, _ in self.rows):
            details = [(detail, seconds) for name, detail, seconds in self.rows if name == group]
            least = [of.get(group) for of in self.least] or [None] * len(self.columns)
            table.add_row(group, *map(_milliseconds, self.total(group), least), style="bold")
            if len(details) > 1:
                for detail, seconds in details:
                    table.add_row(f"  {detail or 'other'}", *map(_milliseconds, seconds))
        table.add_section()
        total = self.total()
        least = [sum(of.values()) for of in self.least] or [None] * len(self.columns)
        table.add_row("all", *map(_milliseconds, total, least), style="bold")
        table.add_row(f"× {self.columns[0]}", *(f"{total[0] / seconds:.2f}" for seconds in total))
        return table

    def json(self) -> dict[str, Any]:
        """Seconds of each row, and all else."""
        return {
            "title": self.title,
            "columns": list(self.columns),
            "notes": list(self.notes),
            "rows": [{"group": g, "detail": d, "seconds": list(s)} for g, d, s in self.rows],
            "total_seconds": list(self.total()),
            "least_seconds": [dict(of) for of in self.least],
            **self.others,
        }


def _milliseconds(seconds: float, least: float | None = None) -> str:
    shown = f"{1e3 * seconds:,.2f}" if seconds else ""
    return shown if least is None else f"{shown} ({1e3 * least:,.1f})"


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bound on a measured figure.

    Args:
        what: the figure.
        value: as measured, or None if it was not.
        bound: what it must reach.
        least: whether it must be at least the bound, else at most.
    """

    what: str
    value: float | None
    bound: float
    least: bool = True

    @property
    def passed(self) -> bool | None:
        """Whether the bound holds; None if nothing was measured."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound


@dataclasses.dataclass(frozen=True)
class Bars:
    """What was aimed at, beside what was reached.

    Args:
        title: of what.
        bars: one a line.
    """

    title: str
    bars: tuple[Bar, ...]

    def table(self) -> Table:
        """For the terminal."""
        table = Table("", "aim", "reached", "", title=self.title, title_justify="left")
        for bar in self.bars:
            reached = "" if bar.value is None else f"{bar.value:.4g}"
            verdict = {True: "pass", False: "short", None: "not measured"}[bar.passed]
            table.add_row(bar.what, f"{'≥' if bar.least else '≤'} {bar.bound:g}", reached, verdict)
        return table

    def json(self) -> dict[str, Any]:
        """The bounds, the figures, and whether they pass."""
        bars = [{**dataclasses.asdict(bar), "passed": bar.passed} for bar in self.bars]
        return {"title": self.title, "bars": bars}


def write(path: Path, environment: dict[str, Any], results: Sequence[Reported], **others: Any) -> None:
    """All results as JSON; written anew after each table, so that what was measured is not lost."""
    record = {**environment, **others, "tables": [result.json() for result in results]}
    write_whole(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it, or ends this process, finds all of it or what was there before."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
