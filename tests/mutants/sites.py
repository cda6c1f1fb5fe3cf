"""Places of a source file that an operator can change, found in its syntax tree.

A change replaces the bytes of one node, or of the gap between two, so that all else stays as it is. Left alone is what
no test should see: docstrings, texts of errors and logs, annotations, assertions, decorators, `if TYPE_CHECKING:`.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

OPERATORS = (
    "comparison", "boolean", "arithmetic", "constant", "condition", "call", "return", "assignment", "min-max",
    "keyword",
)  # fmt: skip

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}
_COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
}
_SWAPPED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
_TEXTS = frozenset({"print", "log", "logger", "logging", "warnings", "echo", "format", "debug", "warning", "exception"})
_NUMBERS = frozenset({"int", "float"})


@dataclass(frozen=True)
class Site:
    """One change of a source.

    Attributes:
        start, end: the bytes of the source that are replaced.
        text: what stands there afterwards.
    """

    operator: str
    start: int
    end: int
    text: str


def find_sites(source: bytes, defaults: dict[str, set[str]]) -> list[Site]:
    """All changes of a file, in the order of the syntax tree. `defaults`: see `defaults_of`."""
    finder = _Finder(source, defaults)
    finder.visit(ast.parse(source))
    return finder.sites


def defaults_of(trees: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Arguments that may be left out, by the name that is called: those that have a default wherever a function or
    class of that name takes them. Fields with a default count as arguments of their class."""
    optional: dict[str, set[str]] = defaultdict(set)
    required: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                _add_arguments(node, optional[node.name], required[node.name])
            elif isinstance(node, ast.ClassDef):
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                        (optional if one.value else required)[node.name].add(one.target.id)
                    elif isinstance(one, ast.FunctionDef) and one.name == "__init__":
                        _add_arguments(one, optional[node.name], required[node.name])
    return {name: given - required[name] for name, given in optional.items()}


def _add_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, optional: set[str], required: set[str]) -> None:
    positional = [*node.args.posonlyargs, *node.args.args]
    first = len(positional) - len(node.args.defaults)
    for index, one in enumerate(positional):
        (optional if index >= first else required).add(one.arg)
    for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
        (required if default is None else optional).add(one.arg)


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes, defaults: dict[str, set[str]]) -> None:
        self.sites: list[Site] = []
        self._source = source
        self._defaults = defaults
        self._lines = [0, *(found.end() for found in re.finditer(rb"\n", source))]
        # the innermost function: its name and the type that it returns
        self._function = ("", "")

    # -- places

    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr | ast.stmt) -> str:
        return self._source[self._start(node) : self._end(node)].decode()

    def _change(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        self.sites.append(Site(operator, self._start(node), self._end(node), text))

    def _change_between(self, operator: str, start: int, end: int, pattern: str, text: str) -> None:
        gap = self._source[start:end].decode()
        if "#" not in gap and (found := re.search(pattern, gap)):
            at = start + len(gap[: found.start()].encode())
            self.sites.append(Site(operator, at, at + len(found[0].encode()), text))

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Constant):
            self._change("condition", test, f"not ({self._text(test)})")

    # -- what is left alone

    def visit_Raise(self, node: ast.Raise) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and "TypeAlias" not in ast.dump(node.annotation):
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for one in node.body:
            self.visit(one)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        outer = self._function
        self._function = (node.name, node.returns.id if isinstance(node.returns, ast.Name) else "")
        for one in node.body:
            self.visit(one)
        self._function = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    # -- statements

    def visit_If(self, node: ast.If) -> None:
        if _called(node.test) == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(value, ast.Call) and not _is_text(value):
            self._change("call", node, "pass")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        value = node.value
        if value is None:
            return
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            self._change("return", value, str(not value.value))
        elif self._function[1] == "bool" or isinstance(value, ast.Compare):
            self._change("return", value, f"not ({self._text(value)})")
        elif self._function[1] in _NUMBERS:
            self._change("return", value, f"({self._text(value)}) + 1")
        self.visit(value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id.startswith("__"):
            return
        self._drop_assignment(node, node.targets)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop_assignment(node, [node.target])
        self._compute(node.op, self._end(node.target), self._start(node.value), node.value)
        self.generic_visit(node)

    def _drop_assignment(self, node: ast.Assign | ast.AugAssign, targets: list[ast.expr]) -> None:
        # in `__init__` it would be missed wherever the object is used
        if self._function[0] not in ("", "__init__") and all(isinstance(one, ast.Attribute) for one in targets):
            self._change("assignment", node, "pass")

    # -- expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        values = [node.left, *node.comparators]
        for left, compared, right in zip(values, node.ops, values[1:], strict=False):
            pattern, text = _COMPARED[type(compared)]
            self._change_between("comparison", self._end(left), self._start(right), pattern, text)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        pattern, text = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._change_between("boolean", self._end(left), self._start(right), pattern, text)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._change_between("boolean", self._start(node), self._start(node.operand), r"not\s*", "")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._compute(node.op, self._end(node.left), self._start(node.right), node.left, node.right)
        self.generic_visit(node)

    def _compute(self, computed: ast.operator, start: int, end: int, *values: ast.expr) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        if type(computed) in _COMPUTED and not any(isinstance(one, texts) or _is_string(one) for one in values):
            pattern, text = _COMPUTED[type(computed)]
            self._change_between("arithmetic", start, end, re.escape(pattern), text)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._change("constant", node, str(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        if _is_text(node):
            return
        name = _called(node.func)
        if name in _SWAPPED:
            end = self._end(node.func)
            self.sites.append(Site("min-max", end - len(name), end, _SWAPPED[name]))
        given: list[ast.expr | ast.keyword] = sorted([*node.args, *node.keywords], key=self._start)
        for index, one in enumerate(given):
            if isinstance(one, ast.keyword) and one.arg in self._defaults.get(name, ()):
                if index + 1 < len(given):
                    self.sites.append(Site("keyword", self._start(one), self._start(given[index + 1]), ""))
                else:
                    start = self._end(given[index - 1]) if index else self._start(one)
                    self.sites.append(Site("keyword", start, self._end(one), ""))
        self.generic_visit(node)


def _called(node: ast.expr) -> str:
    """The last part of a dotted name; "": it is none."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _is_text(node: ast.Call) -> bool:
    """Whether a call logs, prints or formats."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return bool({_called(node.func), _called(owner).lstrip("_")} & _TEXTS)


def _is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
