"""Several processes as one run: how they find each other, and how they agree."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

import jax
import numpy as np
from jax._src import distributed  # its client has no public name

from fp4jax.train.config import DistributedOptions
from fp4jax.train.errors import ConfigError

START_SECONDS = 120
"""How long a process waits for the others to come."""
SILENCE_SECONDS = 30
"""After how long a silent process counts as gone, and the others end. JAX itself would take 100 s."""

_BEAT_SECONDS = 2
_DONE, _FAILED = "done", "failed: "


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
            # A coordinator is not to be found inside of, say, a SLURM job, which would also hand out one device each.
            cluster_detection_method=None if options.coordinator is None else "deactivate",
            initialization_timeout=START_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        # What JAX raises for a missing launcher, a taken port and a peer that does not come.
        how = "--coordinator host:port --num-processes N --process-id I say it where no launcher does"
        raise ConfigError(f"the processes of the run did not find each other: {_line(error)} ({how})") from error


class AgreedError(ConfigError):
    """A ConfigError that every process of the run raises, and knows that the others do."""


class Watch:
    """Ends this process, with a line, when another one of the run dies: a collective would wait for it for ever.

    Each process counts up a number in the store of JAX's coordination service, and looks at the others'. Process 0
    holds that store; if it dies JAX ends the others at once, and says so itself.

    Args:
        orderly: exceptions that all processes raise together; another one in this process ends the others, too.

    Example:
        >>> with Watch():  # with one process it does nothing
        ...     pass
    """

    def __init__(self, orderly: tuple[type[BaseException], ...] = ()) -> None:
        self._orderly, self._last_word = orderly, _DONE
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fp4jax-watch", daemon=True)

    def __enter__(self) -> Self:
        if jax.process_count() > 1:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread.is_alive():
            if error is not None and not isinstance(error, self._orderly):
                self._last_word = _FAILED + _line(error)
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        client, me = distributed.global_state.client, jax.process_index()
        assert client is not None
        others = [process for process in range(jax.process_count()) if process != me]
        last: dict[int, tuple[str, float]] = {process: ("", time.monotonic()) for process in others}
        for beat in itertools.count():
            ended = self._ended.is_set()
            client.key_value_set(f"fp4jax/alive/{me}", self._last_word if ended else str(beat), allow_overwrite=True)
            if ended:
                return
            found = {name.rpartition("/")[2]: value for name, value in client.key_value_dir_get("fp4jax/alive")}
            now = time.monotonic()
            for process, (value, since) in last.items():
                current = found.get(str(process), "")
                if current != value:
                    last[process] = current, now
                silent = current == value != _DONE and now - since > SILENCE_SECONDS
                if silent or current.startswith(_FAILED):
                    why = current.removeprefix(_FAILED) if not silent else f"no sign of life for {SILENCE_SECONDS} s"
                    leave(
                        f"process {process} of {jax.process_count()} is lost ({why}), so process {me} ends too; "
                        "start all of them again with --resume"
                    )
            self._ended.wait(_BEAT_SECONDS)


def is_main() -> bool:
    """Whether this is process 0, which alone writes logs, figures and to the terminal."""
    return jax.process_index() == 0


def on_main(make: Callable[[], str]) -> str:
    """What `make()` returns on process 0, on all of them; a ConfigError that it raises there, they all raise.

    Raises:
        AgreedError: `make` raised a ConfigError.
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
        raise AgreedError(outcome[1:])
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


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
