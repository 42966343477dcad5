"""Steps of the headline's arms, timed one arm after another with nothing else on the device.

    python -m experiments.headline.speed --size 34M

writes results/speed-<size>.json beside this, which `python -m experiments report headline` shows. The speeds in the
records of pieces are no substitute: processes that share a device slow each other.
"""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import tyro

from experiments.tables import markdown

RESULTS = Path(__file__).parent / "results"
WARM, TIMED = 3, 12


@dataclasses.dataclass(frozen=True)
class Options:
    """Which model, and which recipes."""

    size: str = "34M"
    """A key of `experiments.base.SIZES`."""
    recipes: tuple[str, ...] = ("bf16", "fp8", "fp4", "fp4_vector", "fp4_direct")
    """Recipes to time, with the experiments' batch and seeds side by side."""


def measure(options: Options) -> dict[str, Any]:
    """Milliseconds a step, tokens a second of all seeds, and bytes of the compiled step, of every recipe."""
    import jax

    from experiments.base import SEEDS, SIZES
    from experiments.experiment import ArmSpec, Experiment, Piece
    from experiments.running import build
    from fp4jax.train.arm import Text
    from fp4jax.train.rundir import circumstances

    settings, text, rows = SIZES[options.size], None, {}
    for recipe in options.recipes:
        arm_spec = ArmSpec(recipe, recipe)
        experiment = Experiment(
            name="speed", question="", expected="", cost="", settings={options.size: settings}, seeds=SEEDS,
            arms=(arm_spec,), baseline=recipe,
        )  # fmt: skip
        text = text or Text.load(settings.data)
        arm = build(Piece(experiment, arm_spec, options.size), text)
        arm.warm_up()
        state, batches, metrics = arm.init(), arm.batches(0), None
        for step in range(WARM + TIMED):
            if step == WARM:
                jax.block_until_ready(metrics)
                start = time.perf_counter()
            state, metrics = arm.train_step(state, next(batches))
        jax.block_until_ready(metrics)
        seconds = (time.perf_counter() - start) / TIMED
        batches.close()
        rows[recipe] = {
            "milliseconds": 1e3 * seconds,
            "tokens_per_second": arm.tokens_per_step / seconds,
            "memory": arm.memory,
        }
    return {"size": options.size, "seeds": len(SEEDS), **circumstances(), "recipes": rows}


def table() -> str:
    """What has been measured, as Markdown; the speed of the first recipe is 1."""
    parts = []
    for path in sorted(RESULTS.glob("speed-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        first = next(iter(record["recipes"].values()))["milliseconds"]
        rows = [
            [
                f"`{recipe}`",
                f"{row['milliseconds']:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{first / row['milliseconds']:.2f}",
                f"{row['memory'] / 1e9:.1f}",
            ]
            for recipe, row in record["recipes"].items()
        ]
        header = ["recipe", "ms a step", "tokens/s", "relative speed", "memory, GB"]
        parts.append(
            f"Speed and memory of a train step at {record['size']} on the xla backend, {record['seeds']} seeds side by "
            f"side, nothing else on the device ({record['hardware']}; {record['date']}):\n\n{markdown(header, rows)}"
        )
    return "\n\n".join(parts)


def main(options: Options) -> None:
    """Measure and write."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"speed-{options.size}.json"
    path.write_text(json.dumps(measure(options), indent=1) + "\n", encoding="utf-8")
    print(table())


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
