"""Submission without Slurm: the script, the run list, the copy of the code."""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest

from harness.config import compose
from harness.config.errors import ConfigError, StorageError
from harness.config.schema import Config
from harness.core.rundir import RunDir
from launch.slurm import code_snapshot, job_directory, requeue, submit
from launch.slurm.job_script import DIRECTIVE, SETTING, build_directives, quote_value, render
from tests import composed
from tests.distributed.cases import TINY
from tests.full_disk import fill, may_mount, small_disk

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


def config(*overrides: str) -> Config:
    return composed.load([*TINY, "launch=slurm", *overrides])


def render_example(*overrides: str, array: str | None = None, log: str = "slurm-%j.log", **changed: str) -> str:
    directives = build_directives(
        config(*overrides).launch,
        name="first",
        log=Path("/shared/runs/first/logs") / log,
        working_directory=Path("/home/ada"),
        array=array,
    )
    return render(submit.read_template(), directives=directives, settings=SETTINGS | changed)


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
def test_scripts_match_the_golden_files(name: str) -> None:
    """After an intended change, `python -m tests.launch.slurm.test_submit` rewrites them."""
    assert render_golden()[name] == (GOLDEN / name).read_text()


def render_golden() -> dict[str, str]:
    array = {"run": "", "run_list": "/shared/runs/sweep/slurm/runs-0123456789ab.txt", "health": "false"}
    return {
        "nodes.sbatch": render_example(*MANY_NODES),
        "array.sbatch": render_example("launch.slurm.max_requeues=0", array="0-5%2", log="slurm-%A_%a.log", **array),
    }


def test_the_template_is_a_script_with_every_setting() -> None:
    text = submit.read_template()
    subprocess.run(["bash", "-n", "-c", text], check=True)
    names = [placeholder[1] for line in text.splitlines() if (placeholder := SETTING.fullmatch(line))]
    assert SETTINGS.keys() <= set(names)
    assert names == list(dict.fromkeys(names))
    assert DIRECTIVE not in render(text, directives=[], settings={})
    with pytest.raises(AssertionError, match=r"no placeholder for .'speed'."):
        render(text, directives=[], settings={"speed": "9"})


def test_settings_reach_the_shell_unchanged() -> None:
    head, _, _ = render_example(run=ODD).partition("set -u\n")
    shown = subprocess.run(["bash", "-c", f'{head}\nprintf %s "$run"'], check=True, capture_output=True, text=True)
    assert shown.stdout == ODD


def test_a_directive_is_one_line_of_sbatch() -> None:
    assert quote_value("--job-name", "plain-1.2") == "plain-1.2"
    assert quote_value("--job-name", 'an "odd" #1') == '"an \\"odd\\" \\#1"'
    for value in ("two\nlines", "back\\slash"):
        with pytest.raises(ConfigError, match="--job-name: must not contain a line break or a backslash"):
            quote_value("--job-name", value)
    launch = config("launch.slurm.memory_gb=1.5", "launch.nodes=3", "launch.min_nodes=3").launch
    lines = build_directives(launch, name="a", log=Path("/50%/logs/slurm-%j.log"), working_directory=Path("/"))
    assert {"--mem=1431M", "--nodes=3", "--output=/50%%/logs/slurm-%j.log"} <= set(lines)


def test_a_job_with_spares_asks_for_more_nodes_and_survives_the_loss_of_one(tmp_path: Path) -> None:
    def directives(*overrides: str) -> set[str]:
        launch = config("launch.nodes=3", *overrides).launch
        return set(build_directives(launch, name="a", log=Path("/slurm-%j.log"), working_directory=Path("/")))

    assert {"--nodes=5", "--no-kill"} <= directives("launch.spares=2")
    assert {"--nodes=2-5", "--no-kill"} <= directives("launch.spares=2", "launch.min_nodes=2")
    assert "--no-kill" not in directives("launch.min_nodes=2"), "Slurm ends a job that lost a node, and requeues it"
    for overrides, expected in (((), None), (("launch.spares=1",), "true"), (("launch.min_nodes=2",), "true")):
        cfg = config("launch.nodes=3", f"run.dir={tmp_path}", "run.name=r", *overrides)
        assert submit.script_settings(cfg, tmp_path).get("elastic") == expected


def test_a_plain_sbatch_keeps_its_last_nodes_as_spares(tmp_path: Path, fake_slurm_bin: Path) -> None:
    (fake_slurm_bin / "squeue").write_text("#!/bin/sh\n")
    overrides = [f"run.dir={tmp_path}", "launch.nodes=2", "launch.spares=2", "run.name=r"]
    job_directory.prepare_in_job(compose.load(overrides), "7", 5)
    assert compose.read(tmp_path / "r" / "config.yaml").launch.nodes == 3
    with pytest.raises(ConfigError, match=r"^launch\.spares: must leave at least 2 of the 3 nodes of this job, got 2$"):
        job_directory.prepare_in_job(compose.load([*overrides, "run.name=s"]), "8", 3)


def test_the_code_is_stored_once_and_complete(tmp_path: Path) -> None:
    copy = code_snapshot.save_snapshot(tmp_path)
    assert copy == code_snapshot.snapshot_path(tmp_path)
    assert code_snapshot.save_snapshot(tmp_path) == copy
    assert [path.name for path in tmp_path.iterdir()] == [copy.name]
    assert len(json.loads((copy / "code.json").read_text())["commit"] or "x" * 40) == 40
    script = (
        "import sys; from harness.config import compose; from launch.slurm import code_snapshot, submit;"
        "compose.load(['model=7b']); assert 'torch' not in sys.modules; submit.read_template();"
        "print(code_snapshot.snapshot_path(code_snapshot.slurm_dir().parent.parent))"
    )
    command = [sys.executable, "-P", "-c", script]
    result = subprocess.run(command, env={"PYTHONPATH": str(copy)}, cwd=tmp_path, capture_output=True, text=True)
    assert result.stdout.strip() == str(copy), result.stderr


def test_a_requeued_job_finds_its_run_and_code(tmp_path: Path, fake_slurm_bin: Path) -> None:
    (fake_slurm_bin / "squeue").write_text("#!/bin/sh\n")
    overrides = [f"run.dir={tmp_path}", "model=tiny"]
    run, code = job_directory.prepare_in_job(config(*overrides), "12", 2)
    assert run == tmp_path / "tiny-job-12"
    assert compose.read(RunDir(run).config).launch.nodes == 2
    job_directory.write_job(RunDir(run), job_directory.SlurmJob(job="12", code="/kept"))
    assert job_directory.prepare_in_job(config(*overrides), "12", 2) == (run, Path("/kept"))
    assert job_directory.prepare_in_job(config(*overrides, "run.name=tiny-job-12"), "13", 2) == (run, code)


@pytest.fixture
def queue(fake_slurm_bin: Path) -> Path:
    """Directory with the scripts of submitted jobs by id; `queue/alive` lists the active jobs.

    A job is held, in `queue/held`, until it is released or cancelled.
    """
    path = fake_slurm_bin / "queue"
    (path / "held").mkdir(parents=True)
    (path / "alive").write_text("")
    (fake_slurm_bin / "sbatch").write_text(
        '#!/bin/bash\ntest "$1" != --test-only || exit "${REFUSED:-0}"\ntest "$2" == --hold || exit 9\n'
        'test -z "$OVER_LIMIT" || { echo "sbatch: error: $OVER_LIMIT" >&2; exit 1; }\n'
        f'cd {path}; number=$((100 + $(ls -p . held | grep -c "^[0-9]")))\n'
        'cat > held/$number; echo "$number;cluster"\n'
    )
    (fake_slurm_bin / "scontrol").write_text(f'#!/bin/bash\ntest "$1" == release && mv {path}/held/$2 {path}/$2\n')
    (fake_slurm_bin / "scancel").write_text(f"#!/bin/bash\nrm {path}/held/$1\n")
    (fake_slurm_bin / "squeue").write_text(
        f'#!/bin/bash\ngrep -qx "${{2#--jobs=}}" {path}/alive && echo PENDING\nexit 0\n'
    )
    return path


def sweep(directory: Path, *names: str) -> list[Config]:
    cfg = config(f"run.dir={directory}", "launch.nproc=1")
    cfgs = [deepcopy(cfg) for _ in names]
    for each, name in zip(cfgs, names, strict=True):
        each.run.name = name
    return cfgs


def lines_read(script: Path) -> list[str]:
    """What the tasks of a submitted array read, using the line of the script that reads it."""
    settings = [line for line in script.read_text().splitlines() if line.startswith("run_list=")]
    (reader,) = (line.strip() for line in script.read_text().splitlines() if "run=$(sed" in line)
    read = [f'SLURM_ARRAY_TASK_ID={task}; {reader}; echo "$run"' for task in range(4)]
    shown = subprocess.run(["bash", "-c", "\n".join([*settings, *read])], check=True, capture_output=True, text=True)
    return [Path(line).name for line in shown.stdout.splitlines()]


def test_a_second_submission_does_not_change_the_list_of_waiting_tasks(tmp_path: Path, queue: Path) -> None:
    directory = tmp_path / "sweep"
    first = submit.submit_array(sweep(directory, "a", "b", "c", "d"), directory)
    assert lines_read(queue / first) == ["a", "b", "c", "d"]
    (queue / "alive").write_text("".join(f"{first}_{task}\n" for task in (1, 2, 3)))
    before = {path: path.read_bytes() for path in (directory / "slurm").glob("runs*")}

    second = submit.submit_array(sweep(directory, "a"), directory)  # its first task has ended, the others wait
    assert lines_read(queue / second) == ["a", "", "", ""]
    assert lines_read(queue / first) == ["a", "b", "c", "d"], "the list they were submitted with"
    assert {path: path.read_bytes() for path in before} == before
    known = [job_directory.read_job(RunDir(directory / name)) for name in "ab"]
    assert [each and each.job for each in known] == [f"{second}_0", f"{first}_1"]

    with pytest.raises(ConfigError, match=rf"run\.name: job {first}_2 of this run is pending; scancel {first}_2 first"):
        submit.submit_array(sweep(directory, "a", "c"), directory)
    assert submitted(queue) == ["100", "101"]


def test_two_tasks_never_share_a_run_directory(tmp_path: Path, queue: Path) -> None:
    directory = tmp_path / "sweep"
    (tmp_path / "link").symlink_to(directory)
    for cfgs in (sweep(directory, "a", "b", "a"), [*sweep(directory, "a", "b"), *sweep(tmp_path / "link", "a")]):
        with pytest.raises(ConfigError) as refused:
            submit.submit_array(cfgs, directory)
        line = f"run.name: tasks 0 and 2 of the array would share {directory}/a; give each run its own name"
        assert str(refused.value) == line
    assert not directory.exists()
    assert submitted(queue) == []


@pytest.mark.parametrize(
    ("key", "values"), [("launch.nodes", ("4", "1")), ("launch.slurm.time_minutes", ("60", "600"))]
)
def test_the_jobs_of_an_array_share_what_is_in_its_script(
    tmp_path: Path, queue: Path, key: str, values: tuple[str, str]
) -> None:
    cfgs = [
        config(
            f"run.dir={tmp_path}/s", f"run.name={number}", f"{key}={value}", "launch.nproc=2", f"optim.lr=1e-{number}"
        )
        for number, value in enumerate(values)
    ]
    with pytest.raises(ConfigError) as refused:
        submit.submit_array(cfgs, tmp_path / "s")
    problem = f"is {values[0]} in job 0 and {values[1]} in job 1, but the jobs of an array share one script"
    assert str(refused.value) == f"{key}: {problem}; start a sweep for each value"
    assert not (tmp_path / "s").exists()
    assert submitted(queue) == []


def test_a_job_that_slurm_rejects_changes_nothing(tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = [f"run.dir={tmp_path}", "run.name=a", "launch.nproc=1"]
    submit.submit_run(config(*overrides))
    run = RunDir(tmp_path / "a")
    run.events.write_text("")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    monkeypatch.setenv("OVER_LIMIT", "QOSMaxSubmitJobPerUserLimit")
    changed = [*overrides, "optim.lr=9e-3", "run.resume=changed"]
    for cfg in (config(*changed), config(*overrides, "run.name=b")):
        with pytest.raises(ConfigError, match=r"^launch\.slurm: .*QOSMaxSubmitJobPerUserLimit$"):
            submit.submit_run(cfg)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "b").exists()
    monkeypatch.delenv("OVER_LIMIT")
    submit.submit_run(config(*changed))
    assert compose.read(run.config).optim.lr == 9e-3
    assert submitted(queue) == ["100", "101"]


def test_a_job_that_its_user_holds_is_not_released(tmp_path: Path, queue: Path) -> None:
    (cfg,) = sweep(tmp_path, "a")
    cfg.launch.slurm.options = ["--hold"]
    job = submit.submit_run(cfg)
    assert submitted(queue) == []
    assert [path.name for path in (queue / "held").iterdir()] == [job]


def submitted(queue: Path) -> list[str]:
    """The jobs that Slurm may start."""
    return sorted(path.name for path in queue.iterdir() if path.name.isdigit())


def test_a_controller_that_does_not_answer_is_an_error(tmp_path: Path, queue: Path, fake_slurm_bin: Path) -> None:
    (cfg,) = sweep(tmp_path, "a")
    submit.submit_run(cfg)
    (fake_slurm_bin / "squeue").write_text("#!/bin/sh\necho slurm_load_jobs error: Socket timed out >&2\nexit 1\n")
    with pytest.raises(ConfigError, match=r"cannot tell whether job \d+ is alive: .* Socket timed out; try again"):
        submit.submit_run(cfg)
    (fake_slurm_bin / "squeue").write_text("#!/bin/sh\necho error: Invalid job id specified >&2\nexit 1\n")
    submit.submit_run(cfg)
    assert submitted(queue) == ["100", "101"]


def test_a_job_is_submitted_without_the_nodes_that_failed(
    tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (cfg,) = sweep(tmp_path, "a")
    cfg.launch.slurm.options = ["--exclude=n[7-8]", "--exclusive"]
    run = job_directory.prepare_job_run(cfg)
    faulty = requeue.JobExit(69, "RUNNING", "None", "")
    for start in (1, 2):
        assert "--exclude=n[7-8]\n" in (queue / submit.submit_run(cfg)).read_text()
        requeue.record_end(run, faulty, job="99", start=start, unhealthy={"n2": "broken"})
    script = (queue / submit.submit_run(cfg)).read_text()
    lines = [line for line in script.splitlines() if "--exclude=" in line]
    assert lines == ["#SBATCH --exclude=n[7-8]", "#SBATCH --exclude=n[7-8],n2"], "sbatch uses the last of two"
    assert capsys.readouterr().err.startswith("harness: node n2 is excluded until ")
    job = job_directory.read_job(run)
    assert job is not None
    assert job.excluded.keys() == {"n2"}
    fake = queue.parent / "scontrol"
    fake.write_text(fake.read_text() + 'test "$2" != hostnames || echo n2\n')
    cfg.launch.slurm.options = ["--exclude=n2"]
    assert "--exclude=n2\n" in (queue / submit.submit_run(cfg)).read_text()
    assert job_directory.read_job(run) == replace(job, job="103", excluded={}), "the user's own, so it never expires"
    cfg.launch.slurm.options = []
    capsys.readouterr()
    monkeypatch.setenv("REFUSED", "1")
    with pytest.raises(ConfigError, match=r"launch\.slurm: sbatch: exit code 1"):
        submit.submit_run(cfg)
    assert capsys.readouterr().err == "", "Slurm rejects it without the exclusion too: its error is reported"


def test_errors_are_one_line_and_leave_nothing_on_disk(
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
        ("launch.nproc=1", "cluster.memory_gb=0.001"): r"cluster\.memory_gb: the only rank needs",
        ("run.name=a:b",): r"run\.dir: must give a path without colon",
        ("parallel.device=cuda", "launch.nodes=16"): (
            r"^train\.batch_size: must be at least 1 sequence for each of the 16 nodes, got 8"
        ),
    }
    for overrides, line in cases.items():
        with pytest.raises(ConfigError, match=line):
            submit.submit_run(config("run.name=first", *overrides))
    cfg = config("run.name=first", "launch.dry_run=true", "launch.nproc=1")
    assert submit.submit_or_print(cfg) == 0
    shown = capsys.readouterr().out
    assert f"\nrun={tmp_path}/runs/first\n" in shown
    assert shown == submit.render_script(cfg)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not may_mount(), reason="needs the right to mount")
def test_a_full_disk_is_a_storage_error(
    tmp_path: Path, queue: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with small_disk(tmp_path / "disk", num_bytes=1 << 16) as disk:  # room for a config, not for the code
        with pytest.raises(StorageError, match=r"code/\w+: cannot copy the code to it: No space left on device$"):
            submit.submit_run(*sweep(disk, "a"))
        fill(disk)
        with pytest.raises(StorageError, match=r"cannot write it: No space left on device$"):
            submit.submit_run(*sweep(disk, "b"))
        with pytest.raises(StorageError, match=r"cannot write it: No space left on device$"):
            submit.submit_array(sweep(disk, "c"), disk)
        assert job_directory.main([f"run.dir={disk}", "run.name=d"]) == 75
    line, decision = capsys.readouterr().err.splitlines()
    assert line.startswith("harness: ")
    assert line.endswith(": cannot write it: No space left on device")
    assert decision == "harness: job 7 is requeued: requeued 0 times, launch.slurm.max_requeues=20"
    assert submitted(queue) == []
    assert list((queue / "held").iterdir()) == [], "what could not be recorded is cancelled"


@pytest.mark.parametrize(("nodes", "min_nodes", "batch"), [(4, 2, 64), (16, 15, 1024), (16, 8, 1024), (16, 1, 130)])
def test_fewer_nodes_need_not_divide_the_batch(tmp_path: Path, nodes: int, min_nodes: int, batch: int) -> None:
    overrides = [f"launch.nodes={nodes}", f"launch.min_nodes={min_nodes}", f"train.batch_size={batch}"]
    submit.check_submission(config("launch.nproc=8", f"run.dir={tmp_path}", "run.name=first", *overrides))


@pytest.mark.parametrize(
    ("line", "finished"),
    [
        ("JobId=3 JobState=RUNNING Reason=None ExitCode=0:0", None),
        ("JobId=3 JobState=REQUEUE_HOLD Reason=launch_failed_requeued_held ExitCode=0:0", None),
        ("JobId=3 JobState=COMPLETING Reason=None ExitCode=75:0", None),
        ("JobId=3 JobState=COMPLETED Reason=None ExitCode=0:0", ("COMPLETED", 0)),
        ("JobId=3 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0", ("FAILED", 3)),
        ("JobId=3 JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", ("TIMEOUT", 1)),
    ],
)
def test_parse_the_state_of_a_job(line: str, finished: tuple[str, int] | None) -> None:
    assert submit.parse_finished(line) == finished


if __name__ == "__main__":
    for name, text in render_golden().items():
        (GOLDEN / name).write_text(text)
