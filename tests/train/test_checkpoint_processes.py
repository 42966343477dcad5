"""Two processes of four devices save together, restore what one wrote and the reverse, and fail together."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_process import whole_state
from checkpoint_states import assert_same, like_of, mesh_of, sharded_state

from fp4jax.train.checkpoint import Checkpointer, DamagedCheckpointError
from fp4jax.train.checkpoint import processes as processes_module
from fp4jax.train.checkpoint.directory import StepDirectory
from fp4jax.train.checkpoint.errors import PeerProblem
from fp4jax.train.checkpoint.snapshot import snapshot
from fp4jax.train.checkpoint.storage import ArrayStore
from fp4jax.train.checkpoint.writing import StepWriter

PROCESS = Path(__file__).with_name("checkpoint_process.py")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder that two processes worked in, and what process 0 printed."""
    folder = tmp_path_factory.mktemp("pair")
    with Checkpointer(folder / "alone") as checkpoints:
        checkpoints.save(1, sharded_state(mesh_of((8,), ("data",)), ("data",)))
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    flags = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", str(PROCESS)]
    processes, logs = [], [folder / "0.log", folder / "1.log"]
    for index, log in enumerate(logs):
        with log.open("w") as file:
            arguments = [*command, str(index), str(port), str(folder)]
            processes.append(subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, env=environment))
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    text = "\n".join(f"--- process {index}\n{log.read_text()[-8000:]}" for index, log in enumerate(logs))
    assert codes == [0, -signal.SIGKILL], text
    return folder, logs[0].read_text()


def test_two_processes_save_restore_and_fail_together(pair):
    """Every check of `checkpoint_process.Checks`, of which the last one kills process 1 in the middle of a save."""
    assert pair[1].split("\n")[-2] == "a_killed_process_ends_the_other"
    assert pair[1].count("\n") >= 12


def test_one_process_restores_what_two_wrote(pair):
    folder, _ = pair
    state = whole_state()
    with Checkpointer(folder / "together") as checkpoints:
        restored, metadata = checkpoints.restore(state)
        assert metadata == {"step": 5, "process": 0}
        assert_same(restored, state)
        for got, asked in zip(jax.tree.leaves(restored["global"]), jax.tree.leaves(state["global"])):
            assert got.sharding == asked.sharding
        for mesh in mesh_of((4,), ("data",)), mesh_of((1,), ("data",)):
            other = sharded_state(mesh, ("data",))
            rest = {name: leaf for name, leaf in state["global"].items() if name not in other}
            restored, _ = checkpoints.restore(state | {"global": rest | other}, step=4)
            assert_same(restored, state)
            assert all(restored["global"][name].sharding == leaf.sharding for name, leaf in other.items())
        plain = jax.tree.map(lambda x: np.asarray(x) if x.dtype == np.float32 else like_of(x), state)
        assert_same(checkpoints.restore(plain)[0], state)


def test_each_element_was_written_once(pair):
    step = pair[0] / "together" / "5"
    leaves = json.loads((step / "fp4jax.json").read_text())["manifest"]["leaves"]
    rows = next(leaf for leaf in leaves if leaf["name"] == "['global']['rows']")
    assert sorted(piece["box"] for piece in rows["pieces"]) == [[[i, i + 4], [0, 4]] for i in (0, 4, 8, 12)]
    assert sorted(piece["stored"].split("/")[0] for piece in rows["pieces"]) == ["part.0"] * 2 + ["part.1"] * 2
    replicated = next(leaf for leaf in leaves if leaf["name"] == "['global']['replicated']")
    assert [piece["box"] for piece in replicated["pieces"]] == [[[0, 5]]]
    own = [leaf for leaf in leaves if leaf["name"].startswith(("['own']", "['host']"))]
    assert {piece["stored"].split("/")[0] for leaf in own for piece in leaf["pieces"]} == {"part.0"}
    files = {path.relative_to(step).as_posix() for path in step.rglob("*") if path.is_file()}
    assert files == {piece["stored"] for leaf in leaves for piece in leaf["pieces"]} | {"fp4jax.json"}


def test_a_killed_process_leaves_the_last_step_good(pair, tmp_path):
    shutil.copytree(pair[0] / "run", tmp_path / "run")
    state = whole_state()
    with Checkpointer(tmp_path / "run") as checkpoints:
        assert checkpoints.latest() == 5
        assert_same(checkpoints.restore(state)[0], state)
        checkpoints.save(6, state)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 5, 6]
        assert_same(checkpoints.restore(state)[0], state)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["4", "5", "6"]


def test_damage_to_any_part_is_refused_by_name(pair, tmp_path):
    shutil.copytree(pair[0] / "together", tmp_path / "run")
    target = like_of(whole_state())
    step, rng = tmp_path / "run" / "5", random.Random(0)
    leaves = json.loads((step / "fp4jax.json").read_text())["manifest"]["leaves"]
    stored = {piece["stored"]: leaf["name"] for leaf in leaves for piece in leaf["pieces"]}
    with Checkpointer(tmp_path / "run") as checkpoints:
        for name in rng.sample(sorted(stored), 6):
            path, content = step / name, (step / name).read_bytes()
            bit = rng.randrange(8 * len(content))
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            for damaged, what in (flipped, "is altered"), (content[:-1], "bytes, "), (None, "is missing"):
                path.unlink() if damaged is None else path.write_bytes(damaged)
                with pytest.raises(DamagedCheckpointError) as caught:
                    checkpoints.restore(target)
                assert f"leaf {stored[name]}: file {name} " in str(caught.value)
                assert what in str(caught.value)
                assert str(caught.value).endswith("the last good checkpoint is step 4, pass --resume-step 4 / step=4")
                path.write_bytes(content)
        checkpoints.restore(target)


# How processes agree, with a service in memory and threads for processes.


class _Service:
    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def key_value_try_get(self, key):
        return self.blocking_key_value_get(key, 0, "NOT_FOUND")

    def blocking_key_value_get(self, key, milliseconds, otherwise="DEADLINE_EXCEEDED"):
        with self.changed:
            if self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                return self.values[key]
        raise jax.errors.JaxRuntimeError(f"{otherwise}: {key}")

    def key_value_delete(self, key):
        with self.changed:
            self.values = {name: value for name, value in self.values.items() if not name.startswith(f"{key}/")}


@pytest.fixture
def processes(monkeypatch):
    """The service, and three processes of which each is at the start of a run."""
    jax.devices()  # JAX's own use of its client comes before it is replaced
    service, made = _Service(), []
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for index in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(processes_module.distributed.global_state, "client", service)
            patch.setattr(jax, "process_index", lambda index=index: index)
            patch.setattr(processes_module, "_checkpointers", iter([0]))
            made.append(processes_module.Processes(timeout=0.8))
            made[-1].exchange("start")
    return service, made


def _in_each(processes, function):
    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(function, processes))


def test_exchanges_are_agreed_on_and_forgotten(processes):
    service, made = processes

    def agree(process):
        answers = []
        for step in range(5):
            with process.exchange(f"save of step {step}") as exchange:
                answers.append(exchange.gather("found", [process.index, step]))
                answers.append(exchange.decide("newest", lambda step=step: 10 * process.index + step))
        return answers

    expected = [answer for step in range(5) for answer in ([[0, step], [1, step], [2, step]], step)]
    assert _in_each(made, agree) == [expected] * 3
    assert {int(key.split("/")[3]) for key in service.values} == {4, 5}


def test_a_slow_process_is_waited_for_and_a_silent_one_is_not(processes):
    _, (first, second, _) = processes
    exchange, other = first.exchange("save of step 1"), second.exchange("save of step 1")

    def work():
        with other.busy():
            time.sleep(2)  # more than twice the timeout
        other.say("part", "done")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work)
        assert exchange.hear(1, "part") == "done"
    start = time.monotonic()
    with pytest.raises(PeerProblem, match=r"process 2 gave no sign of life for 0.8 s \(timeout=0.8\) in the save"):
        exchange.hear(2, "part")
    assert 0.8 <= time.monotonic() - start < 4


def test_what_fails_one_process_reaches_all_in_its_words(processes):
    def save(process):
        with process.exchange("save of step 1") as exchange:
            if process.index == 2:
                raise OSError(28, "No space left on device")
            exchange.gather("found", None)

    def fail(process):
        with pytest.raises((PeerProblem, OSError)) as caught:
            save(process)
        return str(caught.value)

    words = "process 2 failed: OSError(28, 'No space left on device')"
    assert _in_each(processes[1], fail) == [words, words, "[Errno 28] No space left on device"]


def test_a_service_that_is_gone_is_named(processes, monkeypatch):
    service, (first, _, _) = processes
    exchange = first.exchange("save of step 1")

    def unavailable(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses\nmore")

    monkeypatch.setattr(service, "blocking_key_value_get", unavailable)
    with pytest.raises(PeerProblem, match=r"service, which runs in process 0, does not answer \(UNAVAILABLE: fai"):
        exchange.hear(1, "part")


def _write_in_each(processes, roots, step):
    def write(process, root):
        state = {"w": np.full(3, step), "b": np.arange(4.0)}
        writer = StepWriter(StepDirectory(root), ArrayStore(), keep=None, keep_every=None)
        try:
            writer.write(process.exchange(f"save of step {step}"), step, snapshot(state), {})
        except PeerProblem as problem:
            return str(problem)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(write, processes, roots))


def test_a_directory_that_is_not_shared_is_named(processes, tmp_path):
    _, made = processes
    shared, other = tmp_path / "shared", tmp_path / "other"
    assert _write_in_each(made, [shared] * 3, 1) == [None] * 3
    found = _write_in_each(made, [shared, shared, other], 2)
    assert f"process 2 does not see {other / '.building-2-'}" in found[2]
    assert "must be on a file system that all processes share" in found[2]
    assert found == [found[2]] * 3  # in the words of the process that cannot see it
    assert StepDirectory(shared).committed() == [1]
    assert sorted(path.name for path in (shared / "1").iterdir()) == ["fp4jax.json", "part.0", "part.1", "part.2"]
