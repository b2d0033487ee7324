"""What becomes a job and what becomes of it, as far as no Slurm is needed: the script, the book of ends, the copy of
the code, the judgement of a node."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import compose
from harness.config.errors import ConfigError
from harness.config.schema import Config
from harness.core.rundir import RunDir
from launch.slurm import code_snapshot, job_directory, node_health, requeue, submit
from launch.slurm.render import DIRECTIVE, SETTING, directives, quoted, render
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
    return render(submit.template(), directives=asked, settings=SETTINGS | changed)


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
    """After a change that is meant: `python -m tests.launch.slurm.test_submit` writes them anew."""
    assert golden()[name] == (GOLDEN / name).read_text()


def golden() -> dict[str, str]:
    array = {"run": "", "run_list": "/shared/runs/sweep/slurm/runs-0123456789ab.txt", "health": "false"}
    return {
        "nodes.sbatch": rendered(*MANY_NODES),
        "array.sbatch": rendered("launch.slurm.max_requeues=0", array="0-5%2", log="slurm-%A_%a.log", **array),
    }


def test_the_template_is_a_script_and_every_setting_a_hole() -> None:
    text = submit.template()
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


def test_the_code_is_kept_once_and_whole(tmp_path: Path) -> None:
    kept = code_snapshot.take(tmp_path)
    assert kept == code_snapshot.place(tmp_path)
    assert code_snapshot.take(tmp_path) == kept
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]
    assert len(json.loads((kept / "code.json").read_text())["commit"] or "x" * 40) == 40
    script = (
        "import sys; from harness import compose; from launch import snapshot, slurm; compose.load(['model=7b']);"
        "assert 'torch' not in sys.modules; slurm.template(); print(snapshot.place(snapshot.slurm_dir().parent.parent))"
    )
    command = [sys.executable, "-P", "-c", script]
    said = subprocess.run(command, env={"PYTHONPATH": str(kept)}, cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.strip() == str(kept), said.stderr


def test_a_job_that_begins_again_finds_its_run_and_code(tmp_path: Path, stand_ins: Path) -> None:
    (stand_ins / "squeue").write_text("#!/bin/sh\n")
    words = [f"run.dir={tmp_path}", "model=tiny"]
    run, code = job_directory.lay_out_in_job(config(*words), "12", 2)
    assert run == tmp_path / "tiny-job-12"
    assert compose.read(RunDir(run).config).launch.nodes == 2
    job_directory.remember(RunDir(run), job_directory.Job(job="12", code="/kept"))
    assert job_directory.lay_out_in_job(config(*words), "12", 2) == (run, Path("/kept"))
    assert job_directory.lay_out_in_job(config(*words, "run.name=tiny-job-12"), "13", 2) == (run, code)


@pytest.fixture
def queue(stand_ins: Path) -> Path:
    """Where the scripts of submitted jobs lie, by number; `queue/alive` holds the jobs that wait or run."""
    path = stand_ins / "queue"
    path.mkdir()
    (path / "alive").write_text("")
    (stand_ins / "sbatch").write_text(
        '#!/bin/bash\ntest "$1" != --test-only || exit "${REFUSED:-0}"\n'
        f'cd {path}; number=$((100 + $(ls | wc -l)))\ncat > $number; echo "$number;cluster"\n'
    )
    (stand_ins / "squeue").write_text(f'#!/bin/bash\ngrep -qx "${{2#--jobs=}}" {path}/alive && echo PENDING\nexit 0\n')
    return path


def sweep(directory: Path, *names: str) -> list[Config]:
    cfg = config(f"run.dir={directory}", "launch.nproc=1")
    cfgs = [deepcopy(cfg) for _ in names]
    for each, name in zip(cfgs, names, strict=True):
        each.run.name = name
    return cfgs


def lines_read(script: Path) -> list[str]:
    """What the tasks of a submitted array read, by the part of the script that reads it."""
    settings = [line for line in script.read_text().splitlines() if line.startswith("run_list=")]
    (reader,) = (line.strip() for line in script.read_text().splitlines() if "run=$(sed" in line)
    read = [f'SLURM_ARRAY_TASK_ID={task}; {reader}; echo "$run"' for task in range(4)]
    shown = subprocess.run(["bash", "-c", "\n".join([*settings, *read])], check=True, capture_output=True, text=True)
    return [Path(line).name for line in shown.stdout.splitlines()]


def test_a_second_submission_changes_nothing_that_waiting_tasks_read(tmp_path: Path, queue: Path) -> None:
    directory = tmp_path / "sweep"
    first = submit.submit_array(sweep(directory, "a", "b", "c", "d"), directory)
    assert lines_read(queue / first) == ["a", "b", "c", "d"]
    (queue / "alive").write_text("".join(f"{first}_{task}\n" for task in (1, 2, 3)))
    before = {path: path.read_bytes() for path in (directory / "slurm").glob("runs*")}

    second = submit.submit_array(sweep(directory, "a"), directory)  # its first task is over, the others wait
    assert lines_read(queue / second) == ["a", "", "", ""]
    assert lines_read(queue / first) == ["a", "b", "c", "d"], "what they were submitted with"
    assert {path: path.read_bytes() for path in before} == before
    known = [job_directory.recall(RunDir(directory / name)) for name in "ab"]
    assert [each and each.job for each in known] == [f"{second}_0", f"{first}_1"]

    with pytest.raises(ConfigError, match=rf"run\.name: job {first}_2 of this run is pending; scancel {first}_2 first"):
        submit.submit_array(sweep(directory, "a", "c"), directory)
    assert len(list(queue.iterdir())) == 3


def test_two_tasks_never_share_a_run_directory(tmp_path: Path, queue: Path) -> None:
    directory = tmp_path / "sweep"
    (tmp_path / "link").symlink_to(directory)
    for cfgs in (sweep(directory, "a", "b", "a"), [*sweep(directory, "a", "b"), *sweep(tmp_path / "link", "a")]):
        with pytest.raises(ConfigError) as refused:
            submit.submit_array(cfgs, directory)
        line = f"run.name: tasks 0 and 2 of the array would share {directory}/a; give each run its own name"
        assert str(refused.value) == line
    assert not directory.exists()
    assert [path.name for path in queue.iterdir()] == ["alive"]


def test_a_controller_that_does_not_answer_is_not_taken_for_an_empty_queue(
    tmp_path: Path, queue: Path, stand_ins: Path
) -> None:
    (cfg,) = sweep(tmp_path, "a")
    submit.submit(cfg)
    (stand_ins / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error: Socket timed out >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"cannot tell whether job \d+ is alive: .* Socket timed out; try again"):
        submit.submit(cfg)
    (stand_ins / "squeue").write_text("#!/bin/sh\necho error: Invalid job id specified >&2\nexit 1\n")
    submit.submit(cfg)
    assert len(list(queue.iterdir())) == 3


def test_a_job_is_submitted_without_the_nodes_that_failed(
    tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cfg,) = sweep(tmp_path, "a")
    cfg.launch.slurm.options = ["--exclude=n[7-8]", "--exclusive"]
    run = job_directory.lay_out(cfg)
    sick = requeue.Ended(69, "RUNNING", "None", "")
    for start in (1, 2):
        assert "--exclude=n[7-8]\n" in (queue / submit.submit(cfg)).read_text()
        requeue.settle(run, sick, job="99", start=start, unhealthy={"n2": "broken"})
    script = (queue / submit.submit(cfg)).read_text()
    asked = [line for line in script.splitlines() if "--exclude=" in line]
    assert asked == ["#SBATCH --exclude=n[7-8]", "#SBATCH --exclude=n[7-8],n2"], "of two sbatch takes the last"
    assert capsys.readouterr().err.startswith("harness: node n2 is excluded until ")
    monkeypatch.setenv("REFUSED", "1")
    with pytest.raises(ConfigError, match=r"launch\.slurm: sbatch: exit code 1"):
        submit.submit(cfg)
    assert capsys.readouterr().err == "", "without the exclusion Slurm refuses it too: its complaint counts"


def test_refusals_are_one_line_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    cases = {
        ("launch.nproc=1",): "launch: sbatch is not on this machine; submit from a login node",
        ("launch.nproc=9",): r"^train\.batch_size: must be at least the number of ranks \(9\)",
        ("launch.nproc=2", "launch.nodes=4", "launch.min_nodes=2", "parallel.replicate=4"): (
            r"^launch\.min_nodes: allows 3 of 4 nodes, .* parallel\.replicate: must divide the number of ranks \(6\)"
        ),
        ("launch.nproc=1", "cluster.memory_gb=0.001"): r"cluster\.memory_gb: the one rank needs",
        ("run.name=a:b",): r"run\.dir: a job finds its code there and cannot do with a colon",
    }
    for words, line in cases.items():
        with pytest.raises(ConfigError, match=line):
            submit.submit(config("run.name=first", *words))
    cfg = config("run.name=first", "launch.dry_run=true", "launch.nproc=1")
    assert submit.start(cfg) == 0
    shown = capsys.readouterr().out
    assert f"\nrun={tmp_path}/runs/first\n" in shown
    assert shown == submit.script_of(cfg)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("nodes", "fewest", "batch"), [(4, 2, 64), (16, 15, 1024), (16, 8, 1024), (16, 1, 130)])
def test_fewer_nodes_need_not_divide_the_batch(tmp_path: Path, nodes: int, fewest: int, batch: int) -> None:
    words = [f"launch.nodes={nodes}", f"launch.min_nodes={fewest}", f"train.batch_size={batch}"]
    submit.check(config("launch.nproc=8", f"run.dir={tmp_path}", "run.name=first", *words))


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
    assert submit.finished_in(line) == finished


WELL = node_health.Facts(
    devices=tuple(
        node_health.Device(index=index, free_bytes=80 * 10**9, memory_bytes=85 * 10**9, num_ecc_errors=0)
        for index in range(2)
    ),
    xids=(31,),
    free_host_bytes=1e12,
    free_disk_bytes=1e12,
    is_writable=True,
)


def test_a_node_is_judged_by_what_it_shows() -> None:
    sick = replace(WELL.devices[1], free_bytes=10**9, num_ecc_errors=2)
    cases: list[tuple[node_health.Facts, list[str]]] = [
        (WELL, []),
        (replace(WELL, devices=WELL.devices[:1]), ["has 1 GPUs, 2 are wanted"]),
        (
            replace(WELL, devices=(WELL.devices[0], sick)),
            ["GPU 1 has 2 uncorrected ECC errors", "GPU 1 has 1 of 85 GB free: another process is on it"],
        ),
        (replace(WELL, xids=(31, 79)), ["the driver reported Xid 79 within the last hour"]),
        (replace(WELL, free_host_bytes=1e9), ["host memory: 1.0 GB free, at least 2 are wanted"]),
        (replace(WELL, is_writable=False), ["the run directory cannot be written"]),
    ]
    for facts, expected in cases:
        assert node_health.complaints(facts, 2) == expected
    assert node_health.complaints(replace(WELL, devices=()), None) == []


def test_a_full_disk_blames_no_node() -> None:
    """All nodes share the disk of the run directory: to exclude the one that saw it first would help nobody."""
    facts = replace(WELL, free_disk_bytes=1e8, devices=WELL.devices[:1])
    assert [complaint.render() for complaint in node_health.judged("n1", facts, 2)] == [
        "harness: health: node n1: has 1 GPUs, 2 are wanted",
        "harness: health: seen from node n1: disk in the run directory: 0.1 GB free, at least 2 are wanted",
    ]
    assert node_health.judged("n1", replace(WELL, free_disk_bytes=2e9, free_host_bytes=2e9), 2) == []


def test_a_clock_is_held_against_the_others() -> None:
    def off(*times_s: float) -> list[tuple[str, bool]]:
        times = {f"n{number}": time_s for number, time_s in enumerate(times_s, start=1)}
        return [(complaint.node, complaint.blames) for complaint in node_health.skewed(times)]

    assert off(100.0, 100.9, 97.5) == [("n3", True)]
    assert off(90.0, 100.0, 100.0, 100.0) == [("n1", True)], "the first node is no better than the others"
    assert off(100.0, 101.0) == off(100.0, 100.0, 101.0) == []
    assert off(100.0, 110.0) == [("n2", False)], "of two nobody knows which is wrong"
    (complaint,) = node_health.skewed({"n1": 100.0, "n2": 100.0, "n3": 97.5})
    assert complaint.text == "its clock is -2.5 s off the other nodes'"


def test_a_node_that_sees_another_run_directory() -> None:
    def lost(*sees: bool) -> list[tuple[str, bool]]:
        nodes = {f"n{number}": each for number, each in enumerate(sees, start=1)}
        return [(complaint.node, complaint.blames) for complaint in node_health.elsewhere(nodes)]

    assert lost(True, True, True) == []
    assert lost(True, True, False) == [("n3", True)]
    assert lost(True, False) == [("n2", False)], "half of them: the first may be the odd one"


def test_what_a_machine_says_is_read() -> None:
    table = "0, 81000, 81559, 0\n1, 80000, 81559, [N/A]\nNo devices were found\n"
    first, second = node_health.devices_in(table)
    assert (first.free_bytes, first.num_ecc_errors, second.index, second.num_ecc_errors) == (81000 * 2**20, 0, 1, 0)
    log = "[  100.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n[ 9000.0] NVRM: Xid (PCI:0000:3b:00): 48, x\n[9001.0] usb\n"
    assert node_health.xids_in(log, 9100.0) == (48,)
    assert node_health.free_host_bytes("MemTotal: 9 kB\nMemAvailable:     4 kB\n") == 4096


def test_how_many_devices_a_node_must_have() -> None:
    def wanted(*words: str) -> int | None:
        return node_health.num_devices_wanted(config(*words))

    assert wanted("launch.slurm.gpus_per_node=8") is None, "on cpu"
    assert wanted("parallel.device=auto", "launch.slurm.gpus_per_node=8", "launch.nproc=4") == 8
    assert wanted("parallel.device=auto", "launch.nproc=4") is None
    assert wanted("parallel.device=cuda", "launch.nproc=4") == 4


if __name__ == "__main__":
    for name, text in golden().items():
        (GOLDEN / name).write_text(text)
