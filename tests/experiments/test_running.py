"""Pieces run, are saved, found again, shared between processes and reported, all on a CPU in seconds."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console
from small_experiment import small

from experiments import base, probes, report, running, store
from experiments.base import ROOT
from experiments.catalog import EXPERIMENTS
from experiments.experiment import Claim, Piece
from experiments.headline import speed
from experiments.optimizers import set_lanes
from fp4jax.recipes import RECIPES
from fp4jax.train.arm import Text
from fp4jax.train.data import DataOptions
from fp4jax.train.errors import ConfigError
from fp4jax.train.optimizer import OPTIMIZERS

LABELS = ("bf16", "by token")


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Programs that run for three steps are not worth optimizing."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def say():
    return Console(file=io.StringIO(), width=400)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Two arms of an experiment at a micro size: its root, the experiment, and what was said."""
    root, experiment, console = tmp_path_factory.mktemp("experiments"), small(EXPERIMENTS["occ"]), say()
    (root / "occ").mkdir()
    (root / "occ" / "README.md").write_text((ROOT / "occ" / "README.md").read_text(encoding="utf-8"))
    pieces = [piece for piece in experiment.pieces() if piece.arm.label in LABELS]
    assert running.run(pieces, console, root=root) == []
    return root, experiment, console.file.getvalue()


def test_a_record_holds_every_seed_and_its_circumstances(ran):
    root, experiment, said = ran
    found = store.stored(experiment, root=root)
    assert list(found) == list(LABELS)
    lanes = found["bf16"]
    assert lanes.seeds == (0, 1)
    assert lanes.final().shape == (2,)
    assert np.isfinite(lanes.validation()).all()
    assert lanes.validation_steps.tolist() == [2, 3]
    assert lanes.curve("loss")[1].shape == (2, 3)
    assert lanes.final()[0] != lanes.final()[1]
    record = lanes.record
    assert {"command", "date", "hardware", "versions", "corpus", "identity"} <= set(record)
    assert sum(record["validation_tokens"].values()) == 2 * 4 * 32
    assert "occ/bf16 at 9M: " in said


def test_weights_and_activations_are_measured_at_every_validation(ran):
    root, experiment, _ = ran
    lanes = store.stored(experiment, root=root)["bf16"]
    steps, histogram = lanes.probe("weights", "histogram")
    assert steps.tolist() == [2, 3]
    assert histogram.shape == (2, 2, probes.BINS)
    np.testing.assert_allclose(histogram.sum(axis=-1), 1, rtol=1e-5)
    steps, flipped = lanes.probe("weights", "flipped")
    assert steps.tolist() == [2]
    assert ((flipped > 0) & (flipped < 0.5)).all()
    _, peak = lanes.probe("activations", "down", "peak")
    assert peak.shape == (2, 2, 1)
    assert (peak > 1).all()
    assert (lanes.probe("activations", "down", "snr_occ")[1] > lanes.probe("activations", "down", "snr")[1]).all()


def test_what_has_run_is_not_run_again(ran):
    root, experiment, _ = ran
    console = say()
    assert running.run([experiment.pieces()[0]], console, root=root) == []
    assert console.file.getvalue() == ""


def test_a_piece_that_would_not_fit_is_not_started(ran):
    root, experiment, _ = ran
    console = say()
    left = running.run([experiment.pieces()[1]], console, running.Limits(seconds=5, tokens_per_second=10), root)
    assert [piece.arm.label for piece in left] == ["no OCC"]
    assert "occ/no OCC at 9M: needs about 77 s, 5 s are left" in console.file.getvalue()


def test_a_missing_text_is_named(ran, tmp_path):
    root, experiment, _ = ran
    settings = dataclasses.replace(experiment.settings["9M"], data=DataOptions(text=(tmp_path / "english",)))
    piece = Piece(dataclasses.replace(experiment, settings={"9M": settings}), experiment.arms[1])
    with pytest.raises(ConfigError, match=r"no text at '.*english': prepare it as docs/experiments.md says"):
        running.run([piece], say(), root=root)
    assert not list(root.glob(".*.claim"))


def test_a_piece_of_another_process_is_left_to_it(ran):
    root, experiment, _ = ran
    piece = experiment.pieces()[1]
    with store.claim(piece, root) as mine, store.claim(piece, root) as again:
        assert mine
        assert not again
        assert [left.arm.label for left in running.run([piece], say(), root=root)] == ["no OCC"]
    child = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    claim = root / f".{piece.key[:16]}.claim"
    claim.write_text(child.stdout.decode())  # of a process that is gone
    with store.claim(piece, root) as mine:
        assert mine
        assert claim.read_text() == str(os.getpid())
    assert not claim.exists()


def test_registries_are_as_before(ran):
    assert "adamw_lanes" not in OPTIMIZERS
    assert "fp4_vector_gradient" not in RECIPES


def test_the_report_names_what_ran_and_what_did_not(ran):
    root, experiment, _ = ran
    few = report.report(experiment, root).read_text()
    assert "\n\nOnly bf16 and by token have run, and no claim can be tested.\n\n" in few
    assert not (root / "occ" / "figure.png").exists()
    claims = (*experiment.claims, Claim("4 bits cost something", "bf16", "by token"))
    experiment = dataclasses.replace(experiment, claims=claims)
    readme = report.report(experiment, root)
    made = report.marked(readme.read_text())
    assert f"**Question.** {experiment.question}" in made
    assert "| no OCC | `w8a4:alpha=none` | not run |" in made
    assert "Not run: no OCC; α = .99; " in made
    assert "| compensation matters | not run |" in made
    assert "## 9M: 0.0M parameters, 0.00M bytes a run, xla backend, " in made
    assert "2 arms, seeds 0, 1; steps of 128; " in made
    assert (root / "occ" / "figure.png").stat().st_size > 10_000
    before = readme.read_text()
    report.report(experiment, root)
    assert readme.read_text() == before
    readme.write_text("no markers")
    with pytest.raises(ConfigError, match=r"occ/README.md must hold the two markers of the report once each"):
        report.report(experiment, root)
    readme.write_text(before)


def test_results_of_different_texts_and_damaged_ones_are_refused(ran, tmp_path):
    root, experiment, _ = ran
    (tmp_path / "occ" / "results").mkdir(parents=True)
    for number, path in enumerate(sorted((root / "occ" / "results").glob("*.json"))):
        record = {**json.loads(path.read_text()), "corpus": f"{number}"}
        (tmp_path / "occ" / "results" / path.name).write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="'occ': its results are of different texts and do not compare"):
        store.stored(experiment, root=tmp_path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no record of results"):
        store.read(path)


@pytest.mark.parametrize("name", ["dge", "granularity", "optimizer", "backward"])
def test_the_train_step_of_the_last_arm_can_be_traced(name):
    """The other experiments have no kind of arm that these, `ran` and the lanes do not have."""
    piece = small(EXPERIMENTS[name]).pieces()[-1]
    arm = running.build(piece, Text.load(DataOptions()))
    tokens = jax.ShapeDtypeStruct((len(piece.lanes), 4, 33), "int32")
    state, metrics = jax.eval_shape(arm.train_step, arm.abstract_state, tokens)
    assert metrics["loss"].shape == (len(piece.lanes),)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, arm.abstract_state)


def test_the_speed_of_a_step_is_measured_and_shown(tmp_path, monkeypatch):
    monkeypatch.setitem(base.SIZES, "micro", small(EXPERIMENTS["headline"]).settings["9M"])
    monkeypatch.setattr("experiments.base.SEEDS", (0, 1))
    monkeypatch.setattr(speed, "RESULTS", tmp_path)
    monkeypatch.setattr(speed, "TIMED", 2)
    speed.main(speed.Options(size="micro", recipes=("bf16",)))
    row = json.loads((tmp_path / "speed-micro.json").read_text())["recipes"]["bf16"]
    assert row["tokens_per_second"] == pytest.approx(2 * 4 * 32 / row["milliseconds"] * 1e3)
    assert row["memory"] > 0
    assert f"| `bf16` | {row['milliseconds']:.1f} | " in speed.table()


def test_lanes_multiply_the_learning_rate():
    """Two lanes of one seed: a first step with half the rate makes half the update."""
    experiment = small(EXPERIMENTS["rates"])
    experiment = dataclasses.replace(experiment, seeds=(0,), learning_rates={"9M": (1e-3, 5e-4)})
    piece = experiment.pieces("9M")[0]
    assert piece.lanes == ((0, 1e-3), (0, 5e-4))
    built = running.build(piece, Text.load(DataOptions()))
    start = jax.tree.map(np.asarray, built.init().params)
    state = set_lanes(built.init(), (1.0, 0.5))
    batches = built.batches(0)
    state, _ = built.train_step(state, next(batches))
    batches.close()
    moved = jax.tree.map(lambda new, old: np.asarray(new) - old, state.params, start)
    whole, half = (np.concatenate([leaf[i].ravel() for leaf in jax.tree.leaves(moved)]) for i in (0, 1))
    assert np.abs(whole).max() > 1e-6
    np.testing.assert_allclose(half, whole / 2, rtol=1e-2, atol=1e-8)
