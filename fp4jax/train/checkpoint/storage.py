"""Arrays on disk: the one module that calls Orbax."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

# Larger arrays are cut into several files, which are written and hashed in parallel.
_CHUNK_BYTES = 1 << 30


class ArrayStore:
    """Writes and reads folders of named NumPy arrays through `orbax.checkpoint.Checkpointer`.

    A folder an array (no OCDBT), so that damage stays local and has a name; raw chunks, since float weights gain under
    10 % from zstd. Any Orbax reader opens the result. Dtypes are those that Orbax returns as they were (see `leaves`).

    Of several processes each reads for itself. None writes: Orbax 0.12.8 writes NumPy arrays from process 0 only.
    """

    def __init__(self):
        alone = ocp.options.MultiprocessingOptions()
        if jax.process_count() > 1:  # or Orbax would wait for the others, in a collective on devices
            me = jax.process_index()
            alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, multiprocessing_options=alone)
        self._orbax = ocp.Checkpointer(handler, multiprocessing_options=alone)
        logging.getLogger("absl").addFilter(_is_worth_logging)

    def save(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes non-empty arrays, which nobody may change meanwhile, into `folder`, which must not exist."""
        unchanging = {name: array.view(_Unchanging) for name, array in arrays.items()}
        chunked = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
        self._orbax.save(folder, args=ocp.args.PyTreeSave(unchanging, save_args=chunked))

    def restore(self, folder: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads the arrays `names` out of `folder`."""
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        if not as_numpy:
            return {}
        wanted = ocp.args.PyTreeRestore(dict.fromkeys(as_numpy, 0), restore_args=as_numpy, partial_restore=True)
        return self._orbax.restore(folder, args=wanted)

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
