"""How the processes of a run agree on a save or a restore: by messages through JAX's coordination service.

A save goes on in a background thread while training runs. Collectives on devices would there interleave with those of
the train step, in another order on each process, and deadlock. The coordination service, which `jax.distributed` starts
in process 0, is a key-value store reached over the network and knows nothing of devices.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import jax
from jax._src import distributed  # its client has no public name; Orbax reaches it in the same way

from fp4jax.train.checkpoint.errors import PeerProblem

_PREFIX = "fp4jax/checkpoint"
_PAUSE_SECONDS = 1.0  # between two looks, and between two signs of life
# One number a checkpointer, given at its first exchange: one that a single process made just to look takes none.
_checkpointers = itertools.count()


class Processes:
    """Numbers the exchanges of one checkpointer, in an order that is the same on every process.

    Args:
        timeout: seconds without a sign of life after which a process is given up.

    Raises:
        RuntimeError: several processes run without `jax.distributed`.
    """

    def __init__(self, timeout: float):
        self.timeout, self.index, self.count = timeout, jax.process_index(), jax.process_count()
        self.client = distributed.global_state.client if self.count > 1 else None
        if self.count > 1 and self.client is None:
            raise RuntimeError(
                f"{self.count} processes are running, and they agree on a checkpoint through jax.distributed: "
                f"call jax.distributed.initialize() first"
            )
        self._number: int | None = None
        self._exchanges = itertools.count()

    def exchange(self, what: str) -> "Exchange":
        """The next exchange. Every process has to come to it, and to the same `what`."""
        if self._number is None:
            self._number = next(_checkpointers) if self.client else 0
        number = next(self._exchanges)
        exchange = Exchange(self, f"{_PREFIX}/{self._number}/{number}", what)
        if self.client and self.index == 0 and number >= 2:
            # All have come to the last exchange, or it failed; so nobody listens to the one before it.
            with _service():
                self.client.key_value_delete(f"{_PREFIX}/{self._number}/{number - 2}")
        return exchange


class Exchange:
    """One save or restore, in which every process takes part. With one process it says nothing and hears itself.

    As a context, an exception that leaves it is told to the others, who then fail as well.
    """

    def __init__(self, processes: Processes, key: str, what: str):
        self.index, self.count = processes.index, processes.count
        self._client, self._timeout = processes.client, processes.timeout
        self._key, self._what = key, what
        self._pause = min(_PAUSE_SECONDS, processes.timeout / 4)
        self._beats, self._next_beat, self._beating = 0, 0.0, threading.Lock()
        self.beat()

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._client is not None:
            text = str(error) if isinstance(error, PeerProblem) else f"process {self.index} failed: {error!r}"
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # then the others see that the service is gone
                self._client.key_value_set(self._at("failed", self.index), text, allow_overwrite=True)

    def beat(self) -> None:
        """Tells the others that work goes on here. Cheap: at most one message a second leaves."""
        if self._client is None or time.monotonic() < self._next_beat or not self._beating.acquire(blocking=False):
            return
        try:
            self._beats += 1
            self._next_beat = time.monotonic() + self._pause
            with _service():
                message = json.dumps([self._what, self._beats])
                self._client.key_value_set(self._at("beat", self.index), message, allow_overwrite=True)
        finally:
            self._beating.release()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Beats from a thread of its own, around work that cannot: deleting a folder may take minutes."""
        if self._client is None:
            yield
            return
        done = threading.Event()

        def tick() -> None:
            with contextlib.suppress(PeerProblem):  # the work's own next message meets the same
                while not done.wait(self._pause):
                    self.beat()

        thread = threading.Thread(target=tick, name="fp4jax-checkpoint-busy")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def say(self, topic: str, value: Any) -> None:
        """Tells the others `value`, which JSON must hold. A topic is used once by each process."""
        if self._client is not None:
            with _service():
                self._client.key_value_set(self._at(topic, self.index), json.dumps([self._what, value]))

    def hear(self, process: int, topic: str) -> Any:
        """What `process` says on `topic`; waits for it as long as it gives signs of life, and gives them meanwhile.

        Raises:
            PeerProblem: it failed, is silent for `timeout` seconds, does something else, or the service is gone.
        """
        client = self._client
        assert client is not None
        last_beat, deadline = None, time.monotonic() + self._timeout
        while True:
            self.beat()
            with _service():
                found = _get(client.blocking_key_value_get, self._at(topic, process), round(1000 * self._pause))
                if found is not None:
                    return self._value(process, found)
                failure = _get(client.key_value_try_get, self._at("failed", process))
                beat = _get(client.key_value_try_get, self._at("beat", process))
            if failure is not None:
                raise PeerProblem(failure)
            beat = None if beat is None else self._value(process, beat)
            if beat != last_beat:
                last_beat, deadline = beat, time.monotonic() + self._timeout
            if time.monotonic() >= deadline:
                raise PeerProblem(
                    f"process {process} gave no sign of life for {self._timeout:g} s (timeout={self._timeout:g}) in "
                    f"the {self._what}: it died, hangs, or did not call it"
                )

    def decide[A](self, topic: str, decide: Callable[[], A]) -> A:
        """What `decide` returns in process 0, on every process; JSON must hold it."""
        if self.index != 0:
            return self.hear(0, topic)
        decision = decide()
        self.say(topic, decision)
        return decision

    def gather[A](self, topic: str, value: A) -> list[A]:
        """The values of all processes by index, on every process; JSON must hold them."""
        self.say(topic, value)
        others = range(1, self.count)
        return self.decide(f"all {topic}", lambda: [value, *(self.hear(process, topic) for process in others)])

    def _value(self, process: int, message: str) -> Any:
        what, value = json.loads(message)
        if what != self._what:
            raise PeerProblem(
                f"process {process} is at the {what}, process {self.index} at the {self._what}: "
                f"all processes have to save and restore the same steps in the same order"
            )
        return value

    def _at(self, topic: str, process: int) -> str:
        return f"{self._key}/{topic}/{process}"


@contextlib.contextmanager
def _service() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerProblem(f"the coordination service, which runs in process 0, does not answer ({reason})") from error


def _get[**P](ask: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> str | None:
    """What `ask` finds, or None if the key is not there (yet)."""
    try:
        return ask(*args, **kwargs)
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
            return None
        raise
