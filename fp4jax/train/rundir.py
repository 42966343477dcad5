"""The folder of a run: its name, the settings it was started with, and the circumstances of a result."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4jax.train.config import Settings, to_json
from fp4jax.train.errors import ConfigError
from fp4jax.train.presets import PRESETS

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
_MAY_DIFFER = ("out", "checkpoint", "devices", "telemetry_every")
"""Settings that a resume may change: they say where and how often, not what is computed."""


def open_run(config: Settings, command: str, *, out: Path | None, fingerprint: str, resume: bool = False) -> Path:
    """Create the folder of a run and record its settings, or find the one to go on with.

    Args:
        config: resolved settings.
        command: the subcommand, for the default name runs/<command>-<date>-<time>.
        out: the folder, or None for the default name.
        fingerprint: of the corpus.
        resume: go on with `out`, if it holds a run; its settings and corpus must be these.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder holds something already, or a run with other settings (the message names them).
    """
    if out is None:
        out = Path("runs") / f"{command}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    record = {"command": command, "settings": to_json(config), "corpus": fingerprint}
    if out.exists() and not out.is_dir():
        raise ConfigError(f"out={str(out)!r} is a file: give a folder")
    if out.exists() and any(out.iterdir()):
        if not resume:
            hint = "give another, or add --resume to go on with it" if command == "train" else "give another"
            raise ConfigError(f"out={str(out)!r} is not empty: {hint}")
        _check_same(out, record)
        return out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create out={str(out)!r}: {error.strerror}") from error
    (out / CONFIG).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return out


def write_json(path: Path, values: Any) -> None:
    """Write JSON so that readers see the old file or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(json.dumps(values, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def circumstances() -> dict[str, str]:
    """Command, date, hardware and versions: what a number needs beside it to be believed."""
    import jax

    import fp4jax

    device = jax.devices()[0]
    hardware = f"{jax.device_count()} × {device.device_kind}"
    if device.platform == "cpu":
        hardware = f"CPU, {os.cpu_count()} cores, {platform.machine()}"
    return {
        "command": shlex.join(["fp4jax", *sys.argv[1:]]),
        "date": f"{datetime.date.today()}",
        "hardware": hardware,
        "versions": f"fp4jax {fp4jax.__version__}{commit(Path(fp4jax.__file__).parents[1])}, jax {jax.__version__}, "
        f"Python {platform.python_version()}",
    }


def commit(checkout: Path) -> str:
    """Of a checkout: " (1a2b3c4)" at that commit, " (1a2b3c4-dirty)" with changes; "" for what is no checkout."""
    if not (checkout / ".git").exists():
        return ""
    git = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout that somebody else owns
        return ""
    return f" ({found})"


def differences(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """The fields in which two JSON values differ, by dotted name."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        found: dict[str, tuple[Any, Any]] = {}
        for key in dict.fromkeys([*old, *new]):
            found |= differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
        return found
    return {} if old == new else {name: (old, new)}


def _follows(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting is what `Settings.resolved` makes of the model and the steps where nobody gives it."""
    preset = PRESETS.get(settings.get("model", {}).get("model"))
    group, _, field = name.partition(".")
    if preset is None or group not in ("loop", "optimizer") or not hasattr(preset, field):
        return False
    default = preset.eval_every_of(settings["loop"]["steps"]) if field == "eval_every" else getattr(preset, field)
    return settings.get(group, {}).get(field) == default


def _shown(value: Any) -> str:
    """A setting in a message."""
    if value is None or value == []:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else f"{value}"


def _check_same(out: Path, record: Mapping[str, Any]) -> None:
    path = out / CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"out={str(out)!r} holds no {CONFIG}: it is not a run to resume") from None
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("settings"), dict):
        raise ConfigError(f"{str(path)!r} is not the record of a run")
    if found.get("command") != record["command"]:
        raise ConfigError(f"out={str(out)!r} holds a run of {found.get('command')!r}, not of {record['command']!r}")
    old, new = ({k: v for k, v in r["settings"].items() if k not in _MAY_DIFFER} for r in (found, record))
    differing = {
        name: values
        for name, values in differences(old, new).items()
        if not (_follows(name, old) and _follows(name, new))
    }
    if inits := {name: values for name, values in differing.items() if name.startswith("init")}:
        differing = inits  # the shape of the model differs because of it
    lines = [
        f"--{name.rpartition('.')[2].replace('_', '-')}: {_shown(there)} there, {_shown(here)} here"
        for name, (there, here) in differing.items()
    ]
    hint = ""
    if "loop.steps" in differing:
        hint = (
            f" (a run of other length can start from its weights: --init {shlex.quote(str(out))}, with another --out)"
        )
    if not lines and found.get("corpus") != record["corpus"]:
        lines = ["the text itself has changed"]
    if lines:
        raise ConfigError(
            f"out={str(out)!r} was started with other settings, and cannot go on with these: {'; '.join(lines)}{hint}"
        )
