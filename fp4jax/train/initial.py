"""`fp4jax train --init`: weights, shape and tokenizer of another model, from which a run starts in place of noise."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from fp4jax.models import MODELS, LlamaConfig, count_parameters
from fp4jax.train.arm import Text
from fp4jax.train.checkpoint.directory import StepDirectory
from fp4jax.train.config import TrainConfig
from fp4jax.train.data import DataOptions
from fp4jax.train.data.manifest import TOKENIZER
from fp4jax.train.errors import ConfigError
from fp4jax.train.model_files import (
    TrainedModel,
    from_json,
    is_prepared,
    open_model,
    open_shape,
    read_text,
    same_tokens,
)
from fp4jax.train.model_options import SHAPE, ModelOptions
from fp4jax.train.presets import PRESETS
from fp4jax.train.rundir import CHECKPOINTS, CONFIG

_SIZES = ("num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim")
"""What `--model` alone says of a shape."""


def resumes(config: TrainConfig) -> bool:
    """Whether the run goes on from a checkpoint of its own, so that nothing of `config.init` is read again."""
    out = config.out
    wish = config.checkpoint.resume or config.checkpoint.resume_step is not None
    return wish and out is not None and bool(StepDirectory(out / CHECKPOINTS).committed())


def follow[C: TrainConfig](config: C) -> C:
    """`config`, and the shape of the model at `config.init` where it says nothing.

    The preset is that of the size nearest in parameters; its sequences are cut to what the model takes. A run that is
    resumed has all of this from its own record.

    Raises:
        ConfigError: no model there, or flags that say otherwise; the message names the first.
        CheckpointError, DataError, MissingPackageError: as `open_shape` does.
    """
    if resumes(config):
        return _from_record(config)
    shape, step = open_shape(str(config.init), step=config.init_step, argument="init")
    _refuse_contradictions(config, shape)
    named = config.model.model or _nearest_size(shape)
    values = {name: getattr(shape, name) for name in SHAPE}
    loop = config.loop
    if loop.seq_len is None and named in PRESETS:
        loop = dataclasses.replace(loop, seq_len=min(PRESETS[named].seq_len, shape.max_seq_len))
    model = dataclasses.replace(config.model, model=named, **values)
    return dataclasses.replace(config, model=model, loop=loop, init_step=step)


def open_initial(config: TrainConfig) -> TrainedModel | None:
    """The model at `config.init`, on the host; None without one, or where the run resumes.

    Raises:
        ConfigError: none there, or of another shape than `config.model`, which is resolved.
        CheckpointError, MissingPackageError: as `open_model` does.
    """
    if config.init is None or resumes(config):
        return None
    model = open_model(config.init, step=config.init_step, argument="init")
    _refuse_contradictions(config, model.config)
    return model


def load_text(config: TrainConfig, initial: TrainedModel | None) -> Text:
    """The text of a run, in the tokens of the model that it starts, or once started, from.

    Raises:
        ConfigError: a tokenizer that is not the model's.
        DataError, MissingPackageError: as `Text.load` does.
    """
    data = config.data
    if initial is None:
        kept = None if config.init is None or config.out is None else config.out / TOKENIZER
        return Text.load(data if kept is None or not kept.exists() else dataclasses.replace(data, tokenizer=kept))
    _refuse_tokenizer(data, initial)
    corpus = read_text(initial, data)
    return Text(corpus.split(data.validation_fraction), corpus.fingerprint)


def keep_tokenizer(folder: Path, data: DataOptions, initial: TrainedModel) -> None:
    """Put the tokenizer that came with the model into the run's folder, where a resume, and `fp4jax eval`, find it."""
    if initial.tokenizer is not None and data.tokenizer is None and not is_prepared(data):
        initial.tokenizer.save(str(folder / TOKENIZER))


def _from_record[C: TrainConfig](config: C) -> C:
    assert config.out is not None
    path = config.out / CONFIG
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))["settings"]
        record = from_json(ModelOptions, settings["model"], str(path))
        seq_len, step = settings["loop"]["seq_len"], settings.get("init_step")
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{str(path)!r} is not the record of a run") from None
    left_open = {
        field.name: getattr(record, field.name)
        for field in dataclasses.fields(record)
        if getattr(config.model, field.name) is None
    }
    loop = config.loop if config.loop.seq_len is not None else dataclasses.replace(config.loop, seq_len=seq_len)
    model = dataclasses.replace(config.model, **left_open)
    if not model.is_whole:
        raise ConfigError(f"{str(path)!r} is of a run that had no init")
    step = step if config.init_step is None else config.init_step
    return dataclasses.replace(config, model=model, loop=loop, init_step=step)


def _refuse_contradictions(config: TrainConfig, shape: LlamaConfig) -> None:
    given: dict[str, Any] = {name: getattr(config.model, name) for name in SHAPE}
    given = {name: value for name, value in given.items() if value is not None}
    if config.model.model is not None and not config.model.is_whole:
        named = dataclasses.replace(config.model, max_seq_len=None).build(1, 1)
        for name in _SIZES:
            if name not in given and getattr(named, name) != getattr(shape, name):
                raise ConfigError(
                    f"model={config.model.model!r} has {name}={getattr(named, name)}, and init={config.init!r} has "
                    f"{getattr(shape, name)}: leave --model out"
                )
    for name, value in given.items():
        if value != (its := getattr(shape, name)):
            raise ConfigError(f"{name}={value} contradicts init={config.init!r}, which has {its}: leave it out")


def _refuse_tokenizer(data: DataOptions, initial: TrainedModel) -> None:
    prepared = is_prepared(data)
    if data.tokenizer is None and not prepared:
        return
    if initial.tokenizer is None and initial.data is not None:
        given = f"text={str(data.text[0])!r}" if prepared else f"tokenizer={str(data.tokenizer)!r}"
        raise ConfigError(f"{given} contradicts init: {initial.name!r} reads bytes, so give it text files alone")
    if data.tokenizer is not None and not same_tokens(data.tokenizer, initial):
        raise ConfigError(
            f"tokenizer={str(data.tokenizer)!r} contradicts init: {initial.name!r} has another one; leave it out"
        )


def _nearest_size(shape: LlamaConfig) -> str:
    """The named size whose number of parameters, with the vocabulary of `shape`, has the ratio to its nearest to 1."""
    size = count_parameters(shape)

    def distance(name: str) -> float:
        named = dataclasses.replace(MODELS[name], vocab_size=shape.vocab_size, tie_embeddings=shape.tie_embeddings)
        return abs(math.log(count_parameters(named) / size))

    return min(MODELS, key=distance)
