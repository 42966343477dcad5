"""One process of a training run of two: `train_process.py INDEX PORT OUT TEXT... -- FLAGS`."""

import sys

from fp4jax.cli import main

if __name__ == "__main__":
    index, port, *rest = sys.argv[1:]
    together = ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id", index]
    sys.exit(main(["train", *rest, *together]))
