"""Mutation testing: `python -m tests.mutation [FILES...] [--sample N] [--seed S] [--jobs N] [--timeout S]`.

Why: a test that passes with any change to the code proves nothing. Each mutant changes one expression or statement of a
file; the tests of that file must fail. Mutants that survive show what is not tested.
How: one process per file runs its tests once unchanged, then imports every module that these tests imported and that
does not depend on the file. For each mutant it forks a child, which loads the file's module from mutated source
(`startup/sitecustomize.py`) and runs the tests in the order of the table, up to the first failure. A mutant that takes
longer than the timeout counts as killed.
No file in the tree changes; several runs may run at the same time.
Left out: two changes at a time, and files that have no entry in `tables.TESTS` and no `--tests`.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutants import Mutant, Mutator, default_parameters
from tests.mutation.startup import sitecustomize
from tests.mutation.tables import EQUIVALENT, Equivalent, list_files, load_equivalents, suite_for

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("harness", "launch")
"""Modules that may be imported before the mutant, if they do not depend on it."""
TIMEOUT_FACTOR, MIN_TIMEOUT_S = 4.0, 60.0
"""The default timeout of a mutant: a multiple of the duration of the unchanged tests, and its lower bound."""
POLL_S = 0.01
KILLED = (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED)
"""Exit codes of pytest that a mutant may cause; a module that cannot be imported interrupts the collection."""


@dataclass
class Job:
    """The mutants of one file."""

    root: Path
    file: str
    tests: tuple[str, ...]
    folder: Path
    seconds: dict[str, float] = field(default_factory=dict)
    """Test -> its duration with unchanged code."""
    kills: Counter[str] = field(default_factory=Counter)
    """Test -> how many mutants it killed."""


class Plugin:
    """Pytest plugin: orders the tests, and records the duration of each and which one failed."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds: dict[str, float] = {}
        self.failed: str | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Hypothesis does not shrink counterexamples and keeps no database in the tree."""
        settings.register_profile("mutation", settings(phases=[Phase.explicit, Phase.generate], database=None))
        settings.load_profile("mutation")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort by the order of the table; within an entry, by mutants killed per second."""
        seconds, kills = self.job.seconds, self.job.kills

        def sort_key(item: pytest.Item) -> tuple[int, float]:
            entries = [index for index, entry in enumerate(self.job.tests) if item.nodeid.startswith(entry)]
            return min(entries, default=0), seconds.get(item.nodeid, 0.0) / (1 + kills[item.nodeid])

        items.sort(key=sort_key)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = report.nodeid


@dataclass
class Result:
    """The result of one mutant."""

    mutant: Mutant
    is_killed: bool
    timed_out: bool
    failed: str | None
    """The test that killed it."""
    reason: str | None
    """Why it is recorded as equivalent."""


@dataclass
class Row:
    """The results of one file."""

    file: str
    num_possible: int
    results: list[Result]

    def counts(self) -> tuple[int, int, int, int]:
        """Mutants, killed, equivalent, survived."""
        killed = sum(result.is_killed for result in self.results)
        equivalent = sum(result.reason is not None and not result.is_killed for result in self.results)
        return len(self.results), killed, equivalent, len(self.results) - killed - equivalent

    def wrong_equivalents(self) -> list[Result]:
        """Mutants that are recorded as equivalent but were killed."""
        return [result for result in self.results if result.is_killed and result.reason is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ |= {"CI": "1", "OMP_NUM_THREADS": "1"}  # hypothesis tries the same examples each time
    sys.path.insert(0, str(options.root))
    rows = []
    for file in options.files or list_files(options.root):
        row = _run_in_fork(file, options)
        rows.append(row)
        for line in report(row):
            print(line, flush=True)
    print("\n".join(["", *table(rows)]))
    return 1 if any(row.wrong_equivalents() for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="default: all files of tests/mutation/tables.py")
    parser.add_argument("--sample", type=int, default=0, help="mutants of each file, drawn at random; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="parallel child processes")
    parser.add_argument("--timeout", type=float, help=f"seconds; default: {TIMEOUT_FACTOR:g} x the unchanged tests")
    parser.add_argument("--tests", nargs="+", help="test files in place of those of the table")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that holds the files and is imported from")
    parser.add_argument("--equivalent", type=Path, default=EQUIVALENT, help="record of equivalent mutants")
    parser.add_argument("--verbose", action="store_true", help="name the test that killed each mutant")
    return parser


def report(row: Row) -> Iterator[str]:
    """Lines that list the survivors and the wrongly recorded equivalents of a file."""
    num, killed, equivalent, survived = row.counts()
    num_timeouts = sum(result.timed_out for result in row.results)
    counted = f"{killed} killed ({num_timeouts} by the timeout), {equivalent} equivalent, {survived} survived"
    yield f"{row.file}: {num} of {row.num_possible} mutants, {counted}"
    for result in row.results:
        mutant = result.mutant
        what = "KILLED, but recorded as equivalent" if result.reason is not None else "survived"
        if result.is_killed is (result.reason is not None):
            yield f"{row.file}:{mutant.line} ({mutant.function}) {what}"
            yield f"  - {mutant.before}"
            yield f"  + {mutant.after}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The Markdown table of all files."""
    yield "| file | mutants | killed | equivalent | survived | killed of non-equivalent |"
    yield "|---|---:|---:|---:|---:|---:|"
    sums = [sum(column) for column in zip(*(row.counts() for row in rows), strict=True)]
    for name, counts in [*((row.file, row.counts()) for row in rows), ("all", sums)]:
        num, killed, equivalent, survived = counts
        share = f"{killed / (num - equivalent):.0%}" if num > equivalent else "-"
        yield f"| {name} | {num} | {killed} | {equivalent} | {survived} | {share} |"


def _run_in_fork(file: str, options: argparse.Namespace) -> Row:
    """Run a file in a forked process, so that its imports do not affect the next file."""
    with TemporaryDirectory() as folder:
        row_file = Path(folder) / "row.json"
        pid = os.fork()
        if pid == 0:
            row = _run_file(file, options, Path(folder))
            row_file.write_text(json.dumps(asdict(row)), encoding="utf-8")
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            raise SystemExit(f"{file}: no result")
        data = json.loads(row_file.read_text(encoding="utf-8"))
    results = [Result(Mutant(**each.pop("mutant")), **each) for each in data.pop("results")]
    return Row(results=results, **data)


def _run_file(file: str, options: argparse.Namespace, folder: Path) -> Row:
    root = options.root.resolve()
    source = (root / file).read_text(encoding="utf-8")
    imports = _imports_by_module(root)
    mutator = Mutator(source, _known_defaults(root, imports.get(_module_name(file), set())))
    chosen = possible = mutator.mutants
    if 0 < options.sample < len(possible):
        indices = sorted(Random(f"{options.seed}:{file}").sample(range(len(possible)), options.sample))
        chosen = [possible[index] for index in indices]
    job = Job(root, file, tuple(options.tests or suite_for(file)), folder)
    _run_baseline(job, {*imports} - _dependents(_module_name(file), imports))
    start_s = time.monotonic()
    _wait_for_success(job, _fork_tests(job, "control", mutator.source()), "control")
    timeout_s = options.timeout or max(MIN_TIMEOUT_S, TIMEOUT_FACTOR * (time.monotonic() - start_s))
    recorded = load_equivalents(options.equivalent)
    results: dict[int, Result] = {}
    for mutant, code, failed in _run_mutants(job, mutator, chosen, timeout_s, options.jobs):
        reason = recorded.get(Equivalent(file, mutant.function, mutant.before, mutant.after))
        results[mutant.number] = Result(mutant, code != pytest.ExitCode.OK, code is None, failed, reason)
        if options.verbose and failed is not None:
            print(f"{file}:{mutant.line} killed by {failed}\n  - {mutant.before}\n  + {mutant.after}", flush=True)
    return Row(file, len(possible), [results[number] for number in sorted(results)])


def _run_baseline(job: Job, independent: set[str]) -> None:
    """Run the unchanged tests in a child and record their durations. Import here what they imported: libraries, and
    modules of the project that do not depend on the file."""
    _wait_for_success(job, _fork_tests(job, "baseline", None), "baseline")
    outcome = json.loads((job.folder / "baseline.json").read_text(encoding="utf-8"))
    job.seconds = outcome["seconds"]
    for name, path in outcome["modules"].items():
        if name in independent or not Path(path).is_relative_to(job.root):
            with suppress(Exception):  # a module that cannot be imported alone is imported by the children
                import_module(name)


def _wait_for_success(job: Job, pid: int, name: str) -> None:
    """Wait for a child that runs unchanged code; exit if its tests fail."""
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise SystemExit(
            f"{_read_log(job, name)}\n{job.file}: its tests fail without any mutation: {' '.join(job.tests)}"
        )


def _run_mutants(
    job: Job, mutator: Mutator, chosen: Sequence[Mutant], timeout_s: float, num_jobs: int
) -> Iterator[tuple[Mutant, int | None, str | None]]:
    """Yield each mutant when it ends, with pytest's exit code (None: timed out) and the test that failed."""
    waiting = list(chosen)
    running: dict[int, tuple[Mutant, float]] = {}
    while waiting or running:
        while waiting and len(running) < num_jobs:
            mutant = waiting.pop(0)
            pid = _fork_tests(job, str(mutant.number), mutator.source(mutant))
            running[pid] = mutant, time.monotonic() + timeout_s
        time.sleep(POLL_S)
        for pid, (mutant, deadline) in [*running.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            is_overdue = not ended and time.monotonic() > deadline
            if ended or is_overdue:
                del running[pid]
                with suppress(ProcessLookupError):  # ends processes that the tests started
                    os.killpg(pid, signal.SIGKILL)
                if is_overdue:
                    os.waitpid(pid, 0)
                yield mutant, None if is_overdue else _exit_code(job, mutant, status), _take_failed_test(job, mutant)


def _exit_code(job: Job, mutant: Mutant, status: int) -> int:
    """The exit code of pytest; a child that died by a signal, such as a segmentation fault, counts as failed."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return int(pytest.ExitCode.TESTS_FAILED)
    if code not in (pytest.ExitCode.OK, *KILLED):
        raise SystemExit(
            f"{_read_log(job, str(mutant.number))}\n{job.file}: pytest exited with {code}, which is not a test failure"
        )
    return code


def _take_failed_test(job: Job, mutant: Mutant) -> str | None:
    """Return the test that killed a mutant, and remove the files of its child."""
    path = job.folder / f"{mutant.number}.json"
    failed: str | None = json.loads(path.read_text(encoding="utf-8"))["failed"] if path.exists() else None
    for each in job.folder.glob(f"{mutant.number}.*"):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    if failed is not None:
        job.kills[failed] += 1
    return failed


def _read_log(job: Job, name: str) -> str:
    return (job.folder / f"{name}.log").read_text(encoding="utf-8")


def _fork_tests(job: Job, name: str, source: str | None) -> int:
    """Fork a child that runs the tests in a new session, with the module loaded from `source` if it is given. It writes
    NAME.json and NAME.log."""
    if source is not None:
        (job.folder / f"{name}.py").write_text(source, encoding="utf-8")
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = int(pytest.ExitCode.INTERNAL_ERROR)
    try:
        os.setsid()
        with (job.folder / f"{name}.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if source is not None:
            os.environ.update(_environment(job, job.folder / f"{name}.py"))
            sitecustomize.install()
        code = _run_tests(job, name)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_tests(job: Job, name: str) -> int:
    plugin = Plugin(job)
    os.chdir(job.root)
    arguments = [
        "-x",
        "-q",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        f"--rootdir={job.root}",
        f"--basetemp={job.folder / f'{name}.tmp'}",
        *job.tests,
    ]
    code = pytest.main(arguments, plugins=[plugin])
    modules = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items()}
    outcome = {"seconds": plugin.seconds, "modules": modules, "failed": plugin.failed}
    (job.folder / f"{name}.json").write_text(json.dumps(outcome), encoding="utf-8")
    return int(code)


def _environment(job: Job, mutated: Path) -> dict[str, str]:
    search_path = [str(Path(sitecustomize.__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        sitecustomize.MODULE: _module_name(job.file),
        sitecustomize.ORIGINAL: str(job.root / job.file),
        sitecustomize.MUTATED: str(mutated),
        "PYTHONPATH": os.pathsep.join(path for path in search_path if path),
    }


def _module_name(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


def _imports_by_module(root: Path) -> dict[str, set[str]]:
    """Module of the project -> names that it imports, anywhere in the file."""
    found = {}
    for path in [path for package in PACKAGES for path in (root / package).glob("**/*.py")]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import():
                    names.update(alias.name for alias in node.names)
                case ast.ImportFrom(module=str(module)):
                    names.update((module, *(f"{module}.{alias.name}" for alias in node.names)))
        found[_module_name(path.relative_to(root).as_posix())] = names
    return found


def _dependents(module: str, imports: dict[str, set[str]]) -> set[str]:
    """The module and all modules that import it, directly or indirectly: these must not be loaded before the mutant."""
    depending: set[str] = set()
    found = {module}
    while found:
        depending |= found
        found = {name for name, imported in imports.items() if imported & found} - depending
    return depending


def _known_defaults(root: Path, imported: Iterable[str]) -> dict[str, frozenset[str]]:
    """Parameters with defaults in those imported modules that belong to the project."""
    known: dict[str, frozenset[str]] = {}
    for name in sorted(imported):
        path = root / f"{name.replace('.', '/')}.py"
        if path.exists():
            known |= default_parameters(ast.parse(path.read_text(encoding="utf-8")))
    return known


if __name__ == "__main__":
    sys.exit(main())
