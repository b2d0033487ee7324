from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from harness.analysis.diagnose.decision_tree import render, walk
from harness.analysis.diagnose.logged_run import LoggedRun
from harness.analysis.postmortem import evidence as schema
from harness.analysis.postmortem import gather as gather_module
from harness.analysis.postmortem.gather import find_incident, gather_evidence, incidents, remarks
from harness.analysis.postmortem.incident_config import overrides_at
from harness.analysis.postmortem.measures import measure
from harness.analysis.postmortem.overrides import computed_settings, overrides_of
from harness.analysis.postmortem.report import markdown_report
from harness.config import compose
from harness.config.errors import ConfigError
from harness.core import rundir
from harness.core.event_json import to_json
from harness.core.events import ActionKind, Event, FindingKind, Incident, RunStarted, StepRecord
from harness.core.rundir import RunDir
from harness.telemetry.event_log import read_non_step_events, read_steps
from tests.analysis.postmortem import stories
from tests.analysis.postmortem.stories import ONSET, evidence_of, log_of, write
from tests.sentinel.series import config, record

pytestmark = pytest.mark.usefixtures("composed_once")


def test_window_of_an_incident(tmp_path: Path) -> None:
    evidence = evidence_of(write(tmp_path / "run", stories.poisoned()))
    assert [record.iteration for record in evidence.records] == list(range(ONSET + 51))
    assert evidence.folder == "001"
    assert [finding.kind for finding in evidence.findings] == [FindingKind.grad_spike]
    assert [action.kind for action in evidence.actions] == [ActionKind.skip]
    assert evidence.run.world_size == 2
    assert evidence.run.settings["optim.beta2"] == 0.95
    (batch,) = evidence.batches
    assert (batch.index, batch.refused, batch.iteration) == (ONSET, True, ONSET)
    assert [(rare.token, rare.num_in_batch, rare.num_in_corpus) for rare in batch.rarest] == [
        (255, 40, 0),
        (254, 35, 3),
    ]


def test_finding_about_speed_blames_no_batch(tmp_path: Path) -> None:
    slow = stories.finding(FindingKind.slow, ONSET + 3, "half the usual throughput")
    evidence = evidence_of(write(tmp_path / "run", [*stories.poisoned(), slow]))
    assert FindingKind.slow in [finding.kind for finding in evidence.findings]
    assert [batch.index for batch in evidence.batches] == [ONSET]


def test_credentials_are_removed(tmp_path: Path) -> None:
    """Evidence is shared, so it must not contain passwords."""
    secret = "https://me:secret@tracking.example"
    run = write(tmp_path / "run", stories.poisoned(), f"{stories.SETTINGS}telemetry: {{tracking_uri: '{secret}'}}\n")
    run.mlflow.write_text(f'{{"tracking_uri": "{secret}", "run_id": "abc"}}')
    evidence = evidence_of(run)
    assert "secret" not in str(schema.to_tree(evidence))
    assert evidence.run.tracking == "https://***@tracking.example abc"


def test_an_incident_keeps_the_configuration_that_it_ran_with(tmp_path: Path) -> None:
    """Whatever its remedy and later resumes have changed."""
    place = [f"run.dir={tmp_path}", "run.name=run", "run.resume=changed"]
    hot = [*place, "optim.lr=30", "data=mixture"]
    run = write(tmp_path / "run", stories.poisoned(), compose.to_yaml(compose.load(hot)))
    before = schema.to_tree(complete(run))
    rundir.prepare_run_dir(compose.load([*hot, "optim.lr=0.001"]), run, iteration=ONSET)
    rundir.prepare_run_dir(compose.load([*hot, "optim.lr=0.002", "optim.beta2=0.9"]), run, iteration=ONSET + 40)
    assert schema.to_tree(complete(run)) == before
    rundir.prepare_run_dir(compose.load(place), run, iteration=ONSET + 60)
    after = complete(run)
    assert after.run.overrides == ["data=mixture", "optim.lr=30.0"]
    assert not [key for key in after.run.settings if key.startswith("data.sources.main.")], "a later source"


def test_a_resume_before_an_incident_is_part_of_its_configuration(tmp_path: Path) -> None:
    place = [f"run.dir={tmp_path}", "run.name=run", "run.resume=changed"]
    run = write(tmp_path / "run", stories.poisoned(), compose.to_yaml(compose.load(place)))
    rundir.prepare_run_dir(compose.load([*place, "optim.lr=30"]), run, iteration=ONSET - 1)
    assert evidence_of(run).run.settings["optim.lr"] == 30.0


def complete(run: RunDir) -> schema.Evidence:
    evidence = evidence_of(run)
    evidence.run.overrides = overrides_at(run, evidence.incident)
    return evidence


def test_cost_in_steps_seconds_tokens_and_money(tmp_path: Path) -> None:
    cost = evidence_of(write(tmp_path / "run", stories.lost_moments())).cost
    assert (cost.undone_steps, cost.refused_steps, cost.raised_steps, cost.steps) == (12, 0, 0, 12)
    assert cost.seconds == pytest.approx(12 * 0.25 + 2.0)
    assert cost.tokens == 12 * 256
    assert cost.gpu_hours == pytest.approx(10 / 3600)
    assert cost.money == pytest.approx(10.0)


def test_cost_is_that_of_the_gpus_of_the_start_in_which_the_incident_began(tmp_path: Path) -> None:
    later = RunStarted(time=1.9e9, iteration=ONSET, world_size=8, num_steps=400, step=ONSET)
    settings = f"{stories.SETTINGS}launch: {{ranks_per_gpu: 2}}\n"
    evidence = evidence_of(write(tmp_path / "run", [*stories.lost_moments(), later], settings))
    assert evidence.run.world_size == 2
    assert evidence.cost.gpu_hours == pytest.approx(5 / 3600)


def grows(until: int) -> str:
    """Settings whose batches have 2 sequences before a batch and 8 from it on."""
    warmup = f"batch_size_warmup: [{{until_batch: {until}, batch_size: 2}}]"
    return stories.SETTINGS.replace("batch_size: 8,", f"batch_size: 8, {warmup},")


def test_cost_in_tokens_is_that_of_the_batches_of_a_warmup(tmp_path: Path) -> None:
    run = write(tmp_path / "undone", stories.lost_moments(), grows(ONSET - 5))
    assert evidence_of(run).cost.tokens == 32 * (5 * 2 + 7 * 8), "batches 140 to 151"
    run.corpus.write_text('{"batch_sizes": [[0, 4], [141, 8]]}')
    assert evidence_of(run).cost.tokens == 32 * (1 * 4 + 11 * 8), "the recorded sizes"
    changes = {at: (lambda row: replace(row, loss=4.0)) for at in range(ONSET, ONSET + 6)}
    spike = write(tmp_path / "raised", log_of(changes, [stories.ended(last=ONSET + 10)]), grows(ONSET + 2))
    assert evidence_of(spike).cost.tokens == 32 * (2 * 2 + 4 * 8)


def test_each_undone_step_is_counted_once_if_a_second_restore_goes_further_back(tmp_path: Path) -> None:
    changes: dict[int, stories.Change] = {  # repeated after a rewind of two steps
        at: (lambda row: replace(row, step=row.iteration - 2, cursor=row.iteration - 2))
        for at in range(ONSET + 1, ONSET + 4)
    }
    events = [
        stories.outcome(ActionKind.rewind, ONSET, steps_lost=2, target="snapshot"),
        stories.outcome(ActionKind.rollback, ONSET + 3, steps_lost=5, target="step-00000146-gen-1"),
        stories.ended(last=ONSET + 3, actions=["rewind", "rollback"]),
    ]
    rows = [row for row in log_of(changes, events) if not isinstance(row, StepRecord) or row.iteration <= ONSET + 3]
    run = write(tmp_path / "run", rows, grows(ONSET - 1))
    cost = evidence_of(run).cost
    assert (cost.undone_steps, cost.raised_steps) == (7, 0)
    # batches 149 and 150 by the rewind; then 147, 148 and the repeated 149, 150 and 151 by the rollback
    assert cost.tokens == 32 * (2 * 8 + 2 * 2 + 3 * 8)


def test_rejected_steps_in_flight_at_a_restore_cost_their_tokens(tmp_path: Path) -> None:
    """The incident ends with the restore; the reports of later steps that were in flight follow it in the log."""
    rejected = {at: stories.refused(loss=6.0, grad_norm=40.0) for at in (ONSET, ONSET + 1)}
    rewind = stories.action(ActionKind.rewind, ONSET)
    back = stories.outcome(ActionKind.rewind, ONSET + 1, steps_lost=2, target="snapshot")
    cost = evidence_of(write(tmp_path / "run", log_of(rejected, [rewind, back, stories.ended()]))).cost
    assert (cost.undone_steps, cost.refused_steps) == (2, 2)
    assert cost.tokens == 4 * 256


def test_kept_spike_costs_its_raised_steps(tmp_path: Path) -> None:
    changes = {at: (lambda row: replace(row, loss=4.0)) for at in range(ONSET, ONSET + 6)}
    cost = evidence_of(write(tmp_path / "run", log_of(changes, [stories.ended(last=ONSET + 10)]))).cost
    assert (cost.raised_steps, cost.steps) == (6, 6)


BACK = ONSET + 5
RESTART = RunStarted(time=1.8e9 + BACK, iteration=BACK, world_size=2, num_steps=400, step=BACK - 35)
ROLLBACK = stories.outcome(ActionKind.rollback, BACK, steps_lost=35, target="step-00000120-gen-0")


@pytest.mark.parametrize("event", [RESTART, ROLLBACK, replace(ROLLBACK, incident=0)])
def test_steps_that_are_trained_again_are_neither_peak_nor_cost(tmp_path: Path, event: Event) -> None:
    """Killed or rolled back within the incident, to 30 steps before it, where the loss was higher. Of the repeated ones
    one has a higher loss than the first time and one a higher gradient norm; a later step has a spike."""

    def falling(row: StepRecord) -> StepRecord:
        return replace(row, loss=row.loss + 0.1 * max(0, ONSET - row.step))

    changes: dict[int, stories.Change] = dict.fromkeys(range(ONSET), falling)
    changes |= dict.fromkeys(range(BACK + 1, stories.NUM_ROWS), lambda row: falling(replace(row, step=row.step - 35)))
    changes[ONSET] = lambda row: replace(row, loss=4.0)
    changes[ONSET + 20] = lambda row: replace(row, step=row.step - 35, loss=5.2)
    changes[ONSET + 25] = lambda row: replace(row, step=row.step - 35, grad_norm=5.0)
    changes[ONSET + 60] = lambda row: replace(row, step=row.step - 35, loss=4.0)
    evidence = evidence_of(write(tmp_path / "run", log_of(changes, [event, stories.ended(last=ONSET + 70)])))
    assert (evidence.numbers.peak_iteration, evidence.numbers.peak) == (ONSET + 20, 5.2)
    num_kept = 2 if event is ROLLBACK else 3
    assert evidence.cost.raised_steps == num_kept, "the update at the onset, unless it was undone, and the two"
    assert evidence.numbers.peak_grad == 5.0
    assert [record.iteration for record in measure(evidence).suspects] == [ONSET + at for at in (0, 20, 25, 60)]


def test_a_batch_without_a_token_to_predict_is_no_suspect(tmp_path: Path) -> None:
    changes = {ONSET: stories.refused(loss=6.0, grad_norm=9.0), ONSET + 3: stories.refused(loss=0.0, grad_norm=0.0)}
    evidence = evidence_of(write(tmp_path / "run", log_of(changes, [stories.ended(last=ONSET + 5)])))
    assert [record.iteration for record in measure(evidence).suspects] == [ONSET]
    assert [batch.index for batch in evidence.batches] == [ONSET]
    assert evidence.cost.refused_steps == 1


def test_incident_without_an_end_event(tmp_path: Path) -> None:
    """After a kill or in a live run, the incident is reconstructed from its actions and findings."""
    log = [event for event in stories.poisoned() if not isinstance(event, Incident)]
    run = write(tmp_path / "run", log)
    (incident,) = incidents(read_non_step_events(run.events))
    assert (incident.number, incident.onset, incident.is_open) == (1, ONSET, True)
    assert (incident.kinds, incident.groups) == (["grad_spike"], ["embedding"])
    assert find_incident(run, 1) == incident
    with pytest.raises(ConfigError, match="has no incident 4; incidents of this run: 1"):
        find_incident(run, 4)


def test_long_window_is_thinned_except_near_the_onset(tmp_path: Path) -> None:
    rows: list[Event] = [stories.healthy(at) for at in range(4000)]
    rows[2500] = replace(stories.healthy(2500), refused=True)
    run = write(tmp_path / "run", [*rows, stories.ended(last=3900)])
    evidence = evidence_of(run)
    kept = {record.iteration for record in evidence.records}
    assert len(kept) <= gather_module.MOST_RECORDS + 1
    assert {*range(ONSET, ONSET + gather_module.NEAR), 2500} <= kept
    assert evidence.num_thinned == 3951 - len(kept)
    assert evidence.cost.refused_steps == 1


def test_duplicate_batches_outside_incidents_are_a_remark(tmp_path: Path) -> None:
    def twice(at: int) -> Event:
        return stories.finding(FindingKind.duplicate_batch, at, "the same tokens", cursors=[at - 1, at])

    log = [twice(20), twice(40), twice(120), *stories.skipped(), twice(ONSET + 20)]
    found = remarks(log)
    assert [(remark.onset, remark.last) for remark in found] == [(20, 40)]
    assert [gather_module.folder_of(remark) for remark in found] == ["remark-001"]
    run = write(tmp_path / "run", log_of({}, [twice(20), twice(40)]))
    assert [finding.iteration for finding in evidence_of(run).findings] == [20, 40]


def test_steps_are_read_by_iteration_with_any_order_of_keys(tmp_path: Path) -> None:
    run = write(tmp_path / "run", stories.poisoned())
    with run.events.open("a") as log:
        log.write('{"iteration": 500, ' + to_json(record(500, 2.0))[1:].replace('"iteration":500,', "") + "\n")
        log.write('{"event":"step","time":0,"iteration":501,"torn')
    assert [row.iteration for row in read_steps(run.events, 228, 600)] == [228, 229, 500]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=50m", "precision=bf16", "optim.lr=3e-4", "optim.clip_norm=null", "data.phases=[]"],
        ["data=synthetic", "data.synthetic.rare_tokens=8", "optim=adamw_wsd", "train.num_steps=500", "parallel=hsdp"],
        ["optim=muon", "optim.muon.momentum=0.9", "optim.schedule=wsd", "optim.decay_steps=3"],
        ["data=files", "data.sources.main.paths=['/data/a b.bin', /data/c]", "optim.lr=1e-3"],
        ["data=mixture", "+data.sources={web: {kind: files, paths: ['/data/a b.bin', /data/c]}}", "run.seed=9"],
    ],
)
def test_overrides_reproduce_the_configuration(overrides: list[str]) -> None:
    cfg = compose.load([*overrides, "run.name=first", "telemetry=plain"])
    found = overrides_of(cfg)
    assert found is not None
    assert computed_settings(compose.load(found)) == computed_settings(cfg)
    assert len(found) <= len(overrides) + 2


numbers = st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e30])
rows = st.builds(
    lambda at, loss, norm, **facts: replace(record(at, loss, norm), **facts),
    st.integers(0, 40),
    numbers,
    numbers,
    step=st.integers(0, 40),
    lr=numbers,
    refused=st.booleans(),
    step_time_s=numbers,
    tokens_per_s=numbers,
    loss_scale=st.none() | numbers,
    v_norm=st.none() | numbers,
    square_ratio=st.none() | numbers,
    group_param_norms=st.just({}) | st.fixed_dictionaries({"head": numbers}),
    group_grad_norms=st.just({}) | st.fixed_dictionaries({"embedding": numbers}),
    activation_rms=st.just({}) | st.fixed_dictionaries({"blocks.0": numbers}),
    nonfinite_ranks=st.lists(st.integers(0, 3), max_size=3),
    ranks=st.just({})
    | st.fixed_dictionaries(
        {
            "grad_norm": st.fixed_dictionaries(
                {"median": numbers, "spread": numbers, "worst": st.just([[0, "nan"], [1, 2.0]])}
            )
        }
    ),
    batch=st.just({}) | st.fixed_dictionaries({"entropy_nats": numbers, "rarest": st.just([[1, 2, None], "odd"])}),
)
findings = st.builds(
    lambda kind, at, onset: stories.finding(kind, at, "a message", onset=onset),
    st.sampled_from(FindingKind),
    st.integers(0, 40),
    st.integers(-5, 45),
)
actions = st.builds(
    lambda kind, at, number, scale: stories.action(
        kind, at, incident=number, onset=at - 2, lr_scale=scale, exclude=[at, at]
    ),
    st.sampled_from(ActionKind),
    st.integers(0, 40),
    st.integers(0, 3),
    st.none() | numbers,
)
outcomes = st.builds(
    lambda kind, at, lost, taken: stories.outcome(kind, at, steps_lost=lost, seconds=taken),
    st.sampled_from(ActionKind),
    st.integers(0, 40),
    st.integers(-3, 20),
    numbers,
)
ends = st.builds(
    lambda at, number: stories.ended(last=at, onset=at - 3, number=number), st.integers(0, 40), st.integers(1, 3)
)
junk = st.sampled_from(["", "{", '{"event":"step"}', "null", '{"event":"action","time":0,"iteration":"x"}', "[]"])


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(st.lists(rows | findings | actions | outcomes | ends | junk, max_size=40))
def test_any_log_can_be_gathered_rendered_and_diagnosed(log: list[Event | str]) -> None:
    with TemporaryDirectory() as directory:
        run = RunDir(Path(directory))
        run.events.write_text("".join(f"{each if isinstance(each, str) else to_json(each)}\n" for each in log))
        known = read_non_step_events(run.events)
        for incident in [*incidents(known), *remarks(known)]:
            evidence = gather_evidence(run, incident)
            assert markdown_report.render(evidence).startswith("# ")
            tree = schema.to_tree(evidence)
            assert schema.to_tree(schema.evidence_from_tree(tree)) == tree
        step_records = [event for event in read_steps(run.events, 0, 1000) if isinstance(event, StepRecord)]
        assert "=>" in render(walk(LoggedRun(records=step_records, events=known), detect=config()))
