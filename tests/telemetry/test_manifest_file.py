"""Tests of reading the manifest: old ones, and damaged ones, which are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.analysis.replay.request import can_reproduce
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.telemetry.manifest import build_manifest, write_manifest
from harness.telemetry.manifest_file import read_run_manifest
from harness.telemetry.sinks.mlflow_run import read_commit

MakeRun = Callable[..., tuple[RunDir, Config]]

DAMAGED: list[tuple[bytes, str]] = [
    (b"", "Expecting value"),
    (b'{"hardware": {"gp', "Unterminated string"),
    (b"\xff", "codec can't decode"),
    (b"[" * 100_000, "recursion"),
    (b"null", "it is empty"),
    (b"[]", "it is not a mapping"),
    (b'{"hardware": []}', "hardware is not a mapping"),
    (b'{"hardware": {"gpus": 8}}', "gpus is not a list of entries"),
    (b'{"hardware": {"gpus": ["H100"]}}', r"gpus\[0\] is not a mapping"),
    (b'{"hardware": {"gpus": [{"memory_bytes": "80 GB"}]}}', "memory_bytes is '80 GB'"),
    (b'{"versions": "2.13"}', "versions is not a mapping"),
    (b'{"diff": {"size_bytes": true}}', "size_bytes is True"),
    (b'{"untracked": [3]}', r"untracked\[0\] is 3"),
    (b'{"starts": {}}', "starts is not a list of entries"),
    (b'{"starts": [null]}', "starts is not a list of entries"),
    (b'{"starts": [{"dtype": "bf16"}]}', "dtype is not a mapping"),
]


@pytest.mark.parametrize(("content", "problem"), DAMAGED)
def test_a_damaged_manifest_is_named_and_kept(make_run: MakeRun, content: bytes, problem: str) -> None:
    run, cfg = make_run()
    run.manifest.write_bytes(content)
    line = rf"^{run.manifest}: is damaged: .*{problem}.*; repair it, or move it away$"
    for read in (
        lambda: read_run_manifest(run.manifest),
        lambda: write_manifest(run, {"commit": "abc"}),
        lambda: can_reproduce(run, cfg),
    ):
        with pytest.raises(ConfigError, match=line) as caught:
            read()
        assert "\n" not in str(caught.value)
    assert run.manifest.read_bytes() == content
    assert read_commit(run) == "", "a sink goes on without it"


def test_what_a_start_writes_is_read(make_run: MakeRun) -> None:
    run, cfg = make_run()
    assert read_run_manifest(run.manifest) == {}
    facts: dict[str, Any] = {"world_size": 2, "corpus_fingerprint": "f00d", "num_parameters": 1234}
    written = build_manifest(cfg, device=torch.device("cpu"), **facts)
    for _ in range(2):
        write_manifest(run, written)
    assert read_run_manifest(run.manifest) == json.loads(run.manifest.read_text())
    assert read_commit(run) == (written["commit"] or "")


@pytest.mark.parametrize("content", ["{}", '{"hardware": null, "diff": null, "starts": null, "untracked": []}'])
def test_keys_may_be_missing_or_null(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    assert read_run_manifest(tmp_path / "manifest.json") == json.loads(content)
