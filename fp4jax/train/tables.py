"""The closing table: what each recipe came to, over one seed or several."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fp4jax.train.config import CompareConfig, to_json
from fp4jax.train.display import number
from fp4jax.train.loop import Result

KNOWN_SPREAD = Path(__file__).with_name("known_spread.json")
"""A summary.json of `fp4jax compare --seeds …` with the presets' settings. Written anew whenever the preset is."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a recipe came to over its seeds.

    Args:
        recipe: its label.
        losses: validation loss of each seed.
        gaps: to the same seed of the baseline, in %; NaN for the lack of one.
        tokens_per_second: of training.
        skipped: steps that changed nothing for not being finite, over all seeds.
        clip_fraction: share of the other steps whose gradient was clipped.
    """

    recipe: str
    losses: tuple[float, ...]
    gaps: tuple[float, ...]
    tokens_per_second: float
    skipped: int
    clip_fraction: float

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return float(np.mean(self.losses))

    @property
    def loss_std(self) -> float:
        """Standard deviation over seeds (n − 1); NaN for one."""
        return _std(self.losses)

    @property
    def gap(self) -> float:
        """Mean of the seeds' gaps, %."""
        return float(np.mean(self.gaps))

    @property
    def gap_std(self) -> float:
        """Standard deviation of the seeds' gaps, %; NaN for one."""
        return _std(self.gaps)


def summarize(results: Sequence[Result], baseline: str) -> list[Summary]:
    """One summary a recipe, in the order they come."""
    base = {result.seed: result.loss for result in results if result.recipe == baseline}
    summaries = []
    for recipe in dict.fromkeys(result.recipe for result in results):
        mine = [result for result in results if result.recipe == recipe]
        summaries.append(
            Summary(
                recipe,
                losses=tuple(result.loss for result in mine),
                gaps=tuple(100 * (result.loss / base.get(result.seed, math.nan) - 1) for result in mine),
                tokens_per_second=float(np.mean([result.tokens_per_second for result in mine])),
                skipped=sum(result.skipped for result in mine),
                clip_fraction=float(np.mean([result.clip_fraction for result in mine])),
            )
        )
    return summaries


def comparison_table(
    summaries: Sequence[Summary], baseline: str, spread: Mapping[str, tuple[float, float]] | None = None
) -> Table:
    """Recipe, validation loss, gap in %, tokens/s and skipped steps.

    Args:
        summaries: one a row.
        baseline: label of the row that gaps are measured to.
        spread: for each recipe, mean and standard deviation of the gap known from several seeds; shown beside the gaps
            of a single one.
    """
    seeds = max(len(summary.losses) for summary in summaries)
    over = f" (mean ± std of {seeds} seeds)" if seeds > 1 else ""
    table = Table(title=f"Validation loss{over}", title_justify="left", title_style="bold")
    table.add_column("recipe", style="bold", no_wrap=True)
    headers = ["loss (nats)", f"gap to {baseline} (%)", *(["gap, known spread (%)"] if spread else [])]
    for header in [*headers, "tokens/s", "skipped steps"]:
        table.add_column(header, justify="right")
    for s in summaries:
        gap = "–" if s.recipe == baseline else _with_std(s.gap, s.gap_std, "+.2f")
        known = spread.get(s.recipe) if spread else None
        cells = [_with_std(s.loss, s.loss_std, ".4f"), gap]
        if spread:
            cells.append("–" if known is None or s.recipe == baseline else _with_std(*known, "+.2f"))
        table.add_row(s.recipe, *cells, number(s.tokens_per_second, ",.0f"), f"{s.skipped}")
    return table


def result_table(result: Result, bytes_per_token: float) -> Table:
    """The validation loss of one training, whole and by source."""
    table = Table(title=f"Validation of {result.recipe}", title_justify="left", title_style="bold")
    table.add_column("text")
    table.add_column("loss (nats)", justify="right")
    table.add_column("bits per byte", justify="right")
    rows = {"all": result.loss} | (result.by_source if len(result.by_source) > 1 else {})
    for name, loss in rows.items():
        # Bytes a token are known for the whole split, so bits per byte are given for it alone.
        bits = f"{loss / math.log(2) / bytes_per_token:.3f}" if name == "all" else ""
        table.add_row(name, f"{loss:.4f}", bits, style="bold" if name == "all" else "")
    return table


def summary_json(config: CompareConfig, summaries: Sequence[Summary], circumstances: Mapping[str, str]) -> Any:
    """What summary.json holds: numbers, settings, and where they come from."""
    return {
        **circumstances,
        "seeds": list(config.seeds),
        "baseline": config.baseline,
        "recipes": {
            s.recipe: {
                "losses": list(s.losses),
                "loss": s.loss,
                "loss_std": None if math.isnan(s.loss_std) else s.loss_std,
                "gaps_percent": [None if math.isnan(gap) else gap for gap in s.gaps],
                "tokens_per_second": None if math.isnan(s.tokens_per_second) else round(s.tokens_per_second),
                "skipped": s.skipped,
                "clip_fraction": round(s.clip_fraction, 4),
            }
            for s in summaries
        },
        "settings": _comparable(config),
    }


@dataclasses.dataclass(frozen=True)
class KnownSpread:
    """Gaps of the same settings over several seeds, measured before.

    Args:
        gaps: for each recipe, mean and standard deviation of its gap, %.
        note: how many seeds, on what, when, by which command.
    """

    gaps: dict[str, tuple[float, float]]
    note: str

    @classmethod
    def find(cls, config: CompareConfig, path: Path = KNOWN_SPREAD) -> "KnownSpread | None":
        """The spread in the package, if it was measured with exactly these settings; else None."""
        if not path.exists():
            return None
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["settings"] != _comparable(config) or len(known["seeds"]) < 2:
            return None
        gaps = {
            recipe: (float(np.mean(entry["gaps_percent"])), _std(entry["gaps_percent"]))
            for recipe, entry in known["recipes"].items()
        }
        seeds = ", ".join(str(seed) for seed in known["seeds"])
        return cls(gaps, f"known spread: seeds {seeds}; {known['hardware']}; {known['date']}; {known['command']}")


def _comparable(config: CompareConfig) -> Any:
    """The settings that a number depends on."""
    settings = to_json(config)
    for name in ("out", "seeds", "recipes", "side_by_side"):
        del settings[name]
    del settings["loop"]["tensorboard"]
    return settings


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _with_std(mean: float, std: float, form: str) -> str:
    return number(mean, form) + ("" if math.isnan(std) else f" ± {std:{form.removeprefix('+')}}")
