"""Checkpoints: asynchronous, atomic, checksummed by leaf and by file, bit-equal on restore (docs/checkpoints.md)."""

from fp4jax.train.checkpoint.checkpointer import Checkpointer as Checkpointer
from fp4jax.train.checkpoint.errors import CheckpointError as CheckpointError
from fp4jax.train.checkpoint.errors import CheckpointMismatchError as CheckpointMismatchError
from fp4jax.train.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
