"""Means, gaps and paired tests, against SciPy and by hand; and what is committed is what the report says."""

import math
import re

import numpy as np
import pytest
from scipy import stats

from experiments import report, store
from experiments.__main__ import pieces_of
from experiments.base import HEADLINE, ROOT, SIZES
from experiments.catalog import EXPERIMENTS
from experiments.statistics import Spread, gap_percent, holm, paired, rank_correlation, vertex
from experiments.tables import best_rates_table


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


def test_the_vertex_is_that_of_the_parabola_and_not_looked_for_outside():
    x = np.log([1e-3, 2e-3, 4e-3, 8e-3])
    place, value = vertex(x, 3 + 2 * (x - np.log(3e-3)) ** 2)
    assert (np.exp(place), value) == (pytest.approx(3e-3), pytest.approx(3))
    for y in (x, -x):
        assert all(math.isnan(found) for found in vertex(x, y))


def test_each_arm_is_shown_at_its_best_rate():
    experiment = EXPERIMENTS["rates"]
    results = store.stored(experiment, "9M")
    bf16, fp4 = (results[label].final(HEADLINE) for label in ("bf16", "fp4"))
    rows = best_rates_table(experiment, results).splitlines()
    gap = 100 * (fp4.min() / bf16.min() - 1)
    assert rows[2].startswith(f"| bf16 | 0.004 | {bf16.min():.4f} | – | ")
    assert rows[3].startswith(f"| fp4 | 0.004 | {fp4.min():.4f} | {gap:+.2f} | ")
    still_falling = store.Lanes({**results["fp4"].record, "lanes": results["fp4"].lanes[:3]})
    rows = best_rates_table(experiment, {**results, "fp4": still_falling}).splitlines()
    assert rows[3] == f"| fp4 | 0.004 | {fp4.min():.4f} | {gap:+.2f} |  |  |  |"


def test_the_page_and_the_readme_state_the_correlation_that_is_computed():
    (line,) = report.agreement(EXPERIMENTS.values()).splitlines()
    arms, value = re.search(r"the (\d+) arms .* rank correlation 0(\.\d\d);", line).groups()  # pyright: ignore
    readme = " ".join((ROOT.parent / "README.md").read_text(encoding="utf-8").split())
    assert f"the gaps of the {arms} arms that ran at both sizes rank much as at 9M ({value})" in readme


def test_the_page_and_the_readme_state_what_a_correction_leaves():
    at_9m, tiny = report.tally(EXPERIMENTS.values()).split("\n\n")
    count, hold, left = re.search(r"9M: (\d+)\. .* (\d+) hold .* number (\d+)", at_9m).groups()  # pyright: ignore
    page, readme = (
        " ".join(path.read_text(encoding="utf-8").split()) for path in (report.PAGE, ROOT.parent / "README.md")
    )
    assert f"{count} claims were tested at 9M without a correction for their number, and {hold} hold." in page
    assert f"Holm's correction leaves {left}," in page
    assert tiny.endswith("number 0.")
    assert "at the tiny size it leaves none" in page
    assert f"of {count} claims tested {hold} hold at p < .05, {left} after Holm's correction" in readme


def test_holms_correction_stops_at_the_first_that_fails():
    p = np.array([0.3, 0.0124, 0.02, 0.001, 0.017])
    expected = [p[i] for i in np.argsort(p)]
    assert [value < 0.05 / (5 - rank) for rank, value in enumerate(expected)] == [True, True, False, True, False]
    assert holm(p).tolist() == [False, True, False, True, False]


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


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_the_docs_count_what_ran(experiment):
    ran = [len(store.stored(experiment, size)) if size in experiment.settings else 0 for size in ("9M", "tiny")]
    cells = " | ".join(f"{count} of {len(experiment.arms)}" if count else "" for count in ran)
    row = rf"\[{experiment.name}\]\([^)]*\) \|[^|]*\| {re.escape(cells)} *\|"
    assert re.search(row, report.PAGE.read_text(encoding="utf-8"))


def test_the_docs_count_what_held():
    both = []
    for experiment in (e for e in EXPERIMENTS.values() if {"9M", "tiny"} <= set(e.settings)):
        at_9m, tiny = (store.stored(experiment, size) for size in ("9M", "tiny"))
        for claim in experiment.claims:
            if {claim.lower, claim.higher} <= set(at_9m) & set(tiny):
                both.append(
                    [paired(r[claim.lower].final(HEADLINE), r[claim.higher].final(HEADLINE)) for r in (at_9m, tiny)]
                )
    held = [tiny for at_9m, tiny in both if at_9m.verdict == "holds"]
    again = [test for test in held if test.verdict == "holds"]
    rest = [test for test in held if test.verdict == "undecided" and test.difference > 0]
    differ = [tests for tests in both if tests[0].difference * tests[1].difference < 0]
    page = " ".join(report.PAGE.read_text(encoding="utf-8").split())
    assert (
        f"Of {len(both)} claims tested at both, {len(held)} hold at 9M. At the tiny size {len(again)} of those" in page
    )
    assert f"the other {len(rest)} have the same sign and are undecided, and none is refuted" in page
    assert len(again) + len(rest) == len(held)
    assert f"**The sign differs in {len(differ)}**, all undecided at both sizes" in page
    assert {test.verdict for tests in differ for test in tests} == {"undecided"}


def test_stored_results_belong_to_an_arm_and_name_no_place():
    pieces = [piece for size in SIZES for piece in pieces_of((), size=size)]
    keys = {piece.path: piece.key for piece in pieces}
    paths = [path for path in ROOT.glob("*/results/**/*.json") if "lanes" in path.read_text(encoding="utf-8")]
    assert paths
    for path in paths:
        assert store.read(path)["key"] == keys[path.relative_to(ROOT)]
        assert path.stat().st_size < 64_000
        assert str(ROOT.parent) not in path.read_text(encoding="utf-8")
