"""Several processes as one run: how they find each other, and how they agree."""

import os
from collections.abc import Callable
from typing import NoReturn

import jax
import numpy as np

from fp4jax.train.config import DistributedOptions
from fp4jax.train.errors import ConfigError

START_SECONDS = 120
"""How long a process waits for the others to come."""
HEARTBEAT_SECONDS = 30
"""After how long a silent process counts as gone; JAX then ends the others."""


def start(options: DistributedOptions) -> None:
    """Join the other processes of the run, if the options speak of any. Before anything asks JAX for a device.

    Raises:
        ConfigError: no launcher is found, or the others do not come.
    """
    if not options.distributed and options.coordinator is None:
        return
    if options.coordinator is not None and ":" not in options.coordinator:
        raise ConfigError(f"coordinator={options.coordinator!r} must be host:port, such as node0:1234")
    try:
        jax.distributed.initialize(
            coordinator_address=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
            initialization_timeout=START_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        how = "--coordinator host:port --num-processes N --process-id I say it where no launcher does"
        raise ConfigError(f"the processes of the run did not find each other: {_line(error)} ({how})") from error


def is_main() -> bool:
    """Whether this is process 0, which alone writes logs, figures and to the terminal."""
    return jax.process_index() == 0


def on_main(make: Callable[[], str]) -> str:
    """What `make()` returns on process 0, on all of them; a ConfigError that it raises there, they all raise.

    Raises:
        ConfigError: as `make`.
    """
    if jax.process_count() == 1:
        return make()
    outcome = ""
    if is_main():
        try:
            outcome = "=" + make()
        except ConfigError as error:
            outcome = "!" + str(error)
    outcome = _broadcast(outcome)
    if outcome.startswith("!"):
        raise ConfigError(outcome[1:])
    return outcome[1:]


def _broadcast(text: str) -> str:
    from jax.experimental import multihost_utils

    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text.encode()))))
    codes = np.zeros(size, np.uint8)
    if is_main():
        codes[:] = np.frombuffer(text.encode(), np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(codes)).tobytes().decode()


def any_process(flag: bool) -> bool:
    """Whether any process passed True. All must call it at the same step."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def leave(message: str) -> NoReturn:
    """End this process at once, with a line: after another is gone, an orderly end would wait for it."""
    os.write(2, f"fp4jax: {message}\n".encode())
    os._exit(1)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
