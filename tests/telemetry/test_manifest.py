"""Tests of the manifest: code, machine, versions, and no secrets."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.telemetry import provenance
from harness.telemetry.manifest import build_manifest, write_manifest
from harness.telemetry.provenance import code
from tests.composed import load

MakeRun = Callable[..., tuple[RunDir, Config]]


def build(cfg: Config, **changes: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"world_size": 2, "device": torch.device("cpu")}
    facts |= {"corpus_fingerprint": "f00d", "num_parameters": 1234}
    return build_manifest(cfg, **(facts | changes))


def test_the_manifest_describes_code_machine_and_seeds(make_run: MakeRun) -> None:
    _, cfg = make_run()
    manifest = build(cfg)
    assert manifest["run"] == "run"
    assert manifest["versions"]["torch"] == version("torch")
    assert all(manifest["versions"][name] for name in ("python", "mlflow", "hydra", "omegaconf", "numpy"))
    assert manifest["hardware"]["world_size"] == 2
    assert manifest["hardware"]["memory_bytes"] > 0
    assert manifest["hardware"]["cpu"]
    assert manifest["seeds"] == {"run": cfg.run.seed}
    assert manifest["dtype"]["compute"] == "fp32"
    assert (manifest["corpus_fingerprint"], manifest["num_parameters"]) == ("f00d", 1234)
    assert {"commit", "diff", "untracked", "argv", "time"} <= manifest.keys()


def test_fp8_runs_record_recipe_and_engine() -> None:
    dtype = build(load(["precision=fp8_emulated", "precision.fp8.recipe=block"]))["dtype"]
    assert (dtype["compute"], dtype["master_weights"]) == ("fp8", "fp32")
    assert dtype["fp8"] == {"recipe": "block", "engine": "emulated"}
    manifest = build(load(["precision=bf16"]))
    assert "fp8" not in manifest["dtype"]
    assert "transformer_engine" in manifest["versions"]


def test_secrets_are_not_written(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run, cfg = make_run()
    for name in ("SECRET_TOKEN", "AWS_SECRET_ACCESS_KEY", "TORCH_HUB_TOKEN", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setattr(sys, "argv", ["train", "telemetry.tracking_uri=https://ann:hunter2@mlflow.example/x", "a=1"])
    write_manifest(run, build(cfg))
    text = run.manifest.read_text()
    assert "hunter2" not in text
    manifest = json.loads(text)
    assert manifest["environment"]["NCCL_DEBUG"] == "WARN"
    assert manifest["argv"] == ["train", "telemetry.tracking_uri=https://***@mlflow.example/x", "a=1"]


def test_a_resume_is_appended(make_run: MakeRun) -> None:
    run, cfg = make_run()
    for world_size in (2, 4, 8):
        write_manifest(run, build(cfg, world_size=world_size))
    manifest = json.loads(run.manifest.read_text())
    assert manifest["hardware"]["world_size"] == 2
    assert [start["hardware"]["world_size"] for start in manifest["starts"]] == [4, 8]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package under git, with one commit."""
    package = tmp_path / "project" / "package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("first = 1\n")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", str(package.parent), *command], check=True)
    return package


def test_a_clean_tree_has_a_commit_and_no_diff(package: Path) -> None:
    found = code(package)
    assert len(found["commit"]) == 40
    assert (found["diff"], found["untracked"]) == (None, [])


def test_a_long_diff_is_truncated_but_fully_hashed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "DIFF_LIMIT_BYTES", 100)
    (package / "__init__.py").write_text("second = 2\n" * 50)
    (package.parent / "notes.txt").write_text("not added")
    whole = subprocess.run(["git", "-C", str(package), "diff", "HEAD"], check=True, capture_output=True).stdout
    found = code(package)
    assert found["diff"] == {
        "size_bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
        "truncated": True,
        "text": whole[:100].decode(),
    }
    assert found["untracked"] == ["notes.txt"]


def test_an_installed_copy_does_not_claim_the_commit_around_it(package: Path) -> None:
    installed = package.parent / "venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    assert code(installed) == {"commit": None, "diff": None, "untracked": None}


def test_without_git_there_is_no_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert code(package) == {"commit": None, "diff": None, "untracked": None}
