"""Multi-tensor kernels against torch: AdamW, sums and chunk_cat, over sizes that do not fill whole pieces."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from harness.distributed.copy_sums import CopySums, request_sums
from harness.distributed.torch_private import chunk_cat
from harness.optim.adamw import AdamWOptions, ParameterShard, step_fused, step_triton
from harness.optim.stochastic_rounding import make_noise
from harness.sentinel.device.local_sums import (
    StateSums,
    square_sums,
    square_sums_in_one_launch,
    state_sums,
    state_sums_in_one_pass,
)
from tests.gpu.kernel_device import DEVICE, IS_INTERPRETED, MARKS

pytestmark = MARKS

Shapes = list[tuple[int, ...]]

ODD: Shapes = [(3,), (1024,), (7, 5), (0, 4), (37, 133), (64, 20)]
EVEN: Shapes = [(8,), (1024,), (0, 4), (40, 128), (64, 20)]
"""ODD sizes do not allow vectorized loads, EVEN sizes do; both have a tensor of several pieces and an empty one."""
if not IS_INTERPRETED:
    ODD, EVEN = [*ODD, (130, 133), (64, 80), (1000, 333)], [*EVEN, (136, 128), (64, 80), (4096, 512)]
NUM_LARGE = 20_001 if IS_INTERPRETED else 5_000_001
"""Values of a tensor of many pieces."""


def build_shards(shapes: Shapes, num_steps: float = 3.0) -> list[ParameterShard]:
    generator = torch.Generator(device=DEVICE).manual_seed(0)

    def random_values(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    return [
        ParameterShard(
            random_values(shape),
            random_values(shape),
            random_values(shape),
            random_values(shape).square(),
            scalar(num_steps),
        )
        for shape in shapes
    ]


def scalar(value: float) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def adamw_options() -> AdamWOptions:
    return AdamWOptions(scalar(0.01), weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


@pytest.mark.parametrize("shapes", [ODD, EVEN])
def test_adamw_matches_torch_and_keeps_the_gradient(shapes: Shapes) -> None:
    ours, theirs = build_shards(shapes), build_shards(shapes)
    for _ in range(3):
        step_triton(ours, adamw_options(), skip_mask=scalar(0.0), divisor=scalar(4.0))
        for shard in theirs:
            gradient = shard.gradient.clone()
            step_fused([shard], adamw_options(), skip_mask=scalar(0.0), divisor=scalar(4.0))
            shard.gradient.copy_(gradient)  # torch writes the divided gradient back
    for own, their, initial in zip(ours, theirs, build_shards(shapes), strict=True):
        torch.testing.assert_close(tuple(own), tuple(their), rtol=1e-5, atol=1e-6)
        assert own.step == 6
        assert torch.equal(own.gradient, initial.gradient)
        assert not torch.equal(own.parameter, initial.parameter) or not own.parameter.numel()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_update_changes_no_bit(bad: float) -> None:
    ours, before = build_shards(ODD, 0.0), build_shards(ODD, 0.0)
    for shard in ours:
        shard.gradient.fill_(bad)
    step_triton(ours, adamw_options(), skip_mask=scalar(1.0), divisor=scalar(bad))
    for own, old in zip(ours, before, strict=True):
        kept = zip(own._replace(gradient=own.step), old._replace(gradient=old.step), strict=True)
        assert all(torch.equal(now, then) for now, then in kept)


def with_bf16_moments(shards: list[ParameterShard]) -> list[ParameterShard]:
    return [shard._replace(first=shard.first.bfloat16(), second=shard.second.bfloat16()) for shard in shards]


@pytest.mark.parametrize("shapes", [ODD, EVEN])
def test_adamw_with_bf16_moments_matches_torch(shapes: Shapes) -> None:
    """The same noise in both. A last bit of fp32 that differs (fused multiply-add) seldom changes how it is rounded."""
    ours, theirs = with_bf16_moments(build_shards(shapes)), with_bf16_moments(build_shards(shapes))
    names, begins = [str(number) for number in range(len(shapes))], [1000 * number for number in range(len(shapes))]
    noise = make_noise(7, names, begins, torch.device(DEVICE))
    for _ in range(3):
        step_triton(ours, adamw_options(), skip_mask=scalar(0.0), divisor=scalar(4.0), noise=noise)
        sums = step_fused(theirs, adamw_options(), skip_mask=scalar(0.0), divisor=scalar(4.0), noise=noise)
    num_equal = num_values = 0
    for own, their in zip(ours, theirs, strict=True):
        is_close = torch.isclose(own.parameter, their.parameter, rtol=1e-4, atol=1e-5)
        assert (~is_close).sum() <= 1e-4 * is_close.numel(), "a moment that is rounded otherwise moves its weight"
        torch.testing.assert_close(own.parameter, their.parameter, rtol=1e-2, atol=1e-3)
        for now, then in ((own.first, their.first), (own.second, their.second)):
            assert now.dtype is torch.bfloat16
            num_equal, num_values = num_equal + int((now == then).sum()), num_values + now.numel()
            torch.testing.assert_close(now.float(), then.float(), rtol=0.03, atol=1e-3)
        assert own.step == 6
    print(f"bf16 moments: {num_equal} of {num_values} equal to plain torch")
    assert num_equal > 0.99 * num_values
    again = step_triton(ours, adamw_options(), skip_mask=scalar(1.0), divisor=scalar(4.0), noise=noise)
    assert again.square.item() == pytest.approx(sums.square.item(), rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.0])
def test_a_skipped_update_with_bf16_moments_changes_no_bit(bad: float) -> None:
    ours, before = with_bf16_moments(build_shards(ODD, 0.0)), with_bf16_moments(build_shards(ODD, 0.0))
    noise = make_noise(7, [str(number) for number in range(len(ODD))], [0] * len(ODD), torch.device(DEVICE))
    for shard in ours:
        shard.gradient.fill_(bad)
    step_triton(ours, adamw_options(), skip_mask=scalar(1.0), divisor=scalar(bad), noise=noise)
    for own, old in zip(ours, before, strict=True):
        kept = zip(own._replace(gradient=own.step), old._replace(gradient=old.step), strict=True)
        assert all(torch.equal(now, then) for now, then in kept)


def test_state_sums_of_bf16_moments_match_torch() -> None:
    weights, _, firsts, seconds, _ = (
        list(column) for column in zip(*with_bf16_moments(build_shards(ODD)), strict=True)
    )
    one = state_sums_in_one_pass(weights, firsts, seconds, scalar(0.2), eps=1e-8)
    exact = exact_sums(weights, firsts, seconds, correction=0.2, eps=1e-8)
    for name, own, expected in zip(StateSums._fields, one, exact, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=0.0, msg=name)


def exact_sums(
    weights: list[Tensor], firsts: list[Tensor], seconds: list[Tensor], *, correction: float, eps: float
) -> StateSums:
    rows = []
    for weight, first, second in zip(weights, firsts, seconds, strict=True):
        moment = second.double()
        direction = first.double() / ((moment / scalar(correction).double()).sqrt() + eps)
        rows.append([weight.double().square().sum(), moment.sum(), moment.square().sum(), direction.square().sum()])
    return StateSums(*torch.tensor(rows, dtype=torch.float64, device=DEVICE).unbind(dim=1))


@pytest.mark.parametrize("is_finite", [True, False])
def test_state_sums_match_torch(is_finite: bool) -> None:
    half, none, mean, square = (torch.full((NUM_LARGE,), value, device=DEVICE) for value in (0.5, 0.0, -2e-3, 1e-6))
    large = ParameterShard(half, none, mean, square, scalar(1.0))
    every = [*build_shards(ODD if is_finite else EVEN), large]
    if not is_finite:
        every[1].parameter[-1], every[3].first[0, 0], every[4].second[0, 0] = math.nan, math.inf, math.nan
    weights, _, firsts, seconds, _ = (list(column) for column in zip(*every, strict=True))
    one = state_sums_in_one_pass(weights, firsts, seconds, scalar(0.2), eps=1e-8)
    exact = exact_sums(weights, firsts, seconds, correction=0.2, eps=1e-8)
    for name, own, expected in zip(StateSums._fields, one, exact, strict=True):
        torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=0.0, equal_nan=True, msg=name)
    if not IS_INTERPRETED:  # torch's sums on a CPU are less precise
        for own, theirs in zip(one, state_sums(weights, firsts, seconds, scalar(0.2), eps=1e-8), strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-4, atol=0.0, equal_nan=True)
    assert one.weight_squares[-1].item() == pytest.approx(0.25 * NUM_LARGE)
    nonfinite = (one.weight_squares.isnan().sum(), one.seconds.isnan().sum(), one.directions.isinf().sum())
    assert [count.item() for count in nonfinite] == ([0, 0, 0] if is_finite else [1, 1, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_chunks", [1, 3, 8] if IS_INTERPRETED else [1, 2, 3, 8])
@pytest.mark.parametrize("shapes", [[shape for shape in shapes if 0 not in shape] for shapes in (ODD, EVEN)])
def test_chunk_cat_matches_torch(shapes: Shapes, num_chunks: int, dtype: torch.dtype) -> None:
    chunk_cat.install("CPU" if IS_INTERPRETED else "CUDA")
    every = [shard.gradient.to(dtype) for shard in build_shards(shapes)]
    width = sum(-(-each.shape[0] // num_chunks) * each[:1].numel() for each in every)
    own, theirs = torch.full((num_chunks, width), 9.0, device=DEVICE), torch.empty(num_chunks, width, device=DEVICE)
    torch.ops.fsdp.chunk_cat(every, 0, num_chunks, out=own)
    torch._chunk_cat(every, 0, num_chunks, out=theirs)
    assert torch.equal(own, theirs)


def copy_into(
    out: Tensor, gradients: list[Tensor], num_chunks: int, sums: CopySums | None = None, requested: Tensor | None = None
) -> bool:
    """Copy with the operator of FSDP; returns whether it has added the squares to `sums`."""
    chunk_cat.install("CPU" if IS_INTERPRETED else "CUDA")
    request = None if sums is None else request_sums(out if requested is None else requested, sums)
    torch.ops.fsdp.chunk_cat(gradients, 0, num_chunks, out=out.view(num_chunks, -1))
    return request is not None and request.is_answered


def take(sums: CopySums) -> Tensor:
    taken = sums.take()
    assert taken is not None
    return taken


def padded_count(gradients: list[Tensor], num_chunks: int) -> int:
    return num_chunks * sum(-(-each.shape[0] // num_chunks) * each[:1].numel() for each in gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("shapes", [[shape for shape in shapes if 0 not in shape] for shapes in (ODD, EVEN)])
def test_the_copy_adds_up_squares(shapes: Shapes, num_chunks: int, dtype: torch.dtype) -> None:
    gradients = [shard.gradient.to(dtype) for shard in build_shards(shapes)]
    plain, own = (torch.full((padded_count(gradients, num_chunks),), 9.0, device=DEVICE) for _ in range(2))
    assert not copy_into(plain, gradients, num_chunks)
    sums = CopySums()
    assert sums.take() is None
    assert copy_into(own, gradients, num_chunks, sums)
    assert torch.equal(own, plain)
    once = take(sums)
    exact = sum(each.double().square().sum() for each in gradients)
    torch.testing.assert_close(once.double(), exact, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(once, torch.linalg.vector_norm(own).square(), rtol=1e-5, atol=0.0)
    for _ in range(2):
        assert copy_into(own, gradients, num_chunks, sums)
    assert torch.equal(take(sums), 2 * once), "sums of two copies, added in the same order"
    assert torch.equal(take(sums), torch.zeros_like(once)), "taken"
    assert not copy_into(own, gradients, num_chunks)
    assert not copy_into(own, gradients, num_chunks, sums, requested=plain), "a copy into another buffer"
    assert torch.equal(take(sums), torch.zeros_like(once))


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # in the interpreter
@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (torch.bfloat16, math.nan),
        (torch.bfloat16, -math.inf),
        (torch.float16, math.inf),
        (torch.float32, math.nan),
        (torch.float32, 1e20),
    ],
)
def test_a_bad_value_anywhere_reaches_the_sum_of_the_copy(dtype: torch.dtype, bad: float) -> None:
    """1e20 is finite, but its square is not in fp32, in which torch's norm squares, too."""
    sums = CopySums()
    for tensor, place in ((0, 0), (0, -1), (1, 17), (2, 0), (2, 2048), (2, -1)):
        gradients = [torch.ones(shape, dtype=dtype, device=DEVICE) for shape in ((3,), (7, 5), (37, 133))]
        gradients[tensor].view(-1)[place] = bad
        out = torch.empty(padded_count(gradients, 2), device=DEVICE)
        assert copy_into(out, gradients, 2, sums)
        taken, square = take(sums), torch.linalg.vector_norm(out).square()
        assert not square.isfinite()
        torch.testing.assert_close(taken, square, equal_nan=True)
    gradients[2].view(-1)[-1] = 1.0
    assert copy_into(out, gradients, 2, sums)
    assert sums.take() == 3 + 7 * 5 + 37 * 133, "the sums start again at zero"


def test_partial_sums_of_a_larger_group_keep_what_was_added() -> None:
    small, large = (torch.ones(count, device=DEVICE) for count in (100, NUM_LARGE))
    sums, out = CopySums(), torch.empty(NUM_LARGE + 1, device=DEVICE)
    for gradient, num_chunks in ((small, 1), (large, 2), (small, 1)):
        assert copy_into(out[: padded_count([gradient], num_chunks)], [gradient], num_chunks, sums)
    assert sums.take() == 200 + NUM_LARGE


@pytest.mark.parametrize("shapes", [ODD, EVEN])
def test_square_sums_match_torch(shapes: Shapes) -> None:
    gradients = [shard.gradient for shard in build_shards(shapes)]
    one = square_sums_in_one_launch(gradients)
    torch.testing.assert_close(one, square_sums(gradients), rtol=1e-5, atol=0.0)
    assert torch.equal(square_sums_in_one_launch(gradients), one), "the order of additions changed"
    gradients[0][-1], gradients[-1][0, 0] = math.nan, math.inf
    nonfinite = square_sums_in_one_launch(gradients)
    assert nonfinite[0].isnan()
    assert nonfinite[-1].isinf()
    assert torch.equal(nonfinite[1:-1], one[1:-1])


def test_tables_are_cached_until_a_tensor_moves() -> None:
    from harness.kernels.multi_tensor import build_table

    gradients = [shard.gradient for shard in build_shards(EVEN)]
    table = build_table(gradients)
    assert build_table(list(gradients)) is table
    assert table.unit == 4
    moved = [*gradients[:-1], gradients[-1].clone()]
    assert build_table(moved) is not table
    unaligned = torch.zeros(9, device=DEVICE)[1:]
    assert build_table([*gradients, unaligned]).unit == 1
