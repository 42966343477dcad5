"""Which steps there are, keep-last-n and rewinding; what is refused, with a way out."""

import doctest
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import define_prng_impl

from fp4jax.train.checkpoint import Checkpointer, CheckpointMismatchError, checkpointer


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
    with pytest.raises(ValueError, match="timeout=0 must be more than 0 seconds"):
        Checkpointer(tmp_path, timeout=0)
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(ValueError, match="step=-1 must be at least 0"):
        checkpoints.save(-1, {"w": jnp.ones(1)})
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(ValueError, match="is closed; make a new one"):
        checkpoints.save(1, {"w": jnp.ones(1)})
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"2 processes are running, .* call jax.distributed.initialize\(\) first"):
        Checkpointer(tmp_path)


def test_the_example_in_the_docstring_runs():
    assert doctest.testmod(checkpointer) == doctest.TestResults(failed=0, attempted=4)
