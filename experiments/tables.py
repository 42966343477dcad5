"""The Markdown tables of an experiment, from stored results."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from experiments.base import HEADLINE
from experiments.experiment import Experiment
from experiments.statistics import Spread, gap_percent, paired, vertex
from experiments.store import Lanes, sources_of
from fp4jax.train.config import Settings


def results_table(experiment: Experiment, results: Mapping[str, Lanes]) -> str:
    """An arm a row: losses, gaps to the baseline, clipped steps, and the paper's number beside."""
    if experiment.learning_rates:
        return _rates_table(experiment, results)
    named = " + ".join(sources_of(next(iter(results.values())).record, HEADLINE))
    scopes = {f"loss, {named}": HEADLINE, "loss, all text": ()} if named else {"loss, all text": ()}
    paper = any(arm.paper is not None for arm in experiment.arms)
    header = ["arm", "recipe", *(cell for scope in scopes for cell in (scope, "gap, %")), "clipped steps, %"]
    header += ["paper: loss", "paper: gap, %"] if paper else []
    rows = []
    paper_base = next((arm.paper for arm in experiment.arms if arm.label == experiment.baseline), None)
    for arm in experiment.arms:
        recipe = f"`{arm.recipe}`" + ("" if arm.optimizer == "adamw" else f", `{arm.optimizer}`")
        lanes, base = results.get(arm.label), results.get(experiment.baseline)
        cells = ["not run", *[""] * 2 * len(scopes)]
        if lanes is not None:
            cells = _cells(lanes, None if base is lanes else base, scopes.values())
        if paper:
            cells += _paper_cells(arm.paper, paper_base)
        rows.append([arm.label, recipe, *cells])
    return markdown(header, rows)


def claims_table(experiment: Experiment, results: Mapping[str, Lanes]) -> str:
    """A claim a row, with its paired tests on the headline sources."""
    rows = []
    for claim in experiment.claims:
        if claim.lower not in results or claim.higher not in results:
            rows.append([claim.text, "not run", *[""] * 4])
            continue
        test = paired(results[claim.lower].final(HEADLINE), results[claim.higher].final(HEADLINE))
        low, high = test.interval
        interval = "" if math.isnan(low) else f"{low:+.3f} to {high:+.3f}"
        rows.append([claim.text, f"{test.difference:+.4f}", interval, _p(test.t_p), _p(test.sign_p), test.verdict])
    header = ["claim", "difference, nats", "95 % interval", "p, paired t", "p, sign flips", "verdict at .05"]
    return markdown(header, rows) if rows else ""


def claim_cells(experiment: Experiment, results: Mapping[str, Lanes]) -> list[str]:
    """For each claim: `holds, 2.7 % (.003)`, by how much the loss said to be higher is, and p; empty if not run."""
    cells = []
    for claim in experiment.claims:
        if claim.lower not in results or claim.higher not in results:
            cells.append("")
            continue
        lower, higher = (results[label].final(HEADLINE) for label in (claim.lower, claim.higher))
        test, gap = paired(lower, higher), gap_percent(higher, lower).mean()
        cells.append(f"{test.verdict}, {gap:+.2f} % ({_p(test.t_p)})")
    return cells


def setting_text(settings: Settings, results: Mapping[str, Lanes]) -> str:
    """What tells a size's results from those of another: parameters, text, backend, hardware."""
    records = [lanes.record for lanes in results.values()]
    hardware = " / ".join(sorted({record["hardware"] for record in records}))
    parameters, tokens = (records[0][name] / 1e6 for name in ("parameters", "tokens_per_lane"))
    return (
        f"{parameters:.1f}M parameters, {tokens:.2f}M {token_of(settings)}s a run, "
        f"{settings.quantization.backend} backend, {hardware}"
    )


def token_of(settings: Settings) -> str:
    """What a token is called: the novels in the package are read by bytes."""
    return "token" if settings.data.text else "byte"


def circumstances_text(results: Mapping[str, Lanes]) -> str:
    """Where and when the numbers were made."""
    records = [lanes.record for lanes in results.values()]
    when = sorted({record["date"] for record in records})
    versions = sorted({record["versions"] for record in records})
    seeds = sorted({seed for lanes in results.values() for seed in lanes.seeds})
    train = sum(record["seconds"]["train"] for record in records)
    return (
        f"{len(records)} arms, seeds {', '.join(map(str, seeds))}; steps of {records[0]['tokens_per_step']:,}; "
        f"{' / '.join(versions)}; {', '.join(when)}; {train:.0f} s of training."
    )


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns but the first two are right-aligned where they hold numbers."""
    rule = ["---" if i < 1 else "---:" if _numeric(rows, i) else "---" for i in range(len(header))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rule, *rows])


def _numeric(rows: Sequence[Sequence[str]], column: int) -> bool:
    cells = [row[column] for row in rows if row[column]]
    return bool(cells) and sum(cell[:1] in "0123456789+-−±–.<" for cell in cells) > len(cells) / 2


def _cells(lanes: Lanes, base: Lanes | None, scopes: Iterable[Sequence[str]]) -> list[str]:
    cells = []
    for sources in scopes:
        loss = lanes.final(sources)
        cells.append(Spread.of(loss).text(".4f"))
        cells.append("–" if base is None else Spread.of(gap_percent(loss, base.final(sources))).text("+.2f"))
    clipped = 100 * np.mean([lane["clip_fraction"] for lane in lanes.lanes])
    return [*cells, f"{clipped:.0f}"]


def _paper_cells(loss: float | None, base: float | None) -> list[str]:
    if loss is None:
        return ["", ""]
    if math.isnan(loss):
        return ["diverged", ""]
    gap = "–" if base is None or loss == base else f"{100 * (loss / base - 1):+.1f}"
    return [f"{loss:.3f}", gap]


def _rates_table(experiment: Experiment, results: Mapping[str, Lanes]) -> str:
    """A learning rate a row, an arm a column, with gaps at the same rate."""
    losses = {label: losses_by_rate(lanes) for label, lanes in results.items()}
    header = ["peak learning rate"]
    for label in losses:
        header += [f"{label}: loss", *([] if experiment.baseline == label else ["gap, %"])]
    rows = []
    for rate in sorted({rate for by_rate in losses.values() for rate in by_rate}):
        row = [f"{rate:g}"]
        for label, by_rate in losses.items():
            loss, base = by_rate.get(rate), losses.get(experiment.baseline, {}).get(rate)
            row.append("" if loss is None else Spread.of(loss).text(".4f"))
            if experiment.baseline != label:
                row.append("" if loss is None or base is None else Spread.of(gap_percent(loss, base)).text("+.2f"))
        rows.append(row)
    return markdown(header, rows)


def best_rates_table(experiment: Experiment, results: Mapping[str, Lanes]) -> str:
    """An arm a row at its best rate, of those tried and by a parabola; the gap is to the baseline at its own best."""
    rows, base = [], None
    for arm in (arm for arm in experiment.arms if arm.label in results):
        losses = losses_by_rate(results[arm.label])
        rates = sorted(losses)
        means = np.array([losses[rate].mean() for rate in rates])
        place, fitted = vertex(np.log(rates), means)
        found = ((rates[int(np.argmin(means))], float(means.min())), (math.exp(place), fitted))
        base = found if arm.label == experiment.baseline else base
        cells = [arm.label]
        for i, (rate, loss) in enumerate(found):
            gap = "–" if base is None or base is found else f"{100 * (loss / base[i][1] - 1):+.2f}"
            cells += ["", "", ""] if math.isnan(loss) else [f"{rate:.4f}" if i else f"{rate:g}", f"{loss:.4f}", gap]
        rows.append(cells)
    return markdown(["at its best", "rate tried", "loss", "gap, %", "rate, by a parabola", "loss", "gap, %"], rows)


def losses_by_rate(lanes: Lanes) -> dict[float, np.ndarray]:
    """Final headline losses [S] by learning rate."""
    final = lanes.final(HEADLINE)
    rates = [lane["learning_rate"] for lane in lanes.lanes]
    return {rate: final[[i for i, other in enumerate(rates) if other == rate]] for rate in dict.fromkeys(rates)}


def _p(value: float) -> str:
    if math.isnan(value):
        return ""
    return "< .001" if value < 0.001 else f"{value:.3f}"
