"""Attention kernels on a GPU: forward and backward time of one layer, causal and with documents.

    python -m tests.bench.attention [--lengths 4096 32768 131072]

Heads are those of the 1b model: 16 for queries, 8 for keys and values, of 128, in bf16. 4,096 tokens come in 8
sequences, longer ones alone. Documents are 512 tokens long on average, with geometric lengths. Times are medians of
CUDA events; the gradient is differentiated as in training. "same bits" says whether repeated backward passes agree.
The mask of `flex_attention` is built once here, and its time is below the table: a step builds it once for all layers.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.model.attention_layer import attend_blocks
from harness.model.attention_mask import BlockSparseMask, build_block_mask, causal_block_mask, document_mask
from harness.precision.attention import fast_attention
from harness.precision.te_attention import te_attention, te_attention_obstacle

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
TOKENS_AT_4K = 8 * 4096
MEAN_DOCUMENT = 512
DENSE_UP_TO = 4096
SCALE = HEAD_DIM**-0.5
NUM_REPEATS, LONG_REPEATS, LONG = 10, 3, 65536
"""Timed repeats, and those of sequences from `LONG` tokens on. One more, from an idle device, is not counted."""
COMPARED = 4
"""Backward passes, before the timed ones, whose bits are compared."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Query, key and value [B, S, heads, head_dim] -> attended."""


class Times(NamedTuple):
    forward_ms: float
    backward_ms: float
    has_same_bits: bool


def by_sdpa(mask: Tensor | None = None) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=SCALE, enable_gqa=True
        )
        return attended.transpose(1, 2)

    return attend


def by_flex(mask: BlockSparseMask) -> Attend:
    compiled = torch.compile(attend_blocks, fullgraph=True, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        attended = compiled(query, key, value, mask, SCALE)
        return attended.transpose(1, 2)

    return attend


def by_varlen(documents: Tensor) -> Attend:
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = starts.flatten().nonzero().flatten().to(torch.int32)
    ends = torch.cat([places, places.new_tensor([documents.numel()])])
    longest = int(ends.diff().max())
    parameters: Any = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    options |= {"enable_gqa": True} if "enable_gqa" in parameters else {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat_query, flat_key, flat_value = (tensor.flatten(0, 1) for tensor in (query, key, value))
        attended: Any = varlen_attn(
            flat_query, flat_key, flat_value, ends, ends, longest, longest, scale=SCALE, **options
        )
        return attended.view(query.shape)  # type: ignore[no-any-return]

    return attend


def by_te(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return te_attention(query, key, value, SCALE)


@contextmanager
def flash_deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_documents(num_rows: int, length: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(0)
    starts = torch.rand(num_rows, length, device="cuda", generator=generator) < 1 / MEAN_DOCUMENT
    return starts.cumsum(dim=1, dtype=torch.int32)


def measure(attend: Attend, num_rows: int, length: int) -> Times:
    generator = torch.Generator(device="cuda").manual_seed(1)
    shapes = [(num_rows, length, heads, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS)]
    query, key, value, gradient = (
        torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16) for shape in shapes
    )
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    first: tuple[Tensor, ...] | None = None
    has_same_bits = True
    for _ in range(COMPARED):
        grads = torch.autograd.grad(attend(query, key, value), leaves, gradient)
        first = first or grads
        has_same_bits = has_same_bits and all(torch.equal(*pair) for pair in zip(first, grads, strict=True))
    marks = []
    for _ in range(1 + (LONG_REPEATS if length >= LONG else NUM_REPEATS)):
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
        begin.record()
        attended = attend(query, key, value)
        middle.record()
        torch.autograd.grad(attended, leaves, gradient)
        end.record()
        marks.append((begin, middle, end))
    torch.cuda.synchronize()
    return Times(
        statistics.median(begin.elapsed_time(middle) for begin, middle, _ in marks[1:]),
        statistics.median(middle.elapsed_time(end) for _, middle, end in marks[1:]),
        has_same_bits,
    )


def kernels(num_rows: int, length: int) -> Iterator[tuple[str, Callable[[], Times]]]:
    """Names and measurements."""
    documents = make_documents(num_rows, length)

    def timed(attend: Attend, context: Callable[[], Any] = fast_attention) -> Times:
        with context():
            return measure(attend, num_rows, length)

    yield "causal: SDPA, cuDNN", lambda: timed(by_sdpa())
    if obstacle := te_attention_obstacle(HEAD_DIM):
        print(f"no deterministic cuDNN: {obstacle}", file=sys.stderr)
    else:
        yield "causal: Transformer Engine, deterministic", lambda: timed(by_te)
    yield "causal: `flex_attention`", lambda: timed(by_flex(causal_block_mask(length, documents.device)))
    yield "causal: SDPA, FlashAttention-2, deterministic", lambda: timed(by_sdpa(), flash_deterministic)
    yield "documents: `flex_attention`", lambda: timed(by_flex(build_block_mask(documents)))
    yield "documents: `varlen_attn`", lambda: timed(by_varlen(documents))
    if length <= DENSE_UP_TO:
        allowed = document_mask(documents) & torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
        yield "documents: SDPA, dense mask", lambda: timed(by_sdpa(allowed))


def row(name: str, num_rows: int, length: int, run: Callable[[], Times]) -> str:
    cells = [f"{num_rows} x {length:,}", name]
    try:
        times = run()
    except (RuntimeError, ImportError, NotImplementedError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"| {' | '.join([*cells, reason[:90].replace('|', '/'), '', '', '', ''])} |"
    total_ms = times.forward_ms + times.backward_ms
    cells += [f"{ms:.2f}" for ms in (times.forward_ms, times.backward_ms, total_ms)]
    cells += [f"{num_rows * length / total_ms * 1e3:,.0f}", "yes" if times.has_same_bits else "no"]
    return f"| {' | '.join(cells)} |"


def mask_ms(num_rows: int, length: int) -> float:
    """Time on the device to build a block-sparse mask."""
    documents = make_documents(num_rows, length)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    build_block_mask(documents)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(NUM_REPEATS):
        build_block_mask(documents)
    end.record()
    torch.cuda.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return elapsed / NUM_REPEATS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768, 131072], help="tokens of a sequence")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.bench.attention: torch finds no CUDA device", file=sys.stderr)
        return 2
    begun_s = time.perf_counter()
    te_attention_obstacle(HEAD_DIM)  # loads Transformer Engine before torch loads cuDNN
    heads = f"{NUM_HEADS}/{NUM_KV_HEADS} heads of {HEAD_DIM}"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {heads}, bf16\n")
    print("| tokens | kernel | forward ms | backward ms | sum ms | tokens/s | same bits |")
    print("|---|---|---:|---:|---:|---:|---|", flush=True)
    shapes = [(max(1, TOKENS_AT_4K // length) if length <= DENSE_UP_TO else 1, length) for length in options.lengths]
    for num_rows, length in shapes:
        for name, run in kernels(num_rows, length):
            print(row(name, num_rows, length, run), flush=True)
            torch.cuda.empty_cache()
    built = ", ".join(f"{num_rows} x {length:,}: {mask_ms(num_rows, length):.3f} ms" for num_rows, length in shapes)
    print(f"\nblock-sparse mask of a batch, once for all layers: {built}")
    print(f"{time.perf_counter() - begun_s:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
