"""What an experiment is: a question, the arms that answer it, and what tells one arm with all its seeds from others."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp4jax.recipe import Recipe
from fp4jax.train.config import Settings

ROOT = Path(__file__).parent
"""The folder of the experiments."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """One arm: a recipe, trained with every seed of its experiment.

    Args:
        label: its name in tables and figures.
        recipe: what `fp4jax train --recipe` takes, or a name of the experiment's own `recipes`.
        optimizer: a row of `fp4jax.train.optimizer.OPTIMIZERS`, or of `experiments.optimizers.OPTIMIZERS`.
        learning_rates: peak rates, in place of the settings' own: every seed is trained with each of them.
        settings: in place of the experiment's.
        baseline: label of the arm to which its gap is measured, in place of the experiment's.
        paper: the paper's final loss of this arm (arXiv:2501.17116), if it has one; NaN where it diverged.
    """

    label: str
    recipe: str
    optimizer: str = "adamw"
    learning_rates: tuple[float, ...] = ()
    settings: Settings | None = None
    baseline: str | None = None
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
        settings: what its arms have in common; nothing that a preset would fill in is left open.
        seeds: of initial weights and data order, the same for every arm.
        arms: in the order of the tables, which is also that of running.
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
    settings: Settings
    seeds: tuple[int, ...]
    arms: tuple[ArmSpec, ...]
    baseline: str = "bf16"
    claims: tuple[Claim, ...] = ()
    paper: str = ""
    recipes: Mapping[str, Callable[..., Recipe]] = dataclasses.field(default_factory=dict)
    appendix: Callable[[], str] | None = None
    figures: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        labels = [arm.label for arm in self.arms]
        named = [
            self.baseline,
            *(arm.baseline for arm in self.arms if arm.baseline),
            *(label for claim in self.claims for label in (claim.lower, claim.higher)),
        ]
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

    def baseline_of(self, label: str) -> str:
        """Label of the arm to which the gap of another is measured: its own label where it is a baseline."""
        return next(arm.baseline for arm in self.arms if arm.label == label) or self.baseline

    def pieces(self) -> list["Piece"]:
        """What there is to run: an arm each, with all its seeds."""
        return [Piece(self, arm) for arm in self.arms]


@dataclasses.dataclass(frozen=True)
class Piece:
    """An arm with all its seeds, which train side by side: what runs at a time, and is stored in one file."""

    experiment: Experiment
    arm: ArmSpec

    @property
    def settings(self) -> Settings:
        """Of the training: those of the arm, or else of the experiment, with the arm's optimizer."""
        settings = self.arm.settings or self.experiment.settings
        return dataclasses.replace(
            settings, optimizer=dataclasses.replace(settings.optimizer, optimizer=self.arm.optimizer)
        )

    @property
    def lanes(self) -> tuple[tuple[int, float], ...]:
        """(seed, peak learning rate) of everything that trains side by side."""
        rate = self.settings.optimizer.learning_rate
        assert rate is not None  # configs leave nothing open
        return tuple((seed, lr) for lr in self.arm.learning_rates or (rate,) for seed in self.experiment.seeds)

    @property
    def identity(self) -> dict[str, Any]:
        """All that the numbers depend on but text, code and hardware: settings that differ from their defaults.

        Defaults are left out, so that a setting added to the package later does not make a stranger of what ran.
        """
        settings = explicit(self.settings)
        settings.get("data", {}).pop("text", None)  # a place on one machine; the store keeps the text's hash
        settings.get("loop", {}).pop("tensorboard", None)
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
    def file_name(self) -> str:
        """Of its results."""
        recipe = re.sub(r"[^A-Za-z0-9._=-]+", "-", self.arm.recipe).strip("-")
        optimizer = "" if self.arm.optimizer == "adamw" else f"-{self.arm.optimizer}"
        return f"{recipe}{optimizer}-{self.key[:8]}.json"


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
