"""The `fp4jax` command: flags from the dataclasses of `fp4jax.train.config`, one clear line for what goes wrong."""

import contextlib
import dataclasses
import io
import itertools
import shlex
import sys
from collections.abc import Callable, Sequence

import tyro
from rich.console import Console, Group
from rich.table import Table

import fp4jax
from fp4jax.train.data.text import DataError
from fp4jax.train.errors import ConfigError, MissingPackageError
from fp4jax.train.naming import check_choice

USAGE_ERROR = 2
INTERRUPTED = 130
WIDTH = 100
"""Columns of tables that go to a file or a pipe, and the most that `fp4jax recipes` takes."""
MARKERS = (tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone)
"""How tyro turns dataclasses into flags: --steps, not --loop.steps; a value is left out rather than given as None."""

type Arguments = Sequence[str]


def main(arguments: Arguments | None = None) -> int:
    """Run a command line.

    Args:
        arguments: what follows `fp4jax`; by default those of the process.

    Returns:
        The exit code: 0; 2 for what the user can mend, with one line on stderr; 130 after Ctrl-C.

    Example:
        >>> main(["--version"])
        fp4jax 0.1.0
        0
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an α on a terminal without one is a question mark, not a crash
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    try:
        return _dispatch(arguments, console)
    except (ConfigError, DataError, MissingPackageError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:  # before training began, or a second Ctrl-C
        print("fp4jax: interrupted", file=sys.stderr)
        return INTERRUPTED


def _dispatch(arguments: list[str], console: Console) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        console.print(_overview())
        return 0
    if arguments[0] == "--version":
        console.print(f"fp4jax {fp4jax.__version__}", highlight=False)
        return 0
    words = 2 if arguments[0] == "data" else 1
    name = check_choice("command", " ".join(arguments[:words]), COMMANDS)
    return COMMANDS[name].run(arguments[words:], console)


# The commands import what they need themselves, so that help and errors come without waiting for Flax.


def _compare(arguments: Arguments, console: Console) -> int:
    from fp4jax.train.config import CompareConfig

    config = _parse(CompareConfig, "compare", arguments).resolved()
    from fp4jax.train.compare import compare
    from fp4jax.train.loop import Interrupted

    try:
        compare(config, console)
    except Interrupted as stop:
        console.print(f"{stop}; what was measured is in {stop.folder}", highlight=False, soft_wrap=True)
        return INTERRUPTED
    return 0


def _train(arguments: Arguments, console: Console) -> int:
    from fp4jax.train.config import TrainConfig

    config = _parse(TrainConfig, "train", arguments)
    if config.init is None:  # which has to be read
        config = config.resolved()
    from fp4jax.train.checkpoint import CheckpointError
    from fp4jax.train.job import train
    from fp4jax.train.loop import Interrupted

    try:
        train(config, console)
    except CheckpointError as error:
        return _fail(str(error))
    except Interrupted as stop:
        again = _without_resume(arguments)
        out = [] if config.out else ["--out", str(stop.folder)]
        console.print(f"{stop}, and saved; to go on:", highlight=False)
        console.print(shlex.join(["fp4jax", "train", *again, *out, "--resume"]), highlight=False, soft_wrap=True)
        return INTERRUPTED
    return 0


def _without_resume(arguments: Arguments) -> list[str]:
    """`arguments` but for --resume and --resume-step N (or =N), which a command that goes on must not repeat."""
    words, kept = iter(arguments), []
    for word in words:
        flag, equals, _ = word.replace("_", "-").partition("=")
        if flag == "--resume-step" and not equals:
            next(words, None)
        elif flag not in ("--resume", "--resume-step"):
            kept.append(word)
    return kept


def _eval(arguments: Arguments, console: Console) -> int:
    from fp4jax.train.evaluate import EvalConfig

    config = _parse(EvalConfig, "eval", arguments).resolved()
    from fp4jax.train.checkpoint import CheckpointError
    from fp4jax.train.evaluate import evaluate

    try:
        evaluate(config, console)
    except CheckpointError as error:
        return _fail(str(error))
    return 0


def _sensitivity(arguments: Arguments, console: Console) -> int:
    from fp4jax.train.sensitivity import SensitivityConfig

    config = _parse(SensitivityConfig, "sensitivity", arguments).resolved()
    from fp4jax.train.checkpoint import CheckpointError
    from fp4jax.train.sensitivity import sensitivity

    try:
        sensitivity(config, console)
    except CheckpointError as error:
        return _fail(str(error))
    return 0


def _export(arguments: Arguments, console: Console) -> int:
    from fp4jax.train.export import ExportConfig

    config = _parse(ExportConfig, "export", arguments).resolved()
    from fp4jax.train.checkpoint import CheckpointError
    from fp4jax.train.export import export

    try:
        export(config, console)
    except CheckpointError as error:
        return _fail(str(error))
    return 0


def _bench(arguments: Arguments, console: Console) -> int:
    from fp4jax.bench.config import BenchConfig

    config = _parse(BenchConfig, "bench", arguments).resolved()
    from fp4jax.bench.run import bench

    bench(config, console)
    return 0


def _plan(arguments: Arguments, console: Console) -> int:
    from fp4jax.train.plan import PlanConfig, plan

    plan(_parse(PlanConfig, "plan", arguments), console)
    return 0


def _recipes(arguments: Arguments, console: Console) -> int:
    if arguments and arguments[0] in ("-h", "--help"):
        console.print(f"usage: fp4jax recipes\n\n{COMMANDS['recipes'].help}", highlight=False)
        return 0
    if arguments:
        return _fail(f"recipes takes no arguments, got {arguments[0]!r}")
    from fp4jax.train.recipe_table import recipes_table

    console.print(recipes_table(), width=min(console.width, WIDTH))
    return 0


def _data_prepare(arguments: Arguments, console: Console) -> int:
    from fp4jax.train.data import PrepareOptions, prepare

    options = _parse(PrepareOptions, "data prepare", arguments)
    corpus = prepare(options, console)
    console.print(corpus.describe(), highlight=False, soft_wrap=True)
    console.print(f"to train on it: fp4jax train --text {options.out}", highlight=False, soft_wrap=True)
    return 0


@dataclasses.dataclass(frozen=True)
class Command:
    """A subcommand.

    Args:
        help: one line for the overview.
        run: does the work, given the arguments after the command's name; returns the exit code.
    """

    help: str
    run: Callable[[Arguments, Console], int]


COMMANDS: dict[str, Command] = {
    "compare": Command("Train one LLaMA under several recipes, and show what the 4 bits cost.", _compare),
    "train": Command("Train a LLaMA of any size under one recipe; checkpoints, bit-equal resume.", _train),
    "eval": Command("Perplexity of a trained model under recipes, by source of the text.", _eval),
    "sensitivity": Command("Quantize one layer at a time, and rank layers by what it does to the loss.", _sensitivity),
    "export": Command("Write a trained model for transformers, or packed at four bits a weight.", _export),
    "bench": Command("Time kernels, a layer and a train step against XLA, Flax and Qwix.", _bench),
    "plan": Command("Memory and traffic of a run on a mesh of any size, from its compiled step.", _plan),
    "recipes": Command("List the recipes: what each quantizes, and its knobs.", _recipes),
    "data prepare": Command("Train a tokenizer on text files, and write them as tokens.", _data_prepare),
}


def _overview() -> Group:
    commands = Table.grid(padding=(0, 3, 0, 2))
    for name, command in COMMANDS.items():
        commands.add_row(f"[bold]{name}[/bold]", command.help)
    return Group(
        "fp4jax: train language models with 4-bit floating-point matrix products",
        "",
        r"usage: fp4jax COMMAND \[OPTIONS], fp4jax COMMAND --help, fp4jax --version",
        "",
        commands,
    )


def _parse[T](kind: type[T], command: str, arguments: Arguments) -> T:
    """`arguments` as a configuration. tyro's help passes; its boxed errors become one line.

    Raises:
        ConfigError: a flag or value that does not exist.
    """
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            return tyro.cli(
                kind,
                prog=f"fp4jax {command}",
                args=arguments,
                config=MARKERS,
            )
    except SystemExit as stop:
        if stop.code != USAGE_ERROR:
            raise
        raise ConfigError(f"{_unboxed(output.getvalue())} (see fp4jax {command} --help)") from None


def _unboxed(box: str) -> str:
    """The first paragraph in a titled box, as one line. Where output is not UTF-8, the box is rules of dashes."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()]
    _title, *rest = [line for line in lines if line]
    body = itertools.dropwhile(_is_rule, rest)
    paragraph = " ".join(itertools.takewhile(lambda line: not _is_rule(line), body))
    return paragraph.partition(" Got errors:")[0]  # those of int and of None, where a flag takes both


def _is_rule(line: str) -> bool:
    return set(line) in ({"─"}, {"-"})


def _fail(message: str) -> int:
    print(f"fp4jax: {message}", file=sys.stderr)
    return USAGE_ERROR
