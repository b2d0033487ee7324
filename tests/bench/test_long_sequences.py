"""The benchmark of shared sequences on a CPU: one process computes the part of a rank; chunks equal the whole."""

from __future__ import annotations

import pytest
import torch

from harness.config.errors import EXIT_BAD_CONFIG
from harness.distributed import context as shared
from harness.distributed.context import ContextSplit
from harness.step import finish_step, forward_backward
from tests.bench import attention, context
from tests.distributed.cases import _build, tiny
from tests.distributed.pool import Pool


def step_alone(num_ranks: int) -> tuple[float, float]:
    """Tokens and mean loss of a step of one rank's part."""
    cfg = tiny()
    parts = _build(cfg)
    with pytest.MonkeyPatch.context() as patch:  # restores what `share_alone` replaces
        for name in ("all_gather_stack", "reduce_scatter_stack"):
            patch.setattr(shared, name, getattr(shared, name))
        context.share_alone(parts, ContextSplit(num_ranks, 0, context.GROUP))
        forward_backward(parts, parts.batches[0], cfg=cfg, probe=False)
        report = finish_step(parts, cfg=cfg, probe=False)
    tokens, loss = (float(parts.signals.layout.scalar(report, name)) for name in ("tokens", "loss"))
    return tokens, loss / tokens


@pytest.mark.full
def test_one_process_computes_the_part_of_a_rank(ranks: Pool) -> None:
    ((tokens, loss),) = ranks.run(1, step_alone, 4)
    assert tokens == 8 * 32 / 4
    assert loss == pytest.approx(5.5, abs=0.3)


def test_chunks_by_torch_equal_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCALE", 0.25)
    inputs = [torch.randn(1, 32, heads, 16) for heads in (4, 2, 2)]
    expected = attention.by_sdpa()(*inputs)
    for rank in range(2):
        split = ContextSplit(2, rank)
        attended = context.by_chunks(split, context.by_flash)(*inputs)
        torch.testing.assert_close(attended, split.take(expected, 1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert context.main(["kernels", "--tokens", "1000", "--ranks", "3"]) == EXIT_BAD_CONFIG
    assert capsys.readouterr().err.startswith("context: train.sequence_length: must be a multiple of 2 x parallel")
    assert context.main(["attention", "--tokens", "1024", "--ranks", "2"]) == EXIT_BAD_CONFIG
    assert capsys.readouterr().err == "context: needs a GPU\n"
