"""Models from elsewhere and back: Hugging Face LLaMA, GGUF, packed four-bit weights, the evaluation harness."""

from fp4jax.interop.errors import InteropError as InteropError
from fp4jax.interop.errors import MissingPackageError as MissingPackageError
from fp4jax.interop.gguf_file import gguf_tokenizer as gguf_tokenizer
from fp4jax.interop.gguf_file import load_gguf as load_gguf
from fp4jax.interop.harness import TextScorer as TextScorer
from fp4jax.interop.harness import harness_model as harness_model
from fp4jax.interop.hf import load_hf as load_hf
from fp4jax.interop.hf import save_hf as save_hf
from fp4jax.interop.hf_config import from_hf_config as from_hf_config
from fp4jax.interop.hf_config import to_hf_config as to_hf_config
from fp4jax.interop.packed import dequantize_params as dequantize_params
from fp4jax.interop.packed import load_packed as load_packed
from fp4jax.interop.packed import quantize_params as quantize_params
from fp4jax.interop.packed import save_packed as save_packed
from fp4jax.interop.pretrained import Pretrained as Pretrained
from fp4jax.interop.pretrained import build_model as build_model
from fp4jax.interop.pretrained import initial_params as initial_params
from fp4jax.interop.pretrained import load_tokenizer as load_tokenizer
from fp4jax.interop.smollm2 import fetch_smollm2 as fetch_smollm2
from fp4jax.interop.smollm2 import find_smollm2 as find_smollm2
