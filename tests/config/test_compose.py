"""Tests of the configuration: every YAML composes, and every error is one line about its key."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.config import compose, conf_files, default_config
from harness.config.errors import ConfigError
from harness.config.explain import explain, keys_of, leaf_keys
from harness.config.plain_config import build_plain
from harness.config.precision import LOSS_SCALES
from harness.config.schema import Config
from harness.config.usual_keys import USUAL_KEYS
from harness.config.value_shapes import require_shape
from harness.sentinel.policy.responses import LONGEST_OVERFLOW
from tests import composed

OVERLAYS = ("experiment", "sweep", "without")
GROUPS = conf_files.groups()
OPTIONS = {group: conf_files.options_of(group) for group in GROUPS}


@pytest.mark.parametrize("row", range(max(map(len, OPTIONS.values()))))
def test_every_file_composes(row: int) -> None:
    """One file of each group at a time; a group with fewer files starts again."""
    chosen = {group: options[row % len(options)] for group, options in OPTIONS.items()}
    if chosen["experiment"] == "rare_burst":
        chosen["data"] = "files"  # its vocabulary is smaller than 256 bytes
    overrides = [f"+{group}={option}" if group in OVERLAYS else f"{group}={option}" for group, option in chosen.items()]
    cfg = compose.load([*overrides, *(["data.sources.main.paths=[corpus]"] if chosen["data"] == "files" else [])])
    assert set(compose.plain(cfg)) == set(keys_of(""))
    check_stored(cfg)


def test_every_group_is_a_section_or_an_overlay() -> None:
    assert set(GROUPS) <= {*keys_of(""), *OVERLAYS}
    chosen_in_file = {field.name for field in fields(Config)} - set(GROUPS)
    assert chosen_in_file == {"run", "train", "eval", "profile"}


def test_every_field_has_a_value() -> None:
    cfg = compose.load()
    for field in fields(Config):
        section = getattr(cfg, field.name)
        assert is_dataclass(section)
        assert "???" not in compose.flat({field.name: compose.plain(cfg)[field.name]}).values()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *((text, text) for text in ("2026_11", "1.10", "1e5", "True", "+1", "007", "-5", "nan", "a-1.10", "on")),
        ("null", None),
        ("'1.10'", "1.10"),
        ('"null"', "null"),
    ],
)
def test_a_string_key_takes_the_text_of_its_override(text: str, name: str | None) -> None:
    assert compose.load([f"run.name={text}"]).run.name == name


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("[2026_11]", ["2026_11"]),
        ("[1.10, x,True]", ["1.10", "x", "True"]),
        ("['1.10',2_0]", ["1.10", "20"]),  # with quotes it is Hydra's to read
        ("[a b,*.bin]", ["a b", "*.bin"]),
        ("[]", []),
    ],
)
def test_items_of_a_list_of_strings_take_their_text(text: str, items: list[str]) -> None:
    assert compose.load([f"eval.harness={text}"]).eval.harness == items


def test_only_string_keys_take_the_text() -> None:
    cfg = compose.load(["++launch.slurm.account=1.10", "train.num_steps=1_000", "optim.lr=1e-4", "run.seed=+7"])
    assert (cfg.launch.slurm.account, cfg.train.num_steps, cfg.optim.lr, cfg.run.seed) == ("1.10", 1000, 1e-4, 7)


def test_overrides_are_applied() -> None:
    cfg = compose.load(["model=1b", "precision=bf16", "optim.lr=1e-4", "train.batch_tokens=1024", "run.name=x"])
    assert (cfg.model.dim, cfg.precision.kind, cfg.optim.lr, cfg.train.batch_size) == (2048, "bf16", 1e-4, 4)
    assert compose.load(["+experiment=1b_bf16"]).model.num_layers == 24


@pytest.mark.parametrize("size", ["125m", "1b", "3b", "7b", "13b", "70b"])
def test_a_size_brings_settings_that_suit_it(size: str) -> None:
    cfg = composed.load([f"model={size}", "train.num_steps=1000000"])
    assert (cfg.precision.kind, cfg.model.init, cfg.optim.warmup_steps) == ("bf16", "hidden", 2000)
    assert (cfg.checkpoint.every_steps, cfg.checkpoint.every_minutes) == (0, 30)
    assert cfg.checkpoint.keep_behind_steps == cfg.sentinel.policy.rollback_margin_steps == 1000
    assert 1.5e-4 <= cfg.optim.lr <= 6e-4
    assert composed.load([f"model={size}", "train.num_steps=5000"]).optim.warmup_steps == 100


def test_overrides_win_over_the_settings_of_a_size() -> None:
    cfg = compose.load(["model=7b", "precision=fp32", "optim=adamw_wsd", "optim.lr=1e-4", "optim.warmup_steps=7"])
    assert (cfg.precision.kind, cfg.optim.schedule, cfg.optim.lr, cfg.optim.warmup_steps) == ("fp32", "wsd", 1e-4, 7)
    assert compose.load(["optim.lr=1e-4", "model=7b"]).optim.lr == 1e-4


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model=9b", "model: no '9b'; choose one of 125m, 13b, 1b, 3b, 50m, 70b, 7b, tiny"),
        ("+experiment=nope", "experiment: no 'nope'; choose one of 1b_bf16, 50m_one_day, rare_burst, rare_tail"),
        ("experiment=rare_tail", "experiment: not chosen by default; add it with +experiment=rare_tail"),
        ("optim=null", "optim: no 'null'; choose one of adamw, adamw_wsd"),
        ("optim=3", "optim: no '3'; choose one of adamw, adamw_wsd"),
        ("data.synthetic.zipf=1", "data.synthetic.zipf: no such key; data.synthetic has num_samples, zipf_exponent, "),
        ("model.dimm=1", "model.dimm: no such key; model has "),
        ("+model.dimm=1", "model.dimm: no such key; model has "),
        ("++optim.q=1", "optim.q: no such key; optim has kind, lr, "),
        *(
            (
                f"precision.initial_loss_scale={scale}",
                "precision.initial_loss_scale: must be from 1 to 2**64 (1.84e+19), ",
            )
            for scale in ("inf", "1e39", "nan", "0", "0.5", "2e19")
        ),
        ("checkpoint.retry_s=-1", "checkpoint.retry_s: must be 0 or more, and finite, got -1"),
        ("foo=1", "foo: no such key; the configuration has run, train, "),
        ("+foo=1", "foo: no such key; the configuration has run, train, "),
        ("=3", "=3: cannot be parsed; write key=value"),
        ("+=3", "+=3: cannot be parsed; write key=value"),
        ("~eval", "~eval: section eval must not be removed"),
        ("~model.dim", "model.dim: cannot be removed"),
        ("~model", "model: has no value"),
        ("optim.lr=abc", "optim.lr: must be a number, got 'abc'"),
        ("optim.lr=", "optim.lr: must be a number, got ''"),
        ("optim.lr=null", "optim.lr: must not be null"),
        ("optim.lr=???", "optim.lr: has no value"),
        ("optim.lr=${nope}", "optim.lr: Interpolation key 'nope' not found"),
        ("optim.lr=1,2", "optim.lr: got several values, 1,2; add --multirun to sweep over them"),
        ("train.num_steps=1.5", "train.num_steps: must be an integer, got '1.5'"),
        ("model.tied_head=perhaps", "model.tied_head: must be true or false, got 'perhaps'"),
        ("run.name=[a]", "run.name: must be a string, got ['a']"),
        ("model.attention=wild", "model.attention: must be one of fused, fp32, got 'wild'"),
        ("model.norm=batch", "model.norm: must be one of rms, layer, got 'batch'"),
        ("model.norm_placement=middle", "model.norm_placement: must be one of pre, post, got 'middle'"),
        ("train=abc", "train: must be a section of keys, got abc; its keys are num_steps, "),
        ("model.dim", "model.dim: cannot be parsed; write key=value"),
        ("model.dim=[1", "model.dim=[1: cannot be parsed; write key=value"),
        ("model.num_heads=3", "model.num_heads: must divide model.dim=128, got 3"),
        ("optim.lr=-1", "optim.lr: must be positive, got -1.0"),
        *(
            (f"{key}=1e-39", f"{key}: must be at least 1.18e-38, because the device holds it in fp32, got 1e-39")
            for key in ("optim.lr", "optim.eps", "optim.clip_norm", "optim.clip_value", "optim.qk_clip")
        ),
        *(
            (f"{key}={10**20}", f"{key}: must be at most 2**53, got {10**20}")
            for key in ("data.synthetic.num_samples", "model.loss_chunk_tokens", "profile.at_step", "checkpoint.keep")
        ),
        (
            f"train.batch_size_warmup=[{{until_batch: {2**53 + 1}, batch_size: 4}}]",
            f"train.batch_size_warmup[0].until_batch: must be at most 2**53, got {2**53 + 1}",
        ),
        (
            f"data.phases=[{{from_batch: {2**53 + 1}, weights: {{main: 1}}}}]",
            f"data.phases[0].from_batch: must be at most 2**53, got {2**53 + 1}",
        ),
        ("model.num_layers=1000000000", "model.num_layers: must be at most 10,000, got 1,000,000,000"),
        ("sentinel.lag=1000000000", "sentinel.lag: must be from 0 to 10,000, got 1,000,000,000"),
        ("sentinel.held_out_rows=10000000", "sentinel.held_out_rows: must be from 0 to 100,000, got 10,000,000"),
        (
            "sentinel.policy.budgets.skip.per_run=-1",
            "sentinel.policy.budgets.skip.per_run: must be 0 (never) or more, got",
        ),
        (
            "sentinel.policy.budgets.trial.per_window=-1",
            "sentinel.policy.budgets.trial.per_window: must be 0 (never) or ",
        ),
        ("sentinel.lag=-1", "sentinel.lag: must be from 0 to 10,000, got -1"),
        (
            "telemetry.system_every_s=1e11",
            "telemetry.system_every_s: must be 0 (no samples) or from 0.1 to 1e+08, got 1",
        ),
        (
            "telemetry.system_every_s=0.05",
            "telemetry.system_every_s: must be 0 (no samples) or from 0.1 to 1e+08, got 0",
        ),
        ("optim.qk_clip=0", "optim.qk_clip: must be positive, or null for no clipping of logits, got 0.0"),
        ("model.norm_eps=1e-60", "model.norm_eps: must be at least 1.18e-38, because the device holds it in fp32, got"),
        ("run.dir=", "run.dir: must not be empty; . is the current directory"),
        ("run.name=a/b", "run.name: must be a directory name without / that does not start with a dot, got 'a/b'"),
        (f"run.name='{'ä' * 128}'", "run.name: must have at most 255 bytes, got 256"),
        ("train.batch_tokens=100", "train.batch_tokens: must be a multiple of train.sequence_length=256, got 100"),
        ("data.eod_token=256", "data.eod_token: must be an id in 0 .. 255 (model.vocab_size), or null, got 256"),
        ("data.eod_token=-1", "data.eod_token: must be an id in 0 .. 255 (model.vocab_size), or null, got -1"),
        ("data=files", "data.sources.main.paths: must name at least one file, prefix or glob for kind=files"),
        ("data.kind=synthetic", "data.kind: no such key; data has eval_fraction, document_mask, eod_token, sources, "),
        (
            "data.sources.main.pathz=[a]",
            "data.sources.main.pathz: no such key; data.sources.main has kind, weight, seed, ",
        ),
        ("data.sources.main.kind=web", "data.sources.main.kind: must be one of embedded, synthetic, files, got 'web'"),
        ("data.sources.main.paths=a", "data.sources.main.paths: must be a list: [...]"),
        ("data.sources.main.paths=[a]", "data.sources.main.paths: must be empty for kind=embedded, got ['a']"),
        ("data.sources.main.weight=0", "data.sources.main.weight: must be positive, got 0.0"),
        ("data.sources.main.weight=-1", "data.sources.main.weight: must be positive, got -1.0"),
        ("data.sources.main.seed=-1", "data.sources.main.seed: must be from 0 to 2**63 - 1, or null, got -1"),
        ("data.sources=3", "data.sources: must map names to sections: {name: {...}}"),
        ("~data.sources.main", "data.sources: must name at least one source"),
        (
            "data.sources.web.kind=files",
            "data.sources.web: does not exist; add it with +data.sources={web: {...}} and the ",
        ),
        (
            "+data.sources.web.kind=files",
            "data.sources.web: does not exist; add it with +data.sources={web: {...}} and the ",
        ),
        ("+data.sources={web: {knd: files}}", "data.sources.web.knd: no such key; data.sources.web has kind, weight, "),
        ("+data.sources={web: {weight: 1}}", "data.sources.web.kind: has no value"),
        (
            "data.phases=[{from_batch: 1, weight: {main: 1}}]",
            "data.phases.weight: no such key; data.phases has from_batch",
        ),
        ("data.phases=[{from_batch: 1, weights: {a: 1}}]", "data.phases[0].weights: no source 'a'; choose one of main"),
        (
            "data.phases=[{from_batch: 1, weights: {main: -1}}]",
            "data.phases[0].weights.main: must be 0 (off) or more, got",
        ),
        (
            "data.phases=[{from_batch: 1, weights: {main: 0}}]",
            "data.phases[0].weights: must leave at least one source with a weight",
        ),
        (
            "+data.sources={a: {kind: synthetic, weight: 1e308}, b: {kind: synthetic, weight: 1e308}}",
            "data.sources: the w",
        ),
        ("data.phases=[{from_batch: -1, weights: {main: 1}}]", "data.phases[0].from_batch: must be 0 or more, got -1"),
        (
            "data.phases=[{from_batch: 5, weights: {main: 1}}, {from_batch: 5, weights: {main: 2}}]",
            "data.phases[1].from_batch: must be above 5, the start of the phase before, got 5",
        ),
        (
            "data.phases=[{from_batch: 1, weights: [1]}]",
            "data.phases[0].weights: must map names to numbers: {name: 1}, ",
        ),
        (
            "data.phases=[{from_batch: 1, weights: {main: [1]}}]",
            "data.phases[0].weights.main: must be a number, got [1]",
        ),
        (
            "data.phases=[{from_batch: 1, weights: {1: 1}}]",
            "data.phases[0].weights: must have names that are strings, ",
        ),
        ("data.phases={from_batch: 1}", "data.phases: is a list; write data.phases=[{...}]"),
        ("data.phases.weights=3", "data.phases: is a list; write data.phases=[{...}]"),
        ("data.phases.weights.main=3", "data.phases: is a list; write data.phases=[{...}]"),
        ("launch.slurm.options.x=3", "launch.slurm.options: is a list; write launch.slurm.options=[...]"),
        (
            "train.batch_size_warmup.until_batch=3",
            "train.batch_size_warmup: is a list; write train.batch_size_warmup=[{...}]",
        ),
        (
            "train.batch_size_warmup=[{until_batch: null, batch_size: 4}]",
            "train.batch_size_warmup[0].until_batch: must not be null",
        ),
        (
            "precision.phases=[{kind: [bf16]}]",
            "precision.phases[0].kind: must be one of fp32, bf16, fp16, fp8, got ['bf",
        ),
        ("data.sources={null: {kind: synthetic}}", "data.sources: must have names that are strings, got None"),
        ("data.sources=[main]", "data.sources: must map names to sections: {name: {...}}, got ['main']"),
        ("data.sources.main.paths=[[a]]", "data.sources.main.paths[0]: must be a string, got ['a']"),
        ("telemetry.alerts.command.run=[[a]]", "telemetry.alerts.command.run[0]: must be a string, got ['a']"),
        ("telemetry.alerts.webhook.events=[{a: 1}]", "telemetry.alerts.webhook.events[0]: must be one of incident, "),
        ("eval.harness=[[a]]", "eval.harness[0]: must be a string, got ['a']"),
        ("eval.harness=[[${run.dir}]]", "eval.harness[0]: must be a string, got ['${run.dir}']"),
        ("profile.ranks=[[0]]", "profile.ranks[0]: must be an integer, got [0]"),
        ("profile.ranks=[null]", "profile.ranks[0]: must not be null"),
        ("data.stratify.rare_below=-1", "data.stratify.rare_below: must be 0 (off) or more, got -1"),
        ("data.stratify.max_per_batch=0", "data.stratify.max_per_batch: must be at least 1, got 0"),
        ("parallel.timeout_s=1e10", "parallel.timeout_s: must be positive, and at most 1e+08, got 1e+10"),
        ("launch.ranks_per_gpu=0", "launch.ranks_per_gpu: must be at least 1, got 0"),
        ("run.deterministic=maybe", "run.deterministic: "),
        ("launch.spares=-1", "launch.spares: must be 0 or more, got -1"),
        ("launch.spares=2", "launch.spares: must be 0 with launch.nodes=1, got 2: a single machine cannot be replaced"),
        ("optim.warmup_steps=999", "optim.warmup_steps: must not exceed train.num_steps=200, got 999"),
    ],
)
def test_a_bad_override_is_one_line(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed.load(["run.seed=1", override])
    message = str(caught.value)
    assert message.startswith(line)
    assert "\n" not in message
    assert "search path" not in message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_a_duration_that_no_clock_can_hold_is_refused(value: float) -> None:
    """In seconds, minutes and hours: threads and sockets raise OverflowError from 9.2e9 s on, late in a run."""
    durations = re.compile(r".*(?<!_gb)_(s|minutes|hours)|restart_window")

    def sections(prefix: str, section: Any) -> Iterator[tuple[str, Any, str]]:
        for field in fields(section):
            key, child = f"{prefix}{field.name}", getattr(section, field.name)
            if is_dataclass(child):
                yield from sections(f"{key}.", child)
            elif durations.fullmatch(field.name):
                yield key, section, field.name

    found = list(sections("", composed.load([])))
    assert {"launch.hang_after_s", "checkpoint.every_minutes", "launch.slurm.exclude_hours"} < {
        key for key, *_ in found
    }
    for key, section, name in found:
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: must be "):
            replace(section, **{name: value})


def test_synthetic_data_needs_two_tokens() -> None:
    with pytest.raises(ConfigError, match=r"^model\.vocab_size: must be at least 2 for synthetic data .*, got 1$"):
        composed.load(["data=synthetic", "model.vocab_size=1"])
    assert composed.load(["data=synthetic", "model.vocab_size=2"]).model.vocab_size == 2


def test_a_job_must_be_longer_than_its_warning() -> None:
    short = ["launch=slurm", "launch.slurm.time_minutes=2"]
    message = r"launch\.slurm\.warn_s: must be less than launch\.slurm\.time_minutes \(120 s\), got 120"
    with pytest.raises(ConfigError, match=message):
        composed.load(short)
    assert composed.load([*short, "launch.slurm.warn_s=60"]).launch.slurm.time_minutes == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["model=7b", "optim.lr=1e-4", "precision=fp8", "data.phases=[{from_batch: 5, weights: {main: 2}}]"],
        ["train.batch_tokens=1024", "run.name=x", "train.num_steps=5000", "optim.warmup_steps=${train.batch_size}"],
        ["model.dimm=1"],
        ["optim.lr=abc", "run.seed=1"],
        ["optim.lr=${nope}"],
        ["optim.lr=1,2"],
        ["model.dim=[1"],
        ["model=tiny", "model.num_heads=3"],
        ["data.sources.web.kind=files"],
    ],
)
def test_the_cache_of_the_tests_changes_no_config_and_no_error(overrides: list[str]) -> None:
    def load_with(load: Callable[[Sequence[str]], Config]) -> Config | str:
        try:
            return load(overrides)
        except ConfigError as error:
            return str(error)

    assert load_with(composed.load) == load_with(compose.load)


def test_a_config_from_the_cache_can_be_changed() -> None:
    composed.load(["run.name=x"]).optim.lr = 7.0
    assert composed.load(["run.name=x"]).optim.lr == composed.load(["run.name=y"]).optim.lr != 7.0


def test_sources_are_added_and_turned_off_on_the_command_line() -> None:
    web = "+data.sources={web: {kind: files, paths: [/data/web], weight: 2}}"
    cfg = compose.load(["data=mixture", web, "data.phases=[{from_batch: 9, weights: {web: 0}}]"])
    assert list(cfg.data.sources) == ["text", "synthetic", "web"]
    assert cfg.data.sources["web"].paths == ["/data/web"]
    assert cfg.data.phases[0].weights == {"web": 0.0}
    assert compose.flat(compose.plain(cfg))["data.sources.web.weight"] == 2.0
    large = "data.phases=[{from_batch: 9, weights: {text: 1.7e308, synthetic: 1.7e308}}]"
    with pytest.raises(ConfigError, match=r"^data\.phases\[0\]\.weights: the weights must have a finite sum"):
        composed.load(["data=mixture", large])
    assert "files" in compose.to_yaml(cfg)


def test_a_close_key_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"did you mean warmup_steps\?$"):
        compose.load(["optim.warmup_step=1"])


def test_a_section_of_any_values_takes_null_and_lists() -> None:
    for value in (None, [1], {"a": [None]}, "text"):
        require_shape(dict[str, Any], {"key": value}, "needs")
    require_shape(list[str] | None, ["a"], "items")
    require_shape(list[str] | None, None, "items")
    with pytest.raises(ConfigError, match=r"^items\[0\]: must be a string, got \[\]$"):
        require_shape(list[str] | None, [[]], "items")


def test_errors_that_are_not_about_an_override_are_unchanged() -> None:
    error = AttributeError("a bug")
    assert explain(error, ["optim.lr=1", "model=tiny"]) is error


def test_a_stored_config_without_a_newer_key_still_opens(tmp_path: Path) -> None:
    tree = compose.plain(compose.load())
    del tree["checkpoint"]["retry_s"], tree["model"]["norm"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    stored, default = compose.read(tmp_path / "config.yaml"), compose.load()
    assert (stored.checkpoint.retry_s, stored.model.norm) == (default.checkpoint.retry_s, default.model.norm)


def test_a_stored_config_without_a_key_that_has_no_default_is_rejected(tmp_path: Path) -> None:
    tree = compose.plain(composed.load())
    del tree["optim"]["lr"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"^optim\.lr: has no value$"):
        compose.read(tmp_path / "config.yaml")


CONF = conf_files.conf_dir()


def edit_conf(file: str, old: str, new: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a copy of `conf/` in which a user has edited a file."""
    shutil.copytree(CONF, directory / "conf")
    text = (directory / "conf" / file).read_text()
    assert text.count(old) == 1
    (directory / "conf" / file).write_text(text.replace(old, new))
    for module in (compose, default_config, conf_files):
        monkeypatch.setattr(module, "conf_dir", lambda: directory / "conf")


@pytest.mark.parametrize(
    ("file", "old", "new", "needs_hydra"),
    [
        ("config.yaml", "num_steps: 200", "num_steps: 70", False),
        ("config.yaml", "data: embedded", "data: mixture", False),
        ("config.yaml", "telemetry: mlflow", "telemetry: plain", False),
        ("optim/adamw.yaml", "lr: 3.0e-3", "lr: 1", False),
        ("optim/adamw.yaml", "lr: 3.0e-3", "lr: 3e-3", True),
        ("optim/adamw.yaml", "warmup_steps: 20", "warmup_steps: ${warmup:${train.num_steps}}", True),
        ("config.yaml", "model: tiny", "model: 125m", True),
        ("config.yaml", "  - _self_\n", "  - pretraining\n  - _self_\n", True),
    ],
)
def test_the_default_is_read_without_hydra_as_hydra_composes_it(
    file: str, old: str, new: str, needs_hydra: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `conf/` as edited by a user, too; a file that needs more than plain values is left to Hydra."""
    edit_conf(file, old, new, tmp_path, monkeypatch)
    expected = compose.validate(compose.compose_tree([]))
    read = default_config.read_default()
    assert (read is None) == needs_hydra
    assert repr(compose.load()) == repr(read or expected) == repr(expected)


NAMES = "defaults: must hold names and entries such as `model: tiny`, got "


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("config.yaml", "  - _self_", "  _self_", r"is not valid YAML: line \d+: .*"),
        ("optim/adamw.yaml", "lr: 3.0e-3", "lr: [3", r"is not valid YAML: line \d+: .*"),
        ("config.yaml", "telemetry: mlflow", "telemetry: 7", f"{NAMES}{{'telemetry': 7}}"),
        ("config.yaml", "- telemetry: mlflow", "- 5", f"{NAMES}5"),
        ("config.yaml", "telemetry: mlflow", "telemetry: [plain, 5]", rf"{NAMES}{{'telemetry': \['plain', 5\]}}"),
        ("config.yaml", "- telemetry: mlflow", "- {telemetry: mlflow, model: tiny}", f"{NAMES}.*"),
        ("model/125m.yaml", "\n  - base@model\n  - /pretraining", " base@model", "defaults: must be a list, .*"),
    ],
)
@pytest.mark.parametrize("overrides", [[], ["model=125m"]])
def test_a_file_that_a_user_broke_is_one_line(
    file: str,
    old: str,
    new: str,
    message: str,
    overrides: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edit_conf(file, old, new, tmp_path, monkeypatch)
    if file.startswith("model") and not overrides:
        assert compose.load().model.name == "tiny", "a file that is not used is not read"
        return
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path / 'conf' / file))}: {message}$"):
        compose.load(overrides)


def test_the_unedited_default_is_read_as_hydra_composes_it() -> None:
    assert repr(default_config.read_default()) == repr(compose.validate(compose.compose_tree([])))


def check_stored(cfg: Config) -> None:
    """A stored config is built without OmegaConf, and equals what OmegaConf composed."""
    built = build_plain(conf_files.parse_yaml(compose.to_yaml(cfg)))
    assert built == cfg
    assert repr(built) == repr(cfg), "the types are equal, too"


def test_a_stored_config_with_lists_and_sections_of_the_user() -> None:
    check_stored(composed.load(["data=mixture", "data.phases=[{from_batch: 9, weights: {text: 0}}]"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.lr", "0.1"),
        ("optim.lr", True),
        ("train.num_steps", 8.0),
        ("train.num_steps", True),
        ("train.num_steps", None),
        ("run.deterministic", "true"),
        ("run.name", "${run.dir}"),
        ("run.name", 7),
        ("run.dir", "???"),
        ("precision.kind", "fp7"),
        ("optim.lr", -1.0),
        ("data.phases", {}),
        ("data.sources", []),
        ("model", 3),
        ("model.unknown", 1),
    ],
)
def test_an_edited_config_is_left_to_omegaconf(key: str, value: Any) -> None:
    assert build_plain(edited(key, value)) is None


def edited(key: str, value: Any) -> dict[str, Any]:
    """The tree of a stored config in which one value was changed by hand."""
    tree: dict[str, Any] = conf_files.parse_yaml(compose.to_yaml(composed.load()))
    section, _, name = key.rpartition(".")
    (tree[section] if section else tree)[name] = value
    return tree


def test_an_edited_config_is_converted_and_checked(tmp_path: Path) -> None:
    def read(key: str, value: Any) -> Config:
        (tmp_path / "config.yaml").write_text(yaml.dump(edited(key, value), Dumper=compose.FAST_DUMPER))
        return compose.read(tmp_path / "config.yaml")

    assert repr(read("optim.lr", 1).optim.lr) == "1.0"
    assert read("run.dir", "").run.dir == ""
    with pytest.raises(ConfigError, match=r"^train\.num_steps: must be an integer, got '8\.5'$"):
        read("train.num_steps", 8.5)
    with pytest.raises(ConfigError, match=r"^optim\.lr: must be finite, got inf$"):
        read("optim.lr", math.inf)
    with pytest.raises(ConfigError, match=r"^data\.phases\[0\]\.weights: must map names to numbers: {name: 1}, got"):
        read("data.phases", [{"from_batch": 1, "weights": [1]}])


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("learning_rate=1", "optim.lr"),
        ("optim.learning_rate=1", "optim.lr"),
        ("lr=1", "optim.lr"),
        ("train.batchsize=1", "batch_size"),
        ("num_layers=1", "model.num_layers"),
        ("model.hidden_size=1", "model.dim"),
        ("max_steps=1", "train.num_steps"),
    ],
)
def test_the_key_that_was_meant_is_named(override: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {re.escape(meant)}\?$"):
        compose.load([override])


def test_every_usual_name_leads_to_a_key() -> None:
    keys = compose.flat(compose.plain(compose.load()))
    for name, key in USUAL_KEYS.items():
        section, _, last = key.rpartition(".")
        assert key in keys or last in keys_of(section), name
        assert name not in leaf_keys(), f"{name} is a key itself"


def test_a_deterministic_run_rejects_delayed_scaling() -> None:
    """Its amax history is lost at a resume; without fp8 the recipe does not matter."""
    fp8 = ["run.deterministic=true", "precision=fp8_emulated"]
    assert composed.load(fp8).run.deterministic
    assert composed.load(["run.deterministic=true", "precision=bf16", "precision.fp8.recipe=delayed"]).run.deterministic
    assert composed.load(["precision=fp8_emulated", "precision.fp8.recipe=delayed"]).run.deterministic is False
    with pytest.raises(ConfigError, match=r"^run\.deterministic: must be false with precision\.fp8\.recipe=delayed: "):
        composed.load([*fp8, "precision.fp8.recipe=delayed"])


def keys_with_a_default(section: Any, prefix: str = "") -> Iterator[str]:
    """Keys of a section of the configuration that have a default in the schema, themselves or through a section."""
    for field in fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if field.default is not MISSING or field.default_factory is not MISSING:
            yield from compose.flat({key: compose.plain(value) if is_dataclass(value) else value})
        elif is_dataclass(value):
            yield from keys_with_a_default(value, f"{key}.")


def test_a_key_has_the_default_of_the_section_that_has_one() -> None:
    """A resume takes it for a key that the stored config does not have yet."""
    cfg = composed.load()
    values, keys = compose.flat(compose.plain(cfg)), set(keys_with_a_default(cfg))
    assert {"model.norm", "profile.num_steps", "sentinel.policy.budgets.trial.per_run"} < keys
    assert {key: compose.schema_default(key) for key in keys} == {key: values[key] for key in keys}
    for key in ("sentinel.policy.budgets.skip.per_run", "sentinel.policy.budgets.trial.nope", "optim.lr", "nope"):
        assert compose.schema_default(key) is None


def test_the_sentinel_lets_every_loss_scale_find_its_value() -> None:
    least, most = LOSS_SCALES
    assert most / 2**LONGEST_OVERFLOW == least
    for scale in LOSS_SCALES:
        assert composed.load([f"precision.initial_loss_scale={scale!r}"]).precision.initial_loss_scale == scale
    fp16 = ("precision=fp16", f"precision.initial_loss_scale={most!r}")
    composed.load(fp16)
    composed.load([*fp16, "sentinel.halt_after_refused=65"])
    with pytest.raises(
        ConfigError, match=r"^sentinel\.halt_after_refused: must be above 64 with precision=fp16 and .*, got 30: "
    ):
        composed.load([*fp16, "sentinel=strict"])
    composed.load(["precision=fp16", "sentinel=strict"])
