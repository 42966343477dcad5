"""Boxes and pieces, the part of one process, and steps that an older fp4jax wrote."""

import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_states import assert_same, every_dtype, like_of
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax.train.checkpoint import Checkpointer, DamagedCheckpointError, parts
from fp4jax.train.checkpoint.errors import PeerProblem, StepProblem
from fp4jax.train.checkpoint.manifest import Manifest
from fp4jax.train.checkpoint.pieces import assemble, box_of, cut, overlap, shape_of, size_of, slices, whole
from fp4jax.train.checkpoint.reading import read_blocks
from fp4jax.train.checkpoint.snapshot import snapshot
from fp4jax.train.checkpoint.storage import ArrayStore

OLDER = Path(__file__).with_name("checkpoint_v1.zip")  # step 1 of a directory, written before several processes could


@settings(max_examples=50, deadline=None)
@given(st.data(), st.lists(st.integers(1, 6), max_size=3), st.integers(1, 40))
def test_any_box_comes_back_from_any_cut(data, shape, most):
    shape = tuple(shape)
    array = np.arange(int(np.prod(shape))).reshape(shape)
    boxes = list(cut(whole(shape), most))
    assert sum(map(size_of, boxes)) == array.size
    assert all(overlap(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i])
    pieces = [(box, array[slices(box, whole(shape))]) for box in boxes]
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    box = tuple((start, data.draw(st.integers(start + 1, size))) for start, size in zip(starts, shape))
    found = assemble(box, pieces)
    assert isinstance(found, np.ndarray)
    assert found.shape == shape_of(box)
    assert np.array_equal(found, array[slices(box, whole(shape))])


def test_files_are_cut_to_a_size():
    assert [size_of(box) for box in cut(whole((3, 100)), 100)] == [99, 99, 99, 3]
    assert [size_of(box) for box in cut(whole((2, 2)), 1)] == [2, 2]  # one row
    assert list(cut((), 1)) == [()]
    assert box_of((slice(None), slice(2, 4)), (3, 4, 2)) == ((0, 3), (2, 4), (0, 2))


def test_a_gap_is_a_problem():
    with pytest.raises(StepProblem, match=r"4 of 6 values of \[\(0, 2\), \(0, 3\)\] are there"):
        assemble(((0, 2), (0, 3)), [(((0, 2), (0, 2)), np.ones((2, 2)))])


def test_a_part_holds_every_dtype_in_files_of_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "_FILE_BYTES", 1 << 12)
    state = every_dtype() | {"wide": np.arange(3000, dtype=np.float32).reshape(3, -1)}
    beats = []
    part = parts.write_part(tmp_path, snapshot(state), 0, lambda: beats.append(1))
    assert len(beats) == 2 * len(part.files)  # written, hashed
    assert max(size for size, _ in part.files.values()) < (1 << 12) + 200
    again = parts.Part.take(tmp_path, 0, part.save(tmp_path, 0))
    assert again == part
    leaves, files = parts.merge([again])
    manifest = Manifest(1, leaves, files, {})
    manifest.check_sizes(tmp_path)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    boxes = {name: {whole(leaves[name].data_shape)} for name in named}
    for name, blocks in read_blocks(tmp_path, manifest, boxes, ArrayStore(), lambda: None).items():
        (block,) = blocks.values()
        leaf = named[name]
        data = jax.random.key_data(leaf) if leaves[name].key_impl else leaf
        assert block.tobytes() == np.asarray(data).tobytes(), name


def test_parts_that_do_not_make_a_whole_are_refused(tmp_path):
    state = {"w": np.ones((2, 3), np.float32), "b": np.ones(2, np.float32)}
    part = parts.write_part(tmp_path, snapshot(state), 0, lambda: None)
    less = parts.Part([part.leaves[0], parts.replace(part.leaves[1], pieces=())], part.files)
    with pytest.raises(PeerProblem, match=r"leaf \['w'\]: 0 of its 6 stored values came from the processes"):
        parts.merge([less])
    swapped = parts.Part(part.leaves[::-1], {})
    with pytest.raises(PeerProblem, match=r"process 1 saves another tree .*: the same leaves in another order"):
        parts.merge([part, swapped])
    sha256 = part.save(tmp_path, 1)
    (tmp_path / "part.1.json").write_text("{}")
    with pytest.raises(PeerProblem, match=r"part.1.json is not what process 1 wrote: do all processes see one file"):
        parts.Part.take(tmp_path, 1, sha256)


def test_a_step_of_version_1_restores(tmp_path):
    codes = np.arange(16, dtype=np.uint8)
    state = {
        "w": jnp.arange(24.0).reshape(8, 3),
        "codes": jnp.asarray(codes.reshape(8, 2).view(ml_dtypes.float4_e2m1fn)),
        "scale": jnp.asarray(codes[:8].view(ml_dtypes.float8_e8m0fnu)),
        "key": jax.random.split(jax.random.key(3), 8),
        "empty": jnp.zeros((0, 3)),
        "half": jnp.arange(8, dtype=jnp.bfloat16),
        "weak": jnp.asarray(0.5),
        "host": np.array([1 / 3]),
    }
    with zipfile.ZipFile(OLDER) as archive:
        archive.extractall(tmp_path)
    with Checkpointer(tmp_path) as checkpoints:
        restored, metadata = checkpoints.restore(state)
        assert metadata == {"seed": 7}
        assert_same(restored, state)
        file = tmp_path / "1" / "state" / "0006.w" / "0.0"
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        with pytest.raises(DamagedCheckpointError, match=r"leaf \['w'\]: file state/0006.w/0.0 is altered"):
            checkpoints.restore(like_of(state))
