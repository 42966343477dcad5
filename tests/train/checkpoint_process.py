"""One of two processes that save and restore together; `test_checkpoint_processes` starts them.

    python checkpoint_process.py <index> <port> <folder>

Each check below runs in both. Process 0 prints the names of those that passed. At the end process 1 kills itself in the
middle of a save, as kill -9 would.
"""

import os
import re
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import every_dtype, sharded_state
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp4jax.train.checkpoint import Checkpointer, CheckpointError, CheckpointMismatchError, DamagedCheckpointError

TIMEOUT = 8.0
ENDED_WITHIN = 2 * TIMEOUT


def mesh_over(shape, names, kind=AxisType.Explicit):
    return jax.make_mesh(shape, names, (kind,) * len(shape))


def whole_state():
    """What both processes save: global leaves over a mesh of both, and leaves that each has on its own."""
    mesh = mesh_over((4, 2), ("fsdp", "tensor"))
    scalar = jax.device_put(0.5, NamedSharding(mesh, PartitionSpec()))
    host = {"host": np.array([1 / 3, -0.0]), "scalar": np.array(2**62)}
    rbg = jax.jit(
        lambda: jax.random.split(jax.random.key(3, impl="rbg"), (4, 2)),
        out_shardings=NamedSharding(mesh, PartitionSpec(None, "tensor")),
    )()
    uneven = jax.device_put(np.arange(24, dtype=np.uint8).view(jnp.uint4).reshape(4, 6), scalar.sharding)
    more = {"weak": scalar, "rbg": rbg, "uint4": uneven, "no rows": jax.device_put(np.ones((0, 4)), scalar.sharding)}
    return {"global": sharded_state(mesh, ("fsdp", "tensor")) | more, "own": every_dtype(), **host}


def same_on_this_process(left, right):
    """Whether the shards here are bit for bit the same."""

    def bits(leaf):
        if isinstance(leaf, np.ndarray):
            return [leaf.tobytes()]
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return [np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards]

    same = jax.tree.map(lambda a, b: a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b), left, right)
    return all(jax.tree.leaves(same))


def error_of(kind, call):
    with pytest.raises(kind) as caught:
        call()
    assert caught.type is kind
    return str(caught.value)


class Checks:
    def __init__(self, index, folder):
        self.index, self.run, self.folder = index, folder / "run", folder
        self.state = whole_state()
        self.checkpoints = Checkpointer(self.run, keep=3, timeout=TIMEOUT)

    def save(self, step, state=None):
        self.checkpoints.save(step, self.state if state is None else state, {"step": step, "process": self.index})

    def failed_save(self, step, state=None):
        self.save(step, state)
        return error_of(CheckpointError, self.checkpoints.wait)

    def saves_while_training_goes_on(self):
        """Collectives of the main thread and the save under way do not get into each other's way."""
        total = jax.jit(lambda x: jnp.sum(x), out_shardings=NamedSharding(mesh_over((8,), ("d",)), PartitionSpec()))
        for step in (1, 2):
            self.save(step)
            for _ in range(20):
                total(self.state["global"]["rows"]).block_until_ready()
        self.checkpoints.wait()
        assert self.checkpoints.steps() == [1, 2]
        assert self.checkpoints.latest() == 2

    def restores_where_it_was_and_elsewhere(self):
        restored, metadata = self.checkpoints.restore(self.state)
        assert metadata == {"step": 2, "process": 0}
        assert same_on_this_process(restored, self.state)
        assert restored["global"]["weak"].weak_type
        for kind in AxisType.Explicit, AxisType.Auto:
            other = sharded_state(mesh_over((8,), ("data",), kind), ("data",))
            target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other)
            rest = {name: leaf for name, leaf in self.state["global"].items() if name not in other}
            restored, _ = self.checkpoints.restore(self.state | {"global": rest | target}, step=1)
            assert same_on_this_process({name: restored["global"][name] for name in other}, other)
            assert all(restored["global"][name].sharding == leaf.sharding for name, leaf in other.items())

    def reads_only_what_its_devices_need(self):
        needless = self.run / "2" / f"part.{1 - self.index}"
        opened, load = [], np.load
        np.load = lambda path, **kwargs: opened.append(Path(path)) or load(path, **kwargs)
        self.checkpoints.restore(self.state)
        np.load = load
        assert opened
        assert {path.parent for path in opened if "rows" in path.name} == {self.run / "2" / f"part.{self.index}"}
        assert sum(path.parent == needless for path in opened) < len(list(needless.iterdir()))

    def restores_what_one_process_wrote(self):
        with Checkpointer(self.folder / "alone", timeout=TIMEOUT) as checkpoints:
            target = sharded_state(mesh_over((2, 4), ("data", "tensor")), ("data", "tensor"))
            assert same_on_this_process(checkpoints.restore(target)[0], target)

    def a_failure_of_one_fails_all(self):
        save = np.save
        if self.index == 1:

            def full(file, array):
                raise OSError(28, "No space left on device")

            np.save = full
        message = self.failed_save(3)
        np.save = save
        there = "OSError(28, 'No space left on device')"
        cause = f"process 1 failed: {there}" if self.index == 0 else there
        assert message == f"saving step 3 in {self.run} failed: {cause}; the last committed step is 2", message
        assert self.checkpoints.latest() == 2

    def a_refusal_of_one_fails_all(self):
        bad = self.state | ({"host": 0.1} if self.index == 1 else {})
        if self.index == 1:
            assert "leaf ['host'] is a float" in error_of(TypeError, lambda: self.save(3, bad))
        else:
            assert "process 1 failed: TypeError(\"leaf ['host'] is a float" in self.failed_save(3, bad)

    def values_that_should_be_equal_and_are_not_are_named(self):
        message = self.failed_save(3, self.state | {"host": np.array([1.0, float(self.index)])})
        assert "leaf ['host'] is in process 1 not what it is in process 0: an array on a process's own" in message
        message = self.failed_save(3, self.state | ({"host": np.ones(3)} if self.index else {}))
        assert "process 1 saves another tree than process 0: leaf ['host'], float64[3], is not in both" in message

    def other_steps_and_calls_are_named(self):
        message = self.failed_save(3 + self.index)
        assert re.search(
            r"process \d is at the save of step \d, process \d at the save of step \d: all processes have to save and "
            r"restore the same steps in the same order; the last committed step is 2",
            message,
        ), message
        multihost_utils.sync_global_devices("steps")
        if self.index == 0:
            message = self.failed_save(3)
        else:
            message = error_of(CheckpointError, lambda: self.checkpoints.restore(self.state))
        assert "at the restore of the newest step" in message, message
        multihost_utils.sync_global_devices("calls")

    def all_refuse_what_one_finds_damaged(self):
        self.save(3)
        self.checkpoints.wait()
        (path,) = (self.run / "3" / "part.1").glob("*.global.rows.0.npy")
        if self.index == 0:
            content = path.read_bytes()
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        multihost_utils.sync_global_devices("damaged")
        assert error_of(DamagedCheckpointError, lambda: self.checkpoints.restore(self.state)) == (
            f"step 3 at {self.run / '3'} is damaged: leaf ['global']['rows']: file part.1/{path.name} is altered: its "
            f"SHA-256 is not the one recorded; the last good checkpoint is step 2, pass --resume-step 2 / step=2"
        )

    def a_misfit_is_the_same_everywhere(self):
        message = error_of(CheckpointMismatchError, lambda: self.checkpoints.restore({"w": jnp.ones(1)}))
        assert "leaf ['w'] is in the target, not in the checkpoint" in message
        message = error_of(FileNotFoundError, lambda: self.checkpoints.restore(self.state, step=7))
        assert f"there is no step 7 in {self.run}; it holds steps 1, 2, 3" in message

    def rewinds_and_keeps(self):
        assert self.checkpoints.restore(self.state, step=2)[1]["step"] == 2
        for step in (3, 4, 5):
            self.save(step)
        self.checkpoints.wait()
        assert self.checkpoints.steps() == [3, 4, 5]
        multihost_utils.sync_global_devices("kept")
        if self.index == 0:
            shutil.copytree(self.run, self.folder / "together")

    def a_killed_process_ends_the_other(self):
        if self.index == 1:
            np.save = lambda file, array: os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        message = self.failed_save(6)
        assert time.monotonic() - start < ENDED_WITHIN
        assert message == (
            f"saving step 6 in {self.run} failed: process 1 gave no sign of life for 8 s (timeout=8) in the save of "
            f"step 6: it died, hangs, or did not call it; the last committed step is 5"
        ), message


def main():
    index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    assert (jax.process_count(), jax.device_count()) == (2, 8)
    try:
        checks = Checks(index, folder)
        for name, check in vars(Checks).items():
            if name not in ("__init__", "save", "failed_save") and callable(check):
                check(checks)
                print(name, flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # at its own end JAX would wait for the process that was killed


if __name__ == "__main__":
    main()
