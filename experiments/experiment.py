"""What an experiment is: a question, the arms that answer it, and what tells one arm with all its seeds from others."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.base import DEFAULT_SIZE, ROOT, SEEDS, SIZES
from fp4jax.recipe import Recipe
from fp4jax.train.config import Settings
from fp4jax.train.naming import check_choice

_FORMER_DEFAULTS = {"model": {"model": "tiny", "tie_embeddings": False}}
"""Defaults under which results are stored and that have become None since: an identity goes on leaving them out."""


@dataclasses.dataclass(frozen=True)
class ArmSpec:
    """One arm: a recipe, trained with every seed of its experiment.

    Args:
        label: its name in tables and figures.
        recipe: what `fp4jax train --recipe` takes, or a name of the experiment's own `recipes`.
        optimizer: a row of `fp4jax.train.optimizer.OPTIMIZERS`, or of `experiments.optimizers.OPTIMIZERS`.
        paper: the paper's final loss of this arm (arXiv:2501.17116), if it has one; NaN where it diverged.
    """

    label: str
    recipe: str
    optimizer: str = "adamw"
    paper: float | None = None


@dataclasses.dataclass(frozen=True)
class Claim:
    """An ordering that can be refuted: `lower` ends at a lower loss than `higher`.

    Args:
        text: the claim in words.
        lower, higher: labels of arms.
    """

    text: str
    lower: str
    higher: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A question and how it is answered.

    Args:
        name: of its folder.
        question: one sentence.
        expected: what was expected before it ran.
        cost: what it takes, in words.
        arms: in the order of the tables, which is also that of running.
        settings: what its arms have in common, by size; nothing that a preset would fill in is left open. Results of
            two sizes never share a table, and claims are tested at each size.
        sizes: at which it is run unless told otherwise.
        seeds: of initial weights and data order, the same for every arm.
        learning_rates: peak rates by size, in place of the settings' own: every seed is trained with each of them.
        baseline: label of the arm to which gaps are measured.
        claims: what the paired tests are of.
        paper: where the paper's numbers stand, and what differs.
        recipes: recipes that `fp4jax.recipes` does not have, by name.
        appendix: makes Markdown to put below the tables.
        figures: names of `experiments.figures.FIGURES` to draw beside the main one.
    """

    name: str
    question: str
    expected: str
    cost: str
    arms: tuple[ArmSpec, ...]
    settings: Mapping[str, Settings] = dataclasses.field(default_factory=lambda: SIZES)
    seeds: tuple[int, ...] = SEEDS
    sizes: tuple[str, ...] = (DEFAULT_SIZE,)
    learning_rates: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    baseline: str = "bf16"
    claims: tuple[Claim, ...] = ()
    paper: str = ""
    recipes: Mapping[str, Callable[..., Recipe]] = dataclasses.field(default_factory=dict)
    appendix: Callable[[], str] | None = None
    figures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        labels = [arm.label for arm in self.arms]
        named = [self.baseline, *(label for claim in self.claims for label in (claim.lower, claim.higher))]
        if len(set(labels)) != len(labels):
            raise ValueError(f"experiment {self.name!r}: two arms have the same label, {labels}")
        if missing := sorted(set(named) - set(labels)):
            raise ValueError(f"experiment {self.name!r}: baseline or claims name {missing}, which no arm is called")

    @property
    def folder(self) -> Path:
        """Where README.md, figures and results/ are."""
        return ROOT / self.name

    @property
    def command(self) -> str:
        """What runs it."""
        return f"python -m experiments run {self.name}"

    def pieces(self, size: str | None = None) -> list["Piece"]:
        """What there is to run, at a size or by default at all of `sizes`: an arm each, with all its seeds.

        Raises:
            ConfigError: it has no settings for the size.
        """
        sizes = self.sizes if size is None else (check_choice("size", size, self.settings),)
        return [Piece(self, arm, size) for size in sizes for arm in self.arms]


@dataclasses.dataclass(frozen=True)
class Piece:
    """An arm with all its seeds, which train side by side: what runs at a time, and is stored in one file."""

    experiment: Experiment
    arm: ArmSpec
    size: str = DEFAULT_SIZE

    @property
    def settings(self) -> Settings:
        """Of the training: those of the experiment at this size, with the arm's optimizer."""
        settings = self.experiment.settings[self.size]
        return dataclasses.replace(
            settings, optimizer=dataclasses.replace(settings.optimizer, optimizer=self.arm.optimizer)
        )

    @property
    def lanes(self) -> tuple[tuple[int, float], ...]:
        """(seed, peak learning rate) of everything that trains side by side."""
        rate = self.settings.optimizer.learning_rate
        assert rate is not None  # configs leave nothing open
        rates = self.experiment.learning_rates.get(self.size, (rate,))
        return tuple((seed, lr) for lr in rates for seed in self.experiment.seeds)

    @property
    def identity(self) -> dict[str, Any]:
        """All that the numbers depend on but text, code and hardware: settings that differ from their defaults.

        Defaults are left out, so that a setting added to the package later does not make a stranger of what ran.
        """
        settings = explicit(self.settings)
        settings.get("data", {}).pop("text", None)  # a place on one machine; the store keeps the text's hash
        settings.get("loop", {}).pop("tensorboard", None)
        for name, values in _FORMER_DEFAULTS.items():
            kept = {k: v for k, v in settings.pop(name, {}).items() if k not in values or v != values[k]}
            settings |= {name: kept} if kept else {}
        return {"recipe": self.arm.recipe, "lanes": [list(lane) for lane in self.lanes], "settings": settings}

    @property
    def key(self) -> str:
        """Hash of the identity. Two experiments with the same piece run it once."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    @property
    def tokens(self) -> int:
        """Training tokens of all lanes."""
        loop = self.settings.plan
        return loop.steps * loop.batch_size * loop.seq_len * len(self.lanes)

    @property
    def path(self) -> Path:
        """Of its results, under the folder of the experiments: those of other than the default size in a folder."""
        recipe = re.sub(r"[^A-Za-z0-9._=-]+", "-", self.arm.recipe).strip("-")
        optimizer = "" if self.arm.optimizer == "adamw" else f"-{self.arm.optimizer}"
        results = Path(self.experiment.name) / "results" / ("" if self.size == DEFAULT_SIZE else self.size)
        return results / f"{recipe}{optimizer}-{self.key[:8]}.json"


def explicit(config: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, nested, as JSON values."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if callable(field.default_factory) else field.default
        if value == default:
            continue
        if dataclasses.is_dataclass(value):
            found[field.name] = explicit(value)
        elif isinstance(value, tuple):
            found[field.name] = [str(item) if isinstance(item, Path) else item for item in value]
        else:
            found[field.name] = str(value) if isinstance(value, Path) else value
    return found
