"""`train`: resume is bit-equal to never having stopped, metrics hold each step once, Ctrl-C saves."""

import dataclasses
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from micro import assert_bit_equal, flags, train_config
from rich.console import Console

import fp4jax
import fp4jax.train.arm
from fp4jax.cli import main
from fp4jax.recipes import RECIPES
from fp4jax.train.arm import Arm, Text
from fp4jax.train.checkpoint import Checkpointer
from fp4jax.train.config import CheckpointOptions
from fp4jax.train.display import Display, Progress
from fp4jax.train.errors import ConfigError
from fp4jax.train.job import CHECKPOINTS, train
from fp4jax.train.loop import Interrupted, StopSignal, Stopwatch
from fp4jax.train.metrics import FILE, read_metrics
from fp4jax.train.step import METRICS

pytestmark = pytest.mark.usefixtures("program_cache")

STEPS = 6


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def noisy() -> fp4jax.Recipe:
    fp4 = fp4jax.recipes.fp4()
    weight = dataclasses.replace(fp4.fprop.rhs, rounding=fp4jax.STOCHASTIC)
    return dataclasses.replace(fp4, name="noisy", fprop=fp4jax.Gemm(fp4.fprop.lhs, weight))


@pytest.fixture(scope="module")
def noisy_recipe():
    """A recipe that draws noise, so that a resume must also find its place in the streams."""
    RECIPES["noisy"] = noisy
    yield
    del RECIPES["noisy"]


@pytest.fixture(scope="module")
def wholes(noisy_recipe, paths, tmp_path_factory):
    """By `accumulate`: folder, result and output of a run that was never stopped."""

    @functools.cache
    def whole(accumulate: int):
        out = tmp_path_factory.mktemp("runs") / "whole"
        console = quiet()
        config = dataclasses.replace(train_config(paths, out, accumulate=accumulate), recipe="noisy")
        folder, result = train(config, console)
        return folder, result, console.file.getvalue()

    return whole


@pytest.fixture(scope="module")
def whole(wholes):
    """The run with one microbatch."""
    return wholes(1)


def final_state(folder, recipe: str, paths):
    """The last checkpoint, as arrays."""
    config = train_config(paths, folder).resolved()
    arm = Arm(config, recipe, (0,), Text.load(config.data))
    with Checkpointer(folder / CHECKPOINTS) as checkpointer:
        state, metadata = checkpointer.restore(arm.abstract_state, STEPS)
    assert metadata == {"settings": metadata["settings"], "corpus": arm.text.fingerprint}
    assert metadata["settings"]["recipe"] == recipe
    return state


def measured(folder) -> list[dict]:
    """The rows without what the clock says."""
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in read_metrics(folder)]


def stop_at(monkeypatch, step: int, how) -> None:
    """Call `how` once the loop shows `step`."""
    original = Progress.set

    def patched(self, status, number, event=""):
        original(self, status, number, event)
        if number == step and status == "training" and not event:
            how()

    monkeypatch.setattr(Progress, "set", patched)


def test_a_run_leaves_everything_in_its_folder(whole):
    folder, result, output = whole
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "checkpoints", "curves.png", "summary.json"
    }  # fmt: skip
    rows = read_metrics(folder, "train")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(set(METRICS) <= set(row) for row in rows)
    validations = read_metrics(folder, "validation")
    assert [row["step"] for row in validations] == [3, 6]
    assert set(validations[0]["sources"]) == {"ahab", "ishmael"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["loss"] == result.loss == pytest.approx(validations[-1]["loss"])
    assert summary["skipped"] == 0
    assert {"command", "date", "hardware", "versions", "by_source", "parameters"} <= set(summary)
    assert "noisy" in output
    assert "bits per byte" in output
    assert result.tokens_per_second > 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_interrupted_run_goes_on_bit_for_bit(wholes, noisy_recipe, paths, tmp_path, monkeypatch, accumulate):
    """Stopped by a real SIGINT after step 5, where no checkpoint was due, between two validations."""
    before = signal.getsignal(signal.SIGINT)  # a job in the background inherits SIG_IGN
    folder, result, _ = wholes(accumulate)
    config = dataclasses.replace(train_config(paths, tmp_path / "run", accumulate=accumulate), recipe="noisy")
    with monkeypatch.context() as patch:
        stop_at(patch, 5, lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match="interrupted noisy after step 5") as caught:
            train(config, quiet())
    assert caught.value.folder == tmp_path / "run"
    assert signal.getsignal(signal.SIGINT) is before
    assert [row["step"] for row in read_metrics(tmp_path / "run", "train")] == [1, 2, 3, 4, 5]
    # Rows of steps that no checkpoint holds, as a kill leaves them: the resume must not keep them.
    with (tmp_path / "run" / FILE).open("a") as file:
        file.write('{"kind": "train", "step": 6, "loss": 99.0}\n{"kind": "tra')
    resume = dataclasses.replace(config, checkpoint=CheckpointOptions(save_every=4, resume=True))
    console = quiet()
    _, resumed = train(resume, console)
    assert "resumed after step 5" in console.file.getvalue()
    assert measured(tmp_path / "run") == measured(folder)
    assert resumed.loss == result.loss
    assert_bit_equal(final_state(tmp_path / "run", "noisy", paths), final_state(folder, "noisy", paths))


def test_a_finished_run_resumes_to_the_same_result(whole, noisy_recipe, paths):
    folder, result, _ = whole
    before = (folder / FILE).read_bytes()
    config = dataclasses.replace(train_config(paths, folder, resume=True), recipe="noisy")
    console = quiet()
    _, again = train(config, console)
    said = console.file.getvalue()
    assert "resumed after step 6, the last: nothing is left to do (--steps is 6), this is its result\n" in said
    assert "–" not in said
    assert f"step 6/6  validation {result.loss:.3f}  done\n" in said
    assert (again.loss, again.by_source) == (result.loss, result.by_source)
    assert np.isnan(again.tokens_per_second)
    assert (folder / FILE).read_bytes() == before


def test_a_resume_with_another_recipe_is_refused(whole, paths):
    folder, *_ = whole
    with pytest.raises(ConfigError, match="recipe: noisy there, bf16 here"):
        train(dataclasses.replace(train_config(paths, folder, resume=True), recipe="bf16"), quiet())


RUN = """
import os, sys
from fp4jax.train.display import Progress
from fp4jax.cli import main
original, stop = Progress.set, int(sys.argv.pop(1))
def set_(self, status, number, event=""):
    original(self, status, number, event)
    if number == stop and status == "training":
        os._exit(9)  # as kill -9 does: nothing is flushed, nothing is closed
Progress.set = set_
sys.exit(main())
"""


def test_a_killed_process_and_a_new_one_equal_a_run_in_one(paths, tmp_path):
    """Killed at step 5; a new process goes on from the checkpoint of step 4 (or 2: saving is asynchronous)."""

    def run(*options: str, stop: int = 0) -> int:
        out = ["--save-every", "2", "--out", str(tmp_path / "killed")]
        words = [str(stop), "train", "--recipe", "bf16", *flags(train_config(paths)), *out, *options]
        command = [sys.executable, "-c", RUN, *words]
        return subprocess.run(command, env={**os.environ}, timeout=300, capture_output=True, text=True).returncode

    assert run(stop=5) == 9
    assert run("--resume") == 0
    console = quiet()  # a resume where there is nothing yet starts anew, and says so
    config = train_config(paths, tmp_path / "whole", resume=True)
    train(dataclasses.replace(config, recipe="bf16"), console)
    assert "no checkpoint yet: starting at step 0" in console.file.getvalue()
    assert measured(tmp_path / "killed") == measured(tmp_path / "whole")
    assert_bit_equal(final_state(tmp_path / "killed", "bf16", paths), final_state(tmp_path / "whole", "bf16", paths))


def test_the_advice_on_a_damaged_checkpoint_works(paths, tmp_path, capsys):
    """The newest step is damaged: the command line says what to add, and with it the run comes to the same end."""

    def run(*options: str) -> tuple[int, str, str]:
        words = ["train", "--recipe", "bf16", *flags(train_config(paths)), "--save-every", "2"]
        code = main([*words, "--out", str(folder), *options])
        return code, *capsys.readouterr()

    folder = tmp_path / "run"
    assert run()[0] == 0
    before, state = measured(folder), final_state(folder, "bf16", paths)
    largest = max((folder / CHECKPOINTS / "6" / "state").rglob("*"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    with (folder / FILE).open("a") as file:
        file.write('{"kind": "train", "step": 7, "loss": 99.0}\n')
    code, _, errors = run("--resume")
    assert (code, errors.count("\n")) == (2, 1)
    assert "step 6 at " in errors
    advice = re.search(r"pass (--resume-step 4) / step=4$", errors)
    assert advice, errors
    code, output, _ = run("--resume", *advice[1].split())
    assert code == 0
    assert "resumed after step 4" in output
    assert measured(folder) == before
    assert_bit_equal(final_state(folder, "bf16", paths), state)  # of the step 6 that took the damaged one's place
    assert run("--resume")[0] == 0
    shutil.rmtree(folder / CHECKPOINTS / "4")
    code, _, errors = run("--resume-step", "4")
    assert code == 2
    assert re.fullmatch(r"fp4jax: resume_step=4: there is no step 4 in .*; it holds steps 2, 6\n", errors), errors


@pytest.mark.parametrize("limit", [0, 2])
def test_the_validated_tokens_do_not_depend_on_accumulate(paths, limit):
    """Of a split that has more windows than `limit` batches take; microbatches are validated one by one."""
    seen = {}
    for accumulate in (1, 2, 4):
        config = train_config(paths, accumulate=accumulate, eval_batches=limit).resolved()
        arm = Arm(config, "bf16", (0,), Text.load(config.data))
        batches = list(arm._validation)
        assert batches[0]["tokens"].shape == (4 // accumulate, 17)
        joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        seen[accumulate] = {name: rows[joined["weights"].any(axis=1)] for name, rows in joined.items()}
        if limit:
            assert len(seen[accumulate]["tokens"]) == 4 * limit
    assert_bit_equal(seen[2], seen[1])
    assert_bit_equal(seen[4], seen[1])


def test_a_restored_state_needs_no_new_program(paths, tmp_path):
    config = train_config(paths).resolved()
    arm = Arm(config, "bf16", (0,), Text.load(config.data))
    batches = arm.batches(0)
    state, _ = arm.train_step(arm.init(), next(batches))
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored, _ = checkpointer.restore(arm.abstract_state)
    state, first = arm.train_step(state, tokens := next(batches))
    again, second = arm.train_step(restored, tokens)
    batches.close()
    assert arm.train_step._cache_size() == 1
    assert_bit_equal((again, second), (state, first))


def test_deterministic_reaches_every_program(paths, monkeypatch):
    """The flags are XLA's own, and a flag that XLA does not know would stop the first program that compiles."""
    flags = dict(fp4jax.train.arm.DETERMINISTIC)
    assert jax.jit(lambda x: x + 1, compiler_options=flags)(1) == 2
    config = train_config(paths, deterministic=True).resolved()
    monkeypatch.setattr("fp4jax.train.arm.DETERMINISTIC", {"xla_no_such_flag": True})
    arm = Arm(config, "bf16", (0,), Text.load(config.data))
    for program in (arm.init, lambda: arm.train_step(arm.abstract_state, jax.ShapeDtypeStruct((4, 17), np.int32))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_flag"):
            program()


def test_debug_nans_finds_the_operation(paths):
    """Under jax_debug_nans nothing is donated, so that JAX can run the step again and name the culprit."""
    config = train_config(paths).resolved()
    with jax.debug_nans(True):
        arm = Arm(config, "bf16", (0,), Text.load(config.data))
        bad = np.full((4, 17), arm.text.vocab_size, np.int32)
        with pytest.raises(FloatingPointError, match="nan"):
            arm.train_step(arm.init(), bad)


def test_layers_that_do_not_exist_are_named(paths):
    config = train_config(paths).resolved()
    config = dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, high_precision="haed"))
    with pytest.raises(ConfigError, match=r"'haed' matches no layer; did you mean 'head'\?") as caught:
        Arm(config, "fp4", (0,), Text.load(config.data))
    assert "\n" not in str(caught.value)


def test_an_unknown_backend_is_refused(paths):
    config = train_config(paths).resolved()
    config = dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, backend="tpu"))
    with pytest.raises(ConfigError, match=r"backend='tpu' is unknown; there are 'hopper', 'xla'"):
        Arm(config, "fp4", (0,), Text.load(config.data))
    config = dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, backend="hopper"))
    with pytest.raises(
        ConfigError, match=r"backend='hopper' does not support recipe 'fp4' here: the device is no H100"
    ):
        Arm(config, "fp4", (0,), Text.load(config.data))


def test_only_the_first_signal_waits():
    with StopSignal() as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_a_thread_signals_are_left_alone():
    before, inside = signal.getsignal(signal.SIGINT), []

    def work():
        with StopSignal() as stop:
            inside.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [(False, before)]


def test_the_stopwatch_counts_training_alone(monkeypatch):
    now = iter([0.0, 2.0, 10.0, 11.0, 11.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    watch.add(1000)  # before the start: the step that compiled
    assert np.isnan(watch.tokens_per_second)
    watch.start()  # 0
    watch.add(100)
    watch.stop()  # 2
    watch.start()  # 10
    watch.add(200)
    assert watch.tokens_per_second == 100  # at 11: 300 tokens in 2 + 1 seconds


def test_lines_replace_the_table_where_there_is_no_terminal():
    console = quiet()
    with Display(console, ["fp4"], steps=10) as display:
        progress = display.progress["fp4"]
        progress.set("compiling", 0)
        progress.loss, progress.validation, progress.tokens_per_second, progress.skipped = 2.5, 2.25, 1234.5, 1.0
        progress.set("training", 5)  # no line of its own so soon after the last
        progress.set("training", 6, event="validation")
        progress.set("done", 10)
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "fp4  compiling the step (10 to do)",
        "fp4  step  6/10  loss 2.500  validation 2.250  1,234 tokens/s  1 skipped",
        "fp4  step 10/10  loss 2.500  validation 2.250  1,234 tokens/s  1 skipped  done",
    ]


def test_a_line_now_and_then_but_not_while_something_else_goes_on(monkeypatch):
    now = iter([0.0, 20.0, 40.0, 60.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    console = quiet()
    with Display(console, ["fp4"], steps=10) as display:
        progress = display.progress["fp4"]
        for status in ("training", "validating", "saving"):
            progress.set(status, 5)
    assert console.file.getvalue().splitlines() == ["fp4  step  5/10  loss –  – tokens/s"]


def test_a_terminal_gets_a_live_table():
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with Display(console, ["bf16", "fp4:alpha=0.999"], steps=10) as display:
        progress = display.progress["fp4:alpha=0.999"]
        progress.loss, progress.tokens_per_second = 2.5, 1234.5
        progress.set("training", 5)
    output = console.file.getvalue()
    for text in ("recipe", "tokens/s", "skipped", "fp4:alpha=0.999", "5/10", "2.500", "1,234", "waiting"):
        assert text in output
