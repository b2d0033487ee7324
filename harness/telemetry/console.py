"""Console output of a run: a progress bar on a terminal, plain lines in a file or a pipe.

`Console.show` takes the same events as the log. Step records move the bar. Without a terminal they print a line every
few seconds, and always the first and the last. Rarer events are printed above the bar. Nothing here runs in a thread,
and no output error stops a run: if the reader of a pipe goes away, the output ends and training continues.
"""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast, final

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from harness.config.errors import EXIT_DONE
from harness.core.batch_sizes import TokenSchedule
from harness.core.credentials import ENVIRONMENT, without_credentials
from harness.core.events import (
    BY_OPERATOR,
    Action,
    ActionKind,
    ChangePlanned,
    CheckpointFailed,
    CheckpointJudged,
    CheckpointSaved,
    EvalRecord,
    Event,
    Finding,
    Intervention,
    Outcome,
    RunEnded,
    RunRestarted,
    RunStarted,
    StepRecord,
    TaskEvaluated,
    TrialMeasured,
)
from harness.core.plural import pluralize
from harness.core.rundir import RunDir
from harness.core.safe_stream import SafeStream
from harness.telemetry.sinks.sink_process import SINK_MODULE
from harness.telemetry.sinks.store_uri import SQLITE, sqlite_path

PLAIN_EVERY_S = 5.0
REFRESH_EVERY_S = 0.1


@dataclass(slots=True, kw_only=True)
class RunTotals:
    """Totals of a start of a run, for the closing lines."""

    first_step: int = 0
    """The step at which the start began; more than 0 if it resumed."""
    first_loss: float | None = None
    last_loss: float | None = None
    eval_loss: float | None = None
    num_refused: int = 0

    def count(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.first_step = event.step
            case StepRecord():
                self.first_loss = event.loss if self.first_loss is None else self.first_loss
                self.last_loss = event.loss
                self.num_refused += event.refused
            case EvalRecord():
                self.eval_loss = event.loss
            case _:
                pass


def closing_lines(run: RunDir, totals: RunTotals, *, tracking_uri: str | None, is_sent: bool) -> str:
    """The last lines of a run: losses, directory, picture, and the command that opens MLflow."""
    rows: list[tuple[str, str]] = []
    since = f" since step {totals.first_step}" if totals.first_step else ""
    if totals.first_loss is not None and totals.last_loss is not None:
        rows.append(("loss", f"{totals.first_loss:.4f} -> {totals.last_loss:.4f}{since}"))
    if totals.eval_loss is not None:
        rows.append(("eval loss", f"{totals.eval_loss:.4f}"))
    if totals.num_refused:
        rows.append(("rejected", f"{pluralize(totals.num_refused, 'update')}{since}"))
    rows.append(("run", _short(run.path)))
    if run.picture.exists():
        rows.append(("picture", _short(run.picture)))
    if tracking_uri is not None:
        rows.append(("mlflow", mlflow_command(tracking_uri)))
    if not is_sent:
        rows.append(("send rest", f"{_program('python')} -m {SINK_MODULE} {shlex.quote(_short(run.path))}"))
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def mlflow_command(tracking_uri: str) -> str:
    """How to open a store: the address of a server, or the command that starts one for a database."""
    if tracking_uri.startswith(ENVIRONMENT):
        name = tracking_uri.removeprefix(ENVIRONMENT)
        value = os.environ.get(name, "")
        return (
            mlflow_command(value)
            if value.startswith("http")
            else f'{_program("mlflow")} ui --backend-store-uri "${name}"'
        )
    database = sqlite_path(tracking_uri)
    if tracking_uri.startswith(("http://", "https://")):
        return without_credentials(tracking_uri)
    uri = tracking_uri if database is None else f"{SQLITE}{_short(database)}"
    return f"{_program('mlflow')} ui --backend-store-uri {shlex.quote(without_credentials(uri))}"


def plain_line(record: StepRecord, num_steps: int, eta_s: float | None) -> str:
    """One step, as a line of a file."""
    eta = [] if eta_s is None else [f"ETA {clock(eta_s)}"]
    return "  ".join([f"step {record.step}/{num_steps}", *_measures(record), *eta])


def live_line(record: StepRecord, num_steps: int, eta_s: float | None) -> str:
    """One step beside the bar. The least important values are last, because a narrow terminal cuts the line."""
    eta = [] if eta_s is None else [f"ETA {clock(eta_s)}"]
    return " ".join([f"{record.step}/{num_steps}", *eta, *_measures(record)])


def _measures(record: StepRecord) -> list[str]:
    return [
        f"loss {record.loss:.4f}",
        f"grad {record.grad_norm:.3g}",
        f"lr {record.lr:.1e}",
        with_prefix(record.tokens_per_s, "tok/s"),
        f"{record.mfu:.1%} MFU" if record.mfu is not None else with_prefix(record.flops_per_s, "FLOP/s"),
    ]


def event_line(event: Event) -> str | None:
    """The line of an event; None for an ordinary step and for events that are not shown."""
    match event:
        case RunStarted():
            ranks = pluralize(event.world_size, "rank")
            if event.resumed_from is None:
                return f"training {pluralize(event.num_steps, 'step')} on {ranks}"
            memory = ""
            if event.in_memory:
                memory = f" in {'a partner' if event.fetched_ranks else 'this machine'}'s memory"
            return f"resumed from {event.resumed_from}{memory}, step {event.step}/{event.num_steps}, on {ranks}"
        case StepRecord(is_empty=True):
            return f"iteration {event.iteration}: no update, batch {event.cursor} has no token to predict"
        case StepRecord(refused=True):
            return (
                f"iteration {event.iteration}: update rejected, loss {event.loss:.4g}, grad norm {event.grad_norm:.4g}"
            )
        case EvalRecord():
            return f"step {event.step}: eval loss {event.loss:.4f}"
        case TaskEvaluated():
            scores = ", ".join(f"{name} {value:.4g}" for name, value in event.metrics.items() if "_stderr" not in name)
            return f"step {event.step}: {event.task}: {scores}"
        case CheckpointSaved():
            return f"step {event.step}: saved {event.directory} in {event.seconds:.1f} s"
        case CheckpointFailed():
            return f"step {event.step}: checkpoint not saved, {event.reason}"
        case CheckpointJudged() if event.health != "good":
            return f"checkpoint {event.directory} is {event.health}: {event.reason}"
        case Finding():
            causes = [*(f"rank {rank}" for rank in event.ranks), *event.groups]
            suffix = f" ({', '.join(causes)})" if causes else ""
            return f"iteration {event.iteration}: {event.kind}, {event.message}{suffix}"
        case Action() if event.incident != BY_OPERATOR:  # the line of the command follows
            return f"iteration {event.iteration}: {event.kind}, {event.reason}"
        case ChangePlanned():
            return f"iteration {event.iteration}: planned change, {event.reason}; wider bounds until {event.until}"
        case TrialMeasured():
            found = f", {', '.join(event.findings)}" if event.findings else ""
            losses = f"held-out loss {event.held_out_before:.4f} -> {event.held_out_loss:.4f}"
            norms = f"grad norm {event.grad_norm_before:.3g} -> {event.grad_norm:.3g}"
            return f"trial of {event.remedy}: {losses}, {norms} in {event.steps} steps, {event.seconds:.1f} s{found}"
        case Outcome(kind=ActionKind.trial, succeeded=True):
            return f"trial: {event.remedy} won, {pluralize(event.kept_steps, 'step')} kept, {event.steps_lost} dropped"
        case Outcome(held_out_loss=float(loss)):
            return f"held-out loss {loss:.4f}, measured in {event.seconds:.2f} s"
        case Outcome(target=str(target)) if target:
            lost = pluralize(event.steps_lost, "step")
            return f"restored {target}, step {event.step}: {lost} lost, took {event.seconds:.2f} s"
        case Outcome(succeeded=False):
            return f"{event.kind} failed: {event.reason or 'there is no state to restore'}"
        case Intervention(changes={"command": str(command), **rest}):
            rejection = f"; rejected: {rest['refused']}" if "refused" in rest else ""
            return f"command of {event.who}: {command} ({event.reason}){rejection}"
        case Intervention():
            changes = ", ".join(f"{key}: {change}" for key, change in event.changes.items())
            return f"{event.who} changed {changes or 'nothing'} ({event.reason})"
        case RunRestarted():
            after = "".join(f"; {new} replaces {old}" for old, new in event.replaced_by.items())
            return f"restart {event.number} after step {event.step}: {event.reason}{after}"
        case RunEnded() if event.exit_code != EXIT_DONE:
            return f"ended at step {event.step}: {event.reason} (exit code {event.exit_code})"
        case _:
            return None


def with_prefix(value: float, unit: str) -> str:
    """Three digits and a metric prefix: 38.2 GFLOP/s."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} E{unit}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds, as much as needed: 1:02:03, 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


@final
class Console:
    """Shows events on `stream`, by default standard output."""

    def __init__(self, num_steps: int, stream: TextIO | None = None, *, schedule: TokenSchedule | None = None) -> None:
        """Without a schedule, all batches are assumed to be as large as the last one."""
        self.totals = RunTotals()
        self._schedule = schedule
        self._num_steps = num_steps
        self._stream = SafeStream(stream or sys.stdout)
        self._last: StepRecord | None = None
        self._shown: StepRecord | None = None
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._progress = _make_progress(self._stream)
            self._task = self._progress.add_task("", total=num_steps, line="", visible=False)
            self._progress.start()

    def show(self, event: Event) -> None:
        self.totals.count(event)
        text = event_line(event)
        if text is not None:
            self.print(text)
        if isinstance(event, StepRecord):
            self._show_step(event)

    def print(self, text: str) -> None:
        """Print permanent lines, above the bar."""
        if self._progress is not None:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Show the last step and remove the bar; `print` still works."""
        if self._last is not None and self._shown is not self._last:
            self._draw(self._last, eta_s=None)
        if self._progress is not None:
            self._progress.stop()

    def _show_step(self, record: StepRecord) -> None:
        eta_s = self._eta_s(record)
        self._last = record
        every_s = PLAIN_EVERY_S if self._progress is None else REFRESH_EVERY_S
        is_due = self._shown is None or abs(record.time - self._shown.time) >= every_s  # also if the clock is set back
        if is_due or record.step >= self._num_steps:
            self._draw(record, eta_s)

    def _eta_s(self, record: StepRecord) -> float | None:
        if self._last is None or record.tokens_per_s <= 0:
            return None
        if self._schedule is not None:
            return self._schedule.left_s(record, num_steps=self._num_steps)
        batch_tokens = record.tokens - self._last.tokens
        return max(0, self._num_steps - record.step) * batch_tokens / record.tokens_per_s

    def _draw(self, record: StepRecord, eta_s: float | None) -> None:
        self._shown = record
        if self._progress is None:
            self.print(plain_line(record, self._num_steps, eta_s))
        else:
            line = live_line(record, self._num_steps, eta_s)
            self._progress.update(self._task, completed=record.step, line=line, visible=True)
            self._progress.refresh()


def _make_progress(stream: SafeStream) -> Progress:
    console = RichConsole(file=cast(TextIO, stream), force_terminal=True)
    bar = BarColumn(bar_width=None, complete_style="cyan", finished_style="green")
    return Progress(
        bar, TextColumn("{task.fields[line]}", markup=False), console=console, auto_refresh=False, expand=True
    )


def _short(path: Path) -> str:
    """The path, relative if it is below the working directory."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _program(name: str) -> str:
    """Path of a program of this virtual environment, which the user's shell may not have activated."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return name
    return str(beside.relative_to(Path.cwd())) if beside.is_relative_to(Path.cwd()) else str(beside)
