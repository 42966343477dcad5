"""`fp4jax export`: a trained model as a Hugging Face folder, or with its quantized weights packed at four bits each."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from fp4jax import interop
from fp4jax.train.compose import recipe_rules
from fp4jax.train.errors import ConfigError, naming_high_precision
from fp4jax.train.model_files import open_model, readable_errors
from fp4jax.train.naming import parse_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Write a model for others: as Hugging Face safetensors, or packed at four bits a quantized weight."""

    model: tyro.conf.Positional[str]
    """A run folder of `fp4jax train`, a Hugging Face folder, packed weights, a .gguf file, or smollm2 (93 MB)."""
    out: tyro.conf.Positional[Path]
    """The folder to write. It must be new."""
    format: Literal["hf", "packed"] = "hf"
    """hf: config.json and safetensors that transformers loads. packed: codes and scales (docs/interop.md)."""
    recipe: str | None = None
    """Quantize the weights as this recipe does; hf then holds what they stand for. By default none; fp4 if packed."""
    high_precision: str = "embed|head"
    """Layers to leave in high precision: a regular expression over their paths."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of weights that are not packed."""
    step: int | None = None
    """Of a run's checkpoint. By default the newest."""

    def resolved(self) -> "ExportConfig":
        """These settings checked, and packed with a recipe.

        Raises:
            ConfigError: an unknown recipe, one that does not quantize weights, or a folder that holds something.
        """
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ConfigError(f"out={str(self.out)!r} is there already: give a new folder")
        name = "fp4" if self.recipe is None and self.format == "packed" else self.recipe
        if name is not None and parse_recipe(name).fprop.rhs is None:
            raise ConfigError(f"recipe={name!r} does not quantize weights")
        return dataclasses.replace(self, recipe=name)


def export(config: ExportConfig, console: Console) -> None:
    """Write the model that `config` names.

    Raises:
        ConfigError, DataError: settings or a model that cannot be used.
        CheckpointError: a damaged checkpoint.
        MissingPackageError: an optional package is absent.
    """
    config = config.resolved()
    model = open_model(config.model, step=config.step)
    params, bits = model.params, None
    with readable_errors():
        if config.recipe is not None:
            rules = recipe_rules(parse_recipe(config.recipe), config.high_precision)
            with naming_high_precision(config.high_precision):
                params = interop.quantize_params(model.config, params, rules)
        options = {"dtype": config.dtype, "tokenizer": model.tokenizer}
        if config.format == "packed":
            bits = interop.save_packed(config.out, model.config, params, **options)
        else:
            interop.save_hf(config.out, model.config, interop.dequantize_params(params), **options)
    size = sum(file.stat().st_size for file in config.out.iterdir()) / 1e6
    packed = "" if bits is None else f"; {bits:.3f} bits a quantized weight, scales included"
    console.print(f"{model.name} -> {config.out}: {size:,.1f} MB{packed}", highlight=False, soft_wrap=True)
