"""Rebuilds the tables and figures of the READMEs from stored results, with no GPU."""

import re
from pathlib import Path

from experiments import figures, store
from experiments.catalog import EXPERIMENTS
from experiments.experiment import ROOT, Experiment
from experiments.tables import circumstances_text, claims_table, results_table
from fp4jax.train.errors import ConfigError

BEGIN, END = "<!-- report: made by `python -m experiments report` -->", "<!-- end of report -->"
NOT_RUN = "**Not run.** No results are stored."


def report(experiment: Experiment, root: Path = ROOT) -> Path:
    """Write the figures of an experiment, and the part of its README between the markers.

    Returns:
        The README.

    Raises:
        ConfigError: a README without the markers, or results that do not belong together.
        MissingPackageError: matplotlib is not installed.
    """
    results = store.stored(experiment, root)
    readme = root / experiment.name / "README.md"
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ConfigError(f"{experiment.name}/README.md must hold the two markers of the report once each")
    parts = [
        f"**Question.** {experiment.question}",
        f"**Command.** `{experiment.command}`: {experiment.cost}.",
        f"**Expected beforehand.** {experiment.expected}",
        experiment.paper and f"**The paper.** {experiment.paper}",
    ]
    if not results:
        parts.append(NOT_RUN)
    else:
        parts.append(results_table(experiment, results))
        if any(arm.label not in results for arm in experiment.arms):
            missing = [arm.label for arm in experiment.arms if arm.label not in results]
            parts.append(f"Not run: {', '.join(missing)}.")
        parts += [claims_table(experiment, results), circumstances_text(results)]
        parts += [experiment.appendix()] if experiment.appendix else []
        for name in figures.draw(experiment, results, root / experiment.name):
            parts.append(f"![{figures.ALT[name]}]({name}.png)")
    before, rest = text.split(BEGIN)
    body = "\n\n".join(part for part in parts if part)
    readme.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return readme


def marked(readme: str) -> str:
    """What stands between the markers."""
    found = re.search(f"{re.escape(BEGIN)}(.*){re.escape(END)}", readme, re.DOTALL)
    return found[1].strip() if found else ""


def overview(root: Path = ROOT) -> str:
    """A line an experiment: how many of its pieces have run, and its question."""
    lines = []
    for experiment in EXPERIMENTS.values():
        done = sum(store.find(piece, root) is not None for piece in experiment.pieces())
        lines.append(f"{experiment.name:<15} {done:>2}/{len(experiment.arms):<3} {experiment.question}")
    return "\n".join(lines)
