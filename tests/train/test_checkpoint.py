"""Checkpoints: every dtype bit for bit, any mesh to any other, asynchronous, keep-last-n, errors with a way out."""

import doctest
import errno
import json
import logging
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.extend.random import define_prng_impl
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp4jax.train.checkpoint import Checkpointer, CheckpointError, CheckpointMismatchError, checkpointer, snapshot
from fp4jax.train.checkpoint.storage import ArrayStore

ONE_BYTE = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3", "float8_e3m4", "int8", "uint8")
FOUR_BITS = ("float4_e2m1fn", "int4", "uint4")
TWO_BYTES = ("bfloat16", "float16", "int16", "uint16")


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _every_bit_pattern(name: str) -> np.ndarray:
    count, width = (16, np.uint8) if name in FOUR_BITS else (256, np.uint8) if name in ONE_BYTE else (65536, np.uint16)
    return np.arange(count, dtype=width).view(_dtype(name)).reshape(4, -1)


def _bits(leaf) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    host = np.asarray(leaf)
    return np.frombuffer(host.tobytes(), np.uint8)


def _assert_same(left, right) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right)):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype, name
        assert a.shape == b.shape, name
        assert np.array_equal(_bits(a), _bits(b)), name


def _like(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)), state
    )


def _mesh(shape: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Explicit):
    count = int(np.prod(shape))
    if jax.device_count() < 8:
        pytest.skip("needs eight devices, virtual or not")
    return jax.make_mesh(shape, names, (kind,) * len(shape), devices=jax.devices()[:count])


@pytest.fixture
def every_dtype():
    payloads = np.array([0x7F800001, 0xFFC12345, 0x80000000, 0x00000001, 0x7F7FFFFF], np.uint32).view(np.float32)
    return {
        "all": {name: jnp.asarray(_every_bit_pattern(name)) for name in (*ONE_BYTE, *FOUR_BITS, *TWO_BYTES)},
        "float32": jnp.asarray(payloads),
        "int32": jnp.asarray(np.array([-(2**31), 2**31 - 1], np.int32)),
        "uint32": jnp.asarray(np.array(2**32 - 1, np.uint32)),
        "complex64": jnp.asarray(np.array([1 - 2j], np.complex64)),
        "bool": jnp.asarray([True, False, True]),
        "empty": [jnp.zeros((0, 3)), jnp.zeros((2, 0), jnp.float4_e2m1fn), jax.random.split(jax.random.key(1), 0)],
        "keys": (jax.random.key(7), jax.random.split(jax.random.key(3, impl="rbg"), (2, 3))),
        "weak": [jnp.asarray(0.1), jnp.full((2, 3), -0.0), jnp.asarray(7), jnp.full(2, 1j)],
    }


def test_every_dtype_comes_back_bit_for_bit(tmp_path, every_dtype):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, every_dtype)
        for target in (every_dtype, _like(every_dtype)):
            restored, metadata = checkpoints.restore(target)
            _assert_same(restored, every_dtype)
            assert metadata == {}
            assert all(leaf.weak_type for leaf in restored["weak"])
            assert not restored["float32"].weak_type


def test_numpy_leaves_come_back_as_numpy(tmp_path):
    state = {
        "f64": np.array([1 / 3, -0.0, np.inf]),
        "i64": np.array(2**62),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "e8m0": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu),
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored, _ = checkpoints.restore(state)
        assert all(isinstance(leaf, np.ndarray) for leaf in restored.values())
        _assert_same(restored, state)
        with pytest.raises(
            ValueError, match=r"leaf \['f64'\] is float64, which JAX turned into float32: set jax_enable_x"
        ):
            checkpoints.restore(state | {"f64": jax.ShapeDtypeStruct((3,), np.float64)})


def _sharded_state(mesh, names):
    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))

    rows, columns = names[0], names[-1]
    return {
        "rows": put(jnp.arange(64.0).reshape(16, 4), rows),
        "columns": put(jnp.arange(128, dtype=jnp.bfloat16).reshape(4, 32), None, columns),
        "replicated": put(jnp.arange(5)),
        "codes": put(jnp.asarray(np.tile(np.arange(16, dtype=np.uint8), (8, 1)).view(ml_dtypes.float4_e2m1fn)), rows),
        "scales": put(jnp.asarray(np.arange(8, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)), rows),
        "packed": put(jnp.arange(128, dtype=jnp.uint8).reshape(8, 16), rows),
        "keys": put(jax.random.split(jax.random.key(0), 8), rows),
    }


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_eight_devices_to_four_to_one(tmp_path, kind):
    state = _sharded_state(_mesh((8,), ("data",), kind), ("data",))
    targets = {
        "four": _sharded_state(_mesh((4,), ("data",), kind), ("data",)),
        "two by two": _sharded_state(_mesh((2, 2), ("fsdp", "tensor"), kind), ("fsdp", "tensor")),
        "one": _sharded_state(_mesh((1,), ("data",), kind), ("data",)),
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(8, state)
        for name, like in targets.items():
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
            for target in (like, abstract):
                restored, _ = checkpoints.restore(target)
                _assert_same(restored, state)
                for got, asked in zip(jax.tree.leaves(restored), jax.tree.leaves(like)):
                    assert got.sharding == asked.sharding, name
        plain, _ = checkpoints.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
        assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(plain))


def test_fingerprints_do_not_depend_on_the_mesh(tmp_path):
    digests = []
    for name, mesh in {"eight": _mesh((8,), ("data",)), "one": _mesh((1,), ("data",))}.items():
        with Checkpointer(tmp_path / name) as checkpoints:
            checkpoints.save(1, _sharded_state(mesh, ("data",)))
        manifest = json.loads((tmp_path / name / "1" / "fp4jax.json").read_text())["manifest"]
        digests.append({leaf["name"]: leaf["sha256"] for leaf in manifest["leaves"]})
    assert digests[0] == digests[1]
    assert len(set(digests[0].values())) == 7


def test_a_target_on_an_abstract_mesh_needs_the_mesh_to_be_set(tmp_path):
    mesh = _mesh((8,), ("data",))
    state = _sharded_state(mesh, ("data",))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with jax.set_mesh(mesh):
            target = jax.eval_shape(lambda tree: tree, state)
            restored, _ = checkpoints.restore(target)
        _assert_same(restored, state)
        assert restored["rows"].sharding.is_equivalent_to(state["rows"].sharding, 2)
        with pytest.raises(
            ValueError, match=r"target of leaf \['codes'\] is laid out on an abstract mesh .* jax.set_mesh"
        ):
            checkpoints.restore(target)


def test_the_state_may_be_donated_and_host_arrays_changed_right_after_save(tmp_path):
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)

    def make():
        sharded = _sharded_state(_mesh((8,), ("data",)), ("data",))
        return {name: sharded[name] for name in ("rows", "columns")} | {"one device": jnp.arange(1000.0)}

    state, host = make(), np.arange(3)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"device": state, "host": host})
        after = step(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        host[:] = -1
        restored, _ = checkpoints.restore({"device": state, "host": host})  # deleted arrays still say shape and place
        assert restored["host"].tolist() == [0, 1, 2]
        _assert_same(step(restored["device"]), after)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(restored["device"]))  # JAX owns what was restored
        _assert_same(checkpoints.restore({"device": state, "host": host})[0]["device"], make())


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
def test_from_the_gpu_and_back_with_donation(tmp_path, every_dtype):
    step = jax.jit(lambda x: x * 2, donate_argnums=0)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, every_dtype | {"big": (big := jnp.arange(2.0**24))})
        step(big)
        assert big.is_deleted()
        restored, _ = checkpoints.restore(every_dtype | {"big": big})
    assert np.array_equal(restored.pop("big"), np.arange(2.0**24, dtype=np.float32))
    _assert_same(restored, every_dtype)


def test_resuming_is_bit_equal_to_never_having_stopped(tmp_path):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(8, 2, rngs=nnx.Rngs(1)))
    graph, params = nnx.split(model)

    @jax.jit
    def train_step(state):
        key, noise = jax.random.split(state["key"])
        x = jax.random.normal(noise, (16, 4))
        loss = lambda params: jnp.mean((nnx.merge(graph, params)(x) - x[:, :2]) ** 2)
        gradients = jax.grad(loss)(state["params"])
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": moments, "key": key, "step": state["step"] + 1}

    start = {"params": params, "optimizer": optimizer.init(params), "key": jax.random.key(5), "step": jnp.asarray(0)}
    state = start
    with Checkpointer(tmp_path) as checkpoints:
        for step in range(1, 7):
            state = train_step(state)
            if step == 3:
                checkpoints.save(step, state, {"data position": {"epoch": 0, "batch": 3}})
    with Checkpointer(tmp_path) as checkpoints:
        resumed, metadata = checkpoints.restore(jax.eval_shape(train_step, start))
    assert metadata == {"data position": {"epoch": 0, "batch": 3}}
    for _ in range(3):
        resumed = train_step(resumed)
    assert int(resumed["step"]) == 6
    _assert_same(resumed, state)


def test_a_plain_orbax_reader_opens_the_arrays(tmp_path):
    state = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "scale": jnp.ones(2, jnp.float8_e4m3fn)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, state)
    with ocp.StandardCheckpointer() as reader:
        found = reader.restore(tmp_path / "5" / "state")
    assert sorted(found) == ["0000.params.w", "0001.scale"]
    assert np.array_equal(found["0000.params.w"], state["params"]["w"])
    assert found["0001.scale"].dtype == np.uint8


def test_names_that_would_be_paths_stay_inside(tmp_path):
    state = {"../up": jnp.ones(1), "/root": {"a/b": jnp.zeros(1)}, "a": {"b": jnp.ones(2)}, "x" * 300: jnp.ones(3)}
    with Checkpointer(tmp_path / "run") as checkpoints:
        checkpoints.save(1, state)
        _assert_same(checkpoints.restore(state)[0], state)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# Asynchronous saving.


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


# Which steps there are.


def test_keep_the_newest_and_every_nth(tmp_path):
    state = {"w": jnp.ones(3)}
    with Checkpointer(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(1, 8):
            checkpoints.save(step, state)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7]
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        checkpoints.save(8, state)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 6, 7, 8]
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(9, state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["9"]


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


def test_steps_grow_unless_the_run_was_rewound(tmp_path, caplog):
    states = {step: {"w": jnp.full(3, float(step))} for step in (10, 15, 20, 30)}
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, states[step])
        with pytest.raises(ValueError, match=r"step 30 cannot be saved in .*, which already holds step 30: steps grow"):
            checkpoints.save(30, states[30])
    with Checkpointer(tmp_path, keep=None) as checkpoints:
        with pytest.raises(
            ValueError, match=r"step 15 cannot be saved .* holds step 30.* restore a step below 15 first"
        ):
            checkpoints.save(15, states[15])
        checkpoints.restore(states[10], step=10)
        checkpoints.save(15, states[15])
        checkpoints.wait()
        assert checkpoints.steps() == [10, 15]
        assert "step 15 replaces steps [20, 30] of a run that was rewound" in caplog.text
        restored, _ = checkpoints.restore(states[10])
        assert restored["w"].tolist() == [15.0] * 3


def test_leftovers_of_a_killed_save_are_ignored_and_cleaned_up(tmp_path):
    state = {"w": jnp.ones(3)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    (tmp_path / "1").rename(tmp_path / ".building-2-abcd")
    (tmp_path / ".discarded-0-abcd").mkdir()
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest() is None
        with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
            checkpoints.restore(state)
        assert len(list(tmp_path.iterdir())) == 2  # a reader cleans nothing: the writer may be alive
        checkpoints.save(3, state)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_absent_steps(tmp_path):
    with Checkpointer(tmp_path / "nowhere") as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.steps() == []
        with pytest.raises(FileNotFoundError, match=r"there is no checkpoint in .*nowhere"):
            checkpoints.restore({})
        assert not (tmp_path / "nowhere").exists()
        checkpoints.save(3, {"w": jnp.ones(1)})
        checkpoints.save(5, {"w": jnp.ones(1)})
        with pytest.raises(FileNotFoundError, match=r"there is no step 4 in .*; it holds steps 3, 5"):
            checkpoints.restore({"w": jnp.ones(1)}, step=4)


# What is refused.


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": jnp.ones((2, 3))}, r"leaf \['b'\] is in the checkpoint, not in the target"),
        (
            {"w": jnp.ones((2, 3)), "b": jnp.ones(2), "c": jnp.ones(1)},
            r"leaf \['c'\] is in the target, not in the check",
        ),
        (
            {"w": jnp.ones((3, 2)), "b": jnp.ones(2)},
            r"leaf \['w'\] is float32\[2,3\] in the checkpoint, float32\[3,2\] in",
        ),
        (
            {"w": jnp.ones((2, 3), jnp.bfloat16), "b": jnp.ones(2)},
            r"float32\[2,3\] in the checkpoint, bfloat16\[2,3\] in",
        ),
        ([jnp.ones((2, 3)), jnp.ones(2)], r"leaf \[0\] is in the target.*leaf \[1\].*leaf \['b'\] .*; and 1 more;"),
    ],
)
def test_a_target_of_another_make_is_refused(tmp_path, target, message):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones((2, 3)), "b": jnp.ones(2)})
        with pytest.raises(CheckpointMismatchError, match=message) as caught:
            checkpoints.restore(target)
        assert str(caught.value).startswith(f"step 1 at {tmp_path / '1'} does not fit the target: leaf ")
        assert str(caught.value).endswith(f"no other checkpoint in {tmp_path} fits")
        assert caught.value.last_good is None


def test_a_mismatch_names_the_step_that_fits(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)})
        checkpoints.save(2, {"w": jnp.ones(3)})
        with pytest.raises(
            CheckpointMismatchError, match="that fits is step 1, pass --resume-step 1 / step=1"
        ) as caught:
            checkpoints.restore({"w": jnp.ones(2)})
        assert (caught.value.step, caught.value.last_good) == (2, 1)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (
            {"lr": 0.1},
            TypeError,
            r"leaf \['lr'\] is a float \(0.1\); a checkpoint holds arrays: wrap it with jnp.asarray",
        ),
        ({"name": np.array(["a"])}, TypeError, r"leaf \['name'\] has dtype <U1, which no checkpoint holds"),
        ({"big": np.ones(2, ">f4")}, TypeError, r"leaf \['big'\] has dtype >f4, which no checkpoint holds"),
        ({"w": jnp.ones((0, 2))}, ValueError, "the state of step 1 holds no values: 1 leaves"),
        ({}, ValueError, "the state of step 1 holds no values: 0 leaves"),
    ],
)
def test_a_state_that_cannot_be_saved_is_named(tmp_path, state, error, message):
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(error, match=message):
            checkpoints.save(1, state)
        checkpoints.save(1, {"w": jnp.ones(1)})
        checkpoints.wait()
        assert checkpoints.latest() == 1


@jax.tree_util.register_pytree_with_keys_class
class _Twins(list):
    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("twin"), leaf) for leaf in self], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(children)


def test_leaves_need_names_of_their_own_and_keys_a_known_kind(tmp_path):
    unnamed = define_prng_impl(
        key_shape=(2,),
        seed=lambda seed: jnp.zeros(2, jnp.uint32),
        split=lambda key, shape: jnp.zeros((*shape, 2), jnp.uint32),
        random_bits=lambda key, width, shape: jnp.zeros(shape, jnp.uint32),
        fold_in=lambda key, data: key,
        name="dice",
        tag="dice",
    )
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(
            ValueError, match=r"two leaves of the tree are named \.twin; a checkpoint needs distinct names"
        ):
            checkpoints.save(1, _Twins([jnp.ones(1), jnp.ones(1)]))
        with pytest.raises(
            ValueError, match=r"leaf \['key'\] is a PRNG key of the unregistered kind .*; use threefry2x32"
        ):
            checkpoints.save(1, {"key": jax.random.key(0, impl=unnamed)})


def test_metadata_comes_back_as_it_went_in(tmp_path):
    metadata = {
        "config": {"lr": 3e-4, "none": None},
        "files": ["ä", "\ud800"],
        "on": True,
        "best": float("inf"),
        "n": 2**70,
    }
    expected = json.loads(json.dumps(metadata))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(1)}, metadata=metadata)
        metadata["config"]["lr"] = 1.0
        assert checkpoints.restore({"w": jnp.ones(1)})[1] == expected


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": {"b": (1, 2)}}, r"metadata\['a'\]\['b'\] is \(1, 2\), a tuple; metadata holds dicts, lists"),
        ({"a": [{1: 2}]}, r"metadata\['a'\]\[0\] has the key 1; JSON returns keys as strings, so use '1'"),
        ({"lr": np.float64(1)}, r"metadata\['lr'\] is np.float64\(1.0\), a float64"),
        ({"w": jnp.ones(1)}, r"metadata\['w'\] is .*put arrays into the state"),
    ],
)
def test_metadata_that_json_would_change_is_refused(tmp_path, metadata, message):
    with Checkpointer(tmp_path) as checkpoints, pytest.raises(TypeError, match=message):
        checkpoints.save(1, {"w": jnp.ones(1)}, metadata)


def test_bad_arguments(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="keep=0 must be at least 1, or None"):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep_every=-1 must be at least 1, or None"):
        Checkpointer(tmp_path, keep_every=-1)
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        checkpoints.save(-1, {"w": jnp.ones(1)})
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(ValueError, match="is closed; make a new one"):
        checkpoints.save(1, {"w": jnp.ones(1)})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(NotImplementedError, match="writes from one process, and 2 are running"):
        Checkpointer(tmp_path)


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(checkpointer) == doctest.TestResults(failed=0, attempted=4)
