"""Describes what a run is: model, batch, data, hardware, code and configuration, from its `config.yaml` and manifest.

A config key is marked if its value differs from that of `harness train` without arguments. Every part is optional: a
run of another version, or one without a manifest, shows what its files hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from harness.config import compose
from harness.config.errors import ConfigError
from harness.core.rundir import RunDir
from harness.telemetry.console import with_prefix
from harness.telemetry.manifest_file import read_run_manifest

Rows = list[tuple[str, str]]
"""Label and value."""

NOT_MARKED = ("run.name", "run.dir")
"""Keys that differ in every run."""
SHORT_COMMIT = 12
MOST_PATHS = 4


def setup_facts(run: RunDir) -> dict[str, Any]:
    """Description and configuration of a run, as data of its page."""
    config, manifest = config_tree(run), manifest_tree(run)
    latest = latest_start(manifest)
    groups = {
        "Model": model_rows(config, manifest),
        "Batch and precision": batch_rows(config, latest),
        "Data": data_rows(config, latest),
        "Hardware": hardware_rows(latest),
        "Code": code_rows(latest),
    }
    return {
        "groups": [[title, rows] for title, rows in groups.items() if rows],
        "starts": other_starts(manifest),
        "config": config_sections(config),
    }


def config_tree(run: RunDir) -> dict[str, Any]:
    """The configuration of a run as a tree; empty if it cannot be read."""
    try:
        tree = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def manifest_tree(run: RunDir) -> dict[str, Any]:
    """The manifest of a run; empty if it cannot be read or is damaged."""
    try:
        return read_run_manifest(run.manifest)
    except (OSError, ConfigError):
        return {}


def latest_start(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The newest start in a manifest."""
    starts = manifest.get("starts") or [manifest]
    return dict(starts[-1])


def value_at(tree: Any, *keys: str) -> Any:
    """A value of nested mappings; None if it is not there."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def with_unit(value: Any, unit: str) -> str:
    """A number with its unit; empty if there is no number."""
    return f"{value:,} {unit}" if isinstance(value, int | float) else ""


def known(*rows: tuple[str, str]) -> Rows:
    """The rows that have a value."""
    return [(label, value) for label, value in rows if value]


def joined(*texts: str) -> str:
    return ", ".join(text for text in texts if text)


def model_rows(config: Mapping[str, Any], manifest: Mapping[str, Any]) -> Rows:
    model, size = config.get("model") or {}, manifest.get("num_parameters")
    heads = with_unit(model.get("num_heads"), "heads")
    kv_heads = with_unit(model.get("num_kv_heads"), "KV heads")
    return known(
        ("name", str(model.get("name") or "")),
        ("parameters", f"{count_text(size)} ({size:,})" if isinstance(size, int) else ""),
        ("shape", joined(with_unit(model.get("num_layers"), "layers"), with_unit(model.get("dim"), "wide"))),
        ("feed-forward", with_unit(model.get("ffn_dim"), "wide")),
        ("attention", joined(heads, kv_heads)),
        ("vocabulary", with_unit(model.get("vocab_size"), "tokens")),
    )


def batch_rows(config: Mapping[str, Any], start: Mapping[str, Any]) -> Rows:
    train = config.get("train") or {}
    rows, length = train.get("batch_size"), train.get("sequence_length")
    dtype = start.get("dtype") or {}
    fp8 = f"{value_at(dtype, 'fp8', 'recipe')} recipe, {value_at(dtype, 'fp8', 'engine')}" if dtype.get("fp8") else ""
    seed = value_at(config, "run", "seed")
    return known(
        ("steps", with_unit(train.get("num_steps"), "").strip()),
        ("batch", joined(with_unit(rows, "sequences"), with_unit(length, "tokens each"))),
        ("batch-size warm-up", with_unit(len(train.get("batch_size_warmup") or ()) or None, "stages")),
        ("tokens per step", f"{rows * length:,}" if isinstance(rows, int) and isinstance(length, int) else ""),
        ("precision", joined(str(dtype.get("compute") or value_at(config, "precision", "kind") or ""), fp8)),
        ("master weights", str(dtype.get("master_weights") or "")),
        ("seed", "" if seed is None else str(seed)),
    )


def data_rows(config: Mapping[str, Any], start: Mapping[str, Any]) -> Rows:
    sources = value_at(config, "data", "sources")
    rows = [(name, source_text(source)) for name, source in (sources or {}).items() if isinstance(source, Mapping)]
    phases = value_at(config, "data", "phases")
    rows += [("phases", f"{len(phases)} planned changes")] if phases else []
    return known(*rows, ("fingerprint", str(start.get("corpus_fingerprint") or "")))


def source_text(source: Mapping[str, Any]) -> str:
    paths = [str(path) for path in source.get("paths") or []]
    more = f"and {len(paths) - MOST_PATHS} more" if len(paths) > MOST_PATHS else ""
    weight = source.get("weight")
    return joined(
        str(source.get("kind") or ""), "" if weight is None else f"weight {weight:g}", *paths[:MOST_PATHS], more
    )


def hardware_rows(start: Mapping[str, Any]) -> Rows:
    machine = start.get("hardware") or {}
    gpus = machine.get("gpus") or []
    memory = machine.get("memory_bytes")
    return known(
        ("ranks", with_unit(machine.get("world_size"), "").strip()),
        ("GPUs of rank 0's machine", gpu_text(gpus)),
        ("device", "" if gpus else str(machine.get("device") or "")),
        ("machine of rank 0", str(machine.get("hostname") or "")),
        ("CPU", joined(str(machine.get("cpu") or ""), with_unit(machine.get("num_cores"), "cores"))),
        ("host memory", with_prefix(memory, "B") if isinstance(memory, int) else ""),
        ("CUDA", joined(str(machine.get("cuda") or ""), f"NCCL {machine['nccl']}" if machine.get("nccl") else "")),
        ("driver", str(machine.get("driver") or "")),
        ("system", str(machine.get("platform") or "")),
    )


def gpu_text(gpus: Sequence[Mapping[str, Any]]) -> str:
    """Each model of GPU once, with its number and memory."""
    names = [f"{gpu.get('name')} ({with_prefix(gpu.get('memory_bytes') or 0, 'B')})" for gpu in gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def code_rows(start: Mapping[str, Any]) -> Rows:
    versions = start.get("versions") or {}
    listed = [f"{name} {version}" for name, version in versions.items() if version and name != "harness"]
    return known(
        ("commit", str(start.get("commit") or ("not tracked by git" if "commit" in start else ""))),
        ("uncommitted changes", diff_text(start)),
        ("harness", str(versions.get("harness") or "")),
        ("versions", ", ".join(listed)),
        ("environment", ", ".join(f"{name}={value}" for name, value in (start.get("environment") or {}).items())),
    )


def diff_text(start: Mapping[str, Any]) -> str:
    """Size of the diff against the commit, and the number of untracked files; "none" for a clean tree."""
    if not start.get("commit"):
        return ""
    diff, untracked = start.get("diff"), start.get("untracked") or []
    size, sha256 = value_at(diff, "size_bytes") or 0, value_at(diff, "sha256") or ""
    changed = f"diff of {size:,} bytes (sha256 {sha256[:SHORT_COMMIT]})" if diff else ""
    files = f"{len(untracked)} untracked {'file' if len(untracked) == 1 else 'files'}" if untracked else ""
    return joined(changed, files) or "none"


def other_starts(manifest: Mapping[str, Any]) -> list[list[Any]]:
    """Time, commit, ranks and machine of every start, if there was more than one."""
    later = manifest.get("starts") or []
    if not later:
        return []
    return [
        [
            start.get("time"),
            str(start.get("commit") or "")[:SHORT_COMMIT] + (" with changes" if start.get("diff") else ""),
            str(value_at(start, "hardware", "world_size") or ""),
            str(value_at(start, "hardware", "hostname") or ""),
        ]
        for start in [manifest, *later]
    ]


def config_sections(config: Mapping[str, Any]) -> list[list[Any]]:
    """Section -> rows of key, value, and the default value if it differs (else None), as text."""
    defaults = default_settings()
    sections: dict[str, list[list[str | None]]] = {}
    for key, value in compose.flat(dict(config)).items():
        default = defaults.get(key)
        is_marked = bool(defaults) and key not in NOT_MARKED and yaml_text(value) != yaml_text(default)
        shown = (yaml_text(default) if key in defaults else "not set") if is_marked else None
        sections.setdefault(key.split(".")[0], []).append([key, yaml_text(value), shown])
    return [[section, rows] for section, rows in sections.items()]


def yaml_text(value: Any) -> str:
    """A value as on the command line."""
    return json.dumps(value) if isinstance(value, list | dict | bool) or value is None else str(value)


@cache
def default_settings() -> dict[str, Any]:
    """Key -> value of the default configuration; empty if it cannot be composed."""
    try:
        return compose.flat(compose.plain(compose.load()))
    except (ConfigError, OSError):  # the page of a run does not depend on the configuration of this installation
        return {}


def count_text(number: float) -> str:
    """Three digits and a prefix: 124M, 7.24B."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"
