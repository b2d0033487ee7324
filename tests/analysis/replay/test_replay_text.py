"""The exact text of a replay."""

from __future__ import annotations

from typing import Any

from harness.analysis.replay.replay_text import render


def numbers(loss: float, norm: float | str) -> dict[str, Any]:
    return {"loss": loss, "grad_norm": norm, "group_grad_norms": {}}


def test_text_of_a_full_replay() -> None:
    seen = {"forward": "blocks.1.mlp.up", "broken_weights": "", "backward": "blocks.1.mlp.up", "gradients": ["a", "b"]}
    sample = {"row": 3, "loss": 9.0, "source": "web", "file": "web.bin", "first_document": 4, "last_document": 5}
    text = render(
        {
            "iteration": 36,
            "cursor": 35,
            "checkpoint": "step-00000030-gen-0",
            "num_on_the_way": 5,
            "left_the_log_at": None,
            "exactly": True,
            "logged": numbers(9.0, "nan"),
            "first": numbers(9.0, "nan"),
            "second": numbers(9.0, "nan"),
            "seen": {"1": seen},
            "here": {"checkpoint": "step-00000030-gen-0", "loss": 9.0, "neighbours": [3.0, 3.5]},
            "before": {"checkpoint": "step-00000020-gen-0", "loss": 4.0, "neighbours": [4.0]},
            "nature": "deterministic",
            "cause": "data x state",
            "samples": [
                sample | {"grad_norm": 8.0, "text": "a\nb"},
                sample | {"row": 0, "grad_norm": 2.0, "text": "c"},
            ],
        }
    )
    assert text == (
        "step       iteration 36, batch 35\n"
        "replayed   5 steps from step-00000030-gen-0, equal to the log bit for bit\n"
        "logged     loss 9, gradient norm nan\n"
        "first      loss 9, gradient norm nan\n"
        "second     loss 9, gradient norm nan\n"
        "verdict    deterministic: the replay reproduces the logged step\n"
        "cause      data x state: the batch does not stand out on an older state\n"
        "batch      on the state of this step: loss 9, median of its neighbours 3.25\n"
        "batch      on an older state, step-00000020-gen-0: loss 4, median of its neighbours 4\n"
        "rank 1     first non-finite output in forward: blocks.1.mlp.up; first non-finite gradient in backward: "
        "blocks.1.mlp.up; 2 parameters with a non-finite gradient\n"
        "\n"
        "row 3    loss 9, gradient norm 8 (1.6x the median), web: web.bin, documents 4 to 5: 'a\\nb'\n"
        "row 0    loss 9, gradient norm 2 (0.4x the median), web: web.bin, documents 4 to 5: 'c'\n"
    )
