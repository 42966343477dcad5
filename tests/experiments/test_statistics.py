"""Means, gaps and paired tests, against SciPy and by hand; and what is committed is what the report says."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from experiments import report, store
from experiments.__main__ import pieces_of
from experiments.base import ROOT, SIZES
from experiments.catalog import EXPERIMENTS
from experiments.statistics import Spread, gap_percent, paired, rank_correlation


def test_spread_is_the_standard_deviation_of_a_sample():
    spread = Spread.of(np.array([1.0, 2.0, 3.0]))
    assert (spread.mean, spread.std) == (2.0, 1.0)
    assert spread.text("+.2f") == "+2.00 ± 1.00"
    assert Spread.of(np.array([1.5])).text(".1f") == "1.5"
    assert Spread.of(np.array([1.0, math.nan])).text(".1f") == "diverged"


def test_gaps_are_taken_seed_by_seed():
    np.testing.assert_allclose(gap_percent(np.array([2.2, 3.0]), np.array([2.0, 4.0])), [10, -25])


def test_a_paired_comparison_is_scipys_t_test_and_an_exact_permutation():
    lower, higher = np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.3, 2.1, 3.25, 4.05])
    result = paired(lower, higher)
    assert result.t_p == stats.ttest_rel(higher, lower).pvalue
    exact = stats.permutation_test(
        (higher - lower,), np.mean, permutation_type="samples", alternative="two-sided", n_resamples=np.inf
    )
    assert result.sign_p == exact.pvalue == 2 / 16
    assert result.difference == pytest.approx(0.175)
    half = stats.t.ppf(0.975, 3) * np.std(higher - lower, ddof=1) / 2
    np.testing.assert_allclose(result.interval, (0.175 - half, 0.175 + half))


def test_ranks_of_gaps_are_correlated_by_hand():
    first, second = np.array([3.0, -1.0, 10.0, 4.0, 5.0]), np.array([0.1, 0.0, 0.2, 0.4, 0.3])
    ranks = np.array([2, 1, 5, 3, 4]) - np.array([2, 1, 3, 5, 4])
    assert rank_correlation(first, second) == pytest.approx(1 - 6 * np.sum(ranks**2) / (5 * 24))
    assert math.isnan(rank_correlation(first[:2], second[:2]))


def test_the_page_and_the_readme_state_the_correlation_that_is_computed():
    (line,) = report.agreement(EXPERIMENTS.values()).splitlines()
    arms, value = re.search(r"the (\d+) arms .* rank correlation 0(\.\d\d);", line).groups()  # pyright: ignore
    readme = " ".join((ROOT.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"the gaps of the {arms} arms that ran at both sizes rank as at 9M ({value})" in readme


@pytest.mark.parametrize(
    ("lower", "higher", "verdict"),
    [
        ([1.0, 1.1, 1.2], [1.2, 1.31, 1.39], "holds"),
        ([1.2, 1.31, 1.39], [1.0, 1.1, 1.2], "refuted"),
        ([1.0, 1.1, 1.2], [1.2, 1.0, 1.25], "undecided"),
        ([1.0, 1.1, 1.2], [1.0, 1.1, 1.2], "undecided"),
        ([1.0, 1.1, 1.2], [1.0, math.nan, 1.2], "no test: one seed, or a run that diverged"),
        ([1.0], [1.1], "no test: one seed, or a run that diverged"),
    ],
)
def test_verdicts(lower, higher, verdict):
    assert paired(np.array(lower), np.array(higher)).verdict == verdict


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_readmes_say_what_the_stored_results_say(experiment):
    """`python -m experiments report` has been run since a result or a config changed."""
    readme = (experiment.folder / "README.md").read_text(encoding="utf-8")
    made = report.body(experiment)
    assert report.marked(readme) == made
    figures = set(re.findall(r"\]\((.*?\.png)\)", made))
    assert figures == {path.name for path in experiment.folder.glob("*.png")}


def test_the_docs_say_what_the_claims_came_to():
    assert report.marked(report.PAGE.read_text(encoding="utf-8")) == report.across_sizes(EXPERIMENTS.values())


def test_stored_results_belong_to_an_arm_and_name_no_place():
    pieces = [piece for size in SIZES for piece in pieces_of((), size=size)]
    keys = {piece.path: piece.key for piece in pieces}
    paths = [path for path in ROOT.glob("*/results/**/*.json") if "lanes" in path.read_text(encoding="utf-8")]
    assert paths
    for path in paths:
        assert store.read(path)["key"] == keys[path.relative_to(ROOT)]
        assert path.stat().st_size < 64_000
        assert str(ROOT.parent) not in path.read_text(encoding="utf-8")
