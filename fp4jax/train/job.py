"""`fp4jax train`: one recipe, any size, with checkpoints and bit-equal resume."""

import contextlib
import dataclasses
import json
from pathlib import Path

import jax
from rich.console import Console

from fp4jax.train import distributed
from fp4jax.train.arm import Arm
from fp4jax.train.checkpoint import Checkpointer, CheckpointError
from fp4jax.train.config import CheckpointOptions, DistributedOptions, Plan, TrainConfig, to_json
from fp4jax.train.display import Display
from fp4jax.train.errors import ConfigError
from fp4jax.train.initial import keep_tokenizer, load_text, open_initial
from fp4jax.train.loop import Interrupted, Result, Saving, StopSignal, train_arm
from fp4jax.train.measuring import Measuring, report_measurements
from fp4jax.train.metrics import MetricsLog, require_tensorboard
from fp4jax.train.model_files import TrainedModel
from fp4jax.train.placement import Placement, make_placement
from fp4jax.train.plots import Curves, draw_curves, require_matplotlib
from fp4jax.train.rundir import CHECKPOINTS, circumstances, open_run, write_json
from fp4jax.train.step import TrainState
from fp4jax.train.tables import result_table


def train(config: TrainConfig, console: Console) -> tuple[Path, Result]:
    """Train one model; everything about it goes into one folder.

        config.json       all settings, and the hash of the text
        metrics.jsonl     a row a step, and a row a validation (see `fp4jax.train.metrics`)
        telemetry.jsonl   with `telemetry_every`: a row for each operand that was measured (see `fp4jax.telemetry`)
        events.out.*      the same for TensorBoard
        checkpoints/      the last few states
        curves.png        loss curves
        telemetry.png     with `telemetry_every`: the last measurement
        summary.json      the result, with command, date, hardware and versions

    Args:
        config: settings, resolved or not.
        console: for the progress.

    Returns:
        The folder and the result.

    With several processes (`config.devices`) each calls this. If one is lost the others say so and end at once.

    Raises:
        ConfigError, DataError: settings or text that cannot be used.
        MissingPackageError: an optional package is absent.
        CheckpointError: a checkpoint cannot be written or restored.
        Interrupted: stopped by a signal, with the state saved.

    Example:
        >>> folder, result = train(TrainConfig(recipe="fp4", seed=1), Console())  # doctest: +SKIP
    """
    config = config.resolved()
    require_packages(config.plan)
    distributed.start(config.devices)
    placement = make_placement(config.devices)
    opened = [open_initial(config)]  # `_train` takes it out, so that nothing here keeps its weights while training
    with placement.active():
        if jax.process_count() == 1:
            return _train(config, opened, placement, console)
        try:
            with distributed.Watch(orderly=(distributed.AgreedError, Interrupted)):
                return _train(config, opened, placement, console if distributed.is_main() else Console(quiet=True))
        except (jax.errors.JaxRuntimeError, CheckpointError) as error:
            # Whatever an orderly end waits for will not come.
            distributed.leave(
                f"process {jax.process_index()} failed, or lost the others: {' '.join(str(error).split())[:300]}; "
                "start all of them again with --resume to go on from the last checkpoint"
            )


def _train(
    config: TrainConfig, opened: list[TrainedModel | None], placement: Placement, console: Console
) -> tuple[Path, Result]:
    """See `train`. Every process runs it; process 0 alone writes, and what it prints is seen."""
    plan, options, initial = config.plan, config.checkpoint, opened.pop()
    text = load_text(config, initial)
    arm = Arm(config, config.recipe, (config.seed,), text, placement)

    def folder_of_run() -> str:
        if options.resume_step is not None and config.out and not (config.out / CHECKPOINTS).is_dir():
            where = config.out / CHECKPOINTS
            raise ConfigError(f"resume_step={options.resume_step}: there is no checkpoint in {where}")
        return str(open_run(config, "train", out=config.out, fingerprint=text.fingerprint, resume=options.resume))

    folder = Path(distributed.on_main(folder_of_run))
    settings = to_json(dataclasses.replace(config, devices=DistributedOptions(), out=None))
    mine = json.dumps([settings, text.fingerprint])
    if distributed.on_main(lambda: mine) != mine:
        raise ConfigError(f"process {jax.process_index()} has other settings, or another text, than process 0")
    console.print(describe(arm, folder), highlight=False, soft_wrap=True)
    if initial is not None:
        console.print(f"weights of {initial.name}", highlight=False, soft_wrap=True)
        if distributed.is_main():
            keep_tokenizer(folder, config.data, initial)
    with Checkpointer(folder / CHECKPOINTS, keep=options.keep) as checkpointer:
        state, start = _first_state(arm, initial, checkpointer, options, console)
        del initial  # so the host need not hold its weights any longer
        metadata = {"settings": to_json(config), "corpus": text.fingerprint}
        saving = Saving(checkpointer, options.save_every or max(1, plan.steps // 10), metadata)
        with contextlib.ExitStack() as stack:
            logs, measuring, events = [], None, {"tensorboard": plan.tensorboard, "resume_at": start}
            if distributed.is_main():
                logs.append(stack.enter_context(MetricsLog(folder, **events)))
            if every := config.telemetry_every:
                measuring = Measuring(arm, folder, every, writes=distributed.is_main(), **events)
                stack.enter_context(measuring)
            display = stack.enter_context(Display(console, [config.recipe], plan.steps))
            stop = stack.enter_context(StopSignal())
            progress = display.progress[config.recipe]
            (result,) = train_arm(arm, state, logs, progress, stop, folder=folder, saving=saving, measuring=measuring)
    if distributed.is_main():
        _report(config, arm, folder, result, console)
    return folder, result


def _report(config: TrainConfig, arm: Arm, folder: Path, result: Result, console: Console) -> None:
    """The result as a file, a figure and a table."""
    tokens_per_second = result.tokens_per_second if result.tokens_per_second > 0 else None
    values = dataclasses.asdict(result) | {"tokens_per_second": tokens_per_second}
    write_json(folder / "summary.json", {**circumstances(), "parameters": arm.num_parameters, **values})
    draw_curves(
        folder / "curves.png",
        [Curves.read(config.recipe, [folder])],
        baseline=config.recipe,
        tokens_per_step=arm.tokens_per_step,
        title=title(arm),
        token=arm.text.token,
    )
    console.print(result_table(result, arm.text.split.validation.bytes_per_token))
    speed = "" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s, "
    counts = f"{result.skipped} steps skipped, {result.clip_fraction:.0%} clipped"
    console.print(f"{speed}{counts}; curves: {folder / 'curves.png'}", highlight=False, soft_wrap=True)
    if config.telemetry_every:
        report_measurements(folder, console)


def require_packages(plan: Plan) -> None:
    """Import what writes a run's curves and events, so that its absence is noticed before training and not after it.

    Raises:
        MissingPackageError: matplotlib is absent, or tensorboardX is and `plan.tensorboard` asks for it.
    """
    require_matplotlib()
    if plan.tensorboard:
        require_tensorboard()


def _first_state(
    arm: Arm, initial: TrainedModel | None, checkpointer: Checkpointer, options: CheckpointOptions, console: Console
) -> tuple[TrainState, int | None]:
    """Where training begins, and the step it resumes after; None for a start at step 0."""
    start = options.resume_step
    if start is None and options.resume:
        start = checkpointer.latest()
        if start is None:
            console.print("no checkpoint yet: starting at step 0", highlight=False)
    if start is None:
        return arm.init(None if initial is None else initial.params), None
    try:
        state, _ = checkpointer.restore(arm.abstract_state, start)
    except FileNotFoundError as error:
        raise distributed.AgreedError(f"resume_step={start}: {error}") from error
    done = start >= arm.plan.steps
    left = f", the last: nothing is left to do (--steps is {arm.plan.steps}), this is its result" if done else ""
    console.print(f"resumed after step {start}{left}", highlight=False, soft_wrap=True)
    return state, start


def title(arm: Arm) -> str:
    """What was trained, for the head of a figure: `LLaMA, 4 × 128, .87M parameters`."""
    model = arm.model
    millions = arm.num_parameters / 1e6
    return (
        f"LLaMA, {model.num_layers} layers × {model.embed_dim}, {millions:,.{1 if millions >= 1 else 2}f}M parameters"
    )


def describe(arm: Arm, folder: Path) -> str:
    """A line before training begins."""
    plan, split = arm.plan, arm.text.split
    return (
        f"{title(arm)}; {plan.steps} steps × {plan.batch_size} × {plan.seq_len} tokens of {split.train.num_tokens:,}; "
        f"validation on {split.validation.num_tokens:,}; writing {folder}"
    )
