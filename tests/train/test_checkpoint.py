"""Checkpoints: every dtype bit for bit, any mesh to any other, bit-equal resume."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from checkpoint_states import assert_same, every_dtype, like_of, mesh_of, sharded_state
from flax import nnx
from jax.sharding import AxisType

from fp4jax.train.checkpoint import Checkpointer


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    state = every_dtype()
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        for target in (state, like_of(state)):
            restored, metadata = checkpoints.restore(target)
            assert_same(restored, state)
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
        assert_same(restored, state)
        with pytest.raises(
            ValueError, match=r"leaf \['f64'\] is float64, which JAX turned into float32: set jax_enable_x"
        ):
            checkpoints.restore(state | {"f64": jax.ShapeDtypeStruct((3,), np.float64)})


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_eight_devices_to_four_to_one(tmp_path, kind):
    state = sharded_state(mesh_of((8,), ("data",), kind), ("data",))
    targets = {
        "four": sharded_state(mesh_of((4,), ("data",), kind), ("data",)),
        "two by two": sharded_state(mesh_of((2, 2), ("fsdp", "tensor"), kind), ("fsdp", "tensor")),
        "one": sharded_state(mesh_of((1,), ("data",), kind), ("data",)),
    }
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(8, state)
        for name, like in targets.items():
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
            for target in (like, abstract):
                restored, _ = checkpoints.restore(target)
                assert_same(restored, state)
                for got, asked in zip(jax.tree.leaves(restored), jax.tree.leaves(like)):
                    assert got.sharding == asked.sharding, name
        plain, _ = checkpoints.restore(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))
        assert all(len(leaf.sharding.device_set) == 1 for leaf in jax.tree.leaves(plain))


def test_fingerprints_do_not_depend_on_the_mesh(tmp_path):
    digests = []
    for name, mesh in {"eight": mesh_of((8,), ("data",)), "one": mesh_of((1,), ("data",))}.items():
        with Checkpointer(tmp_path / name) as checkpoints:
            checkpoints.save(1, sharded_state(mesh, ("data",)))
        manifest = json.loads((tmp_path / name / "1" / "fp4jax.json").read_text())["manifest"]
        digests.append({leaf["name"]: [piece["sha256"] for piece in leaf["pieces"]] for leaf in manifest["leaves"]})
    assert digests[0] == digests[1]
    assert len({digest for (digest,) in digests[0].values()}) == 7


def test_a_target_on_an_abstract_mesh_needs_the_mesh_to_be_set(tmp_path):
    mesh = mesh_of((8,), ("data",))
    state = sharded_state(mesh, ("data",))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with jax.set_mesh(mesh):
            target = jax.eval_shape(lambda tree: tree, state)
            restored, _ = checkpoints.restore(target)
        assert_same(restored, state)
        assert restored["rows"].sharding.is_equivalent_to(state["rows"].sharding, 2)
        with pytest.raises(
            ValueError, match=r"target of leaf \['codes'\] is laid out on an abstract mesh .* jax.set_mesh"
        ):
            checkpoints.restore(target)


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
    assert_same(resumed, state)


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
        assert_same(checkpoints.restore(state)[0], state)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
