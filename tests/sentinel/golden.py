"""Golden outputs of the detectors, the baseline, the incidents and the policy on seeded series.

`python -m tests.sentinel.golden` writes them to `tests/sentinel/golden/`; do so after an intended change of behaviour,
and read the difference. Numbers are written with six digits, far coarser than what differs between two math libraries.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from harness.analysis.judge.incident_groups import IncidentGrouper
from harness.core.events import Action, Finding, StepRecord
from harness.sentinel.detect.baseline import (
    FLOATS,
    State,
    advance,
    expected_log_value,
    gate_bounds,
    initial_state,
    initial_state_late,
    tolerance,
    upper_bound,
)
from harness.sentinel.detect.detectors import Detectors
from harness.sentinel.detect.precursor import PrecursorGuard
from tests.sentinel.cluster import Hostility, actions_of, run_cluster
from tests.sentinel.series import config, losses, norms, record, records

FOLDER = Path(__file__).with_name("golden")
CFG = config()
SHORT = config(divergence_rows=40)
"""Blocks of 5 rows, so that slow changes show within few."""
WARM, STEEP = 200, 500
"""Rows before a series begins, and before those: the steep start of a run, which is left out."""
LONGEST = 6000
NUM_CLUSTERS = 80

Golden = dict[str, list[str]]


def number(value: float) -> str:
    return f"{value:.6g}"


def line(finding: Finding) -> str:
    """All of a finding but its time."""
    place = f"{finding.kind} at {finding.iteration} step {finding.step} onset {finding.onset}"
    who = f"ranks {finding.ranks} groups {finding.groups} cursors {finding.cursors}"
    return f"{place} {number(finding.value)} > {number(finding.bound)} {who}: {finding.message}"


@cache
def warm(with_norms: bool, every: int = 1, is_short: bool = False) -> str:
    """State of detectors after healthy rows, as JSON."""
    detectors = Detectors(SHORT if is_short else CFG)
    for row in healthy(WARM, with_norms=with_norms, every=every, skipped=STEEP):
        assert detectors.observe(row) == []
    return json.dumps(detectors.state())


@cache
def curves(num: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a healthy run."""
    return losses(num), norms(num)


def healthy(num: int, *, with_norms: bool = True, every: int = 1, skipped: int = 0) -> list[StepRecord]:
    """Rows of a healthy run, from the one after so many on; `every` steps apart."""
    values, grad_norms = (each[skipped : skipped + num] for each in curves(LONGEST))
    rows = records(values, grad_norms if with_norms else ())
    for place, row in enumerate(rows):
        row.step = row.iteration = row.cursor = skipped + place * every
    return rows


def observed(detectors: Detectors, rows: Sequence[StepRecord]) -> list[str]:
    return [line(finding) for row in rows for finding in detectors.observe(row)]


def after_warm_up(
    loss_factors: Sequence[float],
    norm_factors: Sequence[float] | None = None,
    *,
    every: int = 1,
    is_short: bool = False,
    change: Callable[[StepRecord], None] | None = None,
) -> list[str]:
    """Findings of rows that follow healthy ones, each made higher by a factor."""
    with_norms = norm_factors is not None
    detectors = Detectors.restore(SHORT if is_short else CFG, json.loads(warm(with_norms, every, is_short)))
    rows = healthy(len(loss_factors), with_norms=with_norms, every=every, skipped=STEEP + WARM)
    for place, row in enumerate(rows):
        row.step = row.iteration = row.cursor = STEEP + (WARM + place) * every
        row.loss *= loss_factors[place]
        row.grad_norm *= norm_factors[place] if norm_factors is not None else 1.0
        if change is not None:
            change(row)
    return observed(detectors, rows)


def hump(height: float, num: int, after: int = 20) -> list[float]:
    return [1.0, 1.0] + [height] * num + [1.0] * after


def spikes() -> Iterator[tuple[str, list[str]]]:
    """Of each height and length; with gradients that move or stay; rows that are several steps apart."""
    for height, num in product((1.04, 1.06, 1.08, 1.12, 1.25, 1.45, 1.6, 1.9, 2.1, 3.0), (1, 2, 3, 12)):
        yield f"loss x{height} for {num} rows", after_warm_up(hump(height, num))
    for height, norm, num in product((1.08, 1.4, 1.6, 2.1), (1.1, 1.25, 2.0), (1, 4)):
        name = f"loss x{height}, gradient x{norm} for {num} rows"
        yield name, after_warm_up(hump(height, num), hump(norm, num))
    for height, every in product((1.08, 1.2, 1.3, 1.5), (2, 10)):
        name = f"loss x{height} in one row, {every} steps a row"
        yield name, after_warm_up(hump(height, 1), every=every)
    for gap in (2, 3, 4, 8, 11, 12, 13, 15):
        twice = hump(1.5, 4, 0) + [1.0] * gap + hump(1.5, 4)[2:]
        yield f"two spikes, {gap} rows apart", after_warm_up(twice)
        yield f"two spikes, {gap} rows of 5 steps apart", after_warm_up(twice, every=5)
    for height in (1.1, 1.3):
        factors = hump(height, 1, 0) + [1.0, 1.05, 1.0, height, 1.0, 1.05] * 3
        yield f"loss x{height} again and again", after_warm_up(factors)
        led = [1.0, 3.0, *[1.0] * (len(factors) - 2)]
        yield f"loss x{height} again and again, led by a gradient", after_warm_up(factors, led)
    for gap in (1, 4, 8, 12, 20):
        factors = [1.0] * (gap + 1) + [1.12] * 4 + [1.0] * 4
        led = [1.5, *[1.0] * (len(factors) - 1)]
        yield f"loss {gap} rows after the gradient", after_warm_up(factors, led)


def sparse_starts() -> Iterator[tuple[str, list[str]]]:
    """Rises in the steep start of logs with several steps a row: of each height, sudden or over several rows."""
    for every, height, ramp, first in product((5, 8, 10), (1.04, 1.07, 1.1, 1.2), (1, 4), (35, 45, 70)):
        random = Random(every)
        rows = []
        for place in range(110):
            loss = (3.4 + 8.0 * math.exp(-place * every / 350)) * math.exp(random.gauss(0, 0.009))
            rise = min(1.0, (place - first + 1) / ramp) * (first <= place < first + 9)
            rows.append(record(1 + place * every, loss * (1 + (height - 1) * rise)))
        name = f"loss x{height} from row {first}, over {ramp} rows, {every} steps a row"
        yield name, observed(Detectors(CFG), rows)


def gradient_spikes() -> Iterator[tuple[str, list[str]]]:
    groups = {"embed": 0.5, "blocks.0": 0.5, "blocks.1": 1.0, "head": 0.49}

    def spread(row: StepRecord) -> None:
        row.group_grad_norms = {name: share * row.grad_norm for name, share in groups.items()}
        worst = [[3, row.grad_norm], [1, 0.5 * row.grad_norm], [0, 0.49 * row.grad_norm], [2, 0.05]]
        row.ranks = {"grad_norm": {"median": 0.3, "spread": 5.0, "worst": worst}}

    flat = [1.0] * 60
    for factor, num in product((5.0, 8.0, 9.5, 11.0, 30.0), (1, 4)):
        factors = hump(factor, num, 30)
        yield f"gradient x{factor} for {num} rows", after_warm_up(flat[: len(factors)], factors)
        yield f"gradient x{factor} by groups and ranks", after_warm_up(flat[: len(factors)], factors, change=spread)
    for gap in (4, 11, 12, 13, 25):
        factors = [*hump(20.0, 2, gap), 20.0, 1.0]
        yield f"two bursts, {gap} rows apart", after_warm_up(flat[: len(factors)], factors)


def slow_changes() -> Iterator[tuple[str, list[str]]]:
    for height in (1.02, 1.03, 1.04, 1.06, 1.3, 1.45, 1.6):
        stays = [height] * 130
        yield f"loss x{height} stays", after_warm_up(stays, is_short=True)
        yield f"loss x{height} stays, gradients do not move", after_warm_up(stays, [1.0] * 130, is_short=True)
        yield f"loss x{height} stays, gradients double", after_warm_up(stays, [2.0] * 130, is_short=True)
    for slope in (0.0001, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01):
        rising = [math.exp(slope * place) for place in range(220)]
        yield f"loss rises by {slope} a row", after_warm_up(rising, is_short=True)
        yield f"loss rises by {slope} a row, gradients too", after_warm_up(rising, rising, is_short=True)
    for num, height in product((20, 35, 45, 80), (1.1, 1.7)):
        returning = [height] * num + [1.0] * 60 + [height] * 60
        yield f"loss x{height} for {num} rows, and again", after_warm_up(returning, is_short=True)
    steps = [1.05] * 60 + [1.05**2] * 60 + [1.05**3] * 60
    yield "loss rises in steps", after_warm_up(steps, is_short=True)
    yield "loss rises in steps, 5 steps a row", after_warm_up(steps, is_short=True, every=5)
    for height in (1.06, 1.3):
        yield f"loss x{height} stays, blocks of 25 rows", after_warm_up([height] * 350)
        yield f"loss x{height} stays, 10 steps a row", after_warm_up([height] * 130, every=10)


def starts() -> Iterator[tuple[str, list[str]]]:
    """The first rows, a log that starts late, steps that go back, a rising learning rate, a planned change."""
    for num, height in product((3, 10, 18, 19, 20, 21, 30, 60), (1.3, 2.5)):
        rows = healthy(num + 8)
        for row in rows[num : num + 3]:
            row.loss, row.grad_norm = height * row.loss, 4 * row.grad_norm
        yield f"loss x{height} after {num} rows", observed(Detectors(CFG), rows)
    for first, with_norms in product((999, 1000, 1001, 5000), (True, False)):
        rows = healthy(40, with_norms=with_norms, skipped=first)
        for row in rows[25:28]:
            row.loss, row.grad_norm = 1.4 * row.loss, 3 * row.grad_norm
        rows[35].grad_norm *= 15
        yield f"a log from step {first}, gradients {with_norms}", observed(Detectors(CFG), rows)
    for height, back in product((1.0, 1.2, 2.0), (0, 1, 50)):
        detectors = Detectors.restore(CFG, json.loads(warm(True)))
        rows = healthy(40, skipped=STEEP + WARM - back - 1)
        for row in rows:
            row.loss *= height
        for row in rows[20:23]:
            row.loss, row.grad_norm = 1.5 * row.loss, 3 * row.grad_norm
        yield f"{back} steps back, loss x{height}", observed(detectors, rows)
    for height, is_rising, is_planned in product((1.08, 1.12, 1.2, 1.4), (False, True), (False, True)):

        def widen(row: StepRecord, is_rising: bool = is_rising, is_planned: bool = is_planned) -> None:
            row.lr, row.in_planned_change = 1e-4 * (1 + 0.01 * row.step * is_rising), is_planned

        name = f"loss x{height}, lr rises {is_rising}, planned {is_planned}"
        yield name, after_warm_up(hump(height, 4), hump(15.0 * height, 4), change=widen)


def refusals() -> Iterator[tuple[str, list[str]]]:
    def refuse(row: StepRecord) -> None:
        row.refused = True

    for height, norm in product((1.0, 1.1, 1.3, 3.0), (1.0, 5.0, 8.0, 12.0, 100.0)):
        yield f"refused: loss x{height}, gradient x{norm}", after_warm_up([height], [norm], change=refuse)
    for value, norm in product((0.0, 40.0), (0.0, 40.0)):
        row = record(1, value, norm, refused=True)
        yield f"refused in the first row: {value}, {norm}", observed(Detectors(CFG), [row])


def accepted_levels() -> Iterator[tuple[str, list[str]]]:
    for loss, norm, height in product((None, 3.6), (None, 0.9), (1.2, 1.5)):
        detectors = Detectors.restore(CFG, json.loads(warm(True)))
        rows = healthy(60, skipped=STEEP + WARM)
        for row in rows[1:]:
            row.loss, row.grad_norm = height * row.loss, 1.5 * row.grad_norm
        for row in rows[40:43]:
            row.loss, row.grad_norm = 1.5 * row.loss, 12 * row.grad_norm
        found = observed(detectors, rows[:3])
        detectors.accept_level(loss=loss, grad_norm=norm)
        yield f"loss x{height}, accepted at {loss} and {norm}", found + observed(detectors, rows[3:])


def odd_losses() -> Iterator[tuple[str, list[str]]]:
    rows = healthy(80)
    for row, loss in zip(rows[40:44], (0.0, -1.0, 1e-13, 1e300), strict=True):
        row.loss = loss
    yield "losses without a logarithm", observed(Detectors(CFG), rows)
    yield "a constant", observed(Detectors(CFG), [record(step, 2.0 + (step == 40), 1.0 + step) for step in range(60)])


def guards() -> Iterator[tuple[str, list[str]]]:
    """Weights, moments, learning rate, ranks, batches and loss scale on random walks that pass their bounds."""
    for seed, walk in product(range(3), (weights, moments, rates, ranks, batches, scales)):
        facts_of_rows = [{"loss": 2.0, "grad_norm": 0.3, **facts} for facts in walk(Random(seed), seed)]
        rows = [record(4 * place, **facts) for place, facts in enumerate(facts_of_rows)]
        yield f"{walk.__name__} {seed}", observed(Detectors(CFG), rows)


Facts = Iterator[dict[str, Any]]


def weights(random: Random, seed: int) -> Facts:
    norms = {"embed": 10.0, "head": 5.0}
    for _ in range(150):
        norms = {name: norm * random.choice((0.9, 0.98, 1.0, 1.0, 1.02, 1.1)) for name, norm in norms.items()}
        yield {"group_param_norms": norms} if seed % 2 else {"param_norm": norms["head"]}
    for odd in (math.inf, 0.0, 4.0, math.nan):
        yield {"group_param_norms": norms | {"head": odd}, "nonfinite_ranks": [1, 2]}


def moments(random: Random, seed: int) -> Facts:
    norm = 1.0
    for _ in range(100):
        norm *= random.choice((0.25, 0.5, 0.8, 1.0, 1.0, 1.0, 1.0, 1.2, 2.0, 8.0))
        ratio = random.choice((None, 1.0, 1.0, 1.0, 3.9, 4.1))
        beta2 = (None, 0.95, 0.99)[seed % 3]
        yield {"v_norm": random.choice((None, norm, norm, math.inf)), "square_ratio": ratio, "beta2": beta2}


def rates(random: Random, seed: int) -> Facts:
    rate = 1e-4
    for place in range(150):
        rate *= (
            random.choice((1.0, 1.0, 1.01, 0.9, 0.99)) if place % 10 else random.choice((0.75, 0.85, 1.15, 1.3, 2.0))
        )
        yield {"lr": rate if seed % 2 else rate * min(1.0, place / 60)}


def ranks(random: Random, seed: int) -> Facts:
    for _ in range(80):
        middle = random.uniform(0.5, 2.0)
        factors = random.choice(((1.1, 1.05), (1.18, 1.1), (1.5, 1.0), (1.9, 1.0), (2.5, 2.2), (9.0, 1.0), (12.0, 0.1)))
        worst = [[rank if random.random() < 0.9 else 3, middle * factor] for rank, factor in enumerate(factors)]
        spread = {"median": middle, "spread": random.choice((0.0, 0.01, 0.1)) * middle, "worst": worst}
        mismatched = random.choice(([], [], [], [2], [2, 1]))
        yield {"ranks": {("loss", "grad_norm")[seed % 2]: spread}, "mismatched_ranks": mismatched}


def batches(random: Random, seed: int) -> Facts:
    for place in range(550):
        data = random.choice(({"plan": [1]}, {"rows": [0, 1]}, {"plan": [1, 2]})) if random.random() < 0.02 else {}
        seen = random.randrange(40) if place in (30, 60, 90, 530) else 100 + place
        yield {"fingerprint": str(seen if seed else place % 514), "other_data": data, "cursor": place}


def scales(random: Random, seed: int) -> Facts:
    scale = 16.0
    for _ in range(120):
        scale = min(32.0, max(0.25, scale * random.choice((0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0))))
        is_refused = random.random() < 0.8
        yield {"loss_scale": scale, "refused": is_refused, "grad_norm": math.inf if is_refused else 0.3 + seed}


def step_times() -> Iterator[tuple[str, list[str]]]:
    for factor, num in product((1.2, 1.5, 1.65, 2.0, 4.0), (4, 5, 6, 12, 60)):
        random = Random(round(100 * factor) + num)
        seconds = [0.2] * 30 + [0.2 * factor] * num + [0.2 * min(factor, 1.3)] * 8 + [0.2] * 20
        seconds = [each * random.lognormvariate(0, 0.02) for each in seconds]
        worst = [[2, 0.2 * factor], [0, 0.2], [1, 0.21], [3, 0.19]]
        ranks: dict[str, Any] = {"device_time_s": {"median": 0.2, "spread": 0.01, "worst": worst}}
        rows = [record(step, 2.0, median_step_s=each, ranks=ranks) for step, each in enumerate(seconds)]
        yield f"steps x{factor} for {num} rows", observed(Detectors(CFG), rows)


def precursors() -> Iterator[tuple[str, list[str]]]:
    """Probed signals that rise, fall below half, and rise again, with noise and some odd values."""
    levels = {"attention_logits": 8.0, "group_update_ratios": 1e-3, "fp8_underflow": 2e-3}
    for signal, rate, noise, seed in product(levels, (0.01, 0.015, 0.03), (0.01, 0.05), range(3)):
        name = f"{signal}, {rate:.1%} a step, noise {noise:.0%}, seed {seed}"
        random = Random(name)
        start, length, every = random.choice((40, 100, 170)), random.choice((150, 250)), random.choice((5, 10, 20))
        rows, logarithm = [], 0.0
        for step in range(0, start + 3 * length, every):
            if start <= step < start + length or step >= start + 2 * length:
                logarithm += every * rate
            elif step >= start + length:
                logarithm -= every * rate * random.choice((0.4, 1.3))
            value = levels[signal] * math.exp(logarithm + random.gauss(0, noise))
            if random.random() < 0.03:
                value = random.choice((0.0, math.nan, 3 * value))
            grad_norm = math.nan if random.random() < 0.03 else 1.0
            lr = 1e-3 * min(1.0, (step + 1) / random.choice((1, 30, 60)))
            groups = {"blocks.0": levels[signal] * random.lognormvariate(0, noise), "blocks.1": value}
            rows.append(record(step, 2.0, grad_norm, lr=lr, beta2=0.95, **{signal: groups}))
        guard = PrecursorGuard()
        yield name, [line(finding) for row in rows for finding in guard.observe(row, CFG)]


def lines_of_baselines() -> Golden:
    """The bounds of the gate along curves of several shapes."""
    random = Random(3)
    noise = [random.gauss(0, 0.01) for _ in range(700)]
    heavy = [abs(random.gauss(0, 0.1)) if random.random() < 0.04 else 0.0 for _ in range(700)]
    shapes = {
        "healthy": losses(700),
        "heavy tails": [3 * math.exp(each + more) for each, more in zip(noise, heavy, strict=True)],
        "a fall": [(3.0 if place < 150 else 2.4) * math.exp(each) for place, each in enumerate(noise)],
        "a dip": [3 * math.exp(each - 0.1 * (500 <= place < 600)) for place, each in enumerate(noise)],
        "a jump": [3 * math.exp(each + 0.3 * (place >= 550)) for place, each in enumerate(noise)],
        "not positive": [3.0, 0.0, -1.0, 1e-20, *[3.0] * 40],
    }
    golden: Golden = {}
    for name, values in shapes.items():
        for start, state in (("early", initial_state()), ("late", initial_state_late(3.0))):
            golden[f"{name}, {start}"] = [*_bounds(values, state)]
    return golden


def _bounds(values: Sequence[float], state: State) -> Iterator[str]:
    for place, value in enumerate(values):
        if place in (0, 1, 2, 5, 7, 8, 9, 15, 30, 49, 50, 51, 70) or place % 40 == 0:
            level, spread = expected_log_value(state, CFG, FLOATS)
            bounds = gate_bounds(state, state, CFG, FLOATS)
            wider = gate_bounds(state, state, CFG, FLOATS, warming=0.5, planned=1.0)
            tight = upper_bound(state, CFG, FLOATS, sigmas=0.5, factor=1.3, cap=1.4)
            numbers = (level, spread, tolerance(state, CFG, FLOATS), *bounds, *wider, tight)
            yield f"{place}: {' '.join(map(number, numbers))}"
        state = advance(state, value, place % 11 != 7, CFG, FLOATS)


def lines_of_incidents() -> Golden:
    shapes: dict[str, list[float]] = {}
    for height, num in product((1.15, 1.4, 2.5), (3, 20, 60, 300)):
        shapes[f"x{height} for {num} rows"] = [height] * num
    for decay in (15, 50, 150):
        shapes[f"decays in {decay} rows"] = [1 + 0.5 * math.exp(-place / decay) for place in range(400)]
    shapes["twice"] = [1.4] * 20 + [1.02] * 60 + [1.5] * 20
    shapes["rises on and on"] = [1.3 + 0.002 * place for place in range(300)]
    shapes["nan for a while"] = [1.0, math.nan, math.nan, *[1.02] * 30]
    shapes["nan from the start to the end"] = [math.nan] * 500
    golden: Golden = {}
    for name, factors in shapes.items():
        detectors, incidents = Detectors(CFG), IncidentGrouper(CFG)
        values = losses(700)
        for place, factor in enumerate(factors):
            values[200 + place] *= factor
        rows = records(values, norms(700))
        rows[100].mismatched_ranks = [3]
        rows[500].fingerprint, rows[510].fingerprint = "same", "same"
        ended = [each for row in rows for each in incidents.observe(row, detectors.observe(row))]
        golden[name] = [_format_incident(incident) for incident in [*ended, *incidents.finish()]]
    return golden


def _format_incident(incident: Any) -> str:
    facts = {each.name: getattr(incident, each.name) for each in fields(incident)}
    return " ".join(f"{key}={number(value) if isinstance(value, float) else value}" for key, value in facts.items())


def lines_of_policy() -> Golden:
    """Actions and closed incidents in simulated clusters."""
    golden: Golden = {}
    for seed in range(NUM_CLUSTERS):
        random = Random(seed)
        hostility = Hostility(
            seed=seed,
            lag=random.randrange(4),
            refuse=random.choice((0.0, 0.02, 0.05, 0.1)),
            find=random.choice((0.01, 0.02, 0.04)),
            late=random.choice((0.0, 0.5)),
            fail=random.choice((0.0, 0.0, 0.1, 0.3)),
            damage=random.choice((0.3, 0.7)),
            measure=random.choice((0.0, 0.05, 0.3)),
            restart=random.choice((0.0, 0.02)),
            round_trip=random.choice((0.0, 0.2)),
            odd=random.choice((0.0, 0.2)),
            healing=random.choice((1.0, 0.98, 0.9)),
        )
        cluster = run_cluster(hostility)
        end = f"ends at {cluster.iteration}, halted {cluster.is_halted}, lr scale {cluster.policy.lr_scale}"
        closed = [f"{each.incident} {each.verdict} {each.spike_type}" for each in cluster.closed]
        golden[f"cluster {seed}"] = [*map(_format_action, actions_of(cluster)), f"{end}; {', '.join(closed)}"]
    return golden


def _format_action(action: Action) -> str:
    facts = {each.name: getattr(action, each.name) for each in fields(action)}
    hidden = ("time", "reason")
    shown = {key: value for key, value in facts.items() if value not in (None, [], {}) and key not in hidden}
    shown = {key: number(value) if isinstance(value, float) else value for key, value in shown.items()}
    return f"{' '.join(f'{key}={value}' for key, value in shown.items())}: {action.reason}"


DETECTORS = (
    *(spikes, sparse_starts, gradient_spikes, slow_changes, starts, refusals, accepted_levels, odd_losses),
    *(guards, precursors, step_times),
)
GOLDEN: dict[str, Callable[[], Golden]] = {
    **{part.__name__: lambda part=part: dict(part()) for part in DETECTORS},  # type: ignore[misc]
    "baselines": lines_of_baselines,
    "incidents": lines_of_incidents,
    "policy": lines_of_policy,
}
"""File -> what it holds."""


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.json"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, lines in GOLDEN.items():
        path_of(name).write_text(json.dumps(lines(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
