"""A healthy run of the small default as test data: what the detectors read of its step records.

    python -m tests.sentinel.recorded RUN

writes `healthy_run.jsonl.gz` from the event log of RUN. Numbers have five digits, far fewer than the noise allows to
tell apart. Left out: step times, which depend on the load of the machine, and the values of single ranks.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.core.event_json import read
from harness.core.events import StepRecord
from tests.sentinel.series import record

PATH = Path(__file__).with_name("healthy_run.jsonl.gz")
FIELDS = ("step", "loss", "grad_norm", "lr", "v_norm", "beta2", "square_ratio", "group_param_norms")
MOST_BYTES = 100_000


def load_healthy_run() -> list[StepRecord]:
    """Its records; the cursor and the iteration of a run without rejected updates follow from the step."""
    with gzip.open(PATH, "rt", encoding="utf-8") as lines:
        return [record(row.pop("step"), row.pop("loss"), row.pop("grad_norm"), **row) for row in map(json.loads, lines)]


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: rounded(number) for name, number in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def lines_of(run: Path) -> Iterator[str]:
    for event in read(run / "events.jsonl"):
        if isinstance(event, StepRecord):
            assert not event.refused, f"update {event.step} was rejected"
            values = {name: rounded(getattr(event, name)) for name in FIELDS}
            yield json.dumps({name: value for name, value in values.items() if value not in (None, {})}) + "\n"


def main() -> None:
    packed = gzip.compress("".join(lines_of(Path(sys.argv[1]))).encode(), compresslevel=9, mtime=0)
    assert len(packed) < MOST_BYTES, f"{len(packed)} bytes; at most {MOST_BYTES}"
    PATH.write_bytes(packed)


if __name__ == "__main__":
    main()
