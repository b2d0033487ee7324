"""Golden tests of score cards; `python -m tests.drills.test_score_card` rewrites the golden files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.drills import campaign, score_card
from harness.drills.campaign import Campaign, Round
from harness.drills.scenario import Bounds, Expected
from harness.drills.score import Card, check_bounds, score
from tests.drills import logs

GOLDEN = Path(__file__).parent / "golden"


def score_example(**bounds: float) -> Card:
    expected = Expected(notices=["rank {rank} was killed by SIGKILL"], names_rank=True, starts=2)
    scenario = logs.scenario(expected, Bounds(steps_lost=3, identical=True, **bounds))  # type: ignore[arg-type]
    twin = logs.clean()
    twin.events.insert(5, logs.finding(5, message="loss 9 | bound 8"))
    measured = score(scenario, logs.killed_and_resumed(), twin)
    return Card(
        scenario="kill_rank", summary="one rank is killed", score=measured, bounds=check_bounds(scenario, measured)
    )


def example_campaign() -> Campaign:
    shared = {"seconds": 8.0, "starts": 2}
    rounds = [
        Round(
            number=0,
            faults=["kill_rank at 40 on rank 1", "nan_grad at 60 on rank 0"],
            names=["kill_rank", "nan_grad"],
            injected=[True, True],
            detected=[True, False],
            steps_lost=6,
            loss_gap=0.01,
            failures=[],
            **shared,  # type: ignore[arg-type]
        ),
        Round(
            number=1,
            faults=["clock_jump at 33 on rank 0", "kill_rank at 70 on rank 0"],
            names=["clock_jump", "kill_rank"],
            injected=[True, False],
            detected=[None, None],
            steps_lost=0,
            loss_gap=None,
            failures=["identical: no, wanted yes"],
            **shared,  # type: ignore[arg-type]
        ),
    ]
    return Campaign(seed=7, minutes=1.5, words=["parallel.device=cpu"], rounds=rounds)


TEXTS: dict[str, Callable[[], str]] = {
    "card.txt": lambda: score_card.as_text(score_example(seconds=1.0)),
    "card.md": lambda: score_card.as_markdown(score_example(seconds=1.0)),
    "summary.txt": lambda: score_card.summary_of_drills(
        [score_example(), score_example(seconds=1.0)], [("full_disk", "needs a small disk")]
    ),
    "campaign.txt": lambda: campaign.as_text(example_campaign()),
    "campaign.md": lambda: campaign.as_markdown(example_campaign()),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_equals_the_golden_file(name: str) -> None:
    assert TEXTS[name]() == (GOLDEN / name).read_text(encoding="utf-8")


def test_json_holds_all_bounds() -> None:
    tree = json.loads(score_card.as_json(score_example()))
    assert tree["passed"] is False  # the twin raised an alarm
    assert tree["score"]["steps_lost"] == 3
    assert {bound["name"] for bound in tree["bounds"]} == set(score_card.LABELS) - {"excluded"}, (
        "`excluded` is a line only if the scenario sets it"
    )


if __name__ == "__main__":
    for name, text in TEXTS.items():
        (GOLDEN / name).write_text(text(), encoding="utf-8")
