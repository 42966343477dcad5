"""What the user sees while arms train: a live table on a terminal, a line now and then elsewhere."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

LINE_EVERY = 15.0
"""Seconds between lines where there is no terminal to redraw."""


@dataclasses.dataclass(eq=False)
class Progress:
    """How far an arm is. The loop writes it; `set` tells the display.

    Args:
        label: what the row is called.
        steps: steps of the whole run.
        notify: called with the event ("" for none in particular).
    """

    label: str
    steps: int
    notify: Callable[["Progress", str], None] = lambda progress, event: None
    status: str = "waiting"
    step: int = 0
    loss: float = math.nan
    validation: float = math.nan
    tokens_per_second: float = math.nan
    skipped: float = 0.0

    def set(self, status: str, step: int, event: str = "") -> None:
        """A new status or step; `event` marks what is worth a line of its own."""
        event = event or (status if status != self.status and status in ("compiling", "done") else "")
        self.status, self.step = status, step
        self.notify(self, event)


class Display:
    """Shows a `Progress` for each label, while it is entered as a context.

    Args:
        console: where to; a terminal gets a live table, anything else lines.
        labels: the rows, in order.
        steps: steps of each.
    """

    def __init__(self, console: Console, labels: Sequence[str], steps: int):
        self._console = console
        self.progress = {label: Progress(label, steps, self._notify) for label in labels}
        self._live = (
            Live(get_renderable=self._table, console=console, refresh_per_second=4) if console.is_terminal else None
        )
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def _notify(self, progress: Progress, event: str) -> None:
        now = time.monotonic()
        due = progress.status == "training" and now - self._last_line >= LINE_EVERY
        if self._live or not (event or due):
            return
        self._last_line = now
        width = max(len(label) for label in self.progress)
        self._console.print(f"{progress.label:<{width}}  {_line(progress)}", highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for header in ("recipe", "progress", "step", "loss", "validation", "tokens/s", "skipped", ""):
            # Widths are fixed, so that the table does not jump as digits come and go.
            table.add_column(header, justify="left" if header in ("recipe", "progress", "") else "right", no_wrap=True)
        for p in self.progress.values():
            color = {"waiting": "dim", "done": "green"}.get(p.status, "cyan")
            table.add_row(
                f"[bold]{p.label}[/bold]",
                _bar(p),
                f"{p.step:>5}/{p.steps}",
                f"{number(p.loss, '.3f'):>6}",
                f"{number(p.validation, '.3f'):>6}",
                f"{number(p.tokens_per_second, ',.0f'):>9}",
                f"[red]{p.skipped:g}[/red]" if p.skipped else "0",
                f"[{color}]{p.status:<10}[/{color}]",
            )
        return table


def _bar(p: Progress) -> ProgressBar:
    # Colors that also differ on a terminal of eight.
    return ProgressBar(
        total=p.steps, completed=p.step, width=24, style="bright_black", complete_style="cyan", finished_style="green"
    )


def number(value: float, form: str) -> str:
    """A number in a table; a dash where there is none."""
    return "–" if math.isnan(value) else format(value, form)


def _line(p: Progress) -> str:
    if p.status == "compiling":
        return f"compiling the step ({p.steps} to do)"
    parts = [f"step {p.step:>{len(str(p.steps))}}/{p.steps}"]
    # A run that was done already has made no step.
    trained = p.status != "done" or not (math.isnan(p.loss) and math.isnan(p.tokens_per_second))
    if trained:
        parts.append(f"loss {number(p.loss, '.3f')}")
    if not math.isnan(p.validation):
        parts.append(f"validation {number(p.validation, '.3f')}")
    if trained:
        parts.append(f"{number(p.tokens_per_second, ',.0f')} tokens/s")
    if p.skipped:
        parts.append(f"{p.skipped:g} skipped")
    return "  ".join([*parts, "done"] if p.status == "done" else parts)
