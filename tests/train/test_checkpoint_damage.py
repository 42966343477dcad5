"""Damaged checkpoints are refused by name, and a process killed at any moment of a save loses at most that save."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.train.checkpoint import Checkpointer, DamagedCheckpointError, directory, manifest, storage
from fp4jax.train.checkpoint.storage import ArrayStore


def _state(step: int, size: int = 64):
    return {
        "params": {
            "w": jnp.arange(size, dtype=jnp.float32).reshape(8, -1) * step,
            "b": jnp.full(8, step, jnp.bfloat16),
        },
        "codes": jnp.asarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).view(jnp.float8_e4m3fn),
        "key": jax.random.key(step),
        "step": jnp.int32(step),
    }


def _assert_is_step(restored, metadata, step: int):
    assert metadata == {"step": step}
    for got, saved in zip(jax.tree.leaves(restored), jax.tree.leaves(_state(step))):
        if jax.dtypes.issubdtype(saved.dtype, jax.dtypes.prng_key):
            got, saved = jax.random.key_data(got), jax.random.key_data(saved)
        assert np.asarray(got).tobytes() == np.asarray(saved).tobytes()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A directory with steps 100, 150 and 200."""
    root = tmp_path_factory.mktemp("pristine")
    with Checkpointer(root) as checkpoints:
        for step in (100, 150, 200):
            checkpoints.save(step, _state(step), {"step": step})
    return root


@pytest.fixture
def run(pristine, tmp_path):
    """A copy to damage."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def _files(step_dir: Path) -> list[Path]:
    return sorted(path for path in step_dir.rglob("*") if path.is_file())


def _flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _refused(checkpoints: Checkpointer, step: int | None = None) -> str:
    with pytest.raises(DamagedCheckpointError) as caught:
        checkpoints.restore(_state(1), step)
    return str(caught.value)


def _refusal(checkpoints: Checkpointer) -> str | None:
    """The refusal of step 200, or None where it comes back exactly as it was saved."""
    try:
        restored, metadata = checkpoints.restore(_state(1))
    except DamagedCheckpointError as error:
        return str(error)
    _assert_is_step(restored, metadata, 200)
    return None


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(run):
    rng = random.Random(0)
    harmless = []
    with Checkpointer(run) as checkpoints:
        for path in _files(run / "200"):
            content, name = path.read_bytes(), path.relative_to(run / "200").as_posix()
            count = 8 * len(content)
            for bit in rng.sample(range(count), min(count, 150 if name == "fp4jax.json" else 12)):
                _flip(path, bit)
                message = _refusal(checkpoints)
                if message is None:
                    harmless.append(name)
                else:
                    assert f"step 200 at {run / '200'} is damaged: " in message
                    assert f"file {name} " in message
                    assert message.endswith("is step 150, pass --resume-step 150 / step=150")
                path.write_bytes(content)
        _assert_is_step(*checkpoints.restore(_state(1)), 200)
    assert set(harmless) <= {"fp4jax.json"}  # white space between its values


def test_a_truncated_or_missing_file_is_refused_and_never_named_latest(run):
    with Checkpointer(run) as checkpoints:
        for path in _files(run / "200"):
            content, name = path.read_bytes(), path.relative_to(run / "200").as_posix()
            for size in sorted({0, len(content) // 2, len(content) - 1} - {len(content), -1}):
                path.write_bytes(content[:size])
                assert name in _refused(checkpoints)
                assert checkpoints.steps() == [100, 150]
                with pytest.raises(DamagedCheckpointError, match="pass --resume-step 150 / step=150"):
                    checkpoints.latest()
            path.unlink()
            assert f"{name} is missing" in _refused(checkpoints)
            assert checkpoints.steps() == [100, 150]
            path.write_bytes(content + b"\0")
            assert name in _refused(checkpoints)
            path.write_bytes(content)
        _assert_is_step(*checkpoints.restore(_state(1)), 200)
        _assert_is_step(*checkpoints.restore(_state(1), step=150), 150)


def test_a_missing_folder_is_refused(run):
    with Checkpointer(run) as checkpoints:
        shutil.rmtree(run / "200" / "state" / "0000.codes")
        assert "leaf ['codes']: file state/0000.codes/.zarray is missing" in _refused(checkpoints)
        shutil.rmtree(run / "200" / "state")
        assert "is missing (No such file or directory)" in _refused(checkpoints)
        shutil.rmtree(run / "200")
        (run / "200").mkdir()
        assert "file fp4jax.json is missing" in _refused(checkpoints)


def test_the_error_names_path_leaf_and_last_good_step(run):
    _flip(run / "200" / "state" / "0003.params.w" / "0.0", 77)
    with Checkpointer(run) as checkpoints:
        assert checkpoints.latest() == 200  # full-sized; only reading it tells
        assert _refused(checkpoints) == (
            f"step 200 at {run / '200'} is damaged: leaf ['params']['w']: file state/0003.params.w/0.0 is altered: its "
            f"SHA-256 is not the one recorded; the last good checkpoint is step 150, pass --resume-step 150 / step=150"
        )
        (run / "150" / "state" / "_METADATA").unlink()
        assert "the last good checkpoint is step 100, pass --resume-step 100 / step=100" in _refused(checkpoints)
        assert "step 150 at" in _refused(checkpoints, step=150)
        _flip(run / "100" / "fp4jax.json", 4000)
        assert _refused(checkpoints).endswith(f"there is no other good checkpoint in {run}")


def test_a_large_leaf_is_cut_into_files_and_each_is_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "_CHUNK_BYTES", 1 << 20)
    state = {"w": np.arange(3 << 18, dtype=np.float32).reshape(3, -1)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        assert np.array_equal(checkpoints.restore(state)[0]["w"], state["w"])
        chunks = [path for path in _files(tmp_path / "1") if path.stat().st_size > 1 << 19]
        assert len(chunks) == 4
        for chunk in chunks:
            content = chunk.read_bytes()
            _flip(chunk, 12345)
            with pytest.raises(
                DamagedCheckpointError, match=rf"leaf \['w'\]: file state/0000.w/{chunk.name} is altered"
            ):
                checkpoints.restore(state)
            chunk.write_bytes(content)


def test_resuming_before_a_damaged_step_replaces_it(run):
    _flip(run / "200" / "state" / "0003.params.w" / "0.0", 77)
    with Checkpointer(run) as checkpoints:
        _refused(checkpoints)
        checkpoints.restore(_state(1), step=150)
        checkpoints.save(200, _state(7), {"step": 7})
        _assert_is_step(*checkpoints.restore(_state(1)), 7)
        assert checkpoints.steps() == [100, 150, 200]


def test_a_step_under_another_number_or_format_is_refused(run):
    with Checkpointer(run) as checkpoints:
        (run / "150").rename(run / "300")
        assert "file fp4jax.json belongs to step 150, not to 300" in _refused(checkpoints)
        body = json.loads((run / "200" / "fp4jax.json").read_text())["manifest"] | {"format": "fp4jax checkpoint 9"}
        outer = {"manifest": body, "sha256": manifest._canonical_sha256(body)}
        (run / "200" / "fp4jax.json").write_text(json.dumps(outer))
        assert "has format 'fp4jax checkpoint 9'; this fp4jax reads 'fp4jax checkpoint, ver" in _refused(
            checkpoints, 200
        )


def test_a_leaf_that_changed_on_its_way_to_the_disk_is_refused(tmp_path, monkeypatch):
    """Checksums of files cannot see this: the files hold what was written, and what was written is wrong."""
    original = ArrayStore.save

    def save(store, folder, arrays):
        wrong = dict(arrays)
        wrong["0003.params.w"] = arrays["0003.params.w"].copy()
        wrong["0003.params.w"].view(np.uint32)[0, 0] ^= 0x80000000  # 0 becomes -0
        original(store, folder, wrong)

    monkeypatch.setattr(ArrayStore, "save", save)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, _state(1))
        assert "leaf ['params']['w']: its values are not the ones that were saved; there is" in _refused(checkpoints)


def test_every_state_of_the_disk_during_a_save_is_a_good_one(tmp_path, monkeypatch):
    """What kill -9 leaves is the disk of that moment: copy it around every call that changes a name, and recover."""
    run, copies, original_rmtree = tmp_path / "run", [], shutil.rmtree

    def copy():
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(run, copies[-1])

    def watched(function):
        def call(*args, **kwargs):
            copy()
            result = function(*args, **kwargs)
            copy()
            return result

        return call

    def rmtree_in_two_halves(path, **kwargs):
        files = _files(Path(path))
        for file in files[: len(files) // 2]:
            file.unlink()
        copy()
        original_rmtree(path, **kwargs)

    with Checkpointer(run, keep=1) as checkpoints:
        checkpoints.save(1, _state(1), {"step": 1})
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(ArrayStore, "save", watched(ArrayStore.save))
            patch.setattr(manifest.Manifest, "write", watched(manifest.Manifest.write))
            patch.setattr(Path, "rename", watched(Path.rename))
            patch.setattr(directory.shutil, "rmtree", rmtree_in_two_halves)
            checkpoints.save(2, _state(2), {"step": 2})
            checkpoints.wait()

    found = []
    for disk in copies:
        with Checkpointer(disk, keep=1) as checkpoints:
            found.append(checkpoints.latest())
            assert checkpoints.steps() == checkpoints._steps.committed()  # nothing half there under a number
            _assert_is_step(*checkpoints.restore(_state(1)), found[-1])
            checkpoints.save(3, _state(3), {"step": 3})
            _assert_is_step(*checkpoints.restore(_state(1)), 3)
        assert [path.name for path in disk.iterdir()] == ["3"]
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 2
    assert len(found) >= 10


def _bulk(step: int) -> dict[str, np.ndarray]:
    return {name: np.full(1 << 18, step, np.float32) for name in "abcd"}


def _save_forever(root: str, pipe) -> None:
    with Checkpointer(root, keep=2) as checkpoints:
        for step in range(1, 10_000):
            checkpoints.save(step, _bulk(step), {"step": step})
            if step % 2:
                checkpoints.wait()
                pipe.send(step)


def test_kill_minus_nine_loses_at_most_the_save_under_way(tmp_path):
    # A fork server imports JAX and Orbax once, so that a victim starts in a fraction of a second.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fp4jax.train.checkpoint"])
    rng = random.Random(1)
    interrupted = 0
    for trial in range(8):
        root = tmp_path / str(trial)
        receiver, sender = context.Pipe(duplex=False)
        victim = context.Process(target=_save_forever, args=(str(root), sender), daemon=True)
        victim.start()
        sender.close()
        committed = receiver.recv()
        victim.join(rng.uniform(0, 0.2))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        with contextlib.suppress(EOFError):
            while True:
                committed = receiver.recv()

        interrupted += any(path.name.startswith(".") for path in root.iterdir())
        with Checkpointer(root, keep=2) as checkpoints:
            latest = checkpoints.latest()
            assert committed <= latest <= committed + 2  # the next two were under way, unreported
            assert checkpoints.steps() == checkpoints._steps.committed()
            restored, metadata = checkpoints.restore(_bulk(0))
            assert metadata == {"step": latest}
            assert all((leaf == latest).all() for leaf in restored.values())
            checkpoints.save(latest + 1, _bulk(latest + 1))
        assert all(path.name.isdigit() for path in root.iterdir())
    assert interrupted  # some kill struck in the middle of a save
