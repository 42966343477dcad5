"""The least time of a train step: against counts by hand, and against what was measured."""

import dataclasses
import json
import pathlib

import pytest

from fp4jax.bench import parts
from fp4jax.bench.config import BenchConfig
from fp4jax.bench.least import H200, KERNELS, Rates, least, least_seconds, reachable
from fp4jax.bench.measure import Peaks
from fp4jax.models import MODELS
from fp4jax.train.naming import parse_recipe

MODEL, TOKENS = MODELS["1.3b"], 8 * 2048


def of(recipe: str | None, rates: Rates = H200) -> dict[str, float]:
    return least_seconds(MODEL, TOKENS, 2048, None if recipe is None else parse_recipe(recipe), rates)


def test_products_are_six_operations_a_weight_and_token():
    weights = 24 * (4 * 2048**2 + 3 * 2048 * 5504)
    assert of(None)[parts.PRODUCTS] == pytest.approx(6 * weights * TOKENS / 830e12)
    assert of("fp4")[parts.PRODUCTS] == pytest.approx(6 * weights * TOKENS / 1622e12)


def test_what_a_recipe_leaves_out_costs_nothing():
    assert set(of("fp4_vector")) == set(of(None)) - {parts.MOVES} | {parts.QUANTIZERS}
    assert set(of("fp4:alpha=none")) == set(of("fp4_vector")) | {parts.DGE}
    assert set(of("fp4")) == set(of("fp4:alpha=none")) | {parts.QUANTILE}
    assert parts.QUANTILE not in of("fp4:quantile=sampled")
    common = {parts.ATTENTION, parts.NORMS, parts.SWIGLU, parts.HEAD, parts.LOSS, parts.OPTIMIZER}
    assert all(of("fp4")[group] == of(None)[group] for group in common)


def test_bytes_of_the_optimizer_and_of_a_quantizer():
    assert of(None)[parts.OPTIMIZER] == pytest.approx(32 * 1_345_423_360 / 4.3e12)
    one = dataclasses.replace(MODEL, num_layers=1)
    values = TOKENS * (3 * 2048 + 5504), TOKENS * (5 * 2048 + 2 * 5504), 4 * 2048**2 + 3 * 2048 * 5504
    spent = least_seconds(one, TOKENS, 2048, parse_recipe("fp4_vector"), H200)[parts.QUANTIZERS]
    assert spent == pytest.approx((4 * values[0] + 6 * values[1] + 10 * values[2]) / 4.3e12)


@pytest.mark.parametrize("recipe", ["fp4", "fp4_vector"])
def test_steps_as_measured_are_explained(recipe):
    """From the time of BF16 and that of the kernels alone, the steps of 2026-11-30 follow to a tenth."""
    rows = {
        row["name"].removeprefix("fp4jax "): row["microseconds"] / 1e3
        for row in FOUND["after"]["step"]["tables"][0]["rows"]
    }
    expected = rows["BF16"] / reachable(rows["BF16"] / 1e3, of(None, KERNELS), of(recipe, KERNELS))
    assert rows[recipe] == pytest.approx(expected, rel=0.1)


def test_tables_take_the_peaks_of_the_run():
    config = BenchConfig(model="1.3b", seq_len=2048)
    at_peak, _ = least(config, Peaks(bfloat16=415e12, fp8=811e12, memory=4.3e12))
    assert at_peak.columns == ("BF16", "fp4")
    assert at_peak.rows[0][2][0] == pytest.approx(2 * of(None)[parts.PRODUCTS])
    assert at_peak.total()[0] > at_peak.total()[1]


ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
FOUND, BEFORE = (
    json.loads((ROOT / "experiments" / "kernels" / f"h200-2026-11-30-{name}.json").read_text(encoding="utf-8"))
    for name in ("evening", "later")
)


def test_the_page_has_the_profile_and_the_least():
    section = PAGE.split("## Where the step's time goes")[1].split("\n## ")[0]
    spent = {}
    for row in FOUND["after"]["profile"]["tables"][0]["rows"]:
        spent.setdefault(row["group"], []).append(row["seconds"])
    spent = {group: [1e3 * sum(column) for column in zip(*rows, strict=True)] for group, rows in spent.items()}
    least = [{group: 1e3 * seconds for group, seconds in of(recipe).items()} for recipe in (None, "fp4")]
    lines = {group: [group] for group in spent}
    lines["embedding, head, loss"] = [lines.pop(group)[0] for group in ("embedding", "head", "loss")]
    lines |= {"between kernels": lines.pop("idle"), "at a time with others": lines.pop("overlap")}
    lines["all"] = [*spent]
    for name, groups in lines.items():
        cells = []
        for column in range(3):
            taken = sum(spent[group][column] for group in groups)
            counted = least[column] if column < 2 else {}
            needed = sum(counted.values()) if name == "all" else sum(counted.get(group, 0) for group in groups)
            cells.append("–" if not taken else f"{taken:.1f} ({needed:.1f})" if needed else f"{taken:.1f}")
        assert f"| {name} | {' | '.join(cells)} |" in section
    bfloat16, fp4, vector = (row["microseconds"] / 1e3 for row in FOUND["after"]["step"]["tables"][0]["rows"])
    assert f"({bfloat16 / 1.3:.0f} ms beside" in section
    assert f"`fp4` would need {fp4 - bfloat16 / 1.3:.1f} ms less, `fp4_vector` {vector - bfloat16 / 1.3:.1f}" in section
    without = sum(spent[group][1] for group in spent if group not in ("quantizers", "quantile"))
    assert f"the step would be {sum(t[0] for t in spent.values()) / without:.2f} times BF16" in section
    seven = [sum(least_seconds(MODELS["7b"], TOKENS, 2048, r, H200).values()) for r in (None, parse_recipe("fp4"))]
    assert f"give {seven[0] / seven[1]:.2f} at peak rates" in section


def test_the_page_has_what_products_and_steps_took():
    after, steps = FOUND["after"], BEFORE["steps"]
    for table in after["products"]["tables"]:
        if "bfloat16 out" in table["title"]:
            times = " | ".join(f"{row['microseconds']:.0f}" for row in table["rows"])
            assert f"| {times} |" in PAGE
    for step, unrolled in ((after["step"], ""), (steps["unrolled"], "layers unrolled: ")):
        for row in step["tables"][0]["rows"]:
            speed = f"{row['microseconds'] / 1e3:.1f} | {row['a_second']:,.0f}"
            name = row["name"].removeprefix("fp4jax ")
            assert f"| {unrolled}{name} (" in PAGE or f"| {unrolled}`{name}` |" in PAGE
            assert f"{speed} | " in PAGE
            assert f"| {row['peak_bytes'] / 1e9:.1f} |" in PAGE
    for row in (row for table in after["layer"]["tables"][:2] for row in table["rows"]):
        assert f"| {row['microseconds']:.0f} | " in PAGE


def test_the_readme_has_the_step_and_the_gap_side_by_side():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    headline = (ROOT / "experiments" / "headline" / "README.md").read_text(encoding="utf-8")
    rows = {row["name"].removeprefix("fp4jax "): row for row in FOUND["after"]["step"]["tables"][0]["rows"]}
    for recipe, shown in (("fp4", "`fp4`, the paper"), ("fp4_vector", "`fp4_vector`")):
        gap = next(line for line in headline.splitlines() if line.startswith(f"| {recipe} | `{recipe}` |")).split("|")[
            4
        ]
        speed, memory = rows["BF16"]["microseconds"] / rows[recipe]["microseconds"], rows[recipe]["peak_bytes"] / 1e9
        assert f"| {shown} | {gap.strip()} | {speed:.2f} | {memory:.1f} |" in readme
