"""The TensorBoard sink: one event file, `tensorboard/events.out.tfevents.harness`, for all starts of a run.

TensorBoard's step is the iteration. The progress holds the size of the file after the last accepted batch; whatever a
crash left behind it is cut off before the next batch, so every event is in the file once. A file that is missing or too
short is written again from the first event. The configuration and incidents are texts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, final

from harness.core.credentials import without_credentials
from harness.core.events import Event, Incident, RunEnded, SystemSampled
from harness.core.rundir import RunDir
from harness.telemetry.event_log import Chunk
from harness.telemetry.sinks.metrics import metrics_of
from harness.telemetry.sinks.sink import SinkKind, SinkState, load_sink_state, save_state

FILE_VERSION = "brain.Event:2"


@dataclass(slots=True, kw_only=True)
class TensorboardState(SinkState):
    """Content of `tensorboard.json`."""

    file_bytes: int = 0
    """Size of the event file after the last accepted batch."""


@final
class TensorboardSink:
    """Writes TensorBoard's event file."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self.state = load_sink_state(run, SinkKind.tensorboard, TensorboardState)
        self._descriptor: int | None = None

    def connect(self) -> None:
        if self._descriptor is not None:
            return
        path = event_file(self._run)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.fstat(descriptor).st_size < self.state.file_bytes:
            self.state = TensorboardState()
        self._descriptor = descriptor

    def send(self, chunk: Chunk) -> None:
        self._append(chunk.events)

    def send_samples(self, samples: list[SystemSampled]) -> None:
        self._append(samples)

    def poll(self) -> None:
        """Nothing to do."""

    def save(self) -> None:
        save_state(self._run, SinkKind.tensorboard, self.state)

    def end(self, *, has_ended: bool) -> None:  # noqa: ARG002 -- the file needs no end
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, events: list[Event] | list[SystemSampled]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as EventProto
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._descriptor is not None
        buffer = BytesIO()
        writer = RecordWriter(buffer)
        if self.state.file_bytes == 0:
            time_s = events[0].time if events else 0.0
            writer.write(EventProto(wall_time=time_s, file_version=FILE_VERSION).SerializeToString())
            settings = without_credentials(self._run.config.read_text(encoding="utf-8"))
            text = "\n".join(f"    {line}" for line in settings.splitlines())
            writer.write(EventProto(wall_time=time_s, summary=text_summary("config", text)).SerializeToString())
        for event in events:
            if (summary := summary_of(event)) is not None:
                record = EventProto(wall_time=event.time, step=event.iteration, summary=summary)
                writer.write(record.SerializeToString())
        os.ftruncate(self._descriptor, self.state.file_bytes)
        data, place = buffer.getvalue(), self.state.file_bytes
        while data:
            num_written = os.pwrite(self._descriptor, data, place)
            data, place = data[num_written:], place + num_written
        self.state.file_bytes = place


def event_file(run: RunDir) -> Path:
    return run.path / "tensorboard" / "events.out.tfevents.harness"


def summary_of(event: Event) -> Any:
    """TensorBoard's summary of an event; None for an event without one."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    match event:
        case Incident():
            text = f"incident {event.number}: {', '.join(event.kinds)} from iteration {event.onset}: {event.verdict}"
            return text_summary("incidents", text)
        case RunEnded():
            return text_summary("run_ended", f"exit code {event.exit_code}: {event.reason}")
        case _:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics_of(event).items()]
            return Summary(value=values) if values else None


def text_summary(tag: str, text: str) -> Any:
    """A summary for TensorBoard's text page, which reads Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])
