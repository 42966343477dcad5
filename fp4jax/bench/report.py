"""Tables of `fp4jax bench`: on the terminal, and as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Row:
    """One alternative.

    Args:
        name: what it is.
        seconds: median time.
    """

    name: str
    seconds: float


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

    def table(self) -> Table:
        """For the terminal."""
        if not self.unit:
            return self._ratios()
        rate, scale = {"FLOP": ("TFLOP/s", 1e12), "B": ("TB/s", 1e12), "tokens": ("tokens/s", 1.0)}[self.unit]
        table = Table(title=self.title, title_justify="left", caption=" ".join(self.notes) or None)
        table.caption_justify = "left"
        table.add_column("")
        for header in ("µs", rate, *(["% of peak"] if self.peak else []), f"× {self.rows[0].name}"):
            table.add_column(header, justify="right")
        for row in self.rows:
            speed = self.work / row.seconds
            shown = f"{speed / scale:,.0f}" if self.unit != "B" else f"{speed / scale:.2f}"
            share = [f"{100 * speed / self.peak:.0f}"] if self.peak else []
            ratio = self.rows[0].seconds / row.seconds
            table.add_row(row.name, f"{1e6 * row.seconds:,.1f}", shown, *share, f"{ratio:.2f}")
        return table

    def _ratios(self) -> Table:
        table = Table("", f"× {self.rows[0].name}", title=self.title, title_justify="left")
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
                }
                for row in self.rows
            ],
        }


def write(path: Path, environment: dict[str, Any], results: Sequence[Result], **others: Any) -> None:
    """All results as JSON; written anew after each table, so that what was measured is not lost."""
    record = {**environment, **others, "tables": [result.json() for result in results]}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
