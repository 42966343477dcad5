"""What the seeds allow to say: means and spreads, gaps in percent, and paired tests of orderings."""

import dataclasses
import itertools
import math

import numpy as np
from scipy import stats

LEVEL = 0.05
"""p below which a claim counts as supported, or as refuted."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n − 1; NaN for one value) over seeds."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Spread":
        """Of [S]."""
        values = np.asarray(values, float)
        return cls(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan)

    def text(self, form: str) -> str:
        """`2.7401 ± 0.0012`; "diverged" where the mean is not finite."""
        if not math.isfinite(self.mean):
            return "diverged"
        spread = "" if math.isnan(self.std) else f" ± {self.std:{form.removeprefix('+')}}"
        return f"{self.mean:{form}}{spread}"


def gap_percent(loss: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """100 (loss / baseline − 1), seed by seed."""
    return 100 * (np.asarray(loss) / np.asarray(baseline) - 1)


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's, of pairs; NaN for fewer than three.

    Example:
        >>> round(rank_correlation(np.array([1.0, 2.0, 4.0, 3.0]), np.array([0.1, 0.2, 0.3, 0.4])), 3)
        0.8
    """
    return float(stats.spearmanr(first, second).statistic) if len(first) > 2 else math.nan


def holm(p: np.ndarray) -> np.ndarray:
    """Which of several tests stay below `LEVEL` after Holm's correction for their number, [n].

    Example:
        >>> holm(np.array([0.04, 0.001, 0.02])).tolist()
        [True, True, True]
        >>> holm(np.array([0.04, 0.001, 0.03])).tolist()
        [False, True, False]
    """
    order = np.argsort(p)
    below = np.asarray(p)[order] < LEVEL / np.arange(len(p), 0, -1)
    kept = np.zeros(len(p), bool)
    kept[order] = np.logical_and.accumulate(below)
    return kept


def vertex(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Where the parabola through the lowest point and its two neighbors is lowest, and its value there.

    Args:
        x: in ascending order.
        y: with a smallest value; NaN for both results if that is the first or the last.

    Example:
        >>> [round(float(v), 3) for v in vertex(np.array([0.0, 1.0, 3.0, 4.0]), np.array([5.0, 2.0, 2.0, 5.0]))]
        [2.0, 1.0]
    """
    lowest = int(np.argmin(y))
    if not 0 < lowest < len(y) - 1:
        return math.nan, math.nan
    parabola = np.polynomial.Polynomial.fit(x[lowest - 1 : lowest + 2], y[lowest - 1 : lowest + 2], 2)
    place = float(parabola.deriv().roots()[0])
    return place, float(parabola(place))


@dataclasses.dataclass(frozen=True)
class Paired:
    """A paired comparison over n seeds.

    Attributes:
        difference: mean of `higher − lower`; positive agrees with the claim.
        interval: 95 % confidence interval of the difference, by the paired t test; NaN where it cannot be had.
        t_p: two-sided p of that test; NaN where it cannot be had.
        sign_p: two-sided p of the exact sign-flip permutation test of the mean, at best 2^(1 − n).
        seeds: n.
    """

    difference: float
    interval: tuple[float, float]
    t_p: float
    sign_p: float
    seeds: int

    @property
    def verdict(self) -> str:
        """By the t test: with three seeds no permutation test can get below .25."""
        if not math.isfinite(self.t_p):
            return "no test: one seed, or a run that diverged"
        if self.t_p >= LEVEL:
            return "undecided"
        return "holds" if self.difference > 0 else "refuted"


def paired(lower: np.ndarray, higher: np.ndarray) -> Paired:
    """Compare the losses of two arms, [S] each, seed by seed.

    Example:
        >>> result = paired(np.array([1.0, 1.1, 1.2]), np.array([1.2, 1.31, 1.39]))
        >>> round(result.difference, 2), result.sign_p, result.verdict
        (0.2, 0.25, 'holds')
    """
    differences = np.asarray(higher, float) - np.asarray(lower, float)
    count, mean = len(differences), float(differences.mean())
    if count < 2 or not np.isfinite(differences).all():
        return Paired(mean, (math.nan, math.nan), math.nan, math.nan, count)
    flips = np.array([np.mean(differences * signs) for signs in itertools.product((1, -1), repeat=count)])
    # Rounding must not tell a flip of all signs from the original.
    sign_p = float(np.mean(np.abs(flips) >= abs(mean) * (1 - 1e-9)))
    if np.ptp(differences) == 0:
        return Paired(mean, (mean, mean), 0.0 if mean else 1.0, sign_p, count)
    test = stats.ttest_rel(higher, lower)
    low, high = test.confidence_interval(1 - LEVEL)
    return Paired(mean, (float(low), float(high)), float(test.pvalue), sign_p, count)
