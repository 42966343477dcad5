"""`compare` end to end on a micro model, its figure and its closing table."""

import dataclasses
import io
import json
import math

import numpy as np
import pytest
from matplotlib import image
from micro import compare_config
from rich.console import Console

from fp4jax.recipes import RECIPES
from fp4jax.train.arm import Arm, Text
from fp4jax.train.compare import compare
from fp4jax.train.config import CompareConfig, LoopOptions
from fp4jax.train.errors import ConfigError
from fp4jax.train.loop import Result
from fp4jax.train.metrics import read_metrics
from fp4jax.train.plots import Curves, draw_curves, smooth
from fp4jax.train.recipe_table import quantizer_cells, recipes_table
from fp4jax.train.tables import KnownSpread, Summary, comparison_table, summarize, summary_json

STEPS = 6


def console() -> Console:
    return Console(file=io.StringIO(), width=100)


def printed(renderable, width: int = 100) -> str:
    target = Console(file=io.StringIO(), width=width)
    target.print(renderable)
    return target.file.getvalue()


@pytest.fixture(scope="module")
def compared(paths, tmp_path_factory):
    """The default recipes with one seed: folder, summaries, and what was printed."""
    out = tmp_path_factory.mktemp("runs") / "compared"
    config = compare_config(paths, out)
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, tensorboard=True))
    target = console()
    return *compare(config, target), target.file.getvalue()


def test_compare_writes_everything(compared):
    folder, summaries, _ = compared
    assert [summary.recipe for summary in summaries] == ["bf16", "fp4", "fp4_direct"]
    for recipe in ("bf16", "fp4", "fp4_direct"):
        rows = read_metrics(folder / f"{recipe}-seed0", "train")
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert list((folder / f"{recipe}-seed0").glob("events.out.tfevents.*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["baseline"] == "bf16"
    assert summary["seeds"] == [0]
    fp4, bf16 = summary["recipes"]["fp4"], summary["recipes"]["bf16"]
    assert fp4["gaps_percent"] == [pytest.approx(100 * (fp4["loss"] / bf16["loss"] - 1))]
    assert bf16["gaps_percent"] == [0]
    assert fp4["loss_std"] is None
    assert fp4["tokens_per_second"] > 0
    clipped = [row["clipped"] for row in read_metrics(folder / "fp4-seed0", "train")]
    assert fp4["clip_fraction"] == pytest.approx(np.mean(clipped), abs=1e-4)
    assert {"command", "date", "hardware", "versions", "settings"} <= set(summary)


def test_recipes_start_from_the_same_weights_and_data(compared):
    """Before the first update the losses differ by quantization alone; after it they part."""
    folder, *_ = compared
    losses = {
        recipe: [row["loss"] for row in read_metrics(folder / f"{recipe}-seed0", "train")]
        for recipe in ("bf16", "fp4", "fp4_direct")
    }
    assert losses["fp4"][0] == pytest.approx(losses["bf16"][0], rel=2e-2)
    assert losses["fp4"][0] != losses["bf16"][0]
    assert losses["bf16"][-1] < losses["bf16"][0]


def test_the_closing_table_says_what_was_asked(compared):
    folder, summaries, output = compared
    for text in ("validation on", "bf16", "fp4_direct", "loss (nats)", "gap to bf16 (%)", "tokens/s", "skipped steps"):
        assert text in output
    assert f"{summaries[1].loss:.4f}" in output
    assert f"{summaries[1].gap:+.2f}" in output
    assert "One seed tells little" in output
    assert str(folder / "curves.png") in output


def test_the_figure_is_no_blank(compared):
    folder, *_ = compared
    pixels = image.imread(folder / "curves.png")
    assert pixels.shape[:2] == (1024, 1280)
    colors = {tuple(color) for color in np.round(pixels[..., :3].reshape(-1, 3) * 255).astype(int)}
    assert {(255, 255, 255), (0, 0, 0), (0, 114, 178), (213, 94, 0)} <= colors


def test_an_existing_folder_is_refused_before_training(compared, paths):
    folder, *_ = compared
    with pytest.raises(ConfigError, match=r"is not empty: give another$"):
        compare(compare_config(paths, folder), console())


@pytest.fixture(scope="module")
def seeds(paths, tmp_path_factory):
    """Two seeds of bf16, one after another and side by side."""
    results = {}
    for side_by_side in (False, True):
        out = tmp_path_factory.mktemp("runs") / "seeds"
        config = compare_config(paths, out, recipes=("bf16",), seeds=(3, 5), side_by_side=side_by_side)
        results[side_by_side] = *compare(config, target := console()), target.file.getvalue()
    return results


def test_seeds_side_by_side_give_the_same_numbers(seeds):
    """Equal within the rounding of BF16: the batched products may sum in another order."""
    for seed in (3, 5):
        alone, together = (
            [row["loss"] for row in read_metrics(seeds[way][0] / f"bf16-seed{seed}", "train")] for way in (False, True)
        )
        np.testing.assert_allclose(together, alone, rtol=1e-2)
    (alone,), (together,) = (seeds[way][1] for way in (False, True))
    assert alone.losses[0] != alone.losses[1]
    assert together.losses[0] != together.losses[1]
    np.testing.assert_allclose(together.losses, alone.losses, rtol=1e-2)


def test_several_seeds_give_mean_and_spread(seeds):
    for _, (summary,), output in seeds.values():
        assert summary.loss == pytest.approx(np.mean(summary.losses))
        assert f"{summary.loss:.4f} ± {summary.loss_std:.4f}" in output
        assert "mean ± std of 2 seeds" in output
        assert "One seed" not in output


def result(recipe: str, seed: int, loss: float, skipped: int = 0) -> Result:
    return Result(recipe, seed, loss, {"emma": loss}, tokens_per_second=1000.0, skipped=skipped, clip_fraction=0.25)


def test_gaps_are_paired_by_seed():
    results = [result("bf16", 0, 2.0), result("bf16", 1, 4.0), result("fp4", 0, 2.2, 1), result("fp4", 1, 4.2, 2)]
    bf16, fp4 = summarize(results, "bf16")
    assert fp4.gaps == pytest.approx((10.0, 5.0))
    assert (fp4.gap, fp4.gap_std) == pytest.approx((7.5, np.std([10, 5], ddof=1)))
    assert (fp4.loss, fp4.loss_std) == pytest.approx((3.2, math.sqrt(2)))
    assert (fp4.skipped, bf16.gaps) == (3, (0.0, 0.0))


def test_the_table_of_a_diverged_recipe_has_dashes_not_a_crash():
    table = printed(comparison_table(summarize([result("bf16", 0, 2.0), result("x", 0, math.nan)], "bf16"), "bf16"))
    row = next(line for line in table.splitlines() if "│ x " in line)
    assert row.count("–") == 2


def known_spread(config: CompareConfig, path):
    results = [result(r, s, loss) for s in (0, 1, 2) for r, loss in (("bf16", 2.0), ("fp4", 2.0 + 0.01 * s))]
    measured = dataclasses.replace(config, seeds=(0, 1, 2))
    origin = {"command": "fp4jax compare --seeds 0 1 2", "date": "2026-11-29", "hardware": "H200", "versions": ""}
    path.write_text(json.dumps(summary_json(measured, summarize(results, "bf16"), origin)))
    return path


def test_the_spread_known_for_the_settings_stands_beside_one_seed(tmp_path):
    config = CompareConfig().resolved()
    known = KnownSpread.find(config, known_spread(config, tmp_path / "known.json"))
    assert known is not None
    assert known.gaps["fp4"] == pytest.approx((0.5, 0.5))
    assert known.note == "known spread: seeds 0, 1, 2; H200; 2026-11-29; fp4jax compare --seeds 0 1 2"
    summaries = summarize([result("bf16", 0, 2.0), result("fp4", 0, 2.02)], "bf16")
    table = printed(comparison_table(summaries, "bf16", known.gaps))
    assert "known spread" in table
    assert "+0.50 ± 0.50" in table


def test_a_spread_of_other_settings_is_not_shown(tmp_path):
    config = CompareConfig().resolved()
    path = known_spread(config, tmp_path / "known.json")
    other = CompareConfig(loop=LoopOptions(steps=7)).resolved()
    assert KnownSpread.find(other, path) is None
    assert KnownSpread.find(config, tmp_path / "none.json") is None
    elsewhere = dataclasses.replace(config, out=tmp_path, recipes=("bf16", "fp4"))
    assert KnownSpread.find(elsewhere, path) is not None


def test_the_spread_in_the_package_is_of_the_preset():
    """Whoever tunes the preset measures its spread anew: a stale file would never be shown."""
    known = KnownSpread.find(CompareConfig().resolved())
    assert known is not None
    assert set(CompareConfig().recipes) <= set(known.gaps)


def test_smoothing_averages_what_is_there():
    values = np.array([[1.0, 2.0, np.nan, 6.0, 8.0]])
    np.testing.assert_allclose(smooth(values, 3), [[1.5, 1.5, 4.0, 7.0, 7.0]])
    assert np.isnan(smooth(np.full((1, 3), np.nan), 3)).all()
    np.testing.assert_array_equal(smooth(values, 1), values)


def test_a_figure_of_one_recipe_has_no_gap(tmp_path):
    loss = np.linspace(5, 2, 50)[None]
    curves = [Curves("fp4", loss, np.array([25, 50]), np.array([[3.0, 2.0]]))]
    draw_curves(tmp_path / "one.png", curves, baseline="fp4", tokens_per_step=512, title="one")
    assert image.imread(tmp_path / "one.png").shape[0] < 1024


def test_a_figure_survives_losses_that_are_not_finite(tmp_path):
    loss = np.linspace(5, 2, 50)[None].copy()
    broken = loss.copy()
    broken[0, 10:] = np.nan
    curves = [
        Curves("bf16", loss, np.array([50]), np.array([[2.0]])),
        Curves("fp4_direct", broken, np.array([50]), np.array([[np.nan]])),
    ]
    draw_curves(tmp_path / "nan.png", curves, baseline="bf16", tokens_per_step=512, title="diverged")
    assert image.imread(tmp_path / "nan.png").std() > 0.05


def test_the_recipe_table_fits_and_is_complete():
    output = printed(recipes_table())
    assert max(map(len, output.splitlines())) <= 100
    for name in RECIPES:
        assert f"│ {name} " in output
    narrow = printed(recipes_table(), width=80)
    assert max(map(len, narrow.splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("bf16", ("high precision", "high precision", "high precision")),
        ("fp4_direct", ("E2M1 PerTensor", "E2M1 PerTensor", "E5M2 PerTensor")),
        (
            "fp4",
            (
                "E2M1 PerVector\nOCC: α=0.99 by tensor, ΔX residual in E4M3",
                "E2M1 PerVector\ngradient: DGE(k=5.0, clip=3.0)",
                "E5M2 PerTensor",
            ),
        ),
    ],
)
def test_the_recipe_table_states_every_quantizer(name, cells):
    assert quantizer_cells(RECIPES[name]()) == cells


def test_the_recipe_table_tells_what_is_quantized_again():
    from fp4jax import PerBlock

    activation, *_ = quantizer_cells(RECIPES["fp4_vector"](activation=PerBlock(32)))
    assert activation == "E2M1 PerBlock(size=32)"  # the same spec again, along the new axis
    *_, gradient = quantizer_cells(RECIPES["fp4_vector"](gradient=None))
    assert gradient == "high precision"


def test_arms_share_batches_over_recipes_and_programs_over_seeds(paths):
    config = compare_config(paths).resolved()
    text = Text.load(config.data)
    arms = [Arm(config, recipe, (2,), text) for recipe in ("bf16", "fp4")]
    arms.append(arms[0].reseeded((3,)))
    readers = [arm.batches(1) for arm in arms]
    bf16, fp4, other = (next(reader) for reader in readers)
    for reader in readers:
        reader.close()
    np.testing.assert_array_equal(bf16, fp4)
    assert not np.array_equal(bf16, other)
    assert arms[2].train_step is arms[0].train_step
    assert arms[2].label == "bf16"
    with pytest.raises(ValueError, match=r"seeds=\(1, 2\) must be as many as the arm's own, \(2,\)"):
        arms[0].reseeded((1, 2))


def test_summaries_of_one_seed_have_no_spread():
    summary = Summary("fp4", (2.0,), (1.0,), 10.0, 0, 0.0)
    assert math.isnan(summary.loss_std)
    assert math.isnan(summary.gap_std)
