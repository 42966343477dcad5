"""`python -m experiments list|run|report`: see docs/experiments.md."""

import dataclasses
import sys
from collections.abc import Sequence

import tyro
from rich.console import Console

from experiments import report as reporting
from experiments.base import SIZES
from experiments.catalog import EXPERIMENTS
from experiments.experiment import Piece
from fp4jax.train.data.text import DataError
from fp4jax.train.errors import ConfigError, MissingPackageError
from fp4jax.train.naming import check_choice


@dataclasses.dataclass(frozen=True)
class List:
    """List the experiments, and how many of their arms have run at each size."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Run what has not run yet, piece by piece; a piece is an arm with all its seeds."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Experiments to run, in this order; by default all, in order of worth."""
    only: tuple[str, ...] = ()
    """Labels of the arms to run; by default all."""
    size: str | None = None
    """Size to run at: 9M, 34M, 125M, or tiny, which needs no text and no GPU. By default each experiment's own."""
    time_limit: float | None = None
    """Seconds: no piece is started that would not fit."""
    tokens_per_second: float = 5e5
    """What is assumed until a piece has been measured: all seeds together, compilation included."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Rebuild the tables and figures of the READMEs and docs/experiments.md from stored results; needs no GPU."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Experiments to report; by default all."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code, 2 for what the user can mend."""
    command = tyro.cli(
        List | Run | Report,  # pyright: ignore[reportArgumentType]  (tyro takes a union)
        prog="python -m experiments",
        description=__doc__,
        args=arguments,
        config=(tyro.conf.OmitArgPrefixes,),
    )
    console = Console(soft_wrap=True, highlight=False)
    try:
        match command:
            case List():
                console.print(reporting.overview())
            case Report(names):
                for name in names or EXPERIMENTS:
                    console.print(f"{reporting.report(EXPERIMENTS[check_choice('experiment', name, EXPERIMENTS)])}")
                console.print(f"{reporting.report_claims()}")
            case Run():
                return _run(command, console)
    except (ConfigError, DataError, MissingPackageError) as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 2
    return 0


def pieces_of(names: Sequence[str], only: Sequence[str] = (), size: str | None = None) -> list[Piece]:
    """The pieces of experiments, in order, those of `only` if it names any.

    Args:
        names: of experiments; none for all, at a size for all that have it.
        only: labels of arms.
        size: by default each experiment's own sizes.

    Raises:
        ConfigError: an unknown experiment, arm or size.
    """
    if size is not None:
        check_choice("size", size, SIZES)
    chosen = [EXPERIMENTS[check_choice("experiment", name, EXPERIMENTS)] for name in names]
    chosen = chosen or [one for one in EXPERIMENTS.values() if size is None or size in one.settings]
    pieces = [piece for experiment in chosen for piece in experiment.pieces(size)]
    for label in only:
        check_choice("arm", label, dict.fromkeys(piece.arm.label for piece in pieces))
    return [piece for piece in pieces if not only or piece.arm.label in only]


def _run(command: Run, console: Console) -> int:
    from experiments.running import Limits, run  # here, so that `list` need not wait for Flax

    limits = Limits(command.time_limit, command.tokens_per_second)
    left = run(pieces_of(command.names, command.only, command.size), console, limits)
    console.print(f"left to run: {len(left)}" if left else "nothing is left to run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
