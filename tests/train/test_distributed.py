"""Two processes of four CPU devices train as one process of eight, save together, and do not outlive each other."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from micro import write_text

from fp4jax.cli import INTERRUPTED, main
from fp4jax.train import distributed
from fp4jax.train.checkpoint import Checkpointer
from fp4jax.train.config import DistributedOptions
from fp4jax.train.errors import ConfigError
from fp4jax.train.loop import AGREE_EVERY
from fp4jax.train.metrics import read_metrics

SCRIPT = Path(__file__).with_name("train_process.py")
SHAPE = [
    "--num-layers", "1", "--embed-dim", "32", "--num-heads", "2", "--mlp-dim", "32", "--batch-size", "8", "--seq-len",
    "16", "--eval-batches", "1", "--no-tensorboard", "--mesh", "data=2,fsdp=2,tensor=2", "--recipe", "fp4",
]  # fmt: skip


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def start(flags: list[str], out: Path) -> list[subprocess.Popen]:
    """Both processes, their output in files beside `out`."""
    port = str(free_port())
    flags_of_xla = "--xla_force_host_platform_device_count=4 --xla_allow_excess_precision=false"  # see conftest.py
    environment = {**os.environ, "XLA_FLAGS": flags_of_xla, "JAX_PLATFORMS": "cpu"}
    processes = []
    for index in range(2):
        command = [sys.executable, str(SCRIPT), str(index), port, *flags, "--out", str(out)]
        with out.with_suffix(f".{index}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return processes


def output(out: Path, index: int) -> str:
    return out.with_suffix(f".{index}.log").read_text(errors="replace")


def losses(folder: Path) -> dict[tuple[str, int], float]:
    return {(row["kind"], row["step"]): row["loss"] for row in read_metrics(folder)}


@pytest.mark.slow
def test_two_processes_train_as_one_and_one_goes_on_from_two(tmp_path):
    text = ["--text", *map(str, write_text(tmp_path))]
    flags = [*SHAPE, *text, "--steps", "4", "--eval-every", "2", "--save-every", "2"]
    pair, one = tmp_path / "pair", tmp_path / "one"
    processes = start(flags, pair)
    assert main(["train", *flags, "--out", str(one)]) == 0
    for index, process in enumerate(processes):
        assert process.wait(timeout=240) == 0, output(pair, index)
    assert losses(pair).keys() == losses(one).keys()
    for place, loss in losses(one).items():
        np.testing.assert_allclose(losses(pair)[place], loss, rtol=2e-6)
    assert json.loads((pair / "summary.json").read_text())["loss"] == losses(pair)["validation", 4]

    with Checkpointer(pair / "checkpoints") as checkpointer:
        assert checkpointer.steps() == [2, 4]
    # Steps 3 and 4 again, from what the two saved, as one process on another mesh.
    other = [flag if flag != "data=2,fsdp=2,tensor=2" else "data=4,fsdp=2" for flag in flags]
    assert main(["train", *other, "--out", str(pair), "--resume-step", "2"]) == 0
    for place, loss in losses(one).items():
        np.testing.assert_allclose(losses(pair)[place], loss, rtol=2e-3)


@pytest.mark.slow
def test_a_process_that_dies_takes_the_other_with_it(tmp_path):
    text = ["--text", *map(str, write_text(tmp_path))]
    out = tmp_path / "run"
    processes = start([*SHAPE, *text, "--steps", "100000", "--eval-every", "5"], out)

    def training() -> bool:
        metrics = out / "metrics.jsonl"
        return metrics.exists() and '"validation"' in metrics.read_text()

    try:
        began = time.monotonic()
        while not training() and time.monotonic() - began < 200:
            time.sleep(0.5)
        assert training(), output(out, 0)
        processes[1].send_signal(signal.SIGKILL)
        code = processes[0].wait(timeout=distributed.SILENCE_SECONDS + 60)
    finally:
        for process in processes:
            process.kill()
    assert code != 0
    # Either a collective fails at once, or the silence is noticed.
    assert "start all of them again with --resume" in output(out, 0), output(out, 0)[-2000:]


@pytest.mark.slow
def test_a_signal_to_one_process_stops_and_saves_both(tmp_path):
    """They agree on the step, and none waits for a collective of the other."""
    text = ["--text", *map(str, write_text(tmp_path))]
    out = tmp_path / "run"
    processes = start([*SHAPE, *text, "--steps", "100000", "--eval-every", "20", "--eval-batches", "1"], out)
    try:
        began = time.monotonic()
        while not read_metrics_if_any(out) and time.monotonic() - began < 200:
            time.sleep(0.5)
        processes[1].send_signal(signal.SIGINT)
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [INTERRUPTED, INTERRUPTED], output(out, 0)[-2000:]
    with Checkpointer(out / "checkpoints") as checkpointer:
        (step,) = checkpointer.steps()
    assert step % AGREE_EVERY == 0
    assert f"interrupted fp4 after step {step}, and saved; to go on:" in output(out, 0)
    assert max(row["step"] for row in read_metrics(out)) == step


def read_metrics_if_any(folder: Path) -> list:
    """Rows that process 0 has flushed; there are some once a file of metrics has any."""
    return read_metrics(folder) if (folder / "metrics.jsonl").exists() else []


def test_a_coordinator_needs_a_port():
    with pytest.raises(ConfigError, match="coordinator='node0' must be host:port, such as node0:1234"):
        distributed.start(DistributedOptions(coordinator="node0", num_processes=2, process_id=0))


def test_one_process_needs_nobody():
    distributed.start(DistributedOptions())
    assert distributed.is_main()
    assert distributed.on_main(lambda: "here") == "here"
    assert distributed.any_process(True)
    assert not distributed.any_process(False)
    with distributed.Watch():
        pass
