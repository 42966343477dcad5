"""Rebuilds the tables and figures of the READMEs from stored results, with no GPU."""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np

from experiments import figures, store
from experiments.base import HEADLINE, ROOT, SIZES
from experiments.catalog import EXPERIMENTS
from experiments.experiment import Experiment, Piece
from experiments.statistics import LEVEL, Paired, gap_percent, holm, paired, rank_correlation
from experiments.store import Lanes
from experiments.tables import (
    best_rates_table,
    circumstances_text,
    claim_cells,
    claims_table,
    markdown,
    results_table,
    setting_text,
)
from fp4jax.train.errors import ConfigError

BEGIN, END = "<!-- report: made by `python -m experiments report` -->", "<!-- end of report -->"
PAGE = ROOT.parent / "docs" / "experiments.md"
NOT_RUN = "**Not run.** No results are stored."


def report(experiment: Experiment, root: Path = ROOT) -> Path:
    """Write the figures of an experiment, and the part of its README between the markers.

    Returns:
        The README.

    Raises:
        ConfigError: a README without the markers, or results that do not belong together.
        MissingPackageError: matplotlib is not installed.
    """
    readme = root / experiment.name / "README.md"
    for size in experiment.settings:
        results = store.stored(experiment, size, root)
        if testable(experiment, results):
            figures.draw(experiment, size, results, root)
    return _put(body(experiment, root), readme)


def report_claims(page: Path = PAGE, root: Path = ROOT) -> Path:
    """Write the table of all claims at all sizes into docs/experiments.md, between the markers.

    Raises:
        ConfigError: a page without the markers, or results that do not belong together.
    """
    return _put(across_sizes(EXPERIMENTS.values(), root), page)


def _put(made: str, page: Path) -> Path:
    text = page.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(f"{page.parent.name}/{page.name} must hold the two markers of the report once each")
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return page


def body(experiment: Experiment, root: Path = ROOT) -> str:
    """What the stored results say, as Markdown: a section a size."""
    parts = [
        f"**Question.** {experiment.question}",
        f"**Command.** `{experiment.command}`: {experiment.cost}.",
        f"**Expected beforehand.** {experiment.expected}",
        experiment.paper and f"**The paper.** {experiment.paper}",
    ]
    sections = [section(experiment, size, store.stored(experiment, size, root)) for size in experiment.settings]
    parts += [part for parts_of_one in sections for part in parts_of_one] or [NOT_RUN]
    parts += [experiment.appendix()] if experiment.appendix else []
    return "\n\n".join(part for part in parts if part)


def section(experiment: Experiment, size: str, results: Mapping[str, Lanes]) -> list[str]:
    """What one size has to say: nothing where nothing has run, a line where no claim can be tested yet."""
    if not results:
        return []
    heading = f"## {size}: {setting_text(experiment.settings[size], results)}"
    if not testable(experiment, results):
        return [heading, f"Only {' and '.join(results)} have run, and no claim can be tested."]
    parts = [heading, results_table(experiment, results)]
    parts += [best_rates_table(experiment, results)] if experiment.learning_rates else []
    if missing := [arm.label for arm in experiment.arms if arm.label not in results]:
        parts.append(f"Not run: {'; '.join(missing)}.")
    parts += [claims_table(experiment, results), circumstances_text(results)]
    parts += [f"![{size}: {figures.ALT[name]}]({file})" for name, file in figures.files(experiment, size).items()]
    return parts


def across_sizes(experiments: Collection[Experiment], root: Path = ROOT) -> str:
    """All claims at all sizes, what a correction for their number leaves, and how alike the gaps rank."""
    made = [claims_by_size(experiments, root), tally(experiments, root), agreement(experiments, root)]
    return "\n\n".join(part for part in made if part)


def claims_by_size(experiments: Iterable[Experiment], root: Path = ROOT) -> str:
    """A claim a row, a size a column: verdict, difference in percent, and p of the paired t test."""
    sizes, rows = {}, []
    for experiment in experiments:
        tested = {size: claim_cells(experiment, store.stored(experiment, size, root)) for size in experiment.settings}
        sizes |= {size: None for size, cells in tested.items() if any(cells)}
        rows += [
            [experiment.name, claim.text, {size: cells[i] for size, cells in tested.items()}]
            for i, claim in enumerate(experiment.claims)
        ]
    header = ["question", "claim", *sizes]
    return markdown(header, [[name, text, *(cells.get(size, "") for size in sizes)] for name, text, cells in rows])


def tally(experiments: Iterable[Experiment], root: Path = ROOT) -> str:
    """How many claims have been tested and hold, and which still do after Holm's correction, a line a size."""
    tests: dict[str, dict[tuple[str, str], tuple[str, Paired]]] = {}
    for experiment in experiments:
        arms = {arm.label: arm for arm in experiment.arms}
        for size in experiment.settings:
            results = store.stored(experiment, size, root)
            for claim in (claim for claim in experiment.claims if {claim.lower, claim.higher} <= set(results)):
                lower, higher = (Piece(experiment, arms[label], size).key for label in (claim.lower, claim.higher))
                test = paired(results[claim.lower].final(HEADLINE), results[claim.higher].final(HEADLINE))
                if np.isfinite(test.t_p):
                    tests.setdefault(size, {}).setdefault((lower, higher), (claim.text, test))
    lines = []
    for size, found in tests.items():
        texts, results = zip(*found.values(), strict=True)
        verdicts = [test.verdict for test in results]
        kept = holm(np.array([test.t_p for test in results]))
        left = "; ".join(text for text, keep in zip(texts, kept, strict=True) if keep)
        lines.append(
            f"Different claims tested at {size}: {len(verdicts)}. At p < {LEVEL} {verdicts.count('holds')} hold and "
            f"{verdicts.count('refuted')} are refuted; after Holm's correction for their number {kept.sum()}"
            f"{' (' + left + ')' if left else ''}."
        )
    return "\n\n".join(lines)


def agreement(experiments: Iterable[Experiment], root: Path = ROOT) -> str:
    """How alike gaps rank at two sizes, a line a pair of sizes; an arm of several questions counts once."""
    gaps: dict[str, dict[tuple[str, str], float]] = {}
    for experiment in experiments:
        for size in experiment.settings:
            results = store.stored(experiment, size, root)
            if experiment.learning_rates or experiment.baseline not in results:
                continue
            base = results[experiment.baseline].final(HEADLINE)
            for arm in experiment.arms:
                if arm.label in results and arm.label != experiment.baseline:
                    gap = gap_percent(results[arm.label].final(HEADLINE), base).mean()
                    gaps.setdefault(size, {})[arm.recipe, arm.optimizer] = float(gap)
    lines = []
    for first, second in itertools.combinations(gaps, 2):
        arms = [arm for arm in gaps[first] if arm in gaps[second]]
        pairs = np.array([[gaps[size][arm] for arm in arms] for size in (first, second)])
        if np.isfinite(found := rank_correlation(*pairs)):
            lines.append(
                f"Gaps of the {len(arms)} arms that ran at {first} and {second}: rank correlation {found:.2f}; gap at "
                f"{second} minus gap at {first}: {np.median(pairs[1] - pairs[0]):+.2f} points, the median."
            )
    return "\n\n".join(lines)


def testable(experiment: Experiment, results: Mapping[str, Lanes]) -> bool:
    """Whether there is something to show: a claim with both its arms, or results of an experiment without claims."""
    both = (claim.lower in results and claim.higher in results for claim in experiment.claims)
    return bool(results) and (any(both) or not experiment.claims)


def marked(readme: str) -> str:
    """What stands between the markers."""
    found = re.search(f"{re.escape(BEGIN)}(.*){re.escape(END)}", readme, re.DOTALL)
    return found[1].strip() if found else ""


def overview(root: Path = ROOT) -> str:
    """A line an experiment: how many of its arms have run at each size, and its question."""
    lines = []
    for experiment in EXPERIMENTS.values():
        cells = []
        for size in SIZES:
            done = len(store.stored(experiment, size, root)) if size in experiment.settings else 0
            asked = done or size in experiment.sizes
            cells.append(f"{done:>2}/{len(experiment.arms)}" if asked else "")
        lines.append([experiment.name, *cells, experiment.question])
    header = ["", *SIZES, ""]
    return "\n".join(
        f"{name:<15}" + "".join(f"{cell:>7}" for cell in cells) + f"  {question}"
        for name, *cells, question in [header, *lines]
    )
