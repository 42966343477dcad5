"""`fp4jax sensitivity` on a run of the micro model, and on a fresh tiny one."""

import io
import json
import math

import matplotlib.figure
import matplotlib.image
import micro
import numpy as np
import pytest
from rich.console import Console

from fp4jax.cli import main
from fp4jax.train import sensitivity as module
from fp4jax.train.compose import recipe_rules
from fp4jax.train.errors import ConfigError
from fp4jax.train.evaluate import score
from fp4jax.train.job import train
from fp4jax.train.model_files import open_model, read_text
from fp4jax.train.naming import parse_recipe
from fp4jax.train.sensitivity import SensitivityConfig, sensitivity, sensitivity_table

QUIET = Console(quiet=True)
BATCHES = {"batch_size": 2, "max_tokens": 96}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a trained micro model."""
    folder = tmp_path_factory.mktemp("sensitivity")
    paths = micro.write_text(folder)
    out, _ = train(micro.train_config(paths, folder / "run"), QUIET)
    return out


def loss_under(run, recipe, high_precision):
    model = open_model(str(run))
    rules = recipe_rules(parse_recipe(recipe), high_precision)
    scores = score(model.config, model.params, rules, read_text(model), seq_len=model.seq_len, **BATCHES)
    return scores["all"].loss


def test_the_ends_and_a_kind_of_layer_are_the_losses_that_rules_give(run):
    result = sensitivity(SensitivityConfig(model=str(run), recipe="fp4_direct", by="kind", **BATCHES), QUIET)
    assert result.high_precision_loss == pytest.approx(loss_under(run, "bf16", "embed|head"), rel=1e-6)
    assert result.quantized_loss == pytest.approx(loss_under(run, "fp4_direct", "embed|head"), rel=1e-6)
    down = next(row for row in result.layers if row.layer == "mlp.down")
    assert down.loss == pytest.approx(loss_under(run, "fp4_direct", r"^(?!.*mlp\.down)"), rel=1e-6)
    assert down.change == pytest.approx(down.loss - result.high_precision_loss, abs=1e-6)
    assert len(result.layers) == 7
    assert all(row.error > 0 for row in result.layers)


def test_layers_are_ranked_and_written(run, tmp_path, capsys):
    out = tmp_path / "out"
    words = [str(run), "--recipe", "fp4_direct", "--leave-one-out", "--batch-size", "2", "--max-tokens", "96"]
    assert main(["sensitivity", *words, "--top", "3", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "fp4_direct, all layers but one quantized" in shown
    assert "11 less sensitive not shown" in shown
    record = json.loads((out / "sensitivity.json").read_text())
    layers = record["layers"]
    assert len(layers) == 14  # 7 layers of 2 blocks
    assert [row["change"] for row in layers] == sorted((row["change"] for row in layers), reverse=True)
    assert layers[0]["layer"] in shown
    for row in layers:  # what is won back by leaving it out
        assert row["change"] == pytest.approx(record["quantized_loss"] - row["loss"], abs=1e-6)
    assert record["settings"]["leave_one_out"] is True
    assert record["command"].startswith("fp4jax")
    assert matplotlib.image.imread(out / "sensitivity.png").std() > 0.05


def test_a_fresh_tiny_model_is_trained_first(monkeypatch, tmp_path):
    # One block of the tiny model: what is trained is the preset's, and that takes a minute.
    paths = micro.write_text(tmp_path)
    monkeypatch.setattr(module, "ModelOptions", lambda: micro.MODEL)
    config = SensitivityConfig(text=paths, train_steps=1, by="block", seq_len=16, **BATCHES)
    result = sensitivity(config, QUIET)
    assert result.model == "tiny, 1 steps"
    assert {row.layer for row in result.layers} == {"block 0", "block 1"}
    assert 4 < result.high_precision_loss < 7  # near log 256


def test_a_loss_that_is_not_finite_ranks_first():
    change, error = module._paired(np.array([1.0, 2.0]), np.array([math.nan, 2.0]), np.array([3.0, 3.0]))
    assert math.isnan(change)
    assert math.isnan(error)
    rows = [
        module.Sensitivity("a", "a", 0, 1.0, 0.5, 0.1),
        module.Sensitivity("b", "b", 0, math.nan, math.nan, math.nan),
    ]
    result = module.SensitivityResult("m", 1.0, math.nan, 6, tuple(sorted(rows, key=module.by_change)))
    assert [row.layer for row in result.layers] == ["b", "a"]
    assert sensitivity_table(result, SensitivityConfig()).row_count == 2


def shown(gap, *, gap_error=math.nan, error=math.nan):
    """The table of two layers under a recipe that costs `gap` in all, in one line."""
    layers = tuple(
        module.Sensitivity(f"mlp.up[{i}]", "mlp.up", i, 2.0, change, error) for i, change in enumerate((0.02, -0.01))
    )
    result = module.SensitivityResult("m", 2.0, 2.0 + gap, 64, layers, gap_error)
    stream = io.StringIO()
    Console(file=stream, width=100).print(sensitivity_table(result, SensitivityConfig()))
    return " ".join(stream.getvalue().split())


@pytest.mark.parametrize(
    ("gap", "gap_error", "reason"),
    [
        (-0.05, 0.01, "The gap is not positive, so that there are no shares of it."),
        (0.0, 0.01, "The gap is not positive, so that there are no shares of it."),
        (0.0009, 0.0001, "The gap is below 0.001 nats, too small for shares of it."),
        (0.05, 0.03, "The gap is less than two standard errors, too uncertain for shares of it."),
    ],
)
def test_a_gap_that_is_noise_has_no_shares(gap, gap_error, reason):
    text = shown(gap, gap_error=gap_error, error=0.003)
    assert reason in text
    assert "share of the gap" not in text
    assert f"a gap of {gap:+.4f} ± {gap_error:.4f}." in text


def test_shares_are_of_a_gap_that_is_none():
    text = shown(0.05, gap_error=0.01, error=0.003)
    assert "share of the gap (%)" in text
    assert "40.0" in text
    assert "± is the standard error over batches." in text
    assert "±" not in shown(0.05)  # one batch has no standard error


def test_the_colors_of_one_row_have_their_whole_label(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, _: figures.append(figure))
    layers = tuple(module.Sensitivity(f"block {i}", "", i, 2.0, 0.01 * i, 0.001) for i in range(4))
    result = module.SensitivityResult("runs/mine, step 300", 2.0, 2.1, 64, layers)
    for leave_one_out in (False, True):
        module._write(result, SensitivityConfig(by="block", out=tmp_path, leave_one_out=leave_one_out), 16)
    for figure in figures:
        figure.canvas.draw()
        box = figure.get_tightbbox(figure.canvas.get_renderer())
        width, height = figure.get_size_inches()
        assert 0 <= box.x0 < box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= height


def test_the_error_of_a_difference_is_that_of_a_weighted_mean():
    before, after = np.array([10.0, 10.0, 10.0, 10.0]), np.array([12.0, 14.0, 12.0, 14.0])
    change, error = module._paired(before, after, np.full(4, 2.0))
    assert change == pytest.approx(1.5)
    assert error == pytest.approx(np.std([1.0, 2.0, 1.0, 2.0], ddof=1) / 2)
    assert math.isnan(module._paired(before[:1], after[:1], np.ones(1))[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recipe": "bf16"}, "recipe 'bf16' quantizes nothing, so no layer is sensitive to it; take fp4, say"),
        ({"recipe": "fp5"}, "recipe 'fp5' is unknown; choose from"),
        ({"top": 0}, "top=0 must be a positive integer"),
        ({"max_tokens": -1}, "max_tokens=-1 must be positive, or 0 for the whole text"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"step": 3}, "step=3 needs the run that has a checkpoint of this step"),
    ],
)
def test_settings_that_cannot_be_used_say_why(fields, message):
    with pytest.raises(ConfigError, match=message):
        SensitivityConfig(**fields).resolved()


def test_errors_are_one_line(run, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, message in (
        (["nowhere"], "no such model: 'nowhere'"),
        ([str(run), "--step", "77"], "77"),
        (["--out", str(tmp_path / "full")], "is in use: give a new or empty folder"),
        (["--by", "head"], "head"),
        ([str(run), "--high-precision", ".*"], "matches"),
    ):
        assert main(["sensitivity", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert message in error
