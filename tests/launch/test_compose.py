"""Values and types fit: every YAML composes, both doors read alike, and every complaint is one line about its key."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import pytest

from harness import compose
from harness.config import Config, ConfigError

GROUPS = sorted(path.name for path in compose.conf_dir().iterdir() if path.is_dir() and path.name != "hydra")
OPTIONS = [(group, option) for group in GROUPS for option in compose.options_of(group)]


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_file_composes(group: str, option: str) -> None:
    cfg = compose.load([f"+{group}={option}" if group == "experiment" else f"{group}={option}"])
    assert set(compose.plain(cfg)) == set(compose.keys_of(""))


def test_every_group_is_a_section_or_an_overlay() -> None:
    assert set(GROUPS) <= {*compose.keys_of(""), "experiment"}
    chosen_in_file = {field.name for field in fields(Config)} - set(GROUPS)
    assert chosen_in_file == {"run", "train", "eval"}


def test_every_field_has_a_value() -> None:
    cfg = compose.load()
    for field in fields(Config):
        section = getattr(cfg, field.name)
        assert is_dataclass(section)
        assert "???" not in compose.flat({field.name: compose.plain(cfg)[field.name]}).values()


def test_overrides_arrive() -> None:
    cfg = compose.load(["model=1b", "precision=bf16", "optim.lr=1e-4", "train.batch_tokens=1024", "run.name=x"])
    assert (cfg.model.dim, cfg.precision.kind, cfg.optim.lr, cfg.train.batch_size) == (2048, "bf16", 1e-4, 4)
    assert compose.load(["+experiment=1b_bf16"]).model.num_layers == 24


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model=9b", "model: no '9b'; choose one of 125m, 13b, 1b, 3b, 50m, 70b, 7b, tiny"),
        ("+experiment=nope", "experiment: no 'nope'; choose one of 1b_bf16, rare_tail"),
        ("experiment=rare_tail", "experiment: not chosen by default; add it with +experiment=rare_tail"),
        ("optim=null", "optim: no 'null'; choose one of adamw, adamw_wsd"),
        ("optim=3", "optim: no '3'; choose one of adamw, adamw_wsd"),
        ("data.synthetic.zipf=1", "data.synthetic.zipf: no such key; data.synthetic has num_samples, zipf_exponent, "),
        ("model.dimm=1", "model.dimm: no such key; model has "),
        ("+model.dimm=1", "model.dimm: no such key; model has "),
        ("++optim.q=1", "optim.q: no such key; optim has lr, "),
        ("foo=1", "foo: no such key; the configuration has run, train, "),
        ("+foo=1", "foo: no such key; the configuration has run, train, "),
        ("~model.dim", "model.dim: cannot be left out"),
        ("~model", "model: has no value"),
        ("optim.lr=abc", "optim.lr: must be a number, got 'abc'"),
        ("optim.lr=", "optim.lr: must be a number, got ''"),
        ("optim.lr=null", "optim.lr: must not be null"),
        ("optim.lr=???", "optim.lr: has no value"),
        ("optim.lr=${nope}", "optim.lr: Interpolation key 'nope' not found"),
        ("optim.lr=1,2", "optim.lr: got several values, 1,2; add --multirun to sweep over them"),
        ("train.num_steps=1.5", "train.num_steps: must be a whole number, got '1.5'"),
        ("model.tied_head=perhaps", "model.tied_head: must be true or false, got 'perhaps'"),
        ("run.name=[a]", "run.name: must be a text, got ['a']"),
        ("model.attention=wild", "model.attention: must be one of fused, fp32, got 'wild'"),
        ("train=abc", "train: is a section, got abc; it has the keys num_steps, "),
        ("model.dim", "model.dim: cannot be read; write key=value"),
        ("model.dim=[1", "model.dim=[1: cannot be read; write key=value"),
        ("model.num_heads=3", "model.num_heads: must divide model.dim=128, got 3"),
        ("optim.lr=-1", "optim.lr: must be positive, got -1.0"),
        ("run.name=a/b", "run.name: must be a plain directory name, got 'a/b'"),
        ("train.batch_tokens=100", "train.batch_tokens: must be a multiple of train.sequence_length=256, got 100"),
        ("optim.warmup_steps=999", "optim.warmup_steps: must not exceed train.num_steps=200, got 999"),
    ],
)
def test_a_bad_override_is_one_line(override: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose.load(["run.seed=1", override])
    message = str(caught.value)
    assert message.startswith(line)
    assert "\n" not in message
    assert "search path" not in message
    assert caught.value.__cause__ is None


def test_a_close_key_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"did you mean warmup_steps\?$"):
        compose.load(["optim.warmup_step=1"])


def test_what_is_no_complaint_about_an_override_stays_as_it_is() -> None:
    error = AttributeError("a mistake of ours")
    assert compose.explain(error, ["optim.lr=1", "model=tiny"]) is error
