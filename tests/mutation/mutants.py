"""Generates the mutants of a source file: copies of it with one small change each.

Left out, because no test should notice: docstrings and other strings, error messages, type annotations, decorators,
assertions (they state invariants), `__repr__` and `__str__`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

Defaults = Mapping[str, frozenset[str]]
"""Function or class name -> its parameters that have a default."""

BOUNDARIES: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
NEGATIONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
BUILTIN_DEFAULTS: Defaults = {
    "max": frozenset({"default", "key"}),
    "min": frozenset({"default", "key"}),
    "sorted": frozenset({"key", "reverse"}),
    "sum": frozenset({"start"}),
    "enumerate": frozenset({"start"}),
}


@dataclass(frozen=True)
class Mutant:
    number: int
    """Among all mutants of the file."""
    line: int
    function: str
    """Qualified name, or "<module>"."""
    before: str
    """The statement; if it is compound, its header."""
    after: str


@dataclass(frozen=True)
class Site:
    """A node that may be mutated, and its position in the tree."""

    node: ast.AST
    parent: ast.AST
    field: str
    """Field of the parent that holds the node."""
    index: int | None
    """Index in the field if that is a list, else None."""
    statement: ast.AST
    """The innermost statement around the node, or the node itself."""
    function: str
    returns: str
    """The return annotation of the innermost function."""

    def replace_node(self, node: ast.AST) -> None:
        """Put another node at this position."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node


class Mutator:
    """All mutants of a file, in the order of its lines."""

    def __init__(self, source: str, defaults: Defaults | None = None) -> None:
        self._tree = ast.parse(source)
        self._changes: list[tuple[Site, ast.AST]] = []
        self.mutants: list[Mutant] = []
        known = {**(defaults or {}), **default_parameters(self._tree), **BUILTIN_DEFAULTS}
        for site in _find_sites(self._tree):
            before = _statement_header(site.statement)
            seen = {before}
            for replacement in _replacements(site, known):
                site.replace_node(replacement)
                after = _statement_header(replacement if site.node is site.statement else site.statement)
                site.replace_node(site.node)
                if after not in seen:
                    seen.add(after)
                    line = getattr(site.node, "lineno", 0) or getattr(site.parent, "lineno", 0)
                    self.mutants.append(Mutant(len(self.mutants), line, site.function, before, after))
                    self._changes.append((site, replacement))

    def source(self, mutant: Mutant | None = None) -> str:
        """The whole file with the change of a mutant, or without any."""
        if mutant is None:
            return ast.unparse(self._tree)
        site, replacement = self._changes[mutant.number]
        site.replace_node(replacement)
        try:
            return ast.unparse(ast.fix_missing_locations(self._tree))
        finally:
            site.replace_node(site.node)


def default_parameters(tree: ast.AST) -> dict[str, frozenset[str]]:
    """For each function its parameters with a default, for each class its fields with a default."""
    found: dict[str, frozenset[str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name, args=args):
                positional = [*args.posonlyargs, *args.args]
                names = [arg.arg for arg in positional[len(positional) - len(args.defaults) :]]
                pairs = zip(args.kwonlyargs, args.kw_defaults, strict=True)
                names += [arg.arg for arg, default in pairs if default is not None]
                found[name] = frozenset(names)
            case ast.ClassDef(name=name, body=body):
                fields = [each for each in body if isinstance(each, ast.AnnAssign) and each.value is not None]
                found[name] = frozenset(each.target.id for each in fields if isinstance(each.target, ast.Name))
    return found


def _find_sites(tree: ast.Module) -> Iterator[Site]:
    def walk(node: ast.AST, statement: ast.AST, function: str, returns: str) -> Iterator[Site]:
        for child, field, index in _mutable_children(node):
            name, annotation = function, returns
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                if child.name in ("__repr__", "__str__"):
                    continue
                name = child.name if function == "<module>" else f"{function}.{child.name}"
                returned = child.returns if isinstance(child, ast.FunctionDef) else None
                annotation = "" if returned is None else ast.unparse(returned)
            inner = child if isinstance(child, ast.stmt | ast.match_case) else statement
            yield Site(child, node, field, index, inner, name, annotation)
            yield from walk(child, inner, name, annotation)

    yield from walk(tree, tree, "<module>", "")


def _mutable_children(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Children with their field and index, except strings, annotations, decorators and others that are not mutated."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return
        case ast.FunctionDef():
            yield node.args, "args", None
            names: tuple[str, ...] = ("body",)
        case ast.arguments():
            names = ("defaults", "kw_defaults")
        case ast.ClassDef():
            names = ("body",)
        case ast.AnnAssign():
            names = ("value",)
        case _:
            names = node._fields
    for name in names:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            yield value, name, None
        elif isinstance(value, list):
            yield from ((item, name, index) for index, item in enumerate(value) if isinstance(item, ast.AST))


def _replacements(site: Site, defaults: Defaults) -> Iterator[ast.AST]:
    node = site.node
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                others = [table[type(operator)] for table in (BOUNDARIES, NEGATIONS) if type(operator) in table]
                for other in others:
                    yield _copy_with(node, ops=_replace_item(node.ops, index, other()))
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield _copy_with(node, op=OPERATORS[type(operator)]())
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield node.operand
        case ast.BoolOp():
            swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield _copy_with(node, op=swapped)
            for index in range(len(node.values)):
                rest = _replace_item(node.values, index)
                yield rest[0] if len(rest) == 1 else _copy_with(node, values=rest)
        case ast.Constant():
            yield from (ast.Constant(value) for value in _other_values(node.value))
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.Attribute(attr=name, ctx=ast.Load()) if name in NAMES:
            yield _copy_with(node, attr=NAMES[name])
        case ast.Call():
            yield from _call_replacements(node, defaults)
        case ast.Return(value=value) if value is not None:
            yield from _return_replacements(node, site.returns)
        case ast.stmt():
            yield from _statement_replacements(node)
    for name in ("test", "guard"):
        yield from _negated_conditions(node, name)
    if isinstance(node, ast.comprehension):
        for index, condition in enumerate(node.ifs):
            if _is_plain(condition):
                negation = ast.UnaryOp(ast.Not(), condition)
                yield _copy_with(node, ifs=_replace_item(node.ifs, index, negation))


def _negated_conditions(node: ast.AST, name: str) -> Iterator[ast.AST]:
    """The node with its condition negated, unless another mutation does that."""
    condition = None if isinstance(node, ast.Assert) else getattr(node, name, None)
    if isinstance(condition, ast.expr) and _is_plain(condition):
        yield _copy_with(node, **{name: ast.UnaryOp(ast.Not(), condition)})


def _is_plain(condition: ast.expr) -> bool:
    is_not = isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not)
    return not (is_not or isinstance(condition, ast.Compare | ast.BoolOp | ast.Constant))


def _other_values(value: object) -> tuple[Any, ...]:
    match value:
        case bool():
            return (not value,)
        case int():
            return (value + 1, value - 1)
        case float():
            return (2.0 * value, 0.0) if value else (1.0,)
        case _:
            return ()


def _call_replacements(node: ast.Call, defaults: Defaults) -> Iterator[ast.AST]:
    """The call without one of the arguments that have a default."""
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    for index, keyword in enumerate(node.keywords):
        if keyword.arg in defaults.get(name, ()):
            yield _copy_with(node, keywords=_replace_item(node.keywords, index))


def _return_replacements(node: ast.Return, annotation: str) -> Iterator[ast.AST]:
    """Return None, the negation of a bool, or a tuple with its first two items swapped."""
    value = node.value
    assert value is not None
    if isinstance(value, ast.Tuple) and len(value.elts) > 1:
        first, second, *others = value.elts
        yield ast.Return(ast.Tuple([second, first, *others], ast.Load()))
    if annotation == "bool":
        if _is_plain(value):
            yield ast.Return(ast.UnaryOp(ast.Not(), value))
    elif not (isinstance(value, ast.Constant) and value.value is None):
        yield ast.Return(ast.Constant(None))


def _statement_replacements(node: ast.stmt) -> Iterator[ast.AST]:
    """The statement removed if it has side effects; other operators of augmented assignments."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return
        case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
            yield ast.If(ast.Constant(False), [node], [])  # the function stays a generator
        case ast.Expr() | ast.Delete() | ast.Raise() | ast.Continue() | ast.Break() | ast.AugAssign():
            yield ast.Pass()
        case ast.Assign(targets=targets) if any(_has_side_effect(target) for target in targets):
            yield ast.Pass()
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS:
        yield _copy_with(node, op=OPERATORS[type(node.op)]())


def _has_side_effect(target: ast.expr) -> bool:
    return any(isinstance(part, ast.Attribute | ast.Subscript) for part in ast.walk(target))


def _copy_with(node: ast.AST, **fields: object) -> ast.AST:
    """A shallow copy with some fields replaced."""
    changed = copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _replace_item(items: Sequence[ast.AST], index: int, *new: ast.AST) -> list[ast.AST]:
    """A copy of the list with the item at an index replaced or removed."""
    return [*items[:index], *new, *items[index + 1 :]]


def _statement_header(node: ast.AST) -> str:
    """One line of source: a simple statement, or a compound one without its body."""
    header: Any = copy(node)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if isinstance(getattr(header, name, None), list):
            setattr(header, name, [ast.Pass()] if name == "body" else [])
    match header:
        case ast.Match():
            return f"match {ast.unparse(header.subject)}:"
        case ast.Try():
            return "try:"
        case ast.FunctionDef() | ast.ClassDef():
            header.decorator_list = []
    text = ast.unparse(ast.fix_missing_locations(header))
    return " ".join(text.removesuffix("pass").split()) or "pass"
