"""Export and import of models: checked against `transformers` on export, against our own model on import."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.checkpoint import catalog, integrity, saver, store
from harness.checkpoint.catalog import Health
from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.model import ModelConfig
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core.event_json import to_json
from harness.core.events import RunStarted
from harness.core.locking.directory_lease import SeenLease, read_newest
from harness.core.rundir import RunDir, append_line, check_resume
from harness.core.state import RunState
from harness.data.prepare.prepare import prepare_corpus
from harness.data.prepare.prepared_files import Options
from harness.data.prepare.tokenizer import EOD_TOKEN, open_tokenizer
from harness.distributed.world import connect, disconnect
from harness.huggingface import convert
from harness.model.init import initialize
from harness.model.transformer import Transformer
from harness.precision.mixed_precision import linear
from harness.telemetry.event_log import prepare_run
from tests import composed

EMBEDDING = "model.embedding.weight"
SEQUENCE_LENGTH = 19
SMALL = [
    f"train.sequence_length={SEQUENCE_LENGTH}",
    "model.dim=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_dim=48",
]
VARIANTS = [
    [],
    ["model.tied_head=true", "model.num_kv_heads=1", "model.rope_theta=500000.0"],
    ["model.qk_norm=true", "model.norm_eps=0.01", "model.attention=fp32"],
    ["model.mup_base_width=8"],
    ["model.mup_base_width=8", "model.qk_norm=true"],
    ["model.mup_base_width=8", "model.tied_head=true", "model.num_kv_heads=4"],
    ["model.embedding_norm=true"],
    ["model.embedding_norm=true", "model.tied_head=true"],
]


@cache
def loaded(*overrides: str) -> Config:
    return composed.load(overrides)


def make_model(cfg: Config, *, seed: int = 3) -> Transformer:
    """A model with weights far from their initial values, so that no term is small."""
    model = Transformer(cfg.model, sequence_length=SEQUENCE_LENGTH, linear=linear)
    initialize(model, cfg.model, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def make_run(path: Path, *overrides: str, steps: tuple[int, ...] = (5,)) -> tuple[RunDir, Config, Transformer]:
    """A run directory with a checkpoint of each step; returns it with the last model."""
    cfg = loaded(*SMALL, *overrides)
    run = RunDir(path)
    path.mkdir(parents=True)
    run.config.write_text(compose.to_yaml(cfg))
    world = connect(loaded("parallel.device=cpu").parallel)
    try:
        for step in steps:
            model = make_model(cfg, seed=step)
            tensors = convert.initial_tensors({name: weight.detach() for name, weight in model.named_parameters()})
            saver.write(run.checkpoints, tensors, RunState(step=step), world=world, rollback={})
    finally:
        disconnect()
    return run, cfg, model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain model, exported from its run."""
    directory = tmp_path_factory.mktemp("plain")
    run, _, _ = make_run(directory / "run")
    return export(run, directory / "exported")


def export(run: RunDir, output: Path, *, dtype: PrecisionKind = PrecisionKind.fp32, **options: int) -> Path:
    convert.export_model(run, convert.choose_checkpoint(run), output, dtype=dtype, **options)
    return output


def stream(vocab_size: int) -> Tensor:
    return torch.randint(vocab_size, (3, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(5))


def logits_of(directory: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    found: Any = AutoModelForCausalLM.from_pretrained(
        directory, local_files_only=True, attn_implementation="eager", output_loading_info=True
    )
    model, report = found
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        logits: Tensor = model(tokens, use_cache=False).logits
    return logits.float()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def content(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("overrides", VARIANTS, ids=str)
def test_transformers_computes_the_same_logits(tmp_path: Path, overrides: list[str]) -> None:
    run, cfg, model = make_run(tmp_path / "run", *overrides)
    directory = export(run, tmp_path / "exported")
    modes = {path.name: path.stat().st_mode for path in directory.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes
    tokens = stream(cfg.model.vocab_size)
    with torch.no_grad():
        ours = model.logits(tokens)
    assert relative_error(ours, logits_of(directory, tokens)) < 2e-6
    described = json.loads((directory / "config.json").read_text())
    assert described["architectures"] == ["Qwen3ForCausalLM" if cfg.model.qk_norm else "LlamaForCausalLM"]
    assert described["max_position_embeddings"] == SEQUENCE_LENGTH
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(("key", "value", "allowed"), [("norm", "layer", "rms"), ("norm_placement", "post", "pre")])
def test_norms_that_hugging_face_does_not_have_are_rejected(tmp_path: Path, key: str, value: str, allowed: str) -> None:
    run, _, _ = make_run(tmp_path / "run", f"model.{key}={value}")
    with pytest.raises(ConfigError, match=rf"^model\.{key}: must be {allowed} for an export, got {value}; [^\n]*$"):
        export(run, tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("overrides", VARIANTS[:3], ids=str)
def test_export_import_export_keeps_every_bit(tmp_path: Path, overrides: list[str]) -> None:
    run, cfg, model = make_run(tmp_path / "run", *overrides)
    first = export(run, tmp_path / "first", file_bytes=10_000)
    path, options = convert.import_model(first, RunDir(tmp_path / "new"))
    assert replace(cfg.model, **options) == cfg.model
    assert path == tmp_path / "new" / "checkpoints" / "step-00000000-gen-0"
    assert catalog.health_of(path) is Health.candidate
    assert integrity.verify(path).step == 0
    assert RunState(**json.loads((path / store.STATE_FILE).read_text())) == RunState()
    read = store.read_tensors(path, store.read_shapes(path))
    expected = convert.initial_tensors({name: weight.detach() for name, weight in model.named_parameters()})
    assert {name: tensor.dtype for name, tensor in read.items()} == {n: t.dtype for n, t in expected.items()}
    assert same(read, expected)

    shutil.copy(run.config, tmp_path / "new")
    second = export(RunDir(tmp_path / "new"), tmp_path / "second")
    assert same(content(first), content(second))
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


def test_folded_model_is_imported_with_the_same_logits(tmp_path: Path) -> None:
    run, cfg, model = make_run(tmp_path / "run", "model.mup_base_width=8", "model.tied_head=true")
    path, options = convert.import_model(export(run, tmp_path / "exported"), RunDir(tmp_path / "new"))
    plain = replace(cfg.model, mup_base_width=None, **options)
    again = Transformer(plain, sequence_length=SEQUENCE_LENGTH, linear=linear)
    names = [f"model.{name}" for name, _ in again.named_parameters()]
    read = store.read_tensors(path, names)
    again.load_state_dict({name.removeprefix("model."): tensor for name, tensor in read.items()})
    tokens = stream(plain.vocab_size)
    with torch.no_grad():
        assert relative_error(again.logits(tokens), model.logits(tokens)) < 2e-6


def test_several_files_contain_the_same_tensors_as_one(tmp_path: Path) -> None:
    run, cfg, _ = make_run(tmp_path / "run")
    one, many = export(run, tmp_path / "one"), export(run, tmp_path / "many", file_bytes=30_000)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in many.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for file in files:
        held = load_file(many / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= 30_000
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in content(many).values())
    assert same(content(one), content(many))
    tokens = stream(cfg.model.vocab_size)
    assert torch.equal(logits_of(one, tokens), logits_of(many, tokens))


def test_fp8_run_is_exported_like_any_other(tmp_path: Path) -> None:
    outputs = []
    for precision in ("fp8", "fp32"):
        run, _, _ = make_run(tmp_path / f"{precision}-run", f"precision={precision}", "train.sequence_length=32")
        outputs.append(export(run, tmp_path / precision))
    assert same(*map(content, outputs))


@pytest.mark.parametrize("dtype", [PrecisionKind.bf16, PrecisionKind.fp16])
def test_weights_are_rounded_once(tmp_path: Path, dtype: PrecisionKind) -> None:
    run, _, _ = make_run(tmp_path / "run")
    wide, narrow = content(export(run, tmp_path / "wide")), content(export(run, tmp_path / "narrow", dtype=dtype))
    torch_dtype = {PrecisionKind.bf16: torch.bfloat16, PrecisionKind.fp16: torch.float16}[dtype]
    assert same({name: tensor.to(torch_dtype) for name, tensor in wide.items()}, narrow)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", local_files_only=True)
    assert model.dtype == torch_dtype


def test_overflow_in_a_cast_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"^--dtype: lm_head.weight contains 70000, above the maximum 65504; use fp32 or bf16$"
    ):
        convert.cast_weight("lm_head.weight", torch.tensor([1.0, -70000.0]), torch.float16)
    assert convert.cast_weight("x", torch.tensor([torch.nan]), torch.float16).isnan().all()


def test_newest_good_checkpoint_is_chosen(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path / "run", steps=(5, 10, 15))
    assert convert.choose_checkpoint(run).step == 15
    catalog.mark(run.checkpoints / "step-00000010-gen-0", Health.good, "a test")
    assert convert.choose_checkpoint(run).step == 10
    assert convert.choose_checkpoint(run, step=5).step == 5
    assert convert.choose_checkpoint(run, name="step-00000015-gen-0").step == 15
    with pytest.raises(ConfigError, match=r"^--step: no checkpoint of step 7; there are step-00000005-gen-0, "):
        convert.choose_checkpoint(run, step=7)
    with pytest.raises(ConfigError, match=r"^--checkpoint: no checkpoint '../x'; there are step-00000005-gen-0, "):
        convert.choose_checkpoint(run, name="../x")


def test_a_tainted_checkpoint_is_only_taken_on_request(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path / "run", steps=(5, 10, 15))
    catalog.mark(run.checkpoints / "step-00000015-gen-0", Health.tainted, "a test")
    assert convert.choose_checkpoint(run).step == 10
    assert convert.choose_checkpoint(run, step=15).step == 15
    for step in (5, 10):
        catalog.mark(run.checkpoints / catalog.name_of(step, 0), Health.tainted, "a test")
    with pytest.raises(ConfigError, match=f"^{run.path}: all its checkpoints are tainted; choose one with --step: "):
        convert.choose_checkpoint(run)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
def test_damaged_checkpoint_is_rejected_and_the_file_is_named(tmp_path: Path, file: str) -> None:
    run, _, _ = make_run(tmp_path / "run")
    path = convert.choose_checkpoint(run).path / file
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ConfigError) as caught:
        export(run, tmp_path / "exported")
    assert str(caught.value).startswith(f"{path}: ")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_configuration_of_another_shape_is_refused(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path / "run")
    run.config.write_text(compose.to_yaml(loaded(*SMALL, "model.ffn_dim=64")))
    message = r"has model.blocks.0.mlp.gate.weight with shape \[48, 32\]; .* needs \[64, 32\]"
    with pytest.raises(ConfigError, match=message):
        export(run, tmp_path / "exported")
    run.config.write_text("model: [")
    with pytest.raises(ConfigError, match=r"config.yaml: cannot be read: "):
        export(run, tmp_path / "exported")
    run.config.unlink()
    with pytest.raises(ConfigError, match=r"config.yaml: is missing"):
        export(run, tmp_path / "exported")
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_existing_output_is_not_overwritten(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path / "run")
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match=r"^--output: .*taken exists; choose another name$"):
        export(run, tmp_path / "taken")
    assert not list((tmp_path / "taken").iterdir())
    (tmp_path / ".busy.part").mkdir()
    with pytest.raises(ConfigError, match=r"busy.part exists: another export is writing it, or was killed"):
        export(run, tmp_path / "busy")
    assert (tmp_path / ".busy.part").is_dir()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, OSError])
def test_an_interrupted_export_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interruption: type[BaseException]
) -> None:
    run, _, _ = make_run(tmp_path / "run")
    written: list[Any] = []

    def save_once(tensors: dict[str, Tensor], path: Path, **options: Any) -> None:
        if written:
            raise interruption
        save_file(tensors, path, **options)
        written.append(path)

    monkeypatch.setattr(convert, "save_file", save_once)
    with pytest.raises(interruption):
        export(run, tmp_path / "exported", file_bytes=10_000)
    assert written
    assert [each.name for each in tmp_path.iterdir()] == ["run"]
    monkeypatch.undo()
    export(run, tmp_path / "exported", file_bytes=10_000)


def test_tokenizer_is_exported(tmp_path: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog. " * 20
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for _ in range(8)))
    options = Options(bpe_size=280, eod_token=EOD_TOKEN, append_eod=True)
    prepare_corpus(
        [tmp_path / "in.jsonl"],
        tmp_path / "corpus",
        options,
        num_workers=1,
        shard_bytes=1 << 20,
        progress=lambda *_: None,
    )
    data = ["data=files", f"data.sources.main.paths=[{tmp_path}/corpus]", "model.vocab_size=280"]
    run, _, _ = make_run(tmp_path / "run", *data)
    directory = export(run, tmp_path / "exported")
    modes = {path.name: path.stat().st_mode for path in directory.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes
    ours = open_tokenizer(tmp_path / "corpus.tokenizer.json")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    assert theirs(text)["input_ids"] == ours.encode([text])[0].tolist()
    assert theirs.eos_token_id == ours.eod(EOD_TOKEN)
    assert json.loads((directory / "config.json").read_text())["eos_token_id"] == ours.eod(EOD_TOKEN)


def test_a_run_with_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path / "run")
    directory = export(run, tmp_path / "exported")
    modes = {path.name: path.stat().st_mode for path in directory.iterdir()}
    assert set(modes.values()) == {modes["config.json"]}, modes
    with pytest.raises(ConfigError, match="already has checkpoints"):
        convert.import_model(directory, run)
    catalog.quarantine(convert.choose_checkpoint(run).path)
    with pytest.raises(ConfigError, match="already has checkpoints"):
        convert.import_model(directory, run)


def test_a_run_that_trains_or_has_trained_is_not_imported_into(tmp_path: Path, exported: Path) -> None:
    run = prepare_run(loaded(*SMALL, f"run.dir={tmp_path}", "run.name=new"))
    imports = "from pathlib import Path; from harness.core.locking import run_lease"
    code = f"{imports}; run_lease.hold(Path({str(run.path)!r}), 60); print(); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match=r"^run\.name: .*new is in use by"):
            convert.import_model(exported, run)
        other.kill()
    started = RunStarted(time=1.0, iteration=0, world_size=1, num_steps=9, step=0, resumed_from=None)
    append_line(run.events, to_json(started))
    with pytest.raises(ConfigError, match=r"new: has already trained; import into a new run$"):
        convert.import_model(exported, run)
    assert not run.checkpoints.exists()


def test_an_import_holds_the_lease_of_the_run_while_it_writes(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, write, seen = RunDir(tmp_path / "new"), saver.write, list[SeenLease | None]()

    def write_and_look(*arguments: Any, **options: Any) -> saver.Written:
        seen.append(read_newest(run.lease))
        return write(*arguments, **options)

    monkeypatch.setattr(saver, "write", write_and_look)
    convert.import_model(exported, run)
    seen.append(read_newest(run.lease))
    pids = [lease.holder.pid for lease in seen if lease is not None and lease.holder is not None]
    assert pids == 2 * [os.getpid()]
    assert [lease.released for lease in seen if lease is not None] == [False, True]


def test_a_run_that_begins_while_the_weights_are_read_is_not_imported_into(
    tmp_path: Path, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = RunDir(tmp_path / "new"), convert.read_weights

    def read_slowly(source: Path, cfg: ModelConfig) -> dict[str, Tensor]:
        prepare_run(loaded(*SMALL, f"run.dir={tmp_path}", "run.name=new"))
        started = RunStarted(time=1.0, iteration=0, world_size=1, num_steps=9, step=0, resumed_from=None)
        append_line(run.events, to_json(started))
        return read(source, cfg)

    monkeypatch.setattr(convert, "read_weights", read_slowly)
    with pytest.raises(ConfigError, match=r"new: has already trained; import into a new run$"):
        convert.import_model(exported, run)
    assert not run.checkpoints.exists()


def test_imported_weights_are_not_loaded_into_another_model(
    tmp_path: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All shapes stay the same."""
    run = RunDir(tmp_path / "new")
    start = [*SMALL, f"run.dir={tmp_path}", "run.name=new"]
    _, options = convert.import_model(exported, run)
    problems = {
        ("model.num_heads=2", "model.num_kv_heads=1"): "model.num_heads: must stay 4 in this run, got 2",
        ("model.norm=layer",): "model.norm: must stay rms in this run, got layer",
        ("model.mup_base_width=16",): "model.mup_base_width: must stay None in this run, got 16",
    }
    for overrides, problem in problems.items():
        with pytest.raises(ConfigError, match=f"^{re.escape(problem)}: its weights were trained with"):
            check_resume(loaded(*start, *overrides), run)
    check_resume(loaded(*start), run)
    prepare_run(loaded(*start, "model.rope_theta=500000"))
    trained = options["rope_theta"]
    warning = f"warning: model.rope_theta was {trained}, is 500000.0: the weights were trained with {trained}\n"
    assert capsys.readouterr().err == warning
    run.imported.write_text("{")
    with pytest.raises(ConfigError, match=r"imported\.json: cannot be read: "):
        check_resume(loaded(*start), run)
    run.imported.unlink()
    check_resume(loaded(*start, "model.norm=layer"), run)  # an earlier version imported it


def drop(weights: dict[str, Tensor]) -> None:
    del weights["model.norm.weight"]


def add(weights: dict[str, Tensor]) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = torch.zeros(48, 32)


def bend(weights: dict[str, Tensor]) -> None:
    weights["lm_head.weight"] = torch.zeros(255, 32)


def quantize(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"] = torch.zeros(32, dtype=torch.int8)


def blow_up(weights: dict[str, Tensor]) -> None:
    weights["model.norm.weight"][3] = torch.inf


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (blow_up, "model.safetensors: model.norm.weight contains values that are not finite"),
        (drop, "exported: model.norm.weight is missing"),
        (add, "exported: model.layers.2.mlp.up_proj.weight does not belong to the model of config.json"),
        (bend, "model.safetensors: lm_head.weight has shape [255, 32], config.json needs [256, 32]"),
        (quantize, "model.safetensors: model.norm.weight has dtype I8; allowed are BF16, F16, F32"),
    ],
)
def test_mismatched_tensors_are_rejected_by_name(tmp_path: Path, exported: Path, change: Any, complaint: str) -> None:
    path = shutil.copytree(exported, tmp_path / "exported") / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    with pytest.raises(ConfigError) as caught:
        convert.import_model(tmp_path / "exported", RunDir(tmp_path / "new"))
    assert str(caught.value).endswith(complaint)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("config.json", None, "is missing"),
        ("config.json", "{", "cannot be read: "),
        ("config.json", "[]", "is not a JSON object"),
        ("config.json", '{"architectures": ["BertModel"]}', "architectures: must be one of LlamaForCausalLM, "),
        ("model.safetensors", None, "is missing"),
        ("model.safetensors", "no tensors", "cannot be read: "),
        ("model.safetensors.index.json", '{"weight_map": {"x": "../x.safetensors"}}', "weight_map: '../x.safetensors'"),
    ],
)
def test_unreadable_files_are_rejected_by_name(
    tmp_path: Path, exported: Path, file: str, text: str | None, complaint: str
) -> None:
    path = shutil.copytree(exported, tmp_path / "exported") / file
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        convert.import_model(tmp_path / "exported", RunDir(tmp_path / "new"))
    assert str(caught.value).startswith(f"{path}: {complaint}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_half_precision_and_old_tables_are_accepted(tmp_path: Path) -> None:
    run, _, _ = make_run(tmp_path / "run")
    path = export(run, tmp_path / "exported", dtype=PrecisionKind.bf16) / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, path)
    checkpoint, _ = convert.import_model(tmp_path / "exported", RunDir(tmp_path / "new"))
    read = store.read_tensors(checkpoint, ["model.head.weight"])["model.head.weight"]
    assert read.dtype == torch.float32
    assert torch.equal(read, weights["lm_head.weight"].float())


def test_a_head_beside_a_tied_embedding_must_be_a_copy_of_it(tmp_path: Path) -> None:
    run, _, model = make_run(tmp_path / "run", "model.tied_head=true")
    path = export(run, tmp_path / "exported") / "model.safetensors"
    weights = load_file(path)
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, path)
    checkpoint, options = convert.import_model(tmp_path / "exported", RunDir(tmp_path / "new"))
    assert options["tied_head"]
    assert torch.equal(store.read_tensors(checkpoint, [EMBEDDING])[EMBEDDING], model.embedding.weight)
    head[7, 3] += 1e-3
    save_file(weights | {"lm_head.weight": head}, path)
    complaint = "lm_head.weight is not model.embed_tokens.weight, but config.json has tie_word_embeddings"
    with pytest.raises(ConfigError, match=complaint):
        convert.import_model(tmp_path / "exported", RunDir(tmp_path / "other"))
