"""The harness's kernels beside those of maintained libraries: torch, Transformer Engine, Liger and torchao.

    python -m tests.bench.gpu.kernel_peers --liger DIR --torchao DIR     each DIR holds the package
    python -m tests.bench.gpu.kernel_peers --only loss rope

Each task is one that a training step has, at the shapes of 1.26B parameters with 8 x 4096 tokens: forward and backward
where there is a backward. All kernels of a task get the same inputs and alternate round by round; the time is the
median of the rounds, between events on the device. The error is the largest ||result - reference|| / ||reference|| of
all results, against fp32 (fp8: the quantized values times 1 / their scale). The peak is what the task allocates beside
its inputs. torch is compiled where the harness compiles, and a library that is not installed is a row without figures.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.model.loss import LossOptions, chunked_cross_entropy
from harness.optim.adamw import AdamWOptions, ParameterShard, step_triton
from harness.precision.fp8.engine import share_cudnn
from harness.precision.fp8.formats import FORWARD, GRADIENT, SCALE_STEPS
from harness.precision.fused_qkv import apply_rope
from tests.bench.clock import release_memory, round_order

DEVICE = "cuda"
TOKENS, LENGTH, DIM, WIDE, VOCABULARY = 32_768, 4096, 2048, 5632, 32_000
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
NUM_LAYERS = 8
"""Layers whose weights the optimizer updates; all 24 would not fit once for each library."""
ROUNDS, BLOCK_MS = 7, 30.0
"""Rounds, and about how long a kernel is repeated in each."""
HEAT_UP_S = 2.0
"""How long the device computes before it is measured: a cool one is faster."""
HARNESS, TORCH, ENGINE, LIGER, TORCHAO = "harness", "torch", "Transformer Engine", "Liger", "torchao"

Results = Sequence[Tensor]


class Kernel(NamedTuple):
    """One way to do a task."""

    library: str
    start: Callable[[], Callable[[], Results]]
    """Imports the library and prepares; returns what is timed."""


class Task(NamedTuple):
    what: str
    kernels: Sequence[Kernel]
    reference: Callable[[], Results]
    """The results in fp32."""


class Timing(NamedTuple):
    ms: float
    spread: float
    """(slowest - fastest) / median of the rounds."""
    error: float
    peak_gib: float


def randn(*shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, device=DEVICE, generator=generator).mul_(scale).to(dtype)


def with_gradients(compute: Callable[..., Results], inputs: Sequence[Tensor], gradients: Results) -> Results:
    """Forward and backward: the outputs and the gradients of the inputs."""
    leaves = [each.detach().requires_grad_() for each in inputs]
    outputs = compute(*leaves)
    return [*(each.detach() for each in outputs), *torch.autograd.grad(list(outputs), leaves, list(gradients))]


def load_engine() -> Any:
    """Transformer Engine's operators, with the libraries that they need."""
    share_cudnn()
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch

    return transformer_engine_torch


def differentiated(
    load: Callable[[], Callable[..., Results]], inputs: Sequence[Tensor], gradients: Results
) -> Callable[[], Callable[[], Results]]:
    """Each library has copies of the inputs, because some write their gradients over them."""

    def start() -> Callable[[], Results]:
        compute, own = load(), ([each.clone() for each in inputs], [each.clone() for each in gradients])
        return lambda: with_gradients(compute, *own)

    return start


def in_fp32(compute: Callable[..., Results], inputs: Sequence[Tensor], gradients: Results) -> Callable[[], Results]:
    return lambda: with_gradients(compute, [each.float() for each in inputs], [each.float() for each in gradients])


class _EngineNorm(torch.autograd.Function):
    """Transformer Engine's kernels; its module holds the weight itself."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, extension: Any) -> Tensor:
        normed, _, inverse = extension.rmsnorm_fwd(
            hidden, weight, 1e-5, None, None, extension.DType.kBFloat16, 0, False
        )
        ctx.save_for_backward(hidden, weight, inverse)
        ctx.extension = extension
        result: Tensor = normed
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight, inverse = ctx.saved_tensors
        grad_hidden, grad_weight = ctx.extension.rmsnorm_bwd(gradient, hidden, inverse, weight, 0, False)
        return grad_hidden, grad_weight, None


def norm_task() -> Task:
    """The residual add and the RMSNorm behind it, which the harness compiles into one kernel."""
    inputs = randn(TOKENS, DIM), randn(TOKENS, DIM, seed=1), randn(DIM, seed=2)
    gradients = randn(TOKENS, DIM, seed=3), randn(TOKENS, DIM, seed=4)

    def plain(hidden: Tensor, change: Tensor, weight: Tensor) -> Results:
        total = hidden + change
        return total, F.rms_norm(total, (DIM,), weight, 1e-5)

    def liger() -> Callable[..., Results]:
        from liger_kernel.transformers.functional import liger_fused_add_rms_norm  # type: ignore[import-not-found]

        def compute(hidden: Tensor, change: Tensor, weight: Tensor) -> Results:
            normed, total = liger_fused_add_rms_norm(hidden, change, weight, 1e-5, in_place=False)
            return total, normed

        return compute

    def engine() -> Callable[..., Results]:
        extension = load_engine()

        def compute(hidden: Tensor, change: Tensor, weight: Tensor) -> Results:
            total = hidden + change
            return total, _EngineNorm.apply(total, weight, extension)  # type: ignore[no-untyped-call]

        return compute

    starts = {HARNESS: lambda: torch.compile(plain), TORCH: lambda: plain, ENGINE: engine, LIGER: liger}
    return Task(
        "residual add and RMSNorm",
        [Kernel(library, differentiated(load, inputs, gradients)) for library, load in starts.items()],
        in_fp32(plain, inputs, gradients),
    )


def swiglu_task() -> Task:
    inputs, gradients = (randn(TOKENS, WIDE), randn(TOKENS, WIDE, seed=1)), (randn(TOKENS, WIDE, seed=2),)

    def plain(gate: Tensor, up: Tensor) -> Results:
        return (F.silu(gate) * up,)

    def liger() -> Callable[..., Results]:
        from liger_kernel.transformers.functional import liger_swiglu

        return lambda gate, up: (liger_swiglu(gate, up),)

    starts = {HARNESS: lambda: torch.compile(plain), TORCH: lambda: plain, LIGER: liger}
    return Task(
        "SwiGLU, bf16",
        [Kernel(library, differentiated(load, inputs, gradients)) for library, load in starts.items()],
        in_fp32(plain, inputs, gradients),
    )


def rope_task() -> Task:
    """From a fused QKV output to rotated queries and keys and to values, and back."""
    widths = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    fused = randn(TOKENS, sum(widths))
    query, key, value = (randn(TOKENS, width, seed=number) for number, width in enumerate(widths, start=1))
    gradients = [query, key, value]
    angles = torch.outer(
        torch.arange(LENGTH, device=DEVICE).float(),
        10_000.0 ** -(torch.arange(0, HEAD_DIM, 2, device=DEVICE) / HEAD_DIM),
    )
    cos, sin = angles.cos(), angles.sin()

    def heads_of(flat: Tensor) -> Tensor:
        return flat.view(-1, LENGTH, flat.shape[1] // HEAD_DIM, HEAD_DIM)

    def plain(qkv: Tensor) -> Results:
        query, key, value = qkv.split_with_sizes(widths, dim=1)
        rotated = (apply_rope(heads_of(each.contiguous()), cos, sin).flatten(2).flatten(0, 1) for each in (query, key))
        return *rotated, value.contiguous()

    def own() -> Callable[[], Results]:
        from harness.kernels.rope import split_and_rotate, unrotate_and_join

        return lambda: [
            *split_and_rotate(fused, cos, sin, widths=widths),
            unrotate_and_join(query, key, value, cos, sin),
        ]

    def liger() -> Callable[..., Results]:
        from liger_kernel.transformers.functional import liger_rope

        table = [torch.cat([each, each], dim=-1).to(torch.bfloat16)[None] for each in (cos, sin)]

        def compute(qkv: Tensor) -> Results:
            query, key, value = qkv.split_with_sizes(widths, dim=1)
            heads = (heads_of(each).transpose(1, 2) for each in (query, key))
            rotated = (each.transpose(1, 2).flatten(2).flatten(0, 1) for each in liger_rope(*heads, *table))
            return *rotated, value.contiguous()

        return compute

    def engine() -> Callable[..., Results]:
        from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

        table = torch.cat([angles, angles], dim=-1)[:, None, None, :].contiguous()

        def compute(qkv: Tensor) -> Results:
            query, key, value = qkv.split_with_sizes(widths, dim=1)
            rotated = (
                apply_rotary_pos_emb(heads_of(each.contiguous()), table, tensor_format="bshd", fused=True)
                for each in (query, key)
            )
            return *(each.flatten(2).flatten(0, 1) for each in rotated), value.contiguous()

        return compute

    starts = {f"{TORCH}, compiled": lambda: torch.compile(plain), ENGINE: engine, LIGER: liger}
    return Task(
        "QKV split and RoPE",
        [
            Kernel(HARNESS, own),
            *(Kernel(library, differentiated(load, [fused], gradients)) for library, load in starts.items()),
        ],
        in_fp32(plain, [fused], gradients),
    )


def loss_task() -> Task:
    """The head's GEMM and the cross-entropy: the loss, and the gradients of hidden states and head."""
    hidden, weight = randn(TOKENS, DIM), randn(VOCABULARY, DIM, scale=DIM**-0.5, seed=1)
    targets = torch.randint(VOCABULARY, (TOKENS,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(2))
    inputs, gradients = (hidden, weight), (torch.ones((), device=DEVICE),)

    def plain(hidden: Tensor, weight: Tensor) -> Results:
        return (F.cross_entropy(F.linear(hidden, weight).float(), targets),)

    def own() -> Callable[..., Results]:
        options = LossOptions(z_loss=0.0, output_multiplier=1.0, chunk_tokens=4096, own_kernels=True)
        seed = torch.full((), 1 / TOKENS, device=DEVICE)
        return lambda hidden, weight: (chunked_cross_entropy(hidden, weight, targets, seed, options=options).objective,)

    def liger() -> Callable[..., Results]:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda hidden, weight: (
            liger_fused_linear_cross_entropy(hidden, weight, targets, accum_dtype=torch.float32),
        )

    def reference() -> Results:
        """In pieces: all logits at once would be 4 GiB, twice."""
        leaves = [each.float().requires_grad_() for each in inputs]
        total = torch.zeros((), device=DEVICE)
        for rows in torch.split(torch.arange(TOKENS, device=DEVICE), 4096):
            loss = F.cross_entropy(F.linear(leaves[0][rows], leaves[1]), targets[rows], reduction="sum") / TOKENS
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return [total, *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    starts = {HARNESS: own, f"{TORCH}, compiled": lambda: torch.compile(plain), LIGER: liger}
    return Task(
        "head and cross-entropy",
        [Kernel(library, differentiated(load, inputs, gradients)) for library, load in starts.items()],
        reference,
    )


def optimizer_task() -> Task:
    """Gradient norm, clipping and AdamW in fp32; the results are some of the weights after the first update."""
    per_layer = [
        (DIM, DIM),
        *[(KV_HEADS * HEAD_DIM, DIM)] * 2,
        (DIM, DIM),
        *[(WIDE, DIM)] * 2,
        (DIM, WIDE),
        (DIM,),
        (DIM,),
    ]
    shapes = [(VOCABULARY, DIM), *per_layer * NUM_LAYERS, (DIM,)]
    gradients = [randn(*shape, scale=1e-4, seed=number, dtype=torch.float32) for number, shape in enumerate(shapes)]
    options = AdamWOptions(lr=torch.tensor(1e-4, device=DEVICE), beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)

    def weights() -> list[Tensor]:
        return [torch.ones(shape, device=DEVICE) for shape in shapes]

    def sample(parameters: Sequence[Tensor]) -> Results:
        return [parameters[0][:1000], parameters[-1]]

    def own() -> Callable[[], Results]:
        from harness.kernels.grad_norm import sum_squares

        shards = [
            ParameterShard(
                parameter, gradient, torch.zeros_like(gradient), torch.zeros_like(gradient), gradient.new_zeros(())
            )
            for parameter, gradient in zip(weights(), gradients, strict=True)
        ]
        skip = torch.zeros((), device=DEVICE)

        def update() -> Results:
            norm = sum_squares(gradients).sum().sqrt()
            step_triton(shards, options, skip_mask=skip, divisor=norm.clamp(max=1.0))
            return sample([shard.parameter for shard in shards])

        return update

    def fused() -> Callable[[], Results]:
        parameters = [nn.Parameter(each) for each in weights()]
        optimizer = torch.optim.AdamW(
            parameters,
            lr=float(options.lr),
            betas=(options.beta1, options.beta2),
            weight_decay=options.weight_decay,
            fused=True,
        )
        return lambda: sample(clip_and_step(parameters, optimizer))

    def engine() -> Callable[[], Results]:
        from transformer_engine.pytorch.optimizers import FusedAdam

        parameters = [nn.Parameter(each) for each in weights()]
        optimizer = FusedAdam(
            parameters, lr=float(options.lr), betas=(options.beta1, options.beta2), weight_decay=options.weight_decay
        )
        return lambda: sample(clip_and_step(parameters, optimizer))

    def clip_and_step(parameters: list[nn.Parameter], optimizer: Any) -> Sequence[Tensor]:
        """As a trainer does it: the gradients are multiplied in place, here by 1, so that every update has the same."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(parameters, 1e9, foreach=True)
        optimizer.step()
        return [parameter.detach() for parameter in parameters]

    def reference() -> Results:
        """After one update, whose bias-corrected moments are the gradient."""
        shares = [gradient / (gradient.abs() + options.eps) for gradient in (gradients[0][:1000], gradients[-1])]
        return [1 - options.lr * options.weight_decay - options.lr * share for share in shares]

    return Task(
        "gradient norm, clipping, AdamW (0.44B, fp32)",
        [Kernel(HARNESS, own), Kernel(f"{TORCH}, fused", fused), Kernel(ENGINE, engine)],
        reference,
    )


def quantize_task() -> Task:
    """To E4M3 by rows and transposed, with a scale that fits the tensor."""
    values = randn(TOKENS, DIM)

    def own() -> Callable[[], Results]:
        from harness.kernels.fp8_quantize import quantize_matrix

        last_scale = torch.zeros((), device=DEVICE)

        def quantize() -> Results:
            tiles = quantize_matrix(values, last_scale, dtype=FORWARD, step=SCALE_STEPS[FORWARD])
            return tiles.rows, tiles.columns, tiles.scale_inv

        return quantize

    def engine() -> Callable[[], Results]:
        extension = load_engine()
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

        quantizer = Float8CurrentScalingQuantizer(extension.DType.kFloat8E4M3, torch.device(DEVICE))
        quantizer.internal = True

        def quantize() -> Results:
            result: Any = extension.quantize(values, quantizer)
            return result._data.view(FORWARD), result._transpose.view(FORWARD), result._scale_inv

        return quantize

    def torchao() -> Callable[[], Results]:
        from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated  # type: ignore[import-not-found]

        @torch.compile
        def quantize(values: Tensor) -> Results:
            scale = tensor_to_scale(values, FORWARD)
            rows = to_fp8_saturated(values.float() * scale, FORWARD)
            return rows, rows.t().contiguous(), scale.reciprocal()

        return lambda: quantize(values)

    return Task(
        "quantization of the MLP's input to fp8, both layouts",
        [Kernel(HARNESS, dequantized(own)), Kernel(ENGINE, dequantized(engine)), Kernel(TORCHAO, dequantized(torchao))],
        lambda: [values.float(), values.float().T],
    )


def fp8_swiglu_task() -> Task:
    """The product by rows and transposed in E4M3, and the gradients of gate and up in both layouts in E5M2."""
    gate, up, gradient = (randn(TOKENS, WIDE, seed=seed) for seed in range(3))

    def own() -> Callable[[], Results]:
        from harness.kernels.swiglu import quantize_swiglu, quantize_swiglu_grads

        scale, scales = torch.zeros((), device=DEVICE), [torch.zeros((), device=DEVICE) for _ in range(2)]

        def quantize() -> Results:
            product = quantize_swiglu(gate, up, scale, dtype=FORWARD, step=SCALE_STEPS[FORWARD])
            *both, columns = quantize_swiglu_grads(
                *(gradient, gate, up, scales, product.scale_inv),
                dtype=GRADIENT,
                product_dtype=FORWARD,
                step=SCALE_STEPS[GRADIENT],
            )
            grads = [each for tiles in both for each in (tiles.rows, tiles.columns, tiles.scale_inv)]
            return product.rows, columns, product.scale_inv, *grads

        return quantize

    def engine() -> Callable[[], Results]:
        extension = load_engine()
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

        joined = torch.cat([gate, up], dim=1)
        quantizers = []
        for dtype in (extension.DType.kFloat8E4M3, extension.DType.kFloat8E5M2):
            quantizers.append(Float8CurrentScalingQuantizer(dtype, torch.device(DEVICE)))
            quantizers[-1].internal = True

        def quantize() -> Results:
            product: Any = extension.swiglu(joined, quantizers[0])
            grads: Any = extension.dswiglu(gradient, joined, quantizers[1])
            rows, columns, scale_inv = grads._data.view(GRADIENT), grads._transpose.view(GRADIENT), grads._scale_inv
            return (
                *(product._data.view(FORWARD), product._transpose.view(FORWARD), product._scale_inv),
                *(rows[:, :WIDE], columns[:WIDE], scale_inv, rows[:, WIDE:], columns[WIDE:], scale_inv),
            )

        return quantize

    def reference() -> Results:
        product, grad_gate, grad_up = with_gradients(
            lambda gate, up: (F.silu(gate) * up,), [gate.float(), up.float()], [gradient.float()]
        )
        return [layout for each in (product, grad_gate, grad_up) for layout in (each, each.T)]

    return Task(
        "SwiGLU and its gradients to fp8, both layouts",
        [Kernel(HARNESS, dequantized(own)), Kernel(ENGINE, dequantized(engine))],
        reference,
    )


def chunk_cat_task() -> Task:
    """A block's gradients into the input of FSDP's reduce-scatter over 8 ranks, in fp32."""
    shapes = [
        (DIM, DIM),
        *[(KV_HEADS * HEAD_DIM, DIM)] * 2,
        (DIM, DIM),
        *[(WIDE, DIM)] * 2,
        (DIM, WIDE),
        (DIM,),
        (DIM,),
    ]
    gradients, num_ranks = [randn(*shape, seed=number) for number, shape in enumerate(shapes)], 8
    widths = [each.numel() // num_ranks for each in gradients]
    out = torch.empty(num_ranks, sum(widths), device=DEVICE)

    def own() -> Callable[[], Results]:
        from harness.kernels.chunk_cat import chunk_cat

        def copy() -> Results:
            chunk_cat(gradients, widths, out)
            return (out,)

        return copy

    def plain() -> Callable[[], Results]:
        return lambda: (torch._chunk_cat(gradients, dim=0, num_chunks=num_ranks, out=out),)

    def reference() -> Results:
        return (torch.cat([each.float().view(num_ranks, -1) for each in gradients], dim=1),)

    return Task("FSDP's copy before the reduce-scatter", [Kernel(HARNESS, own), Kernel(TORCH, plain)], reference)


TASKS: dict[str, Callable[[], Task]] = {
    "norm": norm_task,
    "swiglu": swiglu_task,
    "rope": rope_task,
    "loss": loss_task,
    "optimizer": optimizer_task,
    "quantize": quantize_task,
    "fp8_swiglu": fp8_swiglu_task,
    "chunk_cat": chunk_cat_task,
}
WARMUP_CALLS = 3


@final
@dataclass(frozen=True, slots=True)
class _Quantized:
    """Results that are compared after they were multiplied by 1 / their scales."""

    run: Callable[[], Results]

    def __call__(self) -> Results:
        return self.run()


def dequantized(start: Callable[[], Callable[[], Results]]) -> Callable[[], Callable[[], Results]]:
    """Marks a kernel whose results are triples: rows, columns, and 1 / their scale."""
    return lambda: _Quantized(start())


def values_of(run: Callable[[], Results], results: Results) -> Iterator[Tensor]:
    if not isinstance(run, _Quantized):
        yield from results
        return
    for rows, columns, scale_inv in zip(*[iter(results)] * 3, strict=True):
        yield from (rows.float() * scale_inv, columns.float() * scale_inv)


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference)


class Started(NamedTuple):
    """A kernel that gave its first results."""

    run: Callable[[], Results]
    error: float


def start(task: Task) -> dict[str, Started | str]:
    """The kernels by library; a message for one that could not run."""
    started: dict[str, Started | str] = {}
    expected = task.reference()
    for kernel in task.kernels:
        try:
            run = kernel.start()
            found = values_of(run, [each.detach().clone() for each in run()])
            error = max(relative_error(*pair) for pair in zip(found, expected, strict=True))
        except (ImportError, AttributeError, TypeError, RuntimeError) as failure:
            started[kernel.library] = (str(failure) or type(failure).__name__).splitlines()[0][:90]
        else:
            started[kernel.library] = Started(run, error)
    return started


def measure(task: Task) -> dict[str, Timing | str]:
    """Timings by library; a message for one that could not run."""
    started = start(task)
    rows: dict[str, Timing | str] = {library: each for library, each in started.items() if isinstance(each, str)}
    runs = {library: each.run for library, each in started.items() if isinstance(each, Started)}
    errors = {library: each.error for library, each in started.items() if isinstance(each, Started)}
    peaks = {}
    for library, run in runs.items():
        for _ in range(WARMUP_CALLS):
            run()
        peaks[library] = _peak_gib(run)
    times: dict[str, list[float]] = {library: [] for library in runs}
    repeats = {library: max(3, round(BLOCK_MS / _time(run, 3))) for library, run in runs.items()}
    order = list(runs)
    for number in range(ROUNDS):
        for index in round_order(len(order), number):
            times[order[index]].append(_time(runs[order[index]], repeats[order[index]]))
    for library, measured in times.items():
        median = statistics.median(measured)
        rows[library] = Timing(median, (max(measured) - min(measured)) / median, errors[library], peaks[library])
    return {kernel.library: rows[kernel.library] for kernel in task.kernels}


def _peak_gib(run: Callable[[], Results]) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _time(run: Callable[[], Results], repeats: int) -> float:
    """Mean milliseconds of a call; a first one is not timed."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    run()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / repeats


def heat_up() -> None:
    values, until = randn(8192, 8192), time.monotonic() + HEAT_UP_S
    while time.monotonic() < until:
        values @ values
        torch.cuda.synchronize()


def render(what: str, rows: dict[str, Timing | str]) -> str:
    lines = []
    for library, row in rows.items():
        if isinstance(row, str):
            lines.append(f"| {what} | {library} | {row} | | | |")
        else:
            lines.append(
                f"| {what} | {library} | {row.ms:.3f} | {row.spread:.0%} | {row.error:.1e} | {row.peak_gib:.2f} |"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gpu.kernel_peers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--liger", type=Path, metavar="DIR", help="a directory that holds the package")
    parser.add_argument("--torchao", type=Path, metavar="DIR", help="a directory that holds the package")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("kernel_peers: torch finds no CUDA device", file=sys.stderr)
        return 2
    sys.path += [str(path.resolve()) for path in (options.liger, options.torchao) if path is not None]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    heat_up()
    print("| task | kernels | ms | spread | error | peak GiB |\n|---|---|---:|---:|---:|---:|")
    for name in options.only:
        task = TASKS[name]()
        print(render(task.what, measure(task)), flush=True)
        del task
        release_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main())
