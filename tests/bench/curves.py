"""Quality of the detectors on public training logs, compared with the rules of other trainers.

    python -m tests.bench.curves --clones DIR [--each] [--perturb] [--every]

DIR holds git clones as `owner/name`; `tests.bench.training_logs` names repositories, commits and paths. Events come
from `tests.bench.loss_events`, one rule for every log; peers' rules from `tests.bench.peer_detectors`. Three tables:
- tuning logs: thresholds of `conf/sentinel` were chosen on them, so our row is fitted to them;
- held-out logs: no threshold was chosen on them;
- planted events: held-out logs without an event of their own, with a spike of stated height and shape, or NaN.

An event is found when an alarm falls between ten rows before its onset and ten rows after its end; the delay is from
its onset to the first such alarm, in steps. An alarm more than ten rows before an event, or more than fifty rows after
it, is false unless it is on an outlier. Alarms at most twelve rows apart are one. A row of a log is a step for every
rule, also where rows are five steps apart.

`--every` prints another table instead: our rule on the same logs, recorded every 1, 2, 5 and 10 steps. A log is thinned
from each of its first three rows in turn, so every event counts up to three times. Labels are those of the whole log.
"""

from __future__ import annotations

import math
import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np

from harness.analysis.judge.foreign_logs import empty_record
from harness.config.sentinel import DetectConfig
from harness.core.events import FindingKind
from harness.sentinel.detect.baseline import FLOATS, advance, beyond, gate_bounds, initial_state
from harness.sentinel.detect.detectors import Detectors
from launch.cli.judge import detect_config
from tests.bench.loss_events import Labels, centred_median, label
from tests.bench.peer_detectors import PEERS, MissingGradNormsError, Rule
from tests.bench.training_logs import ADDED, HELD_OUT, TUNING, TrainingLog, load_logs

BEFORE_ROWS, AFTER_ROWS, CLEAN_AFTER_ROWS, SAME_ROWS, OUTLIER_ROWS = 10, 10, 50, 12, 2
PLANT_EVERY, PLANT_ROWS, PLANT_SEED = 1000, 6000, 0
WATCHED = "ours, and what is only watched"
NORM_GAIN = 20.0
"""Relative rise of a planted gradient norm over that of the loss: a loss 10 % higher has a norm three times as high."""


@dataclass(slots=True)
class Score:
    num_logs: int = 0
    num_events: int = 0
    delays: list[int] = field(default_factory=list)
    """Steps from onset to alarm, of the events that were found."""
    num_on_outliers: int = 0
    num_false: int = 0
    num_clean_rows: int = 0


@dataclass(frozen=True, slots=True)
class LabelledLog:
    log: TrainingLog
    labels: Labels


def rows_with_findings(log: TrainingLog, cfg: DetectConfig, *, watched: bool) -> Iterator[int]:
    """Rows with a finding; with `watched`, also findings of the gradient norm alone, which lead to no action."""
    record, detectors = empty_record(), Detectors(cfg)
    for row, (step, loss) in enumerate(zip(log.steps, log.losses, strict=True)):
        record.step = record.iteration = step
        record.loss, record.grad_norm = loss, log.grad_norms[row] if log.grad_norms else 0.0
        if any(watched or finding.kind is not FindingKind.grad_spike for finding in detectors.observe(record)):
            yield row


def rows_rejected_by_gate(log: TrainingLog, cfg: DetectConfig) -> Iterator[int]:
    """Rows whose update the gate rejects; rejected values do not enter its baseline."""
    loss_state, grad_state = initial_state(), initial_state()
    for row, loss in enumerate(log.losses):
        grad_norm = log.grad_norms[row] if log.grad_norms else 1.0
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        rejected = not is_finite or beyond(loss, grad_norm, gate_bounds(loss_state, grad_state, cfg, FLOATS))
        loss_state = advance(loss_state, loss, not rejected, cfg, FLOATS)
        grad_state = advance(grad_state, grad_norm, not rejected, cfg, FLOATS)
        if rejected:
            yield row


def our_rules(cfg: DetectConfig) -> dict[str, Rule]:
    return {
        "ours": lambda log: rows_with_findings(log, cfg, watched=False),
        WATCHED: lambda log: rows_with_findings(log, cfg, watched=True),
        "our gate alone": lambda log: rows_rejected_by_gate(log, cfg),
    }


def score(logs: Sequence[LabelledLog], rule: Rule, *, report: Callable[[str], None] | None = None) -> Score:
    """Score a rule on all logs that it can run on."""
    total = Score()
    for labelled in logs:
        log, labels = labelled.log, labelled.labels
        try:
            alarms = list(rule(log))
        except MissingGradNormsError:
            continue
        first = [first_within(alarms, onset - BEFORE_ROWS, end + AFTER_ROWS) for onset, end in labels.events]
        false, on_outliers = split_alarms(group_alarms(alarms), labels, len(log.losses))
        total.num_logs += 1
        total.num_events += len(first)
        found = zip(first, labels.events, strict=True)
        total.delays += [log.steps[row] - log.steps[onset] for row, (onset, _) in found if row is not None]
        total.num_false += len(false)
        total.num_on_outliers += on_outliers
        total.num_clean_rows += int(clean_rows(labels, len(log.losses)).sum())
        if report is not None and (first or false):
            hits = [None if row is None else log.steps[row] for row in first]
            onsets = [log.steps[onset] for onset, _ in labels.events]
            report(f"    {log.name}: events {onsets}, alarms {hits}, false {[log.steps[row] for row in false]}")
    return total


def first_within(rows: Sequence[int], first: int, last: int) -> int | None:
    return next((row for row in rows if first <= row <= last), None)


def group_alarms(rows: Sequence[int]) -> list[int]:
    """First rows of alarms; rows close to the one before belong to the same alarm."""
    return [row for row, before in zip(rows, [-math.inf, *rows], strict=False) if row - before > SAME_ROWS]


def clean_rows(labels: Labels, num: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Rows on which an alarm is false, unless they are outliers."""
    is_clean = np.full(num, True)
    for onset, end in (*labels.events, *labels.startup):
        is_clean[max(0, onset - BEFORE_ROWS) : end + CLEAN_AFTER_ROWS + 1] = False
    return is_clean


def split_alarms(alarms: Sequence[int], labels: Labels, num: int) -> tuple[list[int], int]:
    """Alarms on clean rows, and how many were raised on an outlier or up to two rows after it."""
    is_clean = clean_rows(labels, num)
    near = {row + later for row in labels.outliers for later in range(OUTLIER_ROWS + 1)}
    on_clean = [row for row in alarms if is_clean[row]]
    false = [row for row in on_clean if row not in near]
    return false, len(on_clean) - len(false)


def plant(log: TrainingLog, height: float, *, ramp_rows: int, decay_rows: int) -> LabelledLog:
    """Insert spikes into a log: the loss rises to `height` above its own in `ramp_rows` and falls back exponentially.

    Gradient norms, if there are any, rise by `NORM_GAIN` times as much. Spikes are a thousand rows apart, each
    shifted by up to 250 rows by a seed; the first is at least 500 rows from the start. A height of NaN makes every row
    NaN from the first onset on.
    """
    random = Random(f"{PLANT_SEED} {log.name}")
    losses, norms = list(log.losses), list(log.grad_norms)
    events = []
    starts = range(PLANT_EVERY - 250, len(losses) - PLANT_EVERY // 2, PLANT_EVERY)
    for onset in (start + random.randint(-250, 250) for start in starts):
        if math.isnan(height):
            losses[onset:] = [math.nan] * (len(losses) - onset)
            norms[onset:] = [math.nan] * (len(norms) - onset)
            events.append((onset, len(losses) - 1))
            break
        num_rows = ramp_rows + 3 * decay_rows
        for later in range(num_rows):
            shape = min(1.0, (later + 1) / ramp_rows) * math.exp(-max(0, later + 1 - ramp_rows) / decay_rows)
            losses[onset + later] *= 1 + height * shape
            if norms:
                norms[onset + later] *= 1 + NORM_GAIN * height * shape
        events.append((onset, onset + num_rows - 1))
    planted = replace(log, losses=tuple(losses), grad_norms=tuple(norms))
    return LabelledLog(planted, Labels(tuple(events), (), ()))


SHAPES = {"sudden": {"ramp_rows": 1, "decay_rows": 20}, "slow": {"ramp_rows": 12, "decay_rows": 30}}
HEIGHTS = (0.05, 0.1, 0.2, 0.5)


def perturb(log: TrainingLog, perturbation: str) -> TrainingLog:
    """Change the noise, the logging interval or the start of a log."""
    random = Random(log.name)
    match perturbation.split():
        case ["noise", factor]:
            levels = np.exp(centred_median(np.log(log.losses), 15))
            scaled = levels * (np.asarray(log.losses) / levels) ** float(factor)
            return replace(log, losses=tuple(scaled.tolist()))
        case ["extra", sigma]:
            return replace(log, losses=tuple(loss * math.exp(random.gauss(0, float(sigma))) for loss in log.losses))
        case ["every", num]:
            return pick_rows(log, slice(0, None, int(num)))
        case ["cut", num]:
            return pick_rows(log, slice(int(num) if len(log.steps) > 1000 else 0, None))
        case ["drift", slope]:
            grown = enumerate(log.losses)
            return replace(log, losses=tuple(loss * math.exp(float(slope) * row) for row, loss in grown))
        case _:
            return log


PERTURBATIONS = (
    *("as it is", "noise 0.5", "noise 2", "extra 0.01", "every 2", "every 5", "every 10"),
    *("cut 300", "cut 550", "drift 0.00005"),
)


def pick_rows(log: TrainingLog, rows: slice) -> TrainingLog:
    return replace(log, steps=log.steps[rows], losses=log.losses[rows], grad_norms=log.grad_norms[rows])


INTERVALS, MOST_FIRST = (1, 2, 5, 10), 3
"""Steps between rows of thinned logs; rows of a log that a thinned one may begin with."""


def stride_of(log: TrainingLog, every: int) -> int:
    """Rows from one recorded step to the next, for a log whose own rows may be several steps apart."""
    middle = len(log.steps) // 2
    return max(1, every // max(1, log.steps[middle] - log.steps[middle - 1]))


def score_thinned(logs: Sequence[LabelledLog], rule: Rule, every: int) -> Score:
    """Score a rule on logs recorded every so many steps, by the labels of all rows; several first rows in turn."""
    total = Score()
    for labelled in logs:
        stride = stride_of(labelled.log, every)
        for first in range(min(stride, MOST_FIRST)):
            alarms = [first + stride * row for row in rule(pick_rows(labelled.log, slice(first, None, stride)))]
            part = score([labelled], lambda _, rows=alarms: iter(rows))  # type: ignore[misc]
            total.num_logs += 1
            total.num_events += part.num_events
            total.delays += part.delays
            total.num_false += part.num_false
            total.num_on_outliers += part.num_on_outliers
            total.num_clean_rows += part.num_clean_rows // stride
    return total


def print_intervals(tables: dict[str, list[LabelledLog]], rule: Rule) -> None:
    for title, logs in tables.items():
        finite = [labelled for labelled in logs if np.isfinite(labelled.log.losses).all()]
        print(f"\nOurs, recorded every so many steps. {title}: {len(finite)} logs without NaN\n\n{HEAD}")
        for every in INTERVALS:
            print(render_row(f"every {every}", score_thinned(finite, rule, every)), flush=True)


def render_row(name: str, total: Score) -> str:
    delay = f"{statistics.median(total.delays):g}" if total.delays else "-"
    rate = f"{1e5 * total.num_false / total.num_clean_rows:.1f}" if total.num_clean_rows else "-"
    found = f"{len(total.delays)} / {total.num_events}" if total.num_logs else "n/a"
    cells = (name, str(total.num_logs), found, delay, f"{total.num_false} ({rate})", str(total.num_on_outliers))
    return f"| {' | '.join(cells)} |"


HEAD = """\
| rule | logs | events found | median delay, steps | false alarms (per 100,000 rows) | alarms on outliers |
|---|---:|---:|---:|---:|---:|"""


def print_table(title: str, logs: Sequence[LabelledLog], rules: dict[str, Rule], *, each: bool) -> None:
    num_rows = sum(len(labelled.log.losses) for labelled in logs)
    num_events = sum(len(labelled.labels.events) for labelled in logs)
    with_norms = [labelled for labelled in logs if labelled.log.grad_norms]
    num_with_norms = sum(len(labelled.labels.events) for labelled in with_norms)
    num_outliers = sum(len(labelled.labels.outliers) for labelled in logs)
    print(f"\n{title}: {len(logs)} logs, {num_rows:,} rows, {num_events} events, {num_outliers} outliers;")
    print(f"{len(with_norms)} of the logs, with {num_with_norms} of the events, have gradient norms\n\n{HEAD}")
    for name, rule in rules.items():
        print(render_row(name, score(logs, rule, report=print if each else None)))


def print_plants(logs: Sequence[LabelledLog], rules: dict[str, Rule]) -> None:
    clean = [pick_rows(labelled.log, slice(0, PLANT_ROWS)) for labelled in logs if not labelled.labels.events]
    for title, chosen in (
        ("with gradient norms", [log for log in clean if log.grad_norms]),
        ("without gradient norms", [log for log in clean if not log.grad_norms]),
    ):
        planted = {
            **{
                f"{shape} {height:.0%}": [plant(log, height, **rows) for log in chosen]
                for shape, rows in SHAPES.items()
                for height in HEIGHTS
            },
            "NaN for good": [plant(log, math.nan, ramp_rows=1, decay_rows=1) for log in chosen],
        }
        numbers = [sum(len(labelled.labels.events) for labelled in of) for of in planted.values()]
        print(f"\nPlanted on held-out logs {title}: {len(chosen)} logs; found, and median delay in rows\n")
        heads = [f"{name} ({num})" for name, num in zip(planted, numbers, strict=True)]
        print(f"| rule | {' | '.join(heads)} |\n|---{'|---:' * len(heads)}|")
        for name, rule in rules.items():
            cells = [render_plant(score(of, rule)) for of in planted.values()]
            print(f"| {name} | {' | '.join(cells)} |")


def render_plant(total: Score) -> str:
    if not total.num_logs:
        return "n/a"
    return f"{len(total.delays)}, {statistics.median(total.delays):g}" if total.delays else "0"


def main() -> None:
    parser = ArgumentParser()
    parser.add_argument("--clones", type=Path, required=True, metavar="DIR", help="git clones, as DIR/owner/name")
    parser.add_argument(
        "--perturb", action="store_true", help="score our rule on noisier, sparser and shorter tuning logs"
    )
    parser.add_argument("--every", action="store_true", help="score our rule on logs recorded every 1, 2, 5, 10 steps")
    parser.add_argument("--each", action="store_true", help="also print every log")
    options = parser.parse_args()
    tables = {
        title: [LabelledLog(log, label(log.losses, log.grad_norms)) for log in load_logs(sources, options.clones)]
        for title, sources in (("Tuning logs", TUNING), ("Held-out logs", HELD_OUT), ("Added held-out logs", ADDED))
        if options.every or sources is not ADDED
    }
    ours = our_rules(detect_config([]))
    if options.every:
        print_intervals(tables, ours["ours"])
        return
    rules = {**ours, **PEERS}
    for title, logs in tables.items():
        print_table(title, logs, rules, each=options.each)
    print_plants(tables["Held-out logs"], {name: rule for name, rule in rules.items() if name != WATCHED})
    if options.perturb:
        finite = [labelled.log for labelled in tables["Tuning logs"] if np.isfinite(labelled.log.losses).all()]
        print(f"\nOurs on changed tuning logs\n\n{HEAD}")
        for perturbation in PERTURBATIONS:
            changed = [perturb(log, perturbation) for log in finite]
            print(
                render_row(
                    perturbation,
                    score([LabelledLog(log, label(log.losses, log.grad_norms)) for log in changed], ours["ours"]),
                )
            )


if __name__ == "__main__":
    main()
