"""Model, data, hardware, code and configuration of a run, from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.analysis.dashboard.run_setup import count_text, default_settings, setup_facts
from harness.core.rundir import RunDir
from tests import composed
from tests.analysis.dashboard.logs import BEGUN, write_setup


def groups(run: RunDir) -> dict[str, dict[str, str]]:
    return {title: dict(rows) for title, rows in setup_facts(run)["groups"]}


def test_the_setup_of_a_run(tmp_path: Path) -> None:
    write_setup(tmp_path)
    assert groups(RunDir(tmp_path)) == {
        "Model": {
            "name": "125m",
            "parameters": "124M (124,000,000)",
            "shape": "12 layers, 768 wide",
            "attention": "12 heads, 4 KV heads",
            "vocabulary": "50,257 tokens",
        },
        "Batch and precision": {
            "steps": "400",
            "batch": "16 sequences, 1,024 tokens each",
            "tokens per step": "16,384",
            "precision": "bf16",
            "master weights": "fp32",
            "seed": "7",
        },
        "Data": {"web": "files, weight 2, web-*.bin", "fingerprint": "09d3d726b636b4ed"},
        "Hardware": {
            "ranks": "8",
            "GPUs of rank 0's machine": "8 x NVIDIA H100 80GB HBM3 (85 GB)",
            "machine of rank 0": "node1",
            "CPU": "EPYC, 96 cores",
            "host memory": "1 TB",
            "CUDA": "12.8, NCCL 2.27.3",
            "driver": "570.1",
            "system": "Linux",
        },
        "Code": {
            "commit": "0123456789abcdef0123",
            "uncommitted changes": "diff of 1,234 bytes (sha256 fedcba987654), 1 untracked file",
            "harness": "0.1.0",
            "versions": "python 3.11.7, torch 2.13.0",
            "environment": "NCCL_DEBUG=WARN",
        },
    }


def test_the_newest_start_counts_and_all_are_listed(tmp_path: Path) -> None:
    write_setup(tmp_path)
    run = RunDir(tmp_path)
    assert setup_facts(run)["starts"] == []
    manifest = json.loads(run.manifest.read_text())
    later = manifest | {"time": BEGUN + 60, "commit": "feedbeef" * 5, "diff": None, "untracked": []}
    run.manifest.write_text(json.dumps(manifest | {"starts": [later]}))
    assert groups(run)["Code"]["commit"] == "feedbeef" * 5
    assert groups(run)["Code"]["uncommitted changes"] == "none"
    assert setup_facts(run)["starts"] == [
        [BEGUN, "0123456789ab with changes", "8", "node1"],
        [BEGUN + 60, "feedbeeffeed", "8", "node1"],
    ]


def test_keys_that_differ_from_the_default_are_marked(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.123, "beta2": default_settings()["optim.beta2"], "of_an_old_version": 3}
    write_setup(tmp_path, optim=settings)
    sections = dict(setup_facts(RunDir(tmp_path))["config"])
    default = default_settings()["optim.lr"]
    assert sections["optim"] == [
        ["optim.lr", "0.123", str(default)],
        ["optim.beta2", str(settings["beta2"]), None],
        ["optim.of_an_old_version", "3", "not set"],
    ]
    assert sections["run"][0] == ["run.name", tmp_path.name, None]


def test_the_default_configuration_has_no_marked_key(tmp_path: Path) -> None:
    from harness.config.compose import to_yaml

    RunDir(tmp_path).config.write_text(to_yaml(composed.load([])))
    marked = [key for _, rows in setup_facts(RunDir(tmp_path))["config"] for key, _, default in rows if default]
    assert marked == []


def test_a_run_without_files_has_an_empty_setup(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert setup_facts(run) == {"groups": [], "starts": [], "config": []}
    run.config.write_text("a: [", encoding="utf-8")
    run.manifest.write_text("[]", encoding="utf-8")
    assert setup_facts(run) == {"groups": [], "starts": [], "config": []}


def test_parameter_counts() -> None:
    assert [count_text(n) for n in (12, 31_904, 124_439_808, 7.24e9, 1e12)] == ["12", "31.9k", "124M", "7.24B", "1T"]


def test_a_damaged_manifest_leaves_what_the_configuration_tells(tmp_path: Path) -> None:
    write_setup(tmp_path)
    run = RunDir(tmp_path)
    manifest = json.loads(run.manifest.read_text())
    for damage in ({"hardware": "H100"}, {"diff": [1]}, {"starts": 3}, {"versions": ["2.13"]}):
        run.manifest.write_text(json.dumps(manifest | damage))
        assert list(groups(run)) == ["Model", "Batch and precision", "Data"]
    run.manifest.write_text(json.dumps(manifest | {"diff": {"sha256": None}}))
    assert groups(run)["Code"]["uncommitted changes"].startswith("diff of 0 bytes")
