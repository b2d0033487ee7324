"""Exports a checkpoint to, and imports a model from, a Hugging Face directory of safetensors files.

Why: other tools can load what was trained here, and models trained elsewhere can be trained further.
How: an export verifies a checkpoint, then reads it one output file at a time, so that a large model needs the memory of
one file. It writes into a hidden directory that is renamed when it is complete. An import becomes the checkpoint of
step 0, with zero moments; a run with the same model config resumes from it.
An import unpickles nothing, and no file name in its index leads out of the directory.
Left out: an import in parts (it needs 4 bytes of memory per parameter), and a loss scale (fp16 starts at 1 after an
import).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoint import catalog, integrity, saver, store
from harness.checkpoint.catalog import Checkpoint, Health
from harness.checkpoint.integrity import Damaged
from harness.config import compose
from harness.config.data import DataKind
from harness.config.errors import ConfigError, require
from harness.config.explain import explain
from harness.config.model import ModelConfig
from harness.config.precision import PrecisionKind
from harness.config.schema import Config
from harness.core.locking import run_lease
from harness.core.locking.lease_holder import DEFAULT_LEASE_S
from harness.core.rundir import RunDir, has_begun, record_imported_model, write_atomically
from harness.core.state import RunState
from harness.data.corpus.remote_cache import use_cache
from harness.data.corpus.token_files import expand
from harness.data.prepare.prepared_files import CorpusFiles
from harness.data.prepare.tokenizer import open_tokenizer
from harness.distributed.world import connect, disconnect
from harness.huggingface import names
from harness.huggingface.names import TensorSource
from harness.precision.mixed_precision import DTYPES
from harness.sentinel.device.gate import first_history

CONFIG, INDEX, TOKENIZER = "config.json", "model.safetensors.index.json", "tokenizer.json"
FILE_BYTES = 5 * 10**9
"""Most bytes in one file of an export."""
LOADABLE = {"F32", "F16", "BF16"}
"""dtypes that fp32 represents exactly."""
NO_WEIGHT = ".rotary_emb.inv_freq"
"""A table in old exports that is no weight; it follows from the configuration."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    files: dict[str, int]
    """Weight file -> bytes of weights in it."""
    has_tokenizer: bool


def choose_checkpoint(run: RunDir, *, step: int | None = None, name: str | None = None) -> Checkpoint:
    """The checkpoint of that step or name; else the newest good one, or the newest candidate if none is good yet."""
    saved = catalog.list_checkpoints(run.checkpoints)
    require(bool(saved), str(run.path), "has no checkpoint")
    listed = ", ".join(checkpoint.name for checkpoint in saved)
    if name is not None:
        saved = [checkpoint for checkpoint in saved if checkpoint.name == name]
        require(bool(saved), "--checkpoint", f"no checkpoint {name!r}; there are {listed}")
    elif step is not None:
        saved = [checkpoint for checkpoint in saved if checkpoint.step == step]
        require(bool(saved), "--step", f"no checkpoint of step {step}; there are {listed}")
    else:
        saved = [checkpoint for checkpoint in saved if checkpoint.health is not Health.tainted]
        require(bool(saved), str(run.path), f"all its checkpoints are tainted; choose one with --step: {listed}")
        saved = [checkpoint for checkpoint in saved if checkpoint.health is Health.good] or saved
    return saved[-1]


def export_model(
    run: RunDir, checkpoint: Checkpoint, output: Path, *, dtype: PrecisionKind, file_bytes: int = FILE_BYTES
) -> Exported:
    """Write the model of a checkpoint as a directory that `transformers` loads; atomic."""
    require(not (output.exists() or output.is_symlink()), "--output", f"{output} exists; choose another name")
    cfg = read_config(run)
    names.require_exportable(cfg.model)
    try:
        integrity.verify(checkpoint.path)
        expected = {f"model.{name}": shape for name, shape in names.parameter_shapes(cfg.model).items()}
        read = partial(store.read_tensors, checkpoint.path, index=store.read_index(checkpoint.path, expected))
        with atomic_directory(output) as scratch:
            has_tokenizer = write_config_and_tokenizer(scratch, cfg, dtype=DTYPES[dtype])
            files = write_weights(read, scratch, cfg=cfg.model, dtype=DTYPES[dtype], file_bytes=file_bytes)
    except Damaged as error:
        raise ConfigError("", str(error)) from None
    return Exported(files=files, has_tokenizer=has_tokenizer)


def read_config(run: RunDir) -> Config:
    """Read the configuration of a run."""
    try:
        return compose.validate(yaml.safe_load(run.config.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(str(run.config), "is missing; is this a run directory that has trained?") from None
    except Exception as error:
        raise ConfigError(str(run.config), f"cannot be read: {explain(error)}") from None


@contextmanager
def atomic_directory(output: Path) -> Iterator[Path]:
    """A hidden directory that is renamed to `output` at the end, or deleted after an error."""
    scratch = output.with_name(f".{output.name}.part")
    try:
        scratch.mkdir(parents=True)
    except FileExistsError:
        message = f"{scratch} exists: another export is writing it, or was killed; in that case remove it"
        raise ConfigError("--output", message) from None
    except OSError as error:
        raise ConfigError("--output", f"cannot create {scratch}: {error.strerror}") from None
    try:
        yield scratch
        catalog.publish(scratch, output)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


Read = Callable[[Iterable[str]], dict[str, Tensor]]
"""Reads full tensors of the checkpoint by name."""


def write_weights(
    read: Read, directory: Path, *, cfg: ModelConfig, dtype: torch.dtype, file_bytes: int
) -> dict[str, int]:
    """Read, fold, cast and write the tensors file by file; returns the bytes in each."""
    layout, shapes = names.exported_tensors(cfg), names.parameter_shapes(cfg)
    sizes = {name: shapes[origin.parameter].numel() * dtype.itemsize for name, origin in layout.items()}
    files = names.assign_files(sizes, file_bytes)
    for file, tensor_names in files.items():
        tensors = read_folded(read, {name: layout[name] for name in tensor_names}, cfg=cfg, dtype=dtype)
        (directory / file).touch()
        mode = (directory / file).stat().st_mode
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(mode)  # safetensors gives its files mode 0600
        fsync_file(directory / file)
        del tensors
    if len(files) > 1:
        places = {name: file for file, tensor_names in files.items() for name in tensor_names}
        write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})
    return {file: sum(sizes[name] for name in tensor_names) for file, tensor_names in files.items()}


def read_folded(
    read: Read, origins: Mapping[str, TensorSource], *, cfg: ModelConfig, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors of the exported model, from those of a verified checkpoint."""
    keys = dict.fromkeys(f"model.{parameter}" for origin in origins.values() for parameter in origin.parameters)
    parameters = {key.removeprefix("model."): tensor for key, tensor in read(keys).items()}
    return {name: cast_weight(name, names.fold(origin, parameters, cfg=cfg), dtype) for name, origin in origins.items()}


def cast_weight(name: str, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a weight; raises if a finite value would overflow."""
    small = weight.to(dtype)
    if torch.isfinite(weight).all() and not torch.isfinite(small).all():
        largest = float(weight.abs().max())
        limit = torch.finfo(dtype).max
        raise ConfigError("--dtype", f"{name} contains {largest:g}, above the maximum {limit:g}; use fp32 or bf16")
    return small.contiguous()


def write_config_and_tokenizer(directory: Path, cfg: Config, *, dtype: torch.dtype) -> bool:
    """Write config.json and, if the data has one, the tokenizer; returns whether there was a tokenizer."""
    found = find_tokenizer(cfg)
    eos_token_id = None
    if found is not None:
        path, eos_token = found
        shutil.copyfile(path, directory / TOKENIZER)
        fsync_file(directory / TOKENIZER)
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos_token}
        write_json(directory / "tokenizer_config.json", tokenizer_config)
        eos_token_id = None if eos_token is None else open_tokenizer(path).eod(eos_token)
    content = names.render_config(
        cfg.model, sequence_length=cfg.train.sequence_length, dtype=dtype, eos_token_id=eos_token_id
    )
    write_json(directory / CONFIG, content)
    return found is not None


def find_tokenizer(cfg: Config) -> tuple[Path, str | None] | None:
    """The tokenizer beside the data of a run and its end-of-document token; None unless all files share one."""
    if any(source.kind is not DataKind.files for source in cfg.data.sources.values()):
        return None
    use_cache(cfg.data.remote)
    try:
        files = [file for source in cfg.data.sources.values() for file in expand(source.paths, key="data")]
        corpora = [CorpusFiles(file.with_suffix("")) for file in files]
        contents = {corpus.tokenizer.read_bytes() for corpus in corpora}
        metas = [corpus.read_meta() for corpus in corpora]
    except (OSError, ConfigError):
        return None
    eos_tokens = {None if meta is None else meta["options"].get("append_eod") for meta in metas}
    return (corpora[0].tokenizer, eos_tokens.pop() if len(eos_tokens) == 1 else None) if len(contents) == 1 else None


def import_model(source: Path, run: RunDir) -> tuple[Path, dict[str, Any]]:
    """Make the weights of a directory the first checkpoint of a run that has not begun; returns its path and the
    matching `model` options.

    The lease of the run is held while the checkpoint is written, and not before: rejected weights leave no directory.
    """
    run_lease.require_free(run.path, wait=False)
    require_new(run)
    path = source / CONFIG
    content, default = read_json(path), compose.load(["parallel.device=cpu"])
    try:
        options = names.parse_config(content)
        cfg = replace(default.model, **options)
    except ConfigError as error:
        raise ConfigError(str(path), str(error)) from None
    weights = read_weights(source, cfg)
    with run_lease.holding():
        run_lease.hold(run.path, DEFAULT_LEASE_S)
        require_new(run)  # again: a run may have begun while the weights were read
        record_imported_model(replace(default, model=cfg), run)
        world = connect(default.parallel)
        try:
            written = saver.write(run.checkpoints, initial_tensors(weights), RunState(), world=world, rollback={})
        finally:
            disconnect()
    return written.path, options


def require_new(run: RunDir) -> None:
    """Reject a run that has begun or has a checkpoint."""
    require(not has_begun(run), str(run.path), "has already trained; import into a new run")
    occupied = [*catalog.list_checkpoints(run.checkpoints), *catalog.list_damaged(run.checkpoints)]
    require(not occupied, str(run.path), "already has checkpoints; import into a new run")


def initial_tensors(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a checkpoint at step 0 with these weights; the zero moments take no memory."""
    tensors = {f"model.{name}": weight for name, weight in weights.items()}
    for name, weight in weights.items():
        tensors[f"optimizer.{name}.step"] = torch.zeros(())
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{moment}"] = torch.zeros(()).expand(weight.shape)
    counters = {
        "step": torch.tensor(0),
        "lr_scale": torch.tensor(1.0),
        "scale": torch.tensor(1.0),
        "clean_steps": torch.tensor(0),
        "gate": first_history(torch.device("cpu")),
    }
    return tensors | {f"device.{name}": value for name, value in counters.items()}


def read_weights(source: Path, cfg: ModelConfig) -> dict[str, Tensor]:
    """Every parameter of the model in fp32, by the name in `Transformer`; raises on missing, extra or misshaped
    tensors."""
    places = find_tensors(source)
    tied_head = places.pop(names.NAMES[names.HEAD], None) if cfg.tied_head else None
    shapes = {names.hf_name(parameter): (parameter, shape) for parameter, shape in names.parameter_shapes(cfg).items()}
    for name in shapes:
        require(name in places, str(source), f"{name} is missing")
    for name in places:
        require(name in shapes, str(source), f"{name} does not belong to the model of {CONFIG}")
    weights: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        with open_safetensors(file) as tensors:
            for name in sorted(name for name, place in places.items() if place == file):
                parameter, shape = shapes[name]
                view = tensors.get_slice(name)
                message = f"{name} has shape {view.get_shape()}, {CONFIG} needs {list(shape)}"
                require(view.get_shape() == list(shape), str(file), message)
                message = f"{name} has dtype {view.get_dtype()}; allowed are {', '.join(sorted(LOADABLE))}"
                require(view.get_dtype() in LOADABLE, str(file), message)
                weights[parameter] = weight = tensors.get_tensor(name).float()
                require(bool(weight.isfinite().all()), str(file), f"{name} contains values that are not finite")
    if tied_head is not None:
        require_tied(tied_head, weights[names.EMBEDDING])
    return weights


def require_tied(file: Path, embedding: Tensor) -> None:
    """Reject a head beside a tied embedding, unless it is a copy of the embedding, as some tools write it."""
    name = names.NAMES[names.HEAD]
    with open_safetensors(file) as tensors:
        is_copy = torch.equal(tensors.get_tensor(name).float(), embedding)
    message = f"{name} is not {names.NAMES[names.EMBEDDING]}, but {CONFIG} has tie_word_embeddings"
    require(is_copy, str(file), message)


def find_tensors(source: Path) -> dict[str, Path]:
    """The file of every tensor, from the index, or the single file if there is no index."""
    if not (source / INDEX).exists():
        with open_safetensors(source / names.ONLY_FILE) as tensors:
            return {name: source / names.ONLY_FILE for name in tensors.keys() if not name.endswith(NO_WEIGHT)}  # noqa: SIM118
    try:
        places = names.parse_index(read_json(source / INDEX))
    except ConfigError as error:
        raise ConfigError(str(source / INDEX), str(error)) from None
    return {name: source / file for name, file in places.items() if not name.endswith(NO_WEIGHT)}


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file; its tensors are read on access."""
    try:
        with safe_open(path, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise ConfigError(str(path), "is missing") from None
    except (SafetensorError, OSError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(str(path), "is missing") from None
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), f"cannot be read: {error}") from None
    require(isinstance(content, dict), str(path), "is not a JSON object")
    assert isinstance(content, dict)
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2) + "\n")


def fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
