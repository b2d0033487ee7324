"""The Weights & Biases sink: one W&B run for all starts of a run, online or offline.

W&B's own process keeps rows on disk and repeats uploads, so a row counts as accepted once W&B has it; `wandb sync
RUN/wandb/*run-*` sends what W&B could not. A server that does not answer at the start is tried again.
W&B ignores a row whose step is not above the last one. The step is therefore the byte position of the event in
`events.jsonl`: it increases with every event, and an event that is sent twice has the same one. System samples lie
between two events: each takes the next step and shifts those after it by one. Bytes that the log has lost shift them,
too. Charts use `iteration`.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, final

from harness.config.compose import flat
from harness.config.errors import EXIT_CRASHED, EXIT_DONE
from harness.config.telemetry import WandbConfig, WandbMode
from harness.core.credentials import without_credentials
from harness.core.events import Event, Incident, RunEnded, RunRestarted, SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry.event_log import Chunk
from harness.telemetry.sinks.metrics import metrics_of
from harness.telemetry.sinks.sink import BadSinkError, SinkKind, SinkState, configuration, load_sink_state, save_state
from harness.telemetry.sinks.sink_log import first_line

INIT_TIMEOUT_S = 30.0


@dataclass(slots=True, kw_only=True)
class WandbState(SinkState):
    """Content of `wandb.json`."""

    run_id: str = ""
    """Id of the W&B run; stored before the first request."""
    num_samples: int = 0
    """System samples that were sent."""
    lost_bytes: int = 0
    """Bytes that the log has lost after they were sent."""

    def rewind(self, offset: int) -> None:
        self.lost_bytes += self.offset - offset
        self.offset = offset

    def step(self, position: int) -> int:
        """W&B's step of an event that ends at this byte of the log."""
        return position + self.num_samples + self.lost_bytes


@final
class WandbSink:
    """Sends one run to W&B."""

    def __init__(self, run: RunDir, cfg: WandbConfig) -> None:
        self._run, self._cfg = run, cfg
        self.state = load_sink_state(run, SinkKind.wandb, WandbState)
        self._wandb_run: Any = None
        self._exit_code = EXIT_CRASHED

    def connect(self) -> None:
        if self._wandb_run is not None:
            return
        import wandb

        if not self.state.run_id:
            self.state.run_id = uuid.uuid4().hex[:12]
            self.save()
        settings = {
            key: without_credentials(value) if isinstance(value, str) else value
            for key, value in flat(configuration(self._run)).items()
        }
        is_online = self._cfg.mode is WandbMode.online
        try:
            wandb_run = wandb.init(
                project=self._cfg.project,
                entity=self._cfg.entity,
                id=self.state.run_id,
                name=self._run.path.name,
                dir=str(self._run.path),
                mode=self._cfg.mode.value,
                resume="allow" if is_online else None,
                config=settings,
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    init_timeout=INIT_TIMEOUT_S,
                    disable_git=True,
                    save_code=False,
                    x_disable_stats=True,
                ),
            )
        except wandb.errors.UsageError as error:
            raise BadSinkError(f"telemetry.wandb: {first_line(error)}") from None
        except Exception:
            wandb.teardown()  # W&B's process takes the run for started, and would reject the next attempt
            raise
        wandb_run.define_metric("iteration", hidden=True)
        wandb_run.define_metric("*", step_metric="iteration")
        self._wandb_run = wandb_run

    def send(self, chunk: Chunk) -> None:
        for event, position in zip(chunk.events, chunk.line_ends, strict=True):
            self._log(event, position)
            match event:
                case Incident():
                    text = f"{', '.join(event.kinds)} from iteration {event.onset}: {event.verdict}"
                    self._wandb_run.summary[f"incident.{event.number:03d}"] = text
                case RunEnded():
                    self._exit_code = event.exit_code
                    self._wandb_run.summary["run_ended"] = event.reason
                case RunRestarted():
                    self._exit_code = EXIT_DONE  # the next start resumes the W&B run
                case _:
                    pass

    def send_samples(self, samples: list[SystemSampled]) -> None:
        for number, sample in enumerate(samples, start=1):
            self._log(sample, self.state.offset + number)
        self.state.num_samples += len(samples)

    def poll(self) -> None:
        """Nothing to do."""

    def save(self) -> None:
        save_state(self._run, SinkKind.wandb, self.state)

    def end(self, *, has_ended: bool) -> None:
        import wandb

        self._wandb_run.finish(exit_code=self._exit_code if has_ended else EXIT_CRASHED)
        self._wandb_run = None
        wandb.teardown()  # waits for W&B's process: `finish` may return before the last rows are in its file

    def _log(self, event: Event, position: int) -> None:
        if values := metrics_of(event):
            row = values | {"iteration": event.iteration, "_timestamp": event.time}
            self._wandb_run.log(row, step=self.state.step(position))
