"""Changes of one line each, drawn by a seed, that a good suite of tests should notice.

Code that no test should check is not changed: docstrings, annotations, decorators, asserts, log
messages, the texts of errors, `__all__`, and `zip(strict=...)`.
"""

import ast
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGES = tuple("repository format storage cache peers mounts torch".split())
"""The packages of `diesel_fs` from which mutants are drawn."""

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[tuple[str, str], ...]]] = {
    ast.Lt: ("<", (("boundary", "<="), ("comparison", ">="))),
    ast.LtE: ("<=", (("boundary", "<"), ("comparison", ">"))),
    ast.Gt: (">", (("boundary", ">="), ("comparison", "<="))),
    ast.GtE: (">=", (("boundary", ">"), ("comparison", "<"))),
    ast.Eq: ("==", (("comparison", "!="),)),
    ast.NotEq: ("!=", (("comparison", "=="),)),
    ast.Is: ("is", (("comparison", "is not"),)),
    ast.IsNot: (r"is\s+not", (("comparison", "is"),)),
    ast.In: ("in", (("comparison", "not in"),)),
    ast.NotIn: (r"not\s+in", (("comparison", "in"),)),
}
_LOGGERS = ("log.", "_log.", "logger.", "_logger.", "logging.", "warnings.")
_SEQUENCES = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed line. `before` and `after` are the whole line, without its end."""

    file: str
    """Relative to the tree."""
    line: int
    kind: str
    before: str
    after: str

    @property
    def package(self) -> str:
        return self.file.split("/")[1]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before.strip()}  ->  {self.after.strip()}"

    def applied(self, source: str) -> str:
        """The source with this change.

        Raises:
            ValueError: The line is not the one from which the mutant was made.
        """
        lines = source.split("\n")
        if self.line > len(lines) or lines[self.line - 1] != self.before:
            raise ValueError(f"{self.file}:{self.line} is no longer: {self.before}")
        lines[self.line - 1] = self.after
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Edit:
    """Replaces the text between two columns, in bytes, of a line."""

    kind: str
    line: int
    start: int
    end: int
    text: str


def draw(
    tree: Path,
    packages: Sequence[str],
    count: int,
    seed: int,
    is_covered: Callable[[str, int], bool],
) -> list[Mutant]:
    """At least `count` mutants, as many of each package, one per line, in covered lines.

    The seed alone decides the order in which lines are tried and the change of each, so two runs
    draw nearly the same mutants if they differ in a few covered lines.
    """
    share = -(-count // len(packages))
    return [
        mutant
        for package in packages
        for mutant in _of_package(tree, package, f"{seed} {package}", is_covered, share)
    ]


def _of_package(
    tree: Path, package: str, seed: str, is_covered: Callable[[str, int], bool], share: int
) -> list[Mutant]:
    places: dict[tuple[str, int], list[Mutant]] = {}
    sources = {}
    for path in sorted((tree / "diesel_fs" / package).rglob("*.py")):
        file = path.relative_to(tree).as_posix()
        sources[file] = path.read_text(encoding="utf-8")
        for mutant in candidates(sources[file], file):
            places.setdefault((file, mutant.line), []).append(mutant)
    chance = random.Random(seed)
    order = sorted(places)
    chance.shuffle(order)
    found: list[Mutant] = []
    for file, line in order:
        mutant = chance.choice(places[file, line])
        if len(found) < share and is_covered(file, line) and _compiles(mutant, sources[file]):
            found.append(mutant)
    return sorted(found, key=lambda each: (each.file, each.line))


def _compiles(mutant: Mutant, source: str) -> bool:
    with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
        try:
            compile(mutant.applied(source), mutant.file, "exec")
        except SyntaxError:
            return False
        return True


def candidates(source: str, file: str) -> list[Mutant]:
    lines = source.split("\n")
    encoded = [line.encode() for line in lines]
    found = []
    for edit in _edits(ast.parse(source), encoded):
        line = encoded[edit.line - 1]
        after = (line[: edit.start] + edit.text.encode() + line[edit.end :]).decode()
        before = lines[edit.line - 1]
        found.append(Mutant(file, edit.line, edit.kind, before, after))
    return sorted(found, key=lambda each: (each.line, each.kind, each.after))


def _edits(node: ast.AST, lines: list[bytes]) -> Iterator[_Edit]:
    if _is_for_people(node):
        return
    if isinstance(node, ast.expr):
        yield from _of_expression(node, lines)
    if isinstance(node, ast.stmt):
        yield from _of_statement(node, lines)
    if isinstance(node, ast.Raise):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params", "format_spec"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _edits(child, lines)


def _is_for_people(node: ast.AST) -> bool:
    """Whether the node is there for readers, type checkers or logs alone."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.arguments() | ast.keyword(arg="strict"):
            return True
        case ast.Call(func=function):
            return ast.unparse(function).startswith(_LOGGERS)
        case ast.Expr(value=ast.Call(func=function)):
            return ast.unparse(function).startswith(_LOGGERS)
        case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.If(test=ast.Name("TYPE_CHECKING")):
            return True
        case ast.Subscript(value=ast.Name(id="Literal" | "Annotated")):
            return True
    return False


def _of_statement(node: ast.stmt, lines: list[bytes]) -> Iterator[_Edit]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield from _negated(test)
        case ast.AugAssign(op=ast.Add() | ast.Sub() as operator, target=target, value=value):
            signs = ("+=", "-=") if isinstance(operator, ast.Add) else ("-=", "+=")
            yield from _between(target, value, re.escape(signs[0]), [("plus", signs[1])], lines)
    if node.end_lineno != node.lineno:
        return
    match node:
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield _whole(node, "return", "return None")
        case ast.Raise() | ast.Break() | ast.Continue():
            yield _whole(node, "jump", "pass")
        case ast.Expr(value=ast.Call() | ast.Await(value=ast.Call())):
            yield _whole(node, "statement", "pass")
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield _whole(node, "statement", "pass")


def _of_expression(node: ast.expr, lines: list[bytes]) -> Iterator[_Edit]:
    match node:
        case ast.Compare(left=left, ops=operators, comparators=comparators):
            operands = [left, *comparators]
            for first, operator, second in zip(operands, operators, comparators, strict=False):
                word, others = _COMPARISONS[type(operator)]
                yield from _between(first, second, word, others, lines)
        case ast.BoolOp(op=operator, values=values):
            words = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
            for first, second in pairwise(values):
                yield from _between(first, second, words[0], [("and-or", words[1])], lines)
        case ast.UnaryOp(op=ast.Not()):
            start = node.col_offset
            blank = lines[node.lineno - 1][start + 3 : start + 4] == b" "
            yield _Edit("not", node.lineno, start, start + 3 + blank, "")
        case ast.IfExp(test=test):
            yield from _negated(test)
        case ast.BinOp(op=ast.Add() | ast.Sub() as operator, left=left, right=right):
            if not (_is_sequence(left) or _is_sequence(right)):
                signs = ("+", "-") if isinstance(operator, ast.Add) else ("-", "+")
                word, other = re.escape(signs[0]), ("plus", signs[1])
                yield from _between(left, right, word, [other], lines)
        case ast.Constant(value=bool(value)):
            yield _whole(node, "constant", str(not value))
        case ast.Constant(value=int(value) | float(value)):
            yield _whole(node, "constant", repr(value + 1))
            yield _whole(node, "constant", repr(value - 1) if value >= 1 else f"({value - 1!r})")
        case ast.Call(func=ast.Name(id="min" | "max" as name) as function):
            yield _whole(function, "min-max", "max" if name == "min" else "min")


def _negated(test: ast.expr) -> Iterator[_Edit]:
    """The negation of a condition that is not a comparison."""
    plain = not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.NamedExpr)
    if plain and test.end_lineno == test.lineno:
        yield _Edit("not", test.lineno, test.col_offset, test.col_offset, "not ")


def _is_sequence(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    return is_text or isinstance(node, _SEQUENCES)


def _whole(node: ast.expr | ast.stmt, kind: str, text: str) -> _Edit:
    assert node.end_col_offset is not None
    return _Edit(kind, node.lineno, node.col_offset, node.end_col_offset, text)


def _between(
    first: ast.expr,
    second: ast.expr,
    word: str,
    others: Sequence[tuple[str, str]],
    lines: list[bytes],
) -> Iterator[_Edit]:
    """The operator between two operands, replaced by each of the others (kind and text)."""
    start = first.end_col_offset
    if first.end_lineno != second.lineno or start is None:
        return
    found = re.search(word.encode(), lines[second.lineno - 1][start : second.col_offset])
    if found:
        for kind, text in others:
            yield _Edit(kind, second.lineno, start + found.start(), start + found.end(), text)
