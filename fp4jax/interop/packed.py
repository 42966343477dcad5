"""Quantized weights on the disk at four bits each: packed codes, scales, and a manifest that says what they mean.

A folder holds

    manifest.json       format, version, the model's configuration, and a record of every quantized tensor
    model.safetensors   (or parts with an index) X.weight for what is not quantized; for what is, X.weight.codes,
                        X.weight.scale and, of two-level scales, X.weight.outer_scale

with Hugging Face's names and orientation: X.weight is [n, k], contracted over its last axis k. Codes of four bits lie
in uint8 [n, ⌈k/2⌉], element 0 in the low nibble; codes of eight bits in uint8 [n, k]. A scale is [n, blocks of k], or
[1, 1] for a whole tensor: float32 as such, E8M0 and E4M3 as uint8 views, because readers of safetensors disagree on the
names of small floats or know none. The record gives the dtype of the view.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from fp4jax import rounding, scaling
from fp4jax.formats import FORMATS, FloatFormat, decode, encode, pack_nibbles, unpack_nibbles
from fp4jax.interop import layout
from fp4jax.interop.errors import InteropError
from fp4jax.interop.hf_config import from_hf_config, to_hf_config
from fp4jax.interop.layout import Params
from fp4jax.interop.tensor_files import SHARD_BYTES, TensorFiles, new_folder, read_json, write_tensors
from fp4jax.models import LlamaConfig
from fp4jax.models.llama import LINEAR_PATHS
from fp4jax.nn import Rules, resolve_blocks
from fp4jax.quantize import QTensor, QuantSpec, quantize
from fp4jax.recipe import Recipe

MANIFEST = "manifest.json"
FORMAT = "fp4jax packed weights"
VERSION = 1

_GRANULARITIES = {
    cls.__name__: cls for cls in (scaling.PerTensor, scaling.PerVector, scaling.PerBlock, scaling.PerBlock2D)
}
_SCALE_RULES = {cls.__name__: cls for cls in (scaling.AbsMax, scaling.PowerOfTwo, scaling.TwoLevel)}
_WIDE = {"F32": np.dtype(np.float32), "BF16": np.dtype(jnp.bfloat16), "F16": np.dtype(np.float16)}
_CONTRACTED = -2
"""The contraction axis of our kernels [k, n]."""


def quantize_params(config: LlamaConfig, params: Any, rules: Rules) -> Params:
    """Parameters in which each kernel that a recipe quantizes is the `QTensor` its product sees.

    Args:
        config: the model's shape.
        params: nested dicts of arrays, an `nnx.State`, or a `Llama`.
        rules: as `Llama` takes them; of each recipe the weight of fprop counts.

    Returns:
        Nested dicts. A stack of kernels [L, k, n] becomes one QTensor whose scales have a leading axis too; each block
        is quantized by itself.

    Raises:
        InteropError: parameters of another shape, a stochastic rounding (an exported weight has one value), or a rule
            that quantizes a head tied to the embedding, which is looked up in high precision.
        TypeError, ValueError: rules that `fp4jax.nn.resolve_rules` refuses.
    """
    leaves = dict(layout.flat(params, config))
    blocks = {path: config.num_layers if path.startswith("layers.") else None for path in LINEAR_PATHS}
    for path, recipes in resolve_blocks(rules, blocks, stacks=("layers",)).items():
        specs = {_weight_spec(path, recipe) for recipe in recipes}
        if len(specs) > 1:
            raise InteropError(f"rules quantize the blocks of {path!r} differently, and packed weights have one format")
        if (spec := specs.pop()) is None:
            continue
        leaf = (*path.split("."), "kernel")
        if leaf not in leaves:
            raise InteropError(
                f"rules quantize {path!r} to {spec!r}, and it is tied to the embedding: begin them with ('head', None)"
            )
        leaves[leaf] = _quantized(leaves[leaf], spec)
    return layout.nested(leaves)


def dequantize_params(params: Mapping[str, Any], dtype: DTypeLike = jnp.float32) -> Params:
    """Parameters with the numbers their QTensors stand for, as NumPy arrays in `dtype`; others stay as they are."""

    def plain(leaf: Any) -> Any:
        return np.asarray(_dequantize(leaf, np.dtype(dtype))) if isinstance(leaf, QTensor) else leaf

    return jax.tree.map(plain, dict(params), is_leaf=lambda leaf: isinstance(leaf, QTensor))


def save_packed(
    folder: str | Path,
    config: LlamaConfig,
    params: Mapping[str, Any],
    *,
    dtype: DTypeLike | None = None,
    tokenizer: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> float:
    """Write parameters that hold QTensors, each code in its four (or eight) bits.

    Args:
        folder: a new or empty folder. It appears whole or not at all.
        config: the model's shape.
        params: from `quantize_params`.
        dtype: float32, bfloat16 or float16 of what is not quantized; None keeps that of the parameters.
        tokenizer: a `tokenizers.Tokenizer`, written as tokenizer.json.
        shard_bytes: the most that goes into one safetensors file.

    Returns:
        Bits for each quantized weight, scales included.

    Raises:
        InteropError: a folder that holds something, parameters of another shape, none quantized, or another dtype.
        MissingPackageError: the package `safetensors` is not installed.

    Example:
        >>> from flax import nnx
        >>> from fp4jax.models import MODELS, Llama
        >>> model = Llama(MODELS["tiny"], rngs=nnx.Rngs(0))
        >>> packed = quantize_params(model.config, model, fp4jax.nn.default_rules(fp4jax.recipes.fp4()))
        >>> q = packed["layers"]["mlp"]["up"]["kernel"]
        >>> q.shape, q.scale.shape, round(8 * q.nbytes / q.values.size, 2)
        ((4, 128, 352), (4, 1, 352), 4.25)
        >>> save_packed("tiny", model.config, packed)
        4.214285714285714
        >>> config, params = load_packed("tiny")
        >>> params["layers"]["mlp"]["up"]["kernel"].values.dtype.name
        'float4_e2m1fn'
    """
    leaves = layout.flat(params, config)
    if dtype is not None and np.dtype(dtype) not in _WIDE.values():
        raise InteropError(f"dtype={np.dtype(dtype).name} is not one of {', '.join(d.name for d in _WIDE.values())}")
    quantized = [leaf for leaf in leaves.values() if isinstance(leaf, QTensor)]
    if not quantized:
        raise InteropError("no parameter is quantized: make them with quantize_params")
    bits = 8 * sum(q.nbytes for q in quantized) / sum(q.values.size for q in quantized)
    records: dict[str, Any] = {}

    def tensors():
        for name, entry in layout.entries(config).items():
            if not isinstance(leaves[entry.path], QTensor):
                with np.errstate(over="ignore"):
                    tensor = layout.to_tensor(entry, leaves, dtype)
                if tensor.dtype == np.float16 and np.isinf(tensor).any() and np.isfinite(entry.ours(leaves)).all():
                    raise InteropError(f"{name} holds values beyond float16's 65504: give dtype=bfloat16 or float32")
                yield name, tensor
                continue
            q = leaves[entry.path]
            q = q if entry.layer is None else jax.tree.map(lambda leaf, layer=entry.layer: leaf[layer], q)
            records[name], parts = _pack(q)
            yield from ((f"{name}.{part}", array) for part, array in parts.items())

    with new_folder(Path(folder)) as scratch:
        write_tensors(scratch, tensors(), shard_bytes=shard_bytes)
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "bits_per_quantized_weight": bits,
            "config": to_hf_config(config),
            "quantized": records,
        }
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save(str(scratch / "tokenizer.json"))
    return bits


def load_packed(folder: str | Path, *, dtype: DTypeLike = jnp.bfloat16) -> tuple[LlamaConfig, Params]:
    """Read what `save_packed` wrote: the same QTensors bit for bit, and the other parameters in float32.

    Args:
        folder: holds manifest.json and safetensors.
        dtype: of the activations of our model.

    Returns:
        The configuration, and nested dicts of host arrays and QTensors.

    Raises:
        InteropError: missing, cut or damaged files, another format or version, tensors that do not fit the manifest.
        MissingPackageError: the package `safetensors` is not installed.
    """
    folder = Path(folder)
    where = repr(str(folder / MANIFEST))
    manifest = read_json(folder / MANIFEST)
    if (found := (manifest.get("format"), manifest.get("version"))) != (FORMAT, VERSION):
        raise InteropError(f"{where} has format and version {found}, and this fp4jax reads {(FORMAT, VERSION)}")
    if not isinstance(records := manifest.get("quantized"), dict) or not isinstance(manifest.get("config"), dict):
        raise InteropError(f"{where} lacks its config or its list of quantized tensors")
    config = from_hf_config(manifest["config"], where=f"config in {where}", dtype=dtype)
    entries = layout.entries(config)
    if unknown := records.keys() - entries.keys():
        raise InteropError(f"{where} lists tensors that our LLaMA does not have: {layout.listing(unknown)}")
    files = TensorFiles(folder)
    leaves: dict[layout.Path, list[Any]] = {}
    for name, entry in entries.items():
        if name in records:
            part = _unpack(files, name, entry, _spec_from_json(records[name], f"{where}: {name}"))
        else:
            part = files.read(name, entry.shape, _WIDE).astype(np.float32)
            part = part.T if entry.transposed else part
        leaves.setdefault(entry.path, []).append(part)
    stacked = {entry.path: entry.layer is not None for entry in entries.values()}
    return config, layout.nested({path: _stack(parts, stacked[path], path) for path, parts in leaves.items()})


def _weight_spec(path: str, recipe: Recipe | None) -> QuantSpec | None:
    spec = None if recipe is None else recipe.fprop.rhs
    if spec is None:
        return None
    assert isinstance(spec, QuantSpec)  # a Recipe refuses REUSE in fprop
    if spec.needs_key:
        raise InteropError(f"the recipe of {path!r} rounds weights stochastically ({spec!r}): export to nearest")
    return spec


def _quantized(kernel: Any, spec: QuantSpec) -> QTensor:
    """A kernel [k, n] or a stack [L, k, n], on the host again: a model's weights need not fit a device twice."""
    return jax.tree.map(np.asarray, _quantize(jnp.asarray(kernel), spec))


@functools.partial(jax.jit, static_argnums=1)
def _quantize(kernel: jax.Array, spec: QuantSpec) -> QTensor:
    return _each(lambda w: quantize(w, spec, axis=_CONTRACTED), kernel)


@functools.partial(jax.jit, static_argnums=1)
def _dequantize(q: QTensor, dtype: np.dtype) -> jax.Array:
    return _each(lambda q: q.dequantize(dtype), q)


def _each(function: Any, kernels: Any) -> Any:
    """`function` of a kernel, or of each in a stack: a scale of the whole tensor is then a scale a block."""
    return jax.vmap(function)(kernels) if kernels.ndim == 3 else function(kernels)


def _pack(q: QTensor) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The record of a kernel [k, n], and its arrays in Hugging Face's orientation."""
    k, n = q.shape
    parts = {"codes": np.asarray(_codes(q.values, q.spec.format))}
    record: dict[str, Any] = {"shape": [n, k], **_spec_to_json(q.spec)}
    for name, array in (("scale", q.scale), ("outer_scale", q.outer_scale)):
        if array is not None:
            host = np.ascontiguousarray(np.asarray(array).T)
            record[name] = {"dtype": host.dtype.name, "shape": list(host.shape)}
            parts[name] = host if host.dtype == np.float32 else host.view(np.uint8)
    return record, parts


@functools.partial(jax.jit, static_argnums=1)
def _codes(values: jax.Array, format: FloatFormat) -> jax.Array:
    """Values [k, n] -> codes [n, k], or packed [n, ⌈k/2⌉]."""
    codes = encode(values.T, format)
    return pack_nibbles(codes) if format.bits == 4 else codes


@functools.partial(jax.jit, static_argnums=(1, 2))
def _values(codes: jax.Array, format: FloatFormat, k: int) -> jax.Array:
    """Undoes `_codes`."""
    codes = unpack_nibbles(codes, k) if format.bits == 4 else codes
    return decode(codes, format).T.astype(format.storage_dtype)


def _unpack(files: TensorFiles, name: str, entry: layout.Entry, spec: QuantSpec) -> QTensor:
    n, k = entry.shape
    like = jax.eval_shape(lambda w: quantize(w, spec, axis=_CONTRACTED), jax.ShapeDtypeStruct((k, n), jnp.float32))
    codes = files.read(f"{name}.codes", (n, (k + 1) // 2 if spec.format.bits == 4 else k), ("U8",))

    def scales(part: str, like: Any) -> Any:
        stored = "F32" if like.dtype == np.float32 else "U8"
        array = files.read(f"{name}.{part}", like.shape[::-1], (stored,))
        return np.ascontiguousarray(array.view(like.dtype).T)

    values: Any = np.asarray(_values(jnp.asarray(codes), spec.format, k))
    return QTensor(
        values,
        scales("scale", like.scale),
        None if like.outer_scale is None else scales("outer_scale", like.outer_scale),
        spec,
        like.axis,
    )


def _stack(parts: list[Any], stacked: bool, path: layout.Path) -> Any:
    if not stacked:
        return parts[0]
    if len({part.spec if isinstance(part, QTensor) else None for part in parts}) > 1:
        raise InteropError(f"{'.'.join(path)} is quantized in another way in some blocks than in others")
    return jax.tree.map(lambda *arrays: np.stack(arrays), *parts)


def _spec_to_json(spec: QuantSpec) -> dict[str, Any]:
    def described(part: Any) -> dict[str, Any]:
        fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
        # axis_name says where blocks are split among devices, which no file needs to know.
        return {"name": type(part).__name__, **{k: v for k, v in fields.items() if k != "axis_name"}}

    return {
        "format": spec.format.name,
        "granularity": described(spec.granularity),
        "scale_rule": described(spec.scale),
        "rounding": spec.rounding.name,
    }


def _spec_from_json(record: Any, where: str) -> QuantSpec:
    try:
        granularity, rule = dict(record["granularity"]), dict(record["scale_rule"])
        return QuantSpec(
            FORMATS[record["format"]],
            _GRANULARITIES[granularity.pop("name")](**granularity),
            _SCALE_RULES[rule.pop("name")](**rule),
            rounding.ROUNDINGS[record["rounding"]],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InteropError(f"{where} has no readable record: {error!r}") from error
