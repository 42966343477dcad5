"""Saving in the background: donation right after it, failures that surface once, nothing lost on the way."""

import errno
import logging
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import assert_same, every_dtype, mesh_of, sharded_state

from fp4jax.train.checkpoint import Checkpointer, CheckpointError, snapshot
from fp4jax.train.checkpoint.storage import ArrayStore


def test_the_state_may_be_donated_and_host_arrays_changed_right_after_save(tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)

    def make():
        sharded = sharded_state(mesh_of((8,), ("data",)), ("data",))
        return {name: sharded[name] for name in ("rows", "columns")} | {"one device": jnp.arange(1000.0)}

    state, host = make(), np.arange(3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"device": state, "host": host})
        after = step(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        host[:] = -1
        restored, _ = checkpoints.restore({"device": state, "host": host})  # deleted arrays still say shape and place
        assert restored["host"].tolist() == [0, 1, 2]
        assert_same(step(restored["device"]), after)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored["device"]))  # JAX owns what was restored
        assert_same(checkpoints.restore({"device": state, "host": host})[0]["device"], make())


class _Accelerator:
    """A stand-in for one shard on a device with pinned host memory."""

    platform, kind = "gpu", "pinned_host"

    def __init__(self):
        self.sharding, self.device_set, self.pageable = self, {self}, 0

    def addressable_memories(self):
        return [self]

    def with_memory_kind(self, kind):
        return kind

    def copy_to_host_async(self):
        self.pageable += 1


def test_a_state_larger_than_pinned_memory_goes_through_pageable_memory(monkeypatch, caplog):
    asked = []

    def device_put(piece, kind):
        asked.append(kind)
        if len(asked) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of host memory")
        return "pinned"

    monkeypatch.setattr(jax, "device_put", device_put)
    transfers, pieces = snapshot._Transfers(), [_Accelerator() for _ in range(4)]
    assert [transfers._begin(piece) for piece in pieces] == ["pinned", *pieces[1:]]
    assert asked == ["pinned_host"] * 2  # the pool is not asked again
    assert [piece.pageable for piece in pieces] == [0, 1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "the state does not fit into JAX's pinned host memory, so copying it there is slow: "
        "set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB above the state's size"
    ]


@pytest.mark.gpu
def test_from_the_gpu_and_back_with_donation(tmp_path):
    state = every_dtype()
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state | {"big": (big := jnp.arange(2.0**24))})
        step(big)
        assert big.is_deleted()
        restored, _ = checkpoints.restore(state | {"big": big})
    assert np.array_equal(restored.pop("big"), np.arange(2.0**24, dtype=np.float32))
    assert_same(restored, state)


class _Gate:
    """Holds the background save until `open` is set, or fails it."""

    def __init__(self, monkeypatch):
        self.entered, self.open, self.failure = threading.Event(), threading.Event(), None
        original = ArrayStore.save

        def save(store, folder, arrays):
            self.entered.set()
            assert self.open.wait(30)
            if self.failure is not None:
                raise self.failure
            original(store, folder, arrays)

        monkeypatch.setattr(ArrayStore, "save", save)


def test_save_returns_while_the_writing_goes_on(tmp_path, monkeypatch):
    gate = _Gate(monkeypatch)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
        assert gate.entered.wait(30)
        assert checkpoints.latest() is None
        assert checkpoints.steps() == []
        gate.open.set()
        checkpoints.wait()
        assert checkpoints.latest() == 1


@pytest.fixture
def full_disk(monkeypatch):
    gate = _Gate(monkeypatch)
    gate.open.set()
    gate.failure = OSError(errno.ENOSPC, "No space left on device")
    return gate


MESSAGE = r"saving step 2 in .* failed: OSError\(28, 'No space left on device'\); the last committed step is 1"


@pytest.mark.parametrize("where", ["wait", "save", "restore", "close"])
def test_a_failure_in_the_background_surfaces_once(tmp_path, full_disk, caplog, where):
    state = {"w": jnp.ones(3)}
    failure, full_disk.failure = full_disk.failure, None
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, state)
    checkpoints.wait()
    full_disk.failure = failure
    checkpoints.save(2, state)
    surface = {
        "wait": checkpoints.wait,
        "save": lambda: checkpoints.save(3, state),
        "restore": lambda: checkpoints.restore(state),
        "close": checkpoints.close,
    }[where]
    with pytest.raises(CheckpointError, match=MESSAGE) as caught:
        surface()
    assert caught.value.__cause__ is failure
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == [
        f"saving step 2 in {tmp_path} failed"
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["1"]  # the half-built folder is gone
    checkpoints.wait()
    if where != "close":
        full_disk.failure = None
        checkpoints.save(3, state)
    checkpoints.close()
    assert checkpoints.steps() == ([1] if where == "close" else [1, 3])


def test_a_failed_save_does_not_hide_the_error_under_way(tmp_path, full_disk):
    def train():
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, {"w": jnp.ones(3)})
            raise KeyError("loss")

    with pytest.raises(KeyError, match="loss") as caught:
        train()
    assert "Besides, saving step 1" in caught.value.__notes__[0]
    assert "no step is committed" in caught.value.__notes__[0]
    with pytest.raises(CheckpointError, match="no step is committed"), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})


def test_nothing_is_logged_when_all_is_well(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)})
        checkpoints.restore({"w": jnp.ones(3)})
    assert [record.message for record in caplog.records] == []


def test_an_old_step_goes_only_after_the_new_one_is_committed(tmp_path, full_disk):
    failure, full_disk.failure = full_disk.failure, None
    checkpoints = Checkpointer(tmp_path, keep=1)
    checkpoints.save(1, {"w": jnp.ones(3)})
    checkpoints.wait()
    full_disk.failure = failure
    checkpoints.save(2, {"w": jnp.ones(3)})
    with pytest.raises(CheckpointError):
        checkpoints.close()
    assert checkpoints.steps() == [1]
