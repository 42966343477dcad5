"""Arrays on disk: the one module that calls Orbax."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

# Larger arrays are cut into several files, which are written and hashed in parallel.
_CHUNK_BYTES = 1 << 30


class ArrayStore:
    """Writes and reads folders of named NumPy arrays through `orbax.checkpoint.Checkpointer`.

    A folder an array (no OCDBT), so that damage stays local and has a name; raw chunks, since float weights gain under
    10 % from zstd. Any Orbax reader opens the result. Dtypes are those that Orbax returns as they were (see `leaves`).
    """

    def __init__(self):
        self._orbax = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False))
        logging.getLogger("absl").addFilter(_is_worth_logging)

    def save(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes non-empty arrays, which nobody may change meanwhile, into `folder`, which must not exist."""
        unchanging = {name: array.view(_Unchanging) for name, array in arrays.items()}
        chunked = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
        self._orbax.save(folder, args=ocp.args.PyTreeSave(unchanging, save_args=chunked))

    def restore(self, folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads the arrays `names`, which must be all that `folder` holds."""
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return self._orbax.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))

    def close(self) -> None:
        """Releases what Orbax holds."""
        self._orbax.close()


class _Unchanging(np.ndarray):
    """Orbax deep-copies host arrays lest they change while it writes; these do not, and twice the memory is a lot."""

    def __deepcopy__(self, memo: dict[int, object]) -> "_Unchanging":
        return self


def _is_worth_logging(record: logging.LogRecord) -> bool:
    # Orbax warns at every save without OCDBT that it finds no OCDBT files to merge.
    return "Skipping merge of OCDBT checkpoints" not in str(record.msg)
