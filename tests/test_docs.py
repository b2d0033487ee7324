"""Links, commands, modules and generated tables of the README, CONTRIBUTING and docs.

`tests/bench/test_claims.py` checks measured figures and the commands that measured them; this file checks
everything else on a page that a change of the code can invalidate.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.config import compose
from harness.config.conf_files import options_of
from harness.config.explain import keys_of
from harness.drills import scenario
from harness.optim.schedule import schedule_factor
from harness.sentinel.detect.guards import MOST_EXPECTED_RISE
from launch.cli import main
from tests import composed, docs_tables
from tests.bench.claims import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
SOURCE_PATH = re.compile(r"^(?:harness|launch|conf|slurm|tests|docs)/[\w./-]*\w(?:/|\.\w+)$")
OPTION = re.compile(r"^--[a-z]")
OVERRIDE = re.compile(r"^\+?([a-z_][\w.]*)=(.*)$")
USER_OPTIONS = {("data", "mine")}
"""Options that the user writes."""
USER_FILES = {"conf/data/mine.yaml"}
PLACEHOLDERS = {"NAME", "GROUP", "SECTION"}
HYDRA_OPTIONS = {"--multirun", "--cfg", "--resolve", "--help"}


class Command(NamedTuple):
    page: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def without_code(text: str) -> str:
    lines = [line for line in FENCE.sub("", text).splitlines() if not line.startswith("    ")]
    return INLINE_CODE.sub("", "\n".join(lines))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


@cache
def anchors(page: Path) -> frozenset[str]:
    return frozenset(slug(heading) for heading in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8"))))


def broken_links(page: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{name_of(page)}: no file {target}"
        elif anchor and anchor not in anchors(file):
            yield f"{name_of(page)}: no heading {target}"


def code_lines(text: str) -> Iterator[str]:
    """Lines of code blocks, continued lines joined, and inline code that may span two lines."""
    blocks = [fence.split("\n", 1)[1] for fence in FENCE.findall(text)]
    rest = FENCE.sub("", text)
    indented = "\n".join(line for line in rest.splitlines() if line.startswith("    "))
    for block in [*blocks, indented]:
        yield from (line.strip() for line in re.sub(r"\\\n\s*", " ", block).splitlines())
    prose = "\n".join(line for line in rest.splitlines() if not line.startswith("    "))
    yield from (" ".join(code.split()) for code in INLINE_CODE.findall(prose))


def commands_of(page: Path) -> Iterator[Command]:
    """All `harness`, `python -m` and `torchrun` commands of a page; several on one line are three spaces apart."""
    for line in code_lines(page.read_text(encoding="utf-8")):
        for part in re.split(r"\s{3,}|\s+#\s| \| ", line.removeprefix("$ ")):
            if re.match(r"(harness|python -m|torchrun) \S", part):
                yield Command(name_of(page), part)


COMMANDS = sorted({command for page in PAGES for command in commands_of(page)})


@cache
def help_of(*arguments: str) -> str:
    """The `--help` text of a command; empty if the command does not exist."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        try:
            main.main([*arguments, "--help"])
        except SystemExit as error:
            return out.getvalue() if error.code in (0, None) else ""
    return out.getvalue()


def problem_of(command: str) -> str:
    """Why a command of a page cannot be run; empty if it can."""
    parts = [part for part in shlex.split(command) if part != "..."]
    match parts:
        case ["harness", "COMMAND", *_]:
            return ""
        case ["harness", option] if OPTION.match(option):
            return "" if option in ("--help", "--version") else f"harness has no option {option}"
        case ["harness", name, *arguments]:
            return problem_of_harness(name, arguments)
        case ["python", "-m", module, *arguments]:
            return problem_of_module(module, arguments)
        case ["torchrun", *options]:
            at = options.index("-m")
            return problem_of_module(options[at + 1], options[at + 2 :])
    return "neither harness, python -m nor torchrun"


def problem_of_harness(name: str, arguments: Sequence[str]) -> str:
    if name not in main.SUMMARIES:
        return f"harness has no command {name}"
    positional = [part for part in arguments if not OPTION.match(part) and "=" not in part]
    match name, positional:
        case "ctl", [run, command, *_]:
            help_text = help_of("ctl", run, command) if command in help_of("ctl") else ""
        case (("checkpoint" | "data" | "sweep"), [command, *_]):
            help_text = help_of(name, command) if command in help_of(name) else ""
        case "drill", ["campaign" as command, *_]:
            help_text = help_of("drill", command)
        case "drill", names:
            known = {*scenario.names(), *PLACEHOLDERS, "all", "list", "score"}
            unknown = [] if "score" in names else [part for part in names if part not in known]
            help_text = "" if unknown else help_of("drill")
        case _:
            help_text = help_of(name)
    if not help_text:
        return f"harness {name} has no {' '.join(positional)}"
    missing = [part for part in arguments if OPTION.match(part) and part not in help_text and part not in HYDRA_OPTIONS]
    if missing:
        return f"harness {name} has no option {', '.join(missing)}"
    overrides = [] if name == "ctl" else arguments  # SOURCE=WEIGHT of ctl is no override
    return "; ".join(filter(None, map(problem_of_override, overrides)))


def problem_of_module(name: str, arguments: Sequence[str]) -> str:
    """The module exists, and its source names each option."""
    if any(placeholder in name for placeholder in PLACEHOLDERS):
        return ""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        return f"no module {name}"
    source = Path(spec.origin)
    source = source.with_name("__main__.py") if spec.submodule_search_locations is not None else source
    if not source.exists():
        return f"{name} cannot be run"
    text = source.read_text(encoding="utf-8")
    missing = [part for part in arguments if OPTION.match(part) and f'"{part}"' not in text]
    if missing:
        return f"{name} has no option {', '.join(missing)}"
    return "; ".join(filter(None, map(problem_of_override, arguments)))


def problem_of_override(part: str) -> str:
    """An override names a key of the config, or an option of a group; values are checked by `tests/config`."""
    found = OVERRIDE.match(part)
    if found is None:
        return ""
    key, value = found.groups()
    section, _, name = key.rpartition(".")
    if key.startswith("drill."):
        return "" if name in keys_of(section.removeprefix("drill").lstrip("."), scenario.Scenario) else f"no {key}"
    if options_of(key):
        known = {
            *options_of(key),
            *PLACEHOLDERS,
            *(option for group, option in USER_OPTIONS if group == key),
        }
        is_known = set(value.strip("[]").split(",")) <= known
        return "" if is_known else f"{key} has no option {value}"
    return "" if name in keys_of(section) or name in PLACEHOLDERS else f"no key {key}"


def missing_files(page: Path, text: str) -> Iterator[str]:
    """Paths in inline code that do not exist in the tree."""
    for code in INLINE_CODE.findall(FENCE.sub("", text)):
        is_path = SOURCE_PATH.match(code) is not None and not PLACEHOLDERS & set(re.findall(r"[A-Z]+", code))
        if is_path and not (ROOT / code).exists() and code not in USER_FILES:
            yield f"{name_of(page)}: no {code}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_existing_targets(page: Path) -> None:
    assert list(broken_links(page, page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_named_files_exist(page: Path) -> None:
    assert list(missing_files(page, page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.text}")
def test_commands_exist(command: Command) -> None:
    assert problem_of(command.text) == ""


ERROR_EXAMPLES = {
    "harness train model.num_heads=3",
    "harness plan +experiment=1b_bf16 train.sequence_length=524288 train.batch_size=8 "
    "train.micro_batch_size=1 --ranks 8",
}
"""Commands that a page shows with their error."""


def is_complete(command: Command) -> bool:
    """Whether a page prints the whole command, without a place that the reader fills in."""
    words = shlex.split(command.text)
    has_gaps = any(word == "..." or word.isupper() or word in {"data=mine", "[group=option]"} for word in words)
    return not has_gaps and command.text not in ERROR_EXAMPLES and any("=" in word for word in words)


def printable(pattern: str) -> list[Any]:
    """Complete commands that start like this; those outside the README run in the full tier."""
    return [
        pytest.param(command, marks=[] if command.page == "README.md" else pytest.mark.full, id=command.text)
        for command in COMMANDS
        if re.match(pattern, command.text) and is_complete(command)
    ]


@pytest.mark.parametrize("command", printable(r"harness (plan|train launch=slurm) "))
def test_plans_and_slurm_jobs_are_accepted_as_printed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, name, *arguments = shlex.split(command.text)
    dry_run = ["launch.dry_run=true"] if name == "train" and "launch.dry_run=true" not in arguments else []
    code = main.main([name, *arguments, *dry_run])
    assert (code, capsys.readouterr().err.count("harness: warning")) == (0, 0)
    assert not list(tmp_path.iterdir()), "nothing is written"


@pytest.mark.parametrize("command", printable(r"harness train (?!launch=slurm|--)"))
def test_starts_compose_as_printed(command: Command) -> None:
    composed.load(shlex.split(command.text)[2:])


def test_commands_are_found_on_pages() -> None:
    texts = {command.text.split(" ")[2] for command in COMMANDS if command.text.startswith("python -m")}
    assert {"tests.bench.gpu", "tests.docs_tables", "harness.telemetry.sinks"} <= texts
    assert any(command.text.startswith("harness train launch=slurm") for command in COMMANDS)


@pytest.mark.parametrize("page", docs_tables.PAGES, ids=name_of)
def test_tables_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert docs_tables.table_names(text), "no table is marked"
    assert docs_tables.update_tables(text) == text, "python -m tests.docs_tables --write"


def test_every_section_of_the_config_has_a_table() -> None:
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    keys = set(compose.flat(docs_tables.defaults()))
    listed = set(re.findall(r"^\| `([\w.]+)`", text, re.MULTILINE))
    filled_by_users = ("data.sources.", "sentinel.policy.budgets.")
    assert {key for key in keys - listed if not key.startswith(filled_by_users)} == set()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("harness drills all", "no command drills"),
        ("harness drill nan_gradient", "has no nan_gradient"),
        ("harness drill nan_grad drill.fault.when=3", "no drill.fault.when"),
        ("harness plan --planets 8", "no option --planets"),
        ("harness data cook texts/", "has no cook"),
        ("harness ctl RUN dance", "has no RUN dance"),
        ("harness train optim.rate=3", "no key optim.rate"),
        ("harness train model=9t", "model has no option 9t"),
        ("harness train 'without=[qk_norm,sleep]'", "without has no option [qk_norm,sleep]"),
        ("python -m tests.bench.nothing", "no module tests.bench.nothing"),
        ("python -m tests.docs_tables --draw", "no option --draw"),
    ],
)
def test_a_wrong_command_is_reported(command: str, expected: str) -> None:
    assert expected in problem_of(command)


def test_a_wrong_link_is_reported() -> None:
    page = ROOT / "README.md"
    text = "[a](docs/nothing.md) [b](README.md#no-such) [c](#train) `[d](x.md)` ![e](docs/first-run.png) [f](https://x.org)"
    assert list(broken_links(page, text)) == [
        "README.md: no file docs/nothing.md",
        "README.md: no heading README.md#no-such",
    ]


def test_a_missing_file_is_reported() -> None:
    text = "`harness/nothing.py` `harness/train.py` `conf/drill/NAME.yaml` `conf/`"
    assert list(missing_files(ROOT / "README.md", text)) == ["README.md: no harness/nothing.py"]


@pytest.mark.parametrize("page", ["first-run", "own-data"])
def test_a_longer_schedule_in_an_example_is_no_jump_of_the_learning_rate(page: str) -> None:
    cfg = composed.load([])
    text = (ROOT / f"docs/examples/{page}.md").read_text()
    (num_steps,) = (int(number) for number in re.findall(r"train\.num_steps=(\d+) run\.resume=changed", text))
    last = cfg.train.num_steps
    before, after = (schedule_factor(cfg.optim, step=last, num_steps=steps) for steps in (last, num_steps))
    assert before < after < MOST_EXPECTED_RISE * before
