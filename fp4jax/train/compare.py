"""`fp4jax compare`: the same model, text and seeds under several recipes, side by side in one table and one figure."""

import re
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from fp4jax.train.arm import Arm, Text
from fp4jax.train.config import CompareConfig
from fp4jax.train.display import Display, Progress
from fp4jax.train.job import describe, require_packages, title
from fp4jax.train.loop import Result, StopSignal, train_arm
from fp4jax.train.metrics import MetricsLog
from fp4jax.train.plots import Curves, draw_curves
from fp4jax.train.rundir import circumstances, open_run, write_json
from fp4jax.train.tables import KnownSpread, Summary, comparison_table, summarize, summary_json


def compare(config: CompareConfig, console: Console) -> tuple[Path, list[Summary]]:
    """Train every recipe with every seed, and write one folder.

        config.json                 all settings, and the hash of the text
        <recipe>-seed<n>/           metrics.jsonl and TensorBoard events of one training
        curves.png                  loss curves, and beneath them the gap to the baseline
        summary.json                the closing table, with command, date, hardware and versions

    Args:
        config: settings, resolved or not.
        console: for the progress and the closing table.

    Returns:
        The folder, and a summary of each recipe.

    Raises:
        ConfigError, DataError: settings or text that cannot be used.
        MissingPackageError: an optional package is absent.
        Interrupted: stopped by a signal. What was measured so far stays in the folder.

    Example:
        >>> folder, summaries = compare(CompareConfig(seeds=(0, 1)), Console())  # doctest: +SKIP
    """
    config = config.resolved()
    require_packages(config.plan)
    text = Text.load(config.data)
    side_by_side = jax.default_backend() == "gpu" if config.side_by_side is None else config.side_by_side
    groups = [config.seeds] if side_by_side else [(seed,) for seed in config.seeds]
    compiled = {recipe: Arm(config, recipe, groups[0], text) for recipe in config.recipes}
    arms = {(recipe, seeds): compiled[recipe].reseeded(seeds) for recipe in config.recipes for seeds in groups}
    first = next(iter(arms.values()))
    folder = open_run(config, "compare", out=config.out, fingerprint=text.fingerprint)
    console.print(describe(first, folder), highlight=False, soft_wrap=True)
    results: list[Result] = []
    labels = {key: _label(*key, alone=len(groups) == 1) for key in arms}
    with Display(console, list(labels.values()), config.plan.steps) as display, StopSignal() as stop:
        for key, arm in arms.items():
            results += _train(config, arm, folder, display.progress[labels[key]], stop)
    summaries = summarize(results, config.baseline)
    write_json(folder / "summary.json", summary_json(config, summaries, circumstances()))
    draw_curves(
        folder / "curves.png",
        [Curves.read(recipe, [folder / _slug(recipe, seed) for seed in config.seeds]) for recipe in config.recipes],
        baseline=config.baseline,
        tokens_per_step=first.plan.batch_size * first.plan.seq_len,
        title=title(first) + (f"; {len(config.seeds)} seeds, mean ± std" if len(config.seeds) > 1 else ""),
        token=text.token,
    )
    _print(config, summaries, folder, console)
    return folder, summaries


def _train(config: CompareConfig, arm: Arm, folder: Path, progress: Progress, stop: StopSignal) -> list[Result]:
    logs = [MetricsLog(folder / _slug(arm.label, seed), tensorboard=config.plan.tensorboard) for seed in arm.seeds]
    try:
        return train_arm(arm, arm.init(), logs, progress, stop, folder=folder)
    finally:
        for log in logs:
            log.close()


def _print(config: CompareConfig, summaries: Sequence[Summary], folder: Path, console: Console) -> None:
    known = KnownSpread.find(config) if len(config.seeds) == 1 else None
    console.print()
    console.print(comparison_table(summaries, config.baseline, known.gaps if known else None))
    if known:
        console.print(known.note, highlight=False, soft_wrap=True)
    elif len(config.seeds) == 1:
        console.print("One seed tells little of a small gap: --seeds 0 1 2 shows the spread.", highlight=False)
    console.print(f"curves: {folder / 'curves.png'}", highlight=False, soft_wrap=True)


def _label(recipe: str, seeds: tuple[int, ...], *, alone: bool) -> str:
    return recipe if alone else f"{recipe} seed {seeds[0]}"


def _slug(recipe: str, seed: int) -> str:
    """A folder's name: `fp4:alpha=0.999` with seed 0 as fp4-alpha=0.999-seed0."""
    return f"{re.sub(r'[^A-Za-z0-9._=-]+', '-', recipe).strip('-')}-seed{seed}"
