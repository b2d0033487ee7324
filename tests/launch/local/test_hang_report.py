"""A hang is explained from the dumps and stacks of the ranks: who called which collective, and who did not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.local.hang_report import (
    Call,
    RankAnswer,
    dump_file,
    explain_hang,
    main_thread_place,
    parse_dump,
    read_answers,
    shorten_dump,
    stacks_file,
)

GROUP = "default_pg 0"


def done(number: int, operation: str = "all_gather") -> Call:
    return Call(GROUP, number, operation, "[8]", is_finished=True)


def waiting(number: int, operation: str = "all_reduce", sizes: str = "[4]", group: str = GROUP) -> Call:
    return Call(group, number, operation, sizes, is_finished=False)


def test_a_rank_that_did_not_call_the_collective_is_named_with_its_place() -> None:
    arrived = RankAnswer([done(1), waiting(2)], "harness/step.py:73 (reduce_signals)")
    absent = RankAnswer([done(1)], "harness/data/batches.py:99 (read)")
    assert explain_hang({0: arrived, 1: absent, 2: arrived}) == (
        "ranks 0 and 2 called all_reduce [4], number 2 of default_pg 0; "
        "rank 1 did not: it is at harness/data/batches.py:99 (read)"
    )


def test_a_rank_that_gave_no_answer_is_named() -> None:
    answers = {0: RankAnswer([waiting(7)]), 1: RankAnswer(None)}
    assert explain_hang(answers) == (
        "rank 0 called all_reduce [4], number 7 of default_pg 0; rank 1 gave no answer: its process is stopped"
    )
    answers[1] = RankAnswer(None, "harness/data/batches.py:99 (read)")
    assert explain_hang(answers).endswith("; rank 1 gave no answer: it is at harness/data/batches.py:99 (read)")


def test_different_operations_under_one_number_are_a_mismatch() -> None:
    answers = {rank: RankAnswer([waiting(5, "all_gather", "[64]")]) for rank in (0, 2, 3)}
    answers[1] = RankAnswer([waiting(5, "barrier", "")])
    assert explain_hang(answers) == (
        "ranks 0, 2 and 3 called all_gather [64], number 5 of default_pg 0; rank 1 called barrier instead"
    )


def test_a_rank_that_waits_in_another_group_is_named() -> None:
    other = waiting(3, "reduce_scatter", "[16]", group="mesh_shard 2")
    answers = {0: RankAnswer([waiting(9)]), 1: RankAnswer([waiting(9)]), 2: RankAnswer([done(8), other], "x.py:1 (f)")}
    assert explain_hang(answers).endswith(
        "rank 2 did not: it waits for reduce_scatter [16], number 3 of mesh_shard 2, at x.py:1 (f)"
    )


def test_many_ranks_are_counted() -> None:
    answers = {rank: RankAnswer([waiting(1)]) for rank in range(1024)} | {77: RankAnswer([])}
    assert explain_hang(answers) == (
        "1,023 ranks called all_reduce [4], number 1 of default_pg 0; rank 77 did not, and waits for no collective"
    )
    most_absent = {rank: RankAnswer([]) for rank in range(20)} | {0: RankAnswer([waiting(1)])}
    assert explain_hang(most_absent).endswith("; 11 more ranks did not call it")


def test_without_an_unfinished_collective_there_is_nothing_to_explain() -> None:
    assert explain_hang({0: RankAnswer([done(1)]), 1: RankAnswer(None)}) == ""
    assert explain_hang({}) == ""


def entry(number: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "collective_seq_id": number,
        "process_group": ["0", "default_pg"],
        "profiling_name": "nccl:_all_gather_base",
        "input_sizes": [[2, 8]],
        "state": "completed",
        "retired": False,
        "is_p2p": False,
    }
    return fields | changes


def test_a_dump_is_parsed() -> None:
    entries = [entry(1), entry(2, state="started"), entry(3, state="scheduled", retired=True), entry(4, is_p2p=True)]
    calls = parse_dump(json.dumps({"entries": entries}))
    assert [(call.number, call.is_finished) for call in calls] == [(1, True), (2, False), (3, True)]
    assert calls[0].describe() == "all_gather [2 x 8]"
    assert calls[0].group == "nccl default_pg 0"
    (barrier,) = parse_dump(json.dumps({"entries": [entry(5, profiling_name="nccl:all_reduce_barrier")]}))
    assert barrier.describe() == "barrier"
    assert parse_dump("{}") == []


def test_a_dump_keeps_what_is_unfinished_and_the_last_of_each_group() -> None:
    other = {"process_group": ["1", "shard"]}
    entries = [each for number in range(1000) for each in (entry(number), entry(number, **other))]
    entries[7] |= {"state": "started"}
    entries += [entry(1000, state="started"), entry(1001, state="scheduled")]
    kept = shorten_dump({"version": "2", "entries": entries})
    assert kept["version"] == "2"
    calls = parse_dump(json.dumps(kept))
    groups = ("nccl default_pg 0", "nccl shard 1")
    numbers = [[call.number for call in calls if call.group == group] for group in groups]
    assert numbers == [[*range(980, 1002)], [3, *range(980, 1000)]]
    assert [call.number for call in calls if not call.is_finished] == [3, 1000, 1001]
    assert shorten_dump({}) == {"entries": []}


STACKS = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3/threading.py", line 320 in wait

Current thread 0x2 (most recent call first):
  File "/venv/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/app/harness/distributed/collectives.py", line 19 in all_reduce_sum
  File "/app/harness/step.py", line 73 in reduce_signals
"""


def test_the_place_of_the_main_thread_is_its_innermost_line_of_this_package() -> None:
    assert main_thread_place(STACKS) == "harness/distributed/collectives.py:19 (all_reduce_sum)"
    assert main_thread_place("Current thread 0x2:\n" + '  File "/a/b.py", line 3 in f\n') == "b.py:3 (f)"
    assert main_thread_place("") == ""


def test_missing_and_damaged_files_are_no_answer(tmp_path: Path) -> None:
    dump_file(tmp_path, 1).write_text('{"entries": [{"')
    dump_file(tmp_path, 2).write_text(json.dumps({"entries": [entry(6, state="started")]}))
    stacks_file(tmp_path, 2).write_text(STACKS)
    answers = read_answers(tmp_path, [0, 1, 2])
    assert [answers[rank].calls is None for rank in (0, 1, 2)] == [True, True, False]
    assert answers[2].place.startswith("harness/")


RANK = """
import faulthandler, os, signal, sys, time
from pathlib import Path
from harness.distributed.torch_private.flight_recorder import record_collectives
record_collectives()
import torch
import torch.distributed as dist
from launch.local.collective_dump import dump_collectives_on_signal

directory, rank = Path(sys.argv[1]), int(sys.argv[2])
store = dist.FileStore(str(directory / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
with (
    dump_collectives_on_signal(directory / f"rank-{rank}.collectives.json", signal.SIGUSR2),
    (directory / f"rank-{rank}.stacks").open("w") as stacks,
):
    faulthandler.register(signal.SIGUSR2, file=stacks, chain=True)
    tensor = torch.ones(4)
    for _ in range(30):
        dist.all_reduce(tensor)
    (directory / f"ready-{rank}").touch()
    if rank == 0:
        dist.all_gather([torch.empty(8), torch.empty(8)], torch.ones(8))
    else:
        time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs pipes of POSIX signals")
def test_two_real_ranks_are_asked_while_they_hang(tmp_path: Path) -> None:
    """One waits in a collective in C code, the other sleeps; a second signal writes a second answer."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank)], env=environment) for rank in (0, 1)
    ]
    try:
        wait_for([tmp_path / f"ready-{rank}" for rank in (0, 1)])
        time.sleep(0.5)  # rank 0 is in its collective
        for process in ranks:
            process.send_signal(signal.SIGUSR2)
        wait_for([dump_file(tmp_path, rank) for rank in (0, 1)])
        line = explain_hang(read_answers(tmp_path, [0, 1]))
        assert len(parse_dump(dump_file(tmp_path, 0).read_text())) == 21, "20 of 30 all-reduces, and the all-gather"
        assert line.startswith(
            "rank 0 called all_gather [8], number 31 of gloo default_pg 0; rank 1 did not: it is at "
        )
        dump_file(tmp_path, 0).unlink()
        ranks[0].send_signal(signal.SIGUSR2)
        wait_for([dump_file(tmp_path, 0)])
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def wait_for(paths: list[Path]) -> None:
    end_s = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end_s, paths
        time.sleep(0.02)
