"""Every experiment is well formed, every arm can be built, and pieces are told apart by what they compute."""

import dataclasses
import re

import pytest
from small_experiment import small

from experiments.__main__ import pieces_of
from experiments.base import ROOT, SIZES
from experiments.catalog import EXPERIMENTS
from experiments.experiment import ArmSpec, Claim, Experiment, Piece
from experiments.running import build
from fp4jax.train.arm import Text
from fp4jax.train.config import LoopOptions
from fp4jax.train.data import DataOptions
from fp4jax.train.errors import ConfigError

DISTINCT = list({piece.key: piece for e in map(small, EXPERIMENTS.values()) for piece in e.pieces()}.values())


@pytest.fixture(scope="module")
def text():
    return Text.load(DataOptions())


def test_every_folder_with_a_config_is_an_experiment():
    assert {path.parent.name for path in ROOT.glob("*/config.py")} == set(EXPERIMENTS)


@pytest.mark.parametrize("piece", DISTINCT, ids=lambda piece: piece.path.stem)
def test_every_arm_can_be_built(piece, text):
    arm = build(piece, text)
    assert arm.seeds == tuple(seed for seed, _ in piece.lanes)
    assert arm.recipe.quantizes == (piece.arm.recipe != "bf16")


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_settings_leave_nothing_to_a_preset(experiment):
    for piece in (piece for size in experiment.settings for piece in experiment.pieces(size)):
        assert piece.settings.resolved() == piece.settings
    assert set(experiment.sizes) <= set(experiment.settings) <= set(SIZES)


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=EXPERIMENTS)
def test_claims_have_the_seeds_to_be_tested(experiment):
    assert experiment.question.endswith((".", "?"))
    assert experiment.expected.endswith(".")
    assert len(experiment.seeds) >= 3 or not experiment.claims


def test_questions_that_share_an_arm_share_its_piece():
    by_key = {}
    for experiment in EXPERIMENTS.values():
        for piece in experiment.pieces():
            by_key.setdefault(piece.key, set()).add(experiment.name)
    assert {"precision", "dge", "occ", "granularity", "optimizer", "headline"} <= max(by_key.values(), key=len)
    assert {"precision", "granularity", "headline"} in by_key.values()


def test_a_key_depends_on_what_is_computed_and_on_nothing_else():
    piece = EXPERIMENTS["precision"].pieces()[0]

    def key(experiment=piece.experiment, **arm):
        return Piece(experiment, dataclasses.replace(piece.arm, **arm)).key

    def with_settings(settings):
        return key(dataclasses.replace(piece.experiment, settings={"9M": settings}))

    assert key(label="other", paper=1.0) == piece.key
    assert key(recipe="fp4") != piece.key
    assert key(optimizer="fp8_adamw") != piece.key
    assert key(dataclasses.replace(piece.experiment, learning_rates={"9M": (1e-3,)})) != piece.key
    assert key(dataclasses.replace(piece.experiment, learning_rates={"34M": (1e-3,)})) == piece.key
    assert key(dataclasses.replace(piece.experiment, seeds=(0, 1))) != piece.key
    settings = piece.settings
    longer = dataclasses.replace(settings, loop=dataclasses.replace(settings.loop, steps=401))
    elsewhere = dataclasses.replace(settings, data=DataOptions(text=(ROOT,)))
    silent = dataclasses.replace(settings, loop=dataclasses.replace(settings.loop, tensorboard=True))
    assert with_settings(longer) != piece.key
    assert with_settings(elsewhere) == with_settings(silent) == piece.key


def test_a_setting_that_is_added_later_makes_no_stranger_of_what_ran(monkeypatch):
    piece = EXPERIMENTS["precision"].pieces()[0]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Later(LoopOptions):
        new: int = 7

    loop = Later(**{field.name: getattr(piece.settings.loop, field.name) for field in dataclasses.fields(LoopOptions)})
    settings = {"9M": dataclasses.replace(piece.settings, loop=loop)}
    assert Piece(dataclasses.replace(piece.experiment, settings=settings), piece.arm).key == piece.key


def test_pieces_are_chosen_by_experiment_and_arm():
    assert [piece.arm.label for piece in pieces_of(["dge"], ["k = 3", "STE"])] == ["STE", "k = 3"]
    assert {piece.experiment.name for piece in pieces_of([], [])} == set(EXPERIMENTS)
    assert [piece.size for piece in pieces_of(["scale"])] == ["9M", "9M", "34M", "34M", "125M", "125M"]
    assert {piece.size for piece in pieces_of([], size="tiny")} == {"tiny"}
    with pytest.raises(ConfigError, match="size 'huge' is unknown; choose from 9M, 34M, 125M, tiny"):
        pieces_of(["dge"], size="huge")
    with pytest.raises(ConfigError, match=re.escape("experiment 'dgee' is unknown; choose from rates, ")):
        pieces_of(["dgee"], [])
    with pytest.raises(ConfigError, match="arm 'k = 4' is unknown; choose from bf16, STE, "):
        pieces_of(["dge"], ["k = 4"])


def test_labels_that_do_not_fit_are_refused():
    fields = {"name": "x", "question": "?", "expected": ".", "cost": "", "settings": None, "seeds": (0,)}
    arm = ArmSpec("bf16", "bf16")
    with pytest.raises(ValueError, match="experiment 'x': two arms have the same label"):
        Experiment(**fields, arms=(arm, arm))
    with pytest.raises(ValueError, match=r"experiment 'x': baseline or claims name \['fp4'\], which no arm is called"):
        Experiment(**fields, arms=(arm,), claims=(Claim("worse", "bf16", "fp4"),))
