"""What becomes a job and what becomes of it, as far as no Slurm is needed: the script, the book of ends, the copy of
the code, the judgement of a node."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import compose, requests
from harness.checkpoint import catalog
from harness.config import Config, ConfigError
from harness.rundir import RunDir
from launch import health, layout, requeue, slurm, snapshot
from launch.requeue import Decision, End, Ended, decide, num_stalled
from launch.sbatch import DIRECTIVE, SETTING, directives, quoted, render
from tests.distributed.cases import TINY

GOLDEN = Path(__file__).parent / "golden"
ODD = 'it\'s "odd" #1 $HOME `id` *'
SETTINGS = {
    "python": "/opt/venv/bin/python",
    "code": "/shared/runs/first/code/0123456789ab",
    "run": "/shared/runs/first",
    "run_list": "",
    "health": "true",
    "checks_per_node": "8",
}


def config(*words: str) -> Config:
    return compose.load([*TINY, "launch=slurm", *words])


def rendered(*words: str, array: str | None = None, log: str = "slurm-%j.log", **changed: str) -> str:
    asked = directives(
        config(*words).launch,
        name="first",
        log=Path("/shared/runs/first/logs") / log,
        working_directory=Path("/home/ada"),
        array=array,
    )
    return render(slurm.template(), directives=asked, settings=SETTINGS | changed)


MANY_NODES = (
    "launch.nodes=4",
    "launch.min_nodes=2",
    "launch.slurm.partition=gpu",
    "launch.slurm.account=llm",
    "launch.slurm.qos=high",
    "launch.slurm.time_minutes=1440",
    "launch.slurm.gpus_per_node=8",
    "launch.slurm.cpus_per_node=96",
    "launch.slurm.memory_gb=0",
    "launch.slurm.options=['--constraint=h100','--exclusive']",
    "launch.slurm.warn_s=300",
)


@pytest.mark.parametrize("name", ["nodes.sbatch", "array.sbatch"])
def test_scripts_are_what_they_were(name: str) -> None:
    """After a change that is meant: `python -m tests.launch.test_slurm` writes them anew."""
    assert golden()[name] == (GOLDEN / name).read_text()


def golden() -> dict[str, str]:
    array = {"run": "", "run_list": "/shared/runs/sweep/slurm/runs.txt", "health": "false"}
    return {
        "nodes.sbatch": rendered(*MANY_NODES),
        "array.sbatch": rendered("launch.slurm.max_requeues=0", array="0-5%2", log="slurm-%A_%a.log", **array),
    }


def test_the_template_is_a_script_and_every_setting_a_hole() -> None:
    text = slurm.template()
    subprocess.run(["bash", "-n", "-c", text], check=True)
    names = [hole[1] for line in text.splitlines() if (hole := SETTING.fullmatch(line))]
    assert SETTINGS.keys() <= set(names)
    assert names == list(dict.fromkeys(names))
    assert DIRECTIVE not in render(text, directives=[], settings={})
    with pytest.raises(AssertionError, match=r"no hole for .'speed'."):
        render(text, directives=[], settings={"speed": "9"})


def test_settings_reach_the_shell_as_they_are() -> None:
    head, _, _ = rendered(run=ODD).partition("set -u\n")
    shown = subprocess.run(["bash", "-c", f'{head}\nprintf %s "$run"'], check=True, capture_output=True, text=True)
    assert shown.stdout == ODD


def test_a_directive_is_one_line_of_sbatch() -> None:
    assert quoted("--job-name", "plain-1.2") == "plain-1.2"
    assert quoted("--job-name", 'an "odd" #1') == '"an \\"odd\\" \\#1"'
    for value in ("two\nlines", "back\\slash"):
        with pytest.raises(ConfigError, match="--job-name: Slurm cannot be given a line break or a backslash"):
            quoted("--job-name", value)
    launch = config("launch.slurm.memory_gb=1.5", "launch.nodes=3", "launch.min_nodes=3").launch
    lines = directives(launch, name="a", log=Path("/50%/logs/slurm-%j.log"), working_directory=Path("/"))
    assert {"--mem=1431M", "--nodes=3", "--output=/50%%/logs/slurm-%j.log"} <= set(lines)


LIMITS = config("launch.slurm.max_requeues=5", "launch.slurm.max_stalled=3").launch.slurm
HERE = Ended(75, "RUNNING", "None", "")
Good = tuple[int, int] | None


def end(good: Good = None, *, requeued: bool = True, start: int = 1) -> End:
    return End(time=0.0, job="7", start=start, exit_code=75, good=good, requeued=requeued, reason="")


@pytest.mark.parametrize(
    ("ended", "history", "good", "decision"),
    [
        (HERE, [], None, Decision(True, "asked to leave")),
        (HERE._replace(exit_code=1), [], None, Decision(True, "crashed with exit code 1")),
        (HERE._replace(exit_code=69), [], None, Decision(True, "a node failed its health check")),
        (HERE._replace(exit_code=0), [], None, Decision(False, "all steps done")),
        (HERE._replace(exit_code=2), [], None, Decision(False, "bad configuration")),
        (HERE._replace(exit_code=3), [], None, Decision(False, "halted by the sentinel")),
        (HERE._replace(state=""), [], None, Decision(False, "Slurm does not say how the job stands")),
        (
            HERE._replace(state="COMPLETING"),
            [],
            None,
            Decision(False, "ended from outside, by scancel or by a requeue that is not this one's"),
        ),
        (HERE._replace(state="COMPLETING", because="TimeLimit"), [], None, Decision(True, "asked to leave")),
        (
            HERE._replace(stopped_by="asked by ada: lunch"),
            [],
            None,
            Decision(False, "stopped on purpose, asked by ada: lunch"),
        ),
        (HERE, [end((0, 10)), end((0, 20))], (0, 20), Decision(True, "asked to leave")),
        (
            HERE,
            [end((0, 10)), end((0, 20)), end((0, 20)), end((0, 20))],
            (0, 20),
            Decision(
                False,
                "3 ends in a row without a new good checkpoint (the newest is of step 20), launch.slurm.max_stalled=3",
            ),
        ),
        (
            HERE,
            [end(), end()],
            None,
            Decision(
                False, "3 ends in a row without a new good checkpoint (there is none), launch.slurm.max_stalled=3"
            ),
        ),
        (
            HERE,
            [end((0, step)) for step in range(5)],
            (0, 9),
            Decision(False, "begun again 5 times already, launch.slurm.max_requeues=5"),
        ),
    ],
)
def test_which_ends_begin_again(ended: Ended, history: list[End], good: Good, decision: Decision) -> None:
    assert decide(ended, history, good, LIMITS) == decision


@given(st.lists(st.integers(0, 3), max_size=8), st.sampled_from([1, 75, 69, 137, None]))
def test_no_job_begins_again_for_ever(steps: list[int], code: int | None) -> None:
    """Whatever happens, a job that makes no new good checkpoint ends within `max_stalled` ends."""
    history = [end((0, step)) for step in steps]
    for _ in range(LIMITS.max_stalled + 1):
        good = history[-1].good if history else None
        if not decide(HERE._replace(exit_code=code), history, good, LIMITS).again:
            break
        history.append(end(good))
    else:
        pytest.fail("began again too often")
    assert len(history) <= max(len(steps) + LIMITS.max_stalled, LIMITS.max_requeues)


def test_stalls_are_counted_from_the_newest_good_checkpoint() -> None:
    goods: list[Good] = [None, (0, 5), (0, 5), (1, 3), (1, 3), (1, 3)]
    assert [num_stalled(goods[:length]) for length in range(1, 7)] == [1, 0, 1, 0, 1, 2]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return layout.lay_out(config(f"run.dir={tmp_path}", "run.name=first", "launch.slurm.max_stalled=3"))


def test_a_start_by_slurm_itself_is_written_down_and_counts(run: RunDir) -> None:
    requeue.settle(run, HERE, job="7", start=1)
    assert requeue.begin(run, "7", 2) == Decision(True, "")
    assert requeue.begin(run, "7", 3) == Decision(True, requeue.BY_SLURM)
    with requeue.book(run).open("a") as book:
        book.write('{"half a li')
    catalog.mark(make_checkpoint(run, 20), catalog.Health.good, "clean")
    assert requeue.begin(run, "7", 4) == Decision(True, requeue.BY_SLURM)
    assert not requeue.begin(run, "7", 7).again
    assert requeue.begin(run, "8", 1) == Decision(True, ""), "another job has a book of its own"
    assert [(end.start, end.exit_code, end.good) for end in requeue.read(run)] == [
        (1, 75, None),
        (2, None, None),
        (3, None, (0, 20)),
        (4, None, (0, 20)),
        (5, None, (0, 20)),
        (6, None, (0, 20)),
    ]


def make_checkpoint(run: RunDir, step: int) -> Path:
    path = run.checkpoints / catalog.name_of(step, 0)
    path.mkdir(parents=True)
    return path


def test_a_person_who_stops_a_run_means_it_and_a_job_that_leaves_does_not(run: RunDir) -> None:
    assert requeue.stopped_by(run) == ""
    requests.ask(run, who="ada", reason="lunch")
    assert requeue.stopped_by(run) == "asked by ada: lunch"
    requests.ask(run, who="slurm", reason="the time of job 7 is nearly up")
    assert requeue.stopped_by(run) == ""
    run.stop.write_text("")
    assert requeue.stopped_by(run) == "by the file STOP"
    layout.lay_out(config(f"run.dir={run.path.parent}", "run.name=first"))
    assert requeue.stopped_by(run) == "", "who asks for a start takes the stop back"


def test_the_code_is_kept_once_and_whole(tmp_path: Path) -> None:
    kept = snapshot.take(tmp_path)
    assert kept == snapshot.place(tmp_path)
    assert snapshot.take(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    assert len(json.loads((kept / "code.json").read_text())["commit"] or "x" * 40) == 40
    script = (
        "import sys; from harness import compose; from launch import snapshot, slurm; compose.load(['model=7b']);"
        "assert 'torch' not in sys.modules; slurm.template(); print(snapshot.place(snapshot.slurm_dir().parent.parent))"
    )
    command = [sys.executable, "-P", "-c", script]
    said = subprocess.run(command, env={"PYTHONPATH": str(kept)}, cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.strip() == str(kept), said.stderr


def test_a_job_that_begins_again_finds_its_run_and_code(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}", "model=tiny"]
    run, code = layout.lay_out_in_job(config(*words), "12", 2)
    assert run == tmp_path / "tiny-job-12"
    assert compose.read(RunDir(run).config).launch.nodes == 2
    layout.remember(RunDir(run), layout.Job(job="12", code="/kept"))
    assert layout.lay_out_in_job(config(*words), "12", 2) == (run, Path("/kept"))
    assert layout.lay_out_in_job(config(*words, "run.name=tiny-job-12"), "13", 2) == (run, code)


def test_refusals_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    cases = {
        ("launch.nproc=1",): "launch: sbatch is not on this machine; submit from a login node",
        ("launch.nproc=3",): r"train\.batch_size: must be a multiple of the number of ranks \(3\)",
        ("launch.nproc=1", "launch.nodes=4", "launch.min_nodes=2"): r"train\.batch_size: .* ranks \(3\)",
        ("launch.nproc=1", "cluster.memory_gb=0.001"): r"cluster\.memory_gb: the one rank needs",
        ("run.name=a:b",): r"run\.dir: a job finds its code there and cannot do with a colon",
    }
    for words, line in cases.items():
        with pytest.raises(ConfigError, match=line):
            slurm.submit(config("run.name=first", *words))
    cfg = config("run.name=first", "launch.dry_run=true", "launch.nproc=1")
    assert slurm.start(cfg) == 0
    shown = capsys.readouterr().out
    assert f"\nrun={tmp_path}/runs/first\n" in shown
    assert shown == slurm.script_of(cfg)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "finished"),
    [
        ("JobId=3 JobState=RUNNING Reason=None ExitCode=0:0", None),
        ("JobId=3 JobState=COMPLETING Reason=None ExitCode=75:0", None),
        ("JobId=3 JobState=COMPLETED Reason=None ExitCode=0:0", ("COMPLETED", 0)),
        ("JobId=3 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0", ("FAILED", 3)),
        ("JobId=3 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", ("TIMEOUT", 1)),
    ],
)
def test_what_slurm_says_of_an_ended_job(line: str, finished: tuple[str, int] | None) -> None:
    assert slurm.finished_in(line) == finished


WELL = health.Facts(
    devices=tuple(
        health.Device(index=index, free_bytes=80 * 10**9, memory_bytes=85 * 10**9, num_ecc_errors=0)
        for index in range(2)
    ),
    xids=(31,),
    free_host_bytes=1e12,
    free_disk_bytes=1e12,
    is_writable=True,
)


def test_a_node_is_judged_by_what_it_shows() -> None:
    sick = replace(WELL.devices[1], free_bytes=10**9, num_ecc_errors=2)
    cases: list[tuple[health.Facts, list[str]]] = [
        (WELL, []),
        (replace(WELL, devices=WELL.devices[:1]), ["has 1 GPUs, 2 are wanted"]),
        (
            replace(WELL, devices=(WELL.devices[0], sick)),
            ["GPU 1 has 2 uncorrected ECC errors", "GPU 1 has 1 of 85 GB free: another process is on it"],
        ),
        (replace(WELL, xids=(31, 79)), ["the driver reported Xid 79 within the last hour"]),
        (replace(WELL, free_host_bytes=1e9), ["host memory: 1.0 GB free, at least 2 are wanted"]),
        (replace(WELL, free_disk_bytes=1e8), ["disk in the run directory: 0.1 GB free, at least 2 are wanted"]),
        (replace(WELL, is_writable=False), ["the run directory cannot be written"]),
    ]
    for facts, expected in cases:
        assert health.complaints(facts, 2) == expected
    assert health.complaints(replace(WELL, devices=()), None) == []


def test_what_a_machine_says_is_read() -> None:
    table = "0, 81000, 81559, 0\n1, 80000, 81559, [N/A]\nNo devices were found\n"
    first, second = health.devices_in(table)
    assert (first.free_bytes, first.num_ecc_errors, second.index, second.num_ecc_errors) == (81000 * 2**20, 0, 1, 0)
    log = "[  100.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n[ 9000.0] NVRM: Xid (PCI:0000:3b:00): 48, x\n[9001.0] usb\n"
    assert health.xids_in(log, 9100.0) == (48,)
    assert health.free_host_bytes("MemTotal: 9 kB\nMemAvailable:     4 kB\n") == 4096
    assert health.skewed({"n1": 100.0, "n2": 100.9, "n3": 97.5}) == [
        "node n3: its clock is -2.5 s off the first node's"
    ]


def test_how_many_devices_a_node_must_have() -> None:
    def wanted(*words: str) -> int | None:
        return health.num_devices_wanted(config(*words))

    assert wanted("launch.slurm.gpus_per_node=8") is None, "on cpu"
    assert wanted("parallel.device=auto", "launch.slurm.gpus_per_node=8", "launch.nproc=4") == 8
    assert wanted("parallel.device=auto", "launch.nproc=4") is None
    assert wanted("parallel.device=cuda", "launch.nproc=4") == 4


if __name__ == "__main__":
    for name, text in golden().items():
        (GOLDEN / name).write_text(text)
