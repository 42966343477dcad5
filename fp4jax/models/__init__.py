"""LLaMA-2 in Flax NNX, its configurations, and its loss."""

from fp4jax.models.configs import MODELS as MODELS
from fp4jax.models.configs import LlamaConfig as LlamaConfig
from fp4jax.models.configs import count_parameters as count_parameters
from fp4jax.models.llama import Llama as Llama
from fp4jax.models.loss import cross_entropy as cross_entropy
from fp4jax.models.loss import token_nll as token_nll
