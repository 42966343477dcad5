"""The command line: help, one clear line for what goes wrong, exit codes."""

import ast
import dataclasses
import inspect
import os
import re
import subprocess
import sys
import typing

import pytest
from rich.console import Console

import fp4jax
from fp4jax.cli import COMMANDS, main
from fp4jax.train.config import CompareConfig, TrainConfig
from fp4jax.train.data import PrepareOptions


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr. Help exits by itself, as argparse's does."""
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code or 0
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.parametrize("command", list(COMMANDS))
def test_help_of_every_command(capsys, command):
    code, output, errors = run(capsys, *command.split(), "--help")
    assert (code, errors) == (0, "")
    assert f"fp4jax {command}" in output


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_alone_it_lists_the_commands(capsys, arguments):
    code, output, errors = run(capsys, *arguments)
    assert (code, errors) == (0, "")
    for name, command in COMMANDS.items():
        assert name in output
        assert command.help in output


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"fp4jax {fp4jax.__version__}\n", "")


def fields_without_a_docstring(config: type) -> list[str]:
    """Fields of a dataclass, and of those nested in it, that no string follows in the source: --help shows that."""
    missing = []
    for owner in config.__mro__[:-1]:
        (body,) = (node.body for node in ast.parse(inspect.getsource(owner)).body)
        for i, node in enumerate(body):
            if isinstance(node, ast.AnnAssign):
                after = body[i + 1] if i + 1 < len(body) else None
                nested = typing.get_type_hints(config)[node.target.id]
                if dataclasses.is_dataclass(nested):
                    missing += fields_without_a_docstring(nested)
                elif not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    missing.append(f"{owner.__name__}.{node.target.id}")
    return missing


@pytest.mark.parametrize("config", [TrainConfig, CompareConfig, PrepareOptions])
def test_every_flag_is_explained(config):
    assert fields_without_a_docstring(config) == []


def test_recipes_fit_a_hundred_columns(capsys):
    code, output, _ = run(capsys, "recipes")
    assert code == 0
    assert max(map(len, output.splitlines())) <= 100
    assert "fp4_direct" in output
    assert "alpha=0.99" in output


def test_a_terminal_without_greek_gets_question_marks():
    script = "import sys; from fp4jax.cli import main; sys.exit(main(['recipes']))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"fp4_direct" in done.stdout
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian", r"command 'trian' is unknown; choose from compare, train, .*data prepare .*mean 'train'"),
        ("data", r"command 'data' is unknown; choose from"),
        ("data prepair x", r"command 'data prepair' is unknown; .*\(did you mean 'data prepare'\?\)"),
        ("recipes all", r"recipes takes no arguments, got 'all'"),
        ("train --steps many", r"--steps: .*'many'.* \(see fp4jax train --help\)"),
        ("train --steps 0", r"steps=0 must be a positive integer"),
        (
            "train --dtype fp8",
            r"invalid choice 'fp8' for argument '--dtype'. Expected one of \('bfloat16', 'float32'\)",
        ),
        ("train --nosuch", r"Unrecognized options: --nosuch \(see fp4jax train --help\)"),
        ("train --model 31m", r"model '31m' is unknown; choose from tiny, 30m, .* \(did you mean '30m'\?\)"),
        ("train --recipe fp5", r"recipe 'fp5' is unknown; choose from bf16, fp8, fp4_direct"),
        ("train --recipe fp4:alpha=1.5", r"recipe 'fp4:alpha=1.5': alpha=1.5 must be in \(0.5, 1\]"),
        ("train --optimizer sgd", r"optimizer 'sgd' is unknown; choose from adamw"),
        ("train --text /no/such.txt", r"text: no such text file: '/no/such.txt'"),
        ("train --tokenizer /no/such.json", r"tokenizer: no such tokenizer file: '/no/such.json'"),
        ("train --init /no/such", r"init='/no/such': no such model: '/no/such' is neither a file nor a folder.*"),
        (
            "train --high-precision haed",
            r"high_precision='haed' matches no layer; did you mean 'head'\? \(the layers are head, layers.*\)",
        ),
        ("train --min-chars -3", r"min_chars=-3 and max_chars=16384 must satisfy"),
        ("train --resume", r"resume needs out=FOLDER"),
        ("train --resume-step 4", r"resume_step=4 needs out=FOLDER"),
        ("train --resume-step 0 --out run", r"resume_step=0 must be a positive integer"),
        ("train --resume-step 4 --out run", r"resume_step=4: there is no checkpoint in run.checkpoints"),
        ("train --embed-dim 100 --num-heads 3", r"embed_dim=100 must be a multiple of num_heads=3"),
        ("compare --recipes bf16 fp44", r"recipe 'fp44' is unknown; .*\(did you mean 'fp4'\?\)"),
        ("compare --seeds 1 1", r"seeds=\(1, 1\) must name at least one, and none twice"),
        ("data prepare", r"Missing from fp4jax data prepare: --out"),
        ("data prepare /no/such.txt --out x", r"no such text file: '/no/such.txt'"),
        ("data prepare x --out y --vocab-size 3", r"vocab_size=3 "),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_two(capsys, arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, output, errors = run(capsys, *arguments.split())
    assert code == 2
    assert re.fullmatch(rf"fp4jax: .*{message}.*\n", errors), errors
    assert output == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "arguments", "purpose"),
    [
        ("grain", "train", "sampling batches"),
        ("tokenizers", "train --tokenizer tokenizer.json", "a tokenizer file"),
        ("tokenizers", "data prepare text.txt", "preparing text"),
        ("matplotlib", "train", "drawing curves"),
        ("matplotlib", "compare", "drawing curves"),
        ("tensorboardX", "train", "writing TensorBoard events"),
        ("tensorboardX", "compare", "writing TensorBoard events"),
    ],
)
def test_a_missing_package_is_one_line(capsys, monkeypatch, tmp_path, package, arguments, purpose):
    """Before anything is trained or written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "text.txt").write_text("\n\n".join(["call me ishmael " * 10] * 40))
    small = "--min-chars 50 --steps 1 --batch-size 1 --seq-len 8 --num-layers 1 --embed-dim 8 --num-heads 1"
    if not arguments.startswith("data"):
        arguments += f" --text text.txt {small}"
    code, output, errors = run(capsys, *arguments.split(), "--out", "run")
    assert (code, output) == (2, "")
    alternative = ", or pass --no-tensorboard" if package == "tensorboardX" else ""
    assert errors == f"fp4jax: {purpose} needs {package!r}: pip install 'fp4jax[train]'{alternative}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_ctrl_c_before_training_is_no_traceback(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4jax.cli._dispatch", interrupt)
    assert run(capsys, "train") == (130, "", "fp4jax: interrupted\n")


@pytest.mark.parametrize("resumed", [[], ["--resume"], ["--resume-step", "4"], ["--resume_step=4"]])
def test_an_interrupted_run_prints_the_command_that_goes_on(capsys, monkeypatch, tmp_path, resumed):
    from fp4jax.train import job
    from fp4jax.train.loop import Interrupted

    def train(config, console: Console):
        raise Interrupted("fp4", 7, tmp_path / "a run")

    monkeypatch.setattr(job, "train", train)
    out = ["--out", str(tmp_path / "a run")]
    code, output, _ = run(capsys, "train", *resumed, "--seed", "3", *(out if resumed else []))
    assert code == 130
    assert "interrupted fp4 after step 7" in output
    assert output.splitlines()[-1] == f"fp4jax train --seed 3 --out '{tmp_path / 'a run'}' --resume"


def test_prepared_text_trains(capsys, monkeypatch, tmp_path):
    """`data prepare`, then `train` on its folder, by the command lines that the first one prints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(
        "\n\n".join(f"chapter {i} of the whale and the sea and the ship" for i in range(300))
    )
    code, output, errors = run(
        capsys, "data", "prepare", "text.txt", "--out", "tokens", "--vocab-size", "280", "--min-chars", "50"
    )
    assert (code, errors) == (0, "")
    assert "to train on it: fp4jax train --text tokens" in output
    small = "--recipe bf16 --steps 2 --batch-size 2 --seq-len 8 --num-layers 1 --embed-dim 8 --num-heads 1 --mlp-dim 8"
    code, output, errors = run(
        capsys, "train", "--text", "tokens", *small.split(), "--no-tensorboard", "--out", "run", "--eval-batches", "1"
    )
    assert (code, errors) == (0, "")
    assert "bits per byte" in output
    assert (tmp_path / "run" / "curves.png").exists()


def test_training_imports_without_its_extras():
    """A machine may lack the packages of `fp4jax[train]`: what needs one says so when it is used."""
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['grain', 'tokenizers', 'tensorboardX', 'matplotlib']));"
        "import fp4jax.train.compare, fp4jax.train.job"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_the_command_does_not_wait_for_flax():
    script = (
        "import sys, fp4jax.cli; print(sorted({'flax', 'optax', 'orbax', 'grain', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
