"""N8: no module reads a format that can run code from data: tests of the lint rule, and beyond.

No rule of ruff covers `recv()` of a `multiprocessing` pipe, which unpickles: a test here finds it.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .rows import each_row
from .test_layers import TREE, modules

UNSAFE_MODULES = frozenset(
    "cloudpickle code codeop copyreg dill joblib jsonpickle marshal pickle pickletools runpy"
    " shelve xmlrpc yaml".split()
)
UNSAFE_CALLS = frozenset("eval exec compile __import__".split())
UNSAFE_METHODS = frozenset(
    ["np.load", "numpy.load", "np.fromstring", "torch.load", "ast.literal_eval", "os.system"]
)


def rules_hit(code: str, name: str) -> set[str]:
    """The lint rules that ruff, with this project's settings, finds broken in a module `name`."""
    command = [sys.executable, "-m", "ruff", "check", "--output-format=json", "--no-cache"]
    done = subprocess.run(
        [*command, f"--stdin-filename={name}", "-"],
        input=code,
        cwd=TREE,
        check=False,
        capture_output=True,
        text=True,
    )
    return {finding["code"] for finding in json.loads(done.stdout)}


@each_row(
    ("code", "rule"),
    [
        ("import pickle\n", "TID251"),
        ("from pickle import loads\n", "TID251"),
        ("import marshal\n", "TID251"),
        ("import shelve\n", "TID251"),
        ("import dill\n", "TID251"),
        ("import numpy as np\n\nnp.load('x')\n", "TID251"),
        ("eval('1')\n", "S307"),
        ("exec('1')\n", "S102"),
        ("import yaml\n\nyaml.load('x')\n", "S506"),
        ("import subprocess\n\nsubprocess.run('id', shell=True)\n", "S602"),
    ],
)
def test_N8_ruff_refuses_it_in_every_package(code: str, rule: str) -> None:
    text = f'"""A module."""\n\n{code}'
    for name in ("diesel_fs/storage/bad.py", "cli/dlcmd/bad.py", "server/diesel_server/bad.py"):
        assert rule in rules_hit(text, name), name


def test_N8_ruff_lets_other_modules_pass() -> None:
    assert rules_hit('"""A module."""\n', "diesel_fs/storage/good.py") == set()


def unsafe(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name for each in names if _top(each.name) in UNSAFE_MODULES)
            case ast.ImportFrom(module=str(module), level=0) if _top(module) in UNSAFE_MODULES:
                yield module
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_CALLS:
                yield name
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                yield "recv() of a multiprocessing pipe"
            case ast.Call(func=ast.Attribute() as method) if ast.unparse(method) in UNSAFE_METHODS:
                yield ast.unparse(method)
            case ast.keyword(arg="allow_pickle" | "shell"):
                yield f"{node.arg}="
            case ast.Attribute(attr="Queue" | "SimpleQueue" | "Manager" | "Pool") if (
                "context" in ast.unparse(node.value) or "multiprocessing" in ast.unparse(node.value)
            ):
                yield ast.unparse(node)


def _top(module: str) -> str:
    return module.partition(".")[0]


@each_row(("module", "path"), modules().items())
def test_N8_no_module_hides_it_behind_a_noqa(module: str, path: Path) -> None:
    assert list(unsafe(ast.parse(path.read_text(encoding="utf-8")))) == [], module


@each_row(
    "code",
    [
        "import pickle",
        "from yaml import safe_load",
        "def f():\n    import marshal as m",
        "eval(x)",
        "pipe.recv()",
        "np.load(x)",
        "f(allow_pickle=True)",
        "multiprocessing.Queue()",
    ],
)
def test_N8_such_code_would_be_found(code: str) -> None:
    assert list(unsafe(ast.parse(code)))
    assert list(unsafe(ast.parse("pipe.recv_bytes(); socket.recv(4)"))) == []
