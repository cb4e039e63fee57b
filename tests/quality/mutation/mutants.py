"""Small wrong versions of a module, one change each, which the tests of that module should detect.

Not changed are annotations and the values of a `Literal`, docstrings, imports, code for the type checker alone,
decorators, and wording (strings with spaces, parts of f-strings): a test of every word would fail at every correction
of one. Nor does a function return None for False: no truth test distinguishes them, and the type checker refuses it.
Nor is `strict` dropped from a `zip` of iterables of equal length.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Change = tuple[str, Callable[[], None]]
"""What it does, and the doing of it, in place."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "floor": "ceil", "ceil": "floor"}
_WORD = re.compile(r"[a-z0-9_.]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change of one module: the `place`-th that there is. `lines` are of the function that it is in, if any."""

    path: str
    place: int
    line: int
    lines: range
    says: str


def mutants(path: str, source: str) -> tuple[Mutant, ...]:
    """Every mutant of a module."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return tuple(
        Mutant(path=path, place=place, line=node.lineno, lines=_function(functions, node.lineno), says=says)
        for place, (node, says, _) in enumerate(_changes(tree))
    )


def _function(functions: list[ast.FunctionDef | ast.AsyncFunctionDef], line: int) -> range:
    """The lines of the innermost function's body that has this one; none for what happens on import."""
    around = [one for one in functions if one.body[0].lineno <= line <= (one.end_lineno or 0)]
    if not around:
        return range(0)
    inner = max(around, key=lambda one: one.lineno)
    return range(inner.body[0].lineno, (inner.end_lineno or 0) + 1)


def mutated(source: str, place: int) -> ast.Module:
    """The module with its `place`-th change made."""
    tree = ast.parse(source)
    for number, (_, _, make) in enumerate(_changes(tree)):
        if number == place:
            make()
            break
    return ast.fix_missing_locations(tree)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, Callable[[], None]]]:
    for node in _nodes(tree):
        if isinstance(node, ast.expr | ast.stmt):
            for says, make in _of(node):
                yield node, says, make


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may be changed, in their order."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "format_spec"} or _is_docstring(node, name):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Import | ast.ImportFrom) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if _is_unread(child):
                continue
            if isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant):
                continue
            yield from _nodes(child)


def _is_unread(node: ast.AST) -> bool:
    """Whether no test can notice a change: a type's choices, a module's public names, `TYPE_CHECKING`, `strict`."""
    match node:
        case (
            ast.Subscript(value=ast.Name(id="Literal"))
            | ast.Assign(targets=[ast.Name(id="__all__")])
            | ast.If(test=ast.Name(id="TYPE_CHECKING"))
            | ast.keyword(arg="strict")
        ):
            return True
    return False


def _is_docstring(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Expr) and name == "value" and isinstance(node.value, ast.Constant)


def _of(node: ast.expr | ast.stmt) -> Iterator[Change]:
    match node:
        case ast.Compare(ops=operators):
            for place, operator in enumerate(operators):
                if other := _COMPARISONS.get(type(operator)):
                    yield _named(operator, other), _item(operators, place, other())
        case ast.BoolOp(op=joined):
            other_join = ast.Or if isinstance(joined, ast.And) else ast.And
            yield _named(joined, other_join), _field(node, "op", other_join())
        case ast.BinOp(op=sign) | ast.AugAssign(op=sign):
            if other_sign := _ARITHMETIC.get(type(sign)):
                yield _named(sign, other_sign), _field(node, "op", other_sign())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not dropped", _field(node, "operand", ast.UnaryOp(op=ast.Not(), operand=operand))
        case ast.UnaryOp(op=ast.USub()):
            yield "-x to x", _field(node, "op", ast.UAdd())
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield "condition negated", _field(node, "test", ast.UnaryOp(op=ast.Not(), operand=test))
        case ast.Return(value=ast.expr() as value):
            if not (isinstance(value, ast.Constant) and (value.value is None or value.value is False)):
                yield "returns None", _field(node, "value", ast.Constant(None))
        case ast.Break():
            yield "break to continue", _field(node, "__class__", ast.Continue)
        case ast.Continue():
            yield "continue to break", _field(node, "__class__", ast.Break)
        case ast.Call(func=ast.Name(id=name) as called) if name in _CALLS:
            yield f"{name} to {_CALLS[name]}", _field(called, "id", _CALLS[name])
        case ast.Constant(value=bool() as truth):
            yield f"{truth} to {not truth}", _field(node, "value", not truth)
        case ast.Constant(value=int() | float() as number):
            yield f"{number} to {number + 1}", _field(node, "value", number + 1)
        case ast.Constant(value=str() as word) if _WORD.fullmatch(word):
            yield f"{word!r} to 'X{word}'", _field(node, "value", f"X{word}")


def _named(before: ast.AST, after: type[ast.AST]) -> str:
    return f"{type(before).__name__} to {after.__name__}"


def _field(node: ast.AST, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(node, name, value)


def _item(operators: list[ast.cmpop], place: int, value: ast.cmpop) -> Callable[[], None]:
    def make() -> None:
        operators[place] = value

    return make
