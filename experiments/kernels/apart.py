"""Sections of a long measurement, each in a process of its own with a limit of its own, and what one finds."""

import json
import pathlib
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.bench.measure import environment, seconds
from fp4jax.bench.report import write_whole


def run_apart(commands: Mapping[str, tuple[Sequence[str], float]], out: pathlib.Path, limit: float) -> dict[str, str]:
    """Run each command, with its limit in seconds, until all have run or ``limit`` is over; gather what they write.

    Args:
        commands: by section; each writes ``section_file(out, section)``.
        out: where all is gathered after each.
        limit: in seconds, for all.

    Returns:
        How each section ended: "done", "failed with status …", "stopped after … s", or "not begun".
    """
    ends, ended = time.monotonic() + limit, dict.fromkeys(commands, "not begun")
    for name, (command, own) in commands.items():
        left = min(own, ends - time.monotonic())
        if left <= 0:
            break
        section_file(out, name).unlink(missing_ok=True)
        print(f"--- {name}, at most {left:.0f} s", flush=True)
        try:
            status = subprocess.run(command, timeout=left, check=False).returncode
            ended[name] = f"failed with status {status}" if status else "done"
        except subprocess.TimeoutExpired:
            ended[name] = f"stopped after {left:.0f} s"
        gathered = {
            section: json.loads(file.read_text())
            for section in commands
            if (file := section_file(out, section)).exists()
        }
        write_whole(out, json.dumps({"sections": ended, **gathered}, indent=1, ensure_ascii=False) + "\n")
    return ended


def section_file(out: pathlib.Path, section: str) -> pathlib.Path:
    """Where a section writes."""
    return out.with_suffix(f".{section}.json")


class Report:
    """Findings, printed as they come and written after each.

    Args:
        out: the file.
        sizes: of the arrays of this run; ``sizes.iterations`` calls make a timing.
    """

    def __init__(self, out: pathlib.Path, sizes: Any):
        self.out, self.sizes = out, sizes
        self.record: dict[str, Any] = {**environment(), "differences": {}, "microseconds": {}}

    def check(self, name: str, got: Any, want: Any) -> None:
        """Whether all arrays are equal bit for bit; if not, how many entries differ, and the first."""
        found = "none"
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                found = f"{a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
            elif wrong := int(jnp.sum(differs := _bits(a) != _bits(b))):
                first = jnp.unravel_index(jnp.argmax(differs), a.shape)
                place = [int(i) for i in first]
                found = f"{wrong} of {a.size}, first at {place}: {a[first]} instead of {b[first]}"
        self._add("differences", name, found)

    def time(self, name: str, function: Callable, *args: Any) -> None:
        """Median time of a call."""
        took = seconds(function, *args, iterations=self.sizes.iterations)
        self._add("microseconds", name, round(1e6 * took, 2))

    def _add(self, kind: str, name: str, value: Any) -> None:
        print(f"{kind}: {name}: {value}", flush=True)
        self.record[kind][name] = value
        write_whole(self.out, json.dumps(self.record, indent=1, ensure_ascii=False) + "\n")


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.dtype(f"u{x.dtype.itemsize}"))
