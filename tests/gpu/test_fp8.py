"""fp8 by Transformer Engine against the emulation, eager and compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from harness.build import Parts, build
from harness.config.compose import load
from harness.config.schema import Config
from harness.core.rundir import RunDir
from harness.distributed.world import connect, disconnect
from harness.precision.attention import fast_attention
from harness.precision.fp8.engine import Engine, get_engine
from harness.precision.fp8.formats import FORWARD, GRADIENT, BlockScaling, Operand
from harness.precision.fp8.linear import Fp8Linear, Recipe, Switch, project
from harness.step import finish_step, forward_backward

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # from torch.compile, NCCL and Transformer Engine
]

SMALL = ["model=tiny", "model.dim=256", "model.ffn_dim=768", "train.batch_size=4", "train.sequence_length=256"]


@pytest.fixture(scope="module")
def engines() -> tuple[Engine, Engine]:
    if importlib.util.find_spec("transformer_engine") is None:
        pytest.skip("needs Transformer Engine")
    return get_engine("transformer_engine"), get_engine("emulated")


def random_values(*shape: int, seed: int = 0) -> Tensor:
    """Normal values, with a few that are large, zero, tiny or NaN."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    values = torch.randn(*shape, device="cuda", generator=generator)
    values.view(-1)[:5] = torch.tensor([0.0, 1e-7, 300.0, -300.0, torch.nan], device="cuda")
    return values.to(torch.bfloat16)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, with one encoding of NaN."""
    return torch.where(tensor.float().isnan(), 0x7F, tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", [FORWARD, GRADIENT])
@pytest.mark.parametrize("transpose", [True, False])
def test_both_engines_quantize_to_the_same_bits(
    engines: tuple[Engine, Engine], dtype: torch.dtype, transpose: bool
) -> None:
    values, scale = random_values(256, 512), torch.tensor(3.7, device="cuda")
    amaxes = [torch.zeros((), device="cuda") for _ in engines]
    real, emulated = (
        engine.quantize(values.nan_to_num(1.0), scale, dtype=dtype, transpose=transpose, amax=amax)
        for engine, amax in zip(engines, amaxes, strict=True)
    )
    assert torch.equal(as_bytes(real.rows), as_bytes(emulated.rows))
    assert torch.equal(as_bytes(real.columns), as_bytes(emulated.columns))
    assert amaxes[0] == amaxes[1] == 300.0
    with_nan = engines[0].quantize(values, scale, dtype=dtype, transpose=transpose, amax=None)
    assert with_nan.rows.float().isnan().sum() == 1, "only NaN becomes NaN"


@pytest.mark.parametrize("square", [True, False])
def test_both_engines_quantize_blocks_to_the_same_bits(engines: tuple[Engine, Engine], square: bool) -> None:
    values = random_values(256, 512).nan_to_num(1.0)
    real, emulated = (
        engine.quantize_blocks(values, dtype=FORWARD, transpose=True, square=square) for engine in engines
    )
    assert torch.equal(as_bytes(real.rows), as_bytes(emulated.rows))
    assert torch.equal(as_bytes(real.columns), as_bytes(emulated.columns))


def test_gemms_use_the_quantized_values(engines: tuple[Engine, Engine]) -> None:
    left, right = random_values(128, 512).nan_to_num(1.0), random_values(256, 512, seed=1).nan_to_num(1.0)
    one = torch.ones((), device="cuda")
    operands = [
        Operand(engines[1].quantize(values, one, dtype=FORWARD, transpose=False, amax=None).rows, one)
        for values in (left, right)
    ]
    before = torch.randn(128, 256, device="cuda").to(torch.bfloat16)
    for out in (None, before):
        real, emulated = (
            engine.gemm(
                *operands, out=None if out is None else out.clone(), scaling=BlockScaling.none, split_accumulator=True
            )
            for engine in engines
        )
        torch.testing.assert_close(real, emulated, rtol=0.01, atol=0.5)


@pytest.mark.parametrize("kind", ["current", "delayed", "block"])
@pytest.mark.usefixtures("engines")
def test_layers_match_the_emulation(kind: str) -> None:
    results = []
    for name in ("transformer_engine", "emulated"):
        torch.manual_seed(0)
        with torch.device("cuda"):
            layers = [Fp8Linear(512, width, recipe=Recipe(kind, name), switch=Switch()) for width in (256, 384)]
            hidden = torch.randn(2, 128, 512).to(torch.bfloat16).requires_grad_()
        for each in layers:
            each.weight = nn.Parameter(each.weight.to(torch.bfloat16))
        outputs = project(hidden, *layers)
        seeds = [torch.randn(output.shape, device="cuda").to(torch.bfloat16) for output in outputs]
        inputs = [hidden, *(each.weight for each in layers)]
        results.append([*outputs, *torch.autograd.grad(outputs, inputs, seeds)])
    for real, emulated in zip(*results, strict=True):
        distance = (real.float() - emulated.float()).norm() / emulated.float().norm()
        assert distance < 0.01


@pytest.fixture
def single_rank() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    disconnect()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def start(overrides: list[str], directory: Path) -> tuple[Config, Parts]:
    cfg = load([*SMALL, "precision=fp8", *overrides])
    return cfg, build(cfg, connect(cfg.parallel), RunDir(directory))


def train_losses(cfg: Config, parts: Parts, first: int, count: int, *, probe: bool = False) -> list[float]:
    losses = []
    with fast_attention():
        for index in range(first, first + count):
            forward_backward(parts, parts.batches[index], cfg=cfg, probe=probe)
            report = finish_step(parts, cfg=cfg, probe=probe)
            layout = parts.signals.layout
            losses.append(float(layout.scalar(report, "loss") / layout.scalar(report, "tokens")))
            if probe:
                assert layout.part(report, "fp8_tensors").tolist() == [4.0 * 4, 7.0 * 4, 7.0 * 4]
    return losses


@pytest.mark.usefixtures("engines", "single_rank")
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_a_compiled_model_switches_to_bf16_and_back_to_fp8(recipe: str, tmp_path: Path) -> None:
    cfg, parts = start(["parallel.compile=true", f"precision.fp8.recipe={recipe}"], tmp_path)
    assert cfg.model.num_layers == 4
    first = train_losses(cfg, parts, 0, 6, probe=True)
    assert len({each.recipe for each in parts.fp8_layers.layers}) == 1
    parts.fp8_layers.use_fp8(False)
    between = train_losses(cfg, parts, 6, 3)
    parts.fp8_layers.use_fp8(True)
    last = train_losses(cfg, parts, 9, 6)
    assert all(torch.isfinite(torch.tensor([*first, *between, *last])))
    assert last[-1] < between[-1] < first[0]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == 3, "one for fp8, one for bf16, one for the gate, whatever the number of blocks"
    parts.close()


@pytest.mark.usefixtures("engines", "single_rank")
@pytest.mark.parametrize("kind", ["selective", "full"])
def test_activation_checkpointing_gives_the_same_losses(kind: str, tmp_path: Path) -> None:
    losses = []
    for activations in ("none", kind):
        cfg, parts = start([f"parallel.activation_checkpointing={activations}"], tmp_path)
        losses.append(train_losses(cfg, parts, 0, 3))
        parts.close()
        disconnect()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
