"""Tables of the docs that are computed from the code: every config key and every drill scenario.

    python -m tests.docs_tables            print the pages with current tables
    python -m tests.docs_tables --write    write docs/configuration.md and docs/drills.md

A page marks the place of a table, and everything between the two comments is replaced:

    <!-- table: sentinel.detect -->

    <!-- end of table -->

Names of tables: a section of the config (`train`, `sentinel.policy`), `groups` (all config groups and their options),
`options GROUP` (the options of one group), `pretraining` (what every size of the model from 125m up sets), `scenarios`
(all drills). The text of a key is the docstring under its field
in `harness/config/`; its default comes from `conf/`. `tests/test_docs.py` fails if a page is not current.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from harness.config import compose, conf_files
from harness.config.key_help import field_texts
from harness.config.schema import Config
from harness.drills import scenario

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs/configuration.md", ROOT / "docs/drills.md")
TABLE = re.compile(r"^<!-- table: (.+?) -->\n.*?^<!-- end of table -->$", re.DOTALL | re.MULTILINE)
MAX_VALUES = 9
"""The most values that the row of an option lists; with more, the row names the file."""
GROUP_ORDER = ("model", "data", "optim", "precision", "parallel", "sentinel", "checkpoint", "telemetry", "launch")


def union_members(hint: Any) -> Iterator[Any]:
    """The types of a union, or the type itself."""
    if get_origin(hint) is UnionType:
        yield from (member for member in get_args(hint) if member is not NoneType)
    else:
        yield hint


def render_choices(hint: Any, *, known: str) -> str:
    """The values of an enum, with the docstrings of its members; empty if the text `known` names all of them."""
    for member in union_members(hint):
        if isinstance(member, type) and issubclass(member, StrEnum):
            texts = field_texts(member)
            if not any(texts.values()) and all(re.search(rf"\b{value}\b", known) for value in texts):
                return ""
            return "; ".join(
                f"`{value}`: {text.rstrip('.')}" if text else f"`{value}`" for value, text in texts.items()
            )
    return ""


def nested_section(hint: Any) -> type | None:
    """The dataclass of a field: its type, or the value type of its dict or list."""
    item_type = get_args(hint)[-1] if get_origin(hint) in (dict, list) else hint
    return item_type if isinstance(item_type, type) and is_dataclass(item_type) else None


def section_of(path: str) -> type:
    """The dataclass of a dotted section, such as `sentinel.policy`."""
    section: type = Config
    for name in path.split("."):
        found = nested_section(get_type_hints(section)[name])
        assert found is not None, f"{path} is not a section of the config"
        section = found
    return section


@cache
def defaults() -> dict[str, Any]:
    """The resolved default config, as plain data."""
    return compose.plain(compose.load())


def value_at(path: str) -> Any:
    value: Any = defaults()
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            return None
        value = value[name]
    return value


def escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


def render_value(value: Any) -> str:
    """A default value in YAML syntax."""
    match value:
        case None:
            return "`null`"
        case bool():
            return f"`{str(value).lower()}`"
        case dict() | list():
            return "`{}`" if value == {} else "`[]`" if value == [] else "see `conf/`"
        case _:
            return f"`{value}`"


def section_table(path: str) -> Iterator[str]:
    """Key, default and meaning of every key of a section; nested sections have their own tables."""
    section = section_of(path)
    hints, texts, values = get_type_hints(section), field_texts(section), value_at(path)
    match container_of(path):
        case "dict":
            prefix, values = f"{path}.NAME", class_defaults(section)
        case "list":
            prefix, values = f"{path}[N]", class_defaults(section)
        case _:
            prefix = path
    yield "| key | default | meaning |"
    yield "|---|---|---|"
    for name, text in texts.items():
        below = nested_section(hints[name])
        if below is not None and get_origin(hints[name]) is None:
            if set(field_texts(below)) == {"per_window", "per_run"}:
                yield f"| `{prefix}.{name}` | {render_budget(values[name])} | {escape_cell(text)} |"
            continue
        default = render_value(values[name]) if name in values else "none"
        allowed = render_choices(hints[name], known=text)
        meaning = ". ".join(part.rstrip(".") for part in (text, allowed) if part)
        yield f"| `{prefix}.{name}` | {default} | {escape_cell(meaning)} |"


def container_of(path: str) -> str:
    """`dict` or `list` if a section is the value type of one, which users fill; else empty."""
    above, _, name = path.rpartition(".")
    origin = get_origin(get_type_hints(section_of(above) if above else Config)[name])
    return "" if origin is None else str(origin.__name__)


def class_defaults(section: Any) -> dict[str, Any]:
    """Defaults of fields that users may leave out."""
    plain_defaults = {field.name: field.default for field in fields(section) if field.default is not MISSING}
    factory_defaults = {
        field.name: field.default_factory() for field in fields(section) if field.default_factory is not MISSING
    }
    return plain_defaults | factory_defaults


def render_budget(value: dict[str, int]) -> str:
    return f"`{value['per_window']}` a window, `{value['per_run']}` a run"


def read_comment(file: Path) -> str:
    """The comment at the top of a YAML file, in one line."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.lstrip("# "))
    return " ".join(lines)


def leaf_values(tree: Any, prefix: str = "") -> Iterator[str]:
    """`key=value` of each leaf of a config tree."""
    if isinstance(tree, dict) and tree:
        for name, child in tree.items():
            yield from leaf_values(child, f"{prefix}.{name}" if prefix else name)
    else:
        yield f"{prefix}={render_value(tree).strip('`')}" if not isinstance(tree, list) else prefix


def options_table(group: str) -> Iterator[str]:
    """The options of a group: comment of the file, and the values that it sets."""
    yield "| option | sets | note |"
    yield "|---|---|---|"
    for option in conf_files.options_of(group):
        file = conf_files.conf_dir() / group / f"{option}.yaml"
        tree = conf_files.read_tree(file)
        tree.pop("defaults", None)
        values = list(leaf_values(tree))
        sets = (
            ", ".join(f"`{value}`" for value in values)
            if len(values) <= MAX_VALUES
            else f"`conf/{group}/{option}.yaml`"
        )
        yield f"| `{group}={option}` | {escape_cell(sets)} | {escape_cell(read_comment(file))} |"


def pretraining_table() -> Iterator[str]:
    """What the sizes that include `conf/pretraining.yaml` set beside their shape, and the defaults of these keys."""
    small, large = (compose.flat(compose.plain(compose.load([f"model={size}"]))) for size in ("50m", "125m"))
    shapes = tuple(f"model.{name}" for name in conf_files.read_tree(conf_files.conf_dir() / "model/125m.yaml")["model"])
    yield "| key | default | `model=125m` and larger |"
    yield "|---|---|---|"
    for key, value in large.items():
        if value != small[key] and key not in (*shapes, "optim.lr"):
            yield f"| `{key}` | {render_value(small[key])} | {render_value(value)} |"


def groups_table() -> Iterator[str]:
    chosen = conf_files.read_tree(conf_files.conf_dir() / "config.yaml")["defaults"]
    default_options = {group: option for entry in chosen if isinstance(entry, dict) for group, option in entry.items()}
    names = conf_files.groups()
    ordered = [*(name for name in GROUP_ORDER if name in names), *(name for name in names if name not in GROUP_ORDER)]
    yield "| group | options | default |"
    yield "|---|---|---|"
    for group in ordered:
        options = " ".join(f"`{option}`" for option in conf_files.options_of(group))
        default = f"`{default_options[group]}`" if group in default_options else f"none; add it with `+{group}=NAME`"
        yield f"| `{group}` | {options} | {default} |"


def scenarios_table() -> Iterator[str]:
    """The fault of each drill, and the findings and actions that it expects."""
    yield "| scenario | fault | finding (any of) | action (any of) | starts |"
    yield "|---|---|---|---|---|"
    for name in scenario.names():
        drill = scenario.load_scenario(name)
        findings, actions = (", ".join(kinds) or "-" for kinds in (drill.expected.findings, drill.expected.actions))
        yield f"| `{name}` | {escape_cell(drill.summary)} | {findings} | {actions} | {drill.expected.starts} |"


def render_table(name: str) -> Iterable[str]:
    match name.split():
        case ["groups"]:
            return groups_table()
        case ["scenarios"]:
            return scenarios_table()
        case ["pretraining"]:
            return pretraining_table()
        case ["options", group]:
            return options_table(group)
        case [section]:
            return section_table(section)
    raise ValueError(f"no table {name!r}")


def update_tables(text: str) -> str:
    def replace_table(match: re.Match[str]) -> str:
        name = match.group(1)
        return "\n".join([f"<!-- table: {name} -->", "", *render_table(name), "", "<!-- end of table -->"])

    return TABLE.sub(replace_table, text)


def table_names(text: str) -> list[str]:
    """Names of the tables of a page."""
    return [match.group(1) for match in TABLE.finditer(text)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.docs_tables", description="Print pages with current tables.")
    parser.add_argument("--write", action="store_true", help="write the pages instead")
    options = parser.parse_args()
    for page in PAGES:
        text = update_tables(page.read_text(encoding="utf-8"))
        if options.write:
            page.write_text(text, encoding="utf-8")
        else:
            print(text, end="")


if __name__ == "__main__":
    main()
