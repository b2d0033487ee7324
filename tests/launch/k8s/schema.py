"""Checks manifests against the schemas that JobSet and Kubeflow Trainer publish as custom resource definitions (CRD).

    python -m tests.launch.k8s.schema CRD.yaml ...            checks the golden manifests against whole CRDs
    python -m tests.launch.k8s.schema --write CRD.yaml ...    also writes schemas.json: the fields that they use

The CRDs are large and belong to others, so the repository holds names, types, required fields and allowed values of the
used fields alone. A manifest that uses another field fails until the schema is written again from the CRDs. Rules in
CEL and in admission webhooks are not checked.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = Path(__file__).with_name("schemas.json")
KEPT = ("type", "enum", "required", "pattern", "minimum", "maximum", "maxLength", "x-kubernetes-int-or-string")
TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "boolean": bool,
    "array": list,
    "object": dict,
    "number": (int, float),
}

Schema = dict[str, Any]


def find_problems(value: Any, schema: Schema, path: str = "") -> Iterator[str]:
    """What the schema does not allow, one line each."""
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: must be an integer or a string, is {value!r}"
        elif isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
            yield f"{path}: {value!r} does not match {schema['pattern']}"
        return
    kind = schema.get("type", "object")
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        yield f"{path}: must be of type {kind}, is {value!r}"
    elif isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{path}: lacks {name}" for name in schema.get("required", []) if name not in value)
        for name, item in value.items():
            inner = properties.get(name, others)
            if inner is None and (properties or path != ".metadata"):
                yield f"{path}.{name}: no such field"
            elif inner is not None:
                yield from find_problems(item, inner, f"{path}.{name}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from find_problems(item, schema["items"], f"{path}[{number}]")
    else:
        yield from find_bad_scalar(value, schema, path)


def find_bad_scalar(value: Any, schema: Schema, path: str) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: must be one of {schema['enum']}, is {value!r}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: {value!r} does not match {schema['pattern']}"
    if isinstance(value, str) and len(value) > schema.get("maxLength", len(value)):
        yield f"{path}: is longer than {schema['maxLength']}"
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        yield f"{path}: {value} is out of range"


def prune(schema: Schema, values: Sequence[Any]) -> Schema:
    """The part of a schema that these values use."""
    pruned = {key: schema[key] for key in KEPT if key in schema}
    trees = [value for value in values if isinstance(value, dict)]
    names = sorted({name for tree in trees for name in tree} & schema.get("properties", {}).keys())
    if names:
        pruned["properties"] = {
            name: prune(schema["properties"][name], [tree[name] for tree in trees if name in tree]) for name in names
        }
    if isinstance(schema.get("additionalProperties"), dict):
        pruned["additionalProperties"] = prune(schema["additionalProperties"], [])
    if "items" in schema:
        pruned["items"] = prune(
            schema["items"], [item for value in values if isinstance(value, list) for item in value]
        )
    return pruned


def golden_objects() -> dict[str, list[Any]]:
    """Kind -> objects in the golden manifests."""
    found: dict[str, list[Any]] = {}
    for path in sorted(GOLDEN.glob("*.yaml")):
        for tree in yaml.safe_load_all(path.read_text()):
            found.setdefault(tree["kind"], []).append(tree)
    return found


def read_crd(path: Path) -> tuple[str, str, Schema]:
    """Kind, API version and schema of a custom resource definition."""
    spec = yaml.safe_load(path.read_text())["spec"]
    version = next(each for each in spec["versions"] if each["served"])
    return spec["names"]["kind"], f"{spec['group']}/{version['name']}", version["schema"]["openAPIV3Schema"]


def main(arguments: Sequence[str]) -> int:
    objects, schemas, num_problems = golden_objects(), {}, 0
    for path in (Path(argument) for argument in arguments if argument != "--write"):
        kind, version, schema = read_crd(path)
        problems = [problem for tree in objects[kind] for problem in find_problems(tree, schema)]
        problems += [f"apiVersion {tree['apiVersion']}" for tree in objects[kind] if tree["apiVersion"] != version]
        num_problems += len(problems)
        print(f"{kind} {version}: {len(objects[kind])} objects, {len(problems)} problems", *problems, sep="\n  ")
        schemas[kind] = {"version": version, "schema": prune(schema, objects[kind])}
    if "--write" in arguments:
        SCHEMAS.write_text(json.dumps(schemas, indent=1, sort_keys=True) + "\n")
    return int(num_problems > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
