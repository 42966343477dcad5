"""Sections of a long measurement, each in a process of its own with a limit of its own."""

import json
import pathlib
import subprocess
import time
from collections.abc import Mapping, Sequence

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
