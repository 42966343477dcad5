"""What a device ran and when, from `jax.profiler`: kernels of a GPU, operations of XLA's CPU runtime."""

import dataclasses
import gzip
import json
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Sequence

import jax
from jax.profiler import ProfileData

# Lines of a GPU's plane that repeat its kernels, summed up by something; the others are streams.
_DERIVED = (
    "XLA Modules", "XLA Ops", "Async XLA Ops", "Steps", "Framework Name Scope", "Framework Ops", "Source code",
    "Launch Stats", "XLA TraceMe",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Event:
    """A kernel, a copy, or on a CPU an operation.

    Args:
        name: the kernel's.
        hlo_op: name of the HLO instruction, "" where the profiler does not tell.
        start, end: in seconds from the first event.
    """

    name: str
    hlo_op: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end - self.start


def record(run: Callable[[], object]) -> bytes:
    """A trace of ``run``, which must wait for the device itself, as a serialized XSpace (the file "*.xplane.pb").

    Raises:
        RuntimeError: if the profiler wrote nothing.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.enable_hlo_proto = False
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        if len(files) != 1:
            raise RuntimeError(f"jax.profiler wrote {len(files)} traces, not one")
        return files[0].read_bytes()


def read(serialized: bytes) -> list[Event]:
    """The events of the first GPU, by start, or of the CPU where there is no GPU in the trace.

    Args:
        serialized: from ``record``.

    Raises:
        ValueError: if the trace holds no such event, with the planes and lines that it holds.
    """
    data = ProfileData.from_serialized_xspace(serialized)  # planes, lines and events point into it
    planes = list(data.planes)
    gpus = sorted((p for p in planes if p.name.startswith("/device:GPU:")), key=lambda p: p.name)
    found = []
    with warnings.catch_warnings():
        # Of a type that jaxlib 0.11.2 makes as statistics are first asked for; as an error it would end the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in gpus[:1] or [p for p in planes if p.name == "/host:CPU"]:
            for event in (event for line in plane.lines if line.name not in _DERIVED for event in line.events):
                hlo_op = str(dict(event.stats).get("hlo_op", ""))
                if gpus or hlo_op:
                    found.append((event.start_ns, event.duration_ns, event.name, hlo_op))
    if not found:
        held = {p.name: [line.name for line in p.lines] for p in planes}
        raise ValueError(
            f"the trace holds no event of a device; its planes and lines are {held}. CUPTI serves one profiler at a "
            "time: run the profile in a process of its own"
        )
    found.sort()
    origin = found[0][0]
    return [
        Event(name, hlo_op, 1e-9 * (start - origin), 1e-9 * (start - origin + duration))
        for start, duration, name, hlo_op in found
    ]


def busy(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Intervals in which at least one event runs, merged and in order; ``events`` are sorted by start."""
    merged: list[tuple[float, float]] = []
    for event in events:
        if merged and event.start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], event.end)
        else:
            merged.append((event.start, event.end))
    return merged


def save(folder: pathlib.Path, name: str, trace: bytes, hlo: str, steps: int) -> None:
    """Keep what ``fp4jax.bench.profile.of_folder`` reads: a trace, the HLO of what ran, and how often it ran."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"steps": steps}))
    (folder / f"{name}.xplane.pb.gz").write_bytes(gzip.compress(trace))
    (folder / f"{name}.hlo.txt.gz").write_bytes(gzip.compress(hlo.encode()))


def load(folder: pathlib.Path, name: str) -> tuple[bytes, str]:
    """A trace and HLO that were saved."""
    return (
        gzip.decompress((folder / f"{name}.xplane.pb.gz").read_bytes()),
        gzip.decompress((folder / f"{name}.hlo.txt.gz").read_bytes()).decode(),
    )
