"""The layers of the package, held by the imports: only to the left, no cycle, no torch below `graph`, CuPy in
one file. So what front ends share (`graph`, `grouping`, `planning`) knows no front end."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tsfuser"
LAYERS = (
    ("version", "interface", "errors", "option_parsers", "options", "log"), ("ir",), ("ops",), ("segment",),
    ("schedule",), ("lower",), ("codegen",),
    ("target",), ("graph",), ("joint",), ("planning",), ("grouping",), ("frontends",), ("debug",),
    ("knobs", "ahead"), ("commands",), ("__main__",),
)  # fmt: skip
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
STANDARD_LIBRARY_ONLY = RANK["graph"]  # layers below this one


def name_of(path, package=PACKAGE):
    """`tsfuser/ir/size.py` -> `("ir", "size")`, `tsfuser/ir/__init__.py` -> `("ir",)`."""
    parts = path.relative_to(package).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(path, modules, package=PACKAGE):
    """What a file imports: our modules as name tuples, and the top names of others."""
    own, others = set(), set()
    here = name_of(path, package)
    folder = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names]
            own |= {name[1:] for name in names if name[0] == "tsfuser"}
            others |= {name[0] for name in names if name[0] != "tsfuser"}
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            if node.level == 0 and module[0] != "tsfuser":
                others.add(module[0])
                continue
            base = module[1:] if node.level == 0 else folder[: len(folder) - node.level + 1] + module
            for alias in node.names:
                longer = base + (alias.name,)
                own.add(longer if longer in modules or longer == ("_C",) else base)
    return own - {()}, others


def problems(package=PACKAGE):
    """Every import that breaks a rule, as sentences."""
    files = sorted(package.rglob("*.py"))
    modules = {name_of(path, package) for path in files}
    found, edges = [], {}
    for path in files:
        here = name_of(path, package)
        if not here:
            continue  # tsfuser/__init__ stands on top of all
        name = ".".join(here)
        own, others = imports_of(path, modules, package)
        edges[here] = {target for target in own if target in modules}
        if here[0] not in RANK:
            found.append(f"{name} belongs to no layer")
            continue
        for target in own - {("_C",)}:
            if RANK.get(target[0], 99) > RANK[here[0]]:
                found.append(f"{name} imports {'.'.join(target)}, which is above it")
        if ("_C",) in own:
            others.add("torch")
        if RANK[here[0]] < STANDARD_LIBRARY_ONLY:
            foreign = (
                others - sys.stdlib_module_names - ({"cupy", "cuda"} if here == ("target", "cuda") else set())
            )
            found += [f"{name} imports {other}" for other in sorted(foreign)]
        elif "cupy" in others and here != ("debug", "standalone"):  # which is a program of its own
            found.append(f"{name} imports cupy")
    return found + cycles(edges)


def cycles(edges):
    """The cycles of the import graph, each once."""
    found, done = [], set()

    def visit(node, path):
        if node in path:
            found.append(
                "import cycle: " + " -> ".join(".".join(n) for n in path[path.index(node) :] + [node])
            )
        elif node not in done:
            for target in sorted(edges.get(node, ())):
                visit(target, path + [node])
            done.add(node)

    for node in sorted(edges):
        visit(node, [])
    return found


def test_imports_go_only_to_the_left():
    assert problems() == []


@pytest.mark.parametrize(
    "path, text, problem",
    [
        ("ir/a.py", "from ..ops import table", "ir.a imports ops.table, which is above it"),
        ("ir/a.py", "import tsfuser.codegen.emit", "ir.a imports codegen.emit, which is above it"),
        ("ir/a.py", "from . import b\n", "import cycle: ir.a -> ir.b -> ir.a"),
        ("ops/a.py", "def f():\n    import torch", "ops.a imports torch"),
        ("planning/a.py", "import cupy", "planning.a imports cupy"),
        ("codegen/a.py", "from .. import _C", "codegen.a imports torch"),
        ("new/a.py", "", "new.a belongs to no layer"),
    ],
)
def test_a_breach_is_found(tmp_path, path, text, problem):
    """The check itself can fail."""
    for other, source in {
        "ops/table.py": "",
        "codegen/emit.py": "",
        "ir/b.py": "from .a import x",
        path: text,
    }.items():
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / other).write_text(source)
    assert problem in problems(tmp_path)


CPP_LAYERS = ("call", "group", "graph", "torchscript", "interpreter", "bindings")


def upward_includes(folder):
    """The includes of C++ files that name a layer above their own. `call` knows no Python either."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".h", ".cpp"):
            here = path.relative_to(folder)
            above = CPP_LAYERS[CPP_LAYERS.index(here.parts[0]) + 1 :]
            names = re.findall(r'#include ["<]([^">]+)[">]', path.read_text())
            found += [f"{here} includes {name}" for name in names if name.split("/")[0] in above]
            if here.parts[0] == "call":
                found += [
                    f"{here} includes {name}" for name in names if "pybind" in name or "Python.h" in name
                ]
    return found


def test_cpp_files_include_no_layer_above_their_own():
    assert upward_includes(ROOT / "csrc_stubs") == []


@pytest.mark.parametrize("name", ["group/python.h", "pybind11/pybind11.h", "torchscript/hooks.h"])
def test_an_upward_include_is_found(tmp_path, name):
    (tmp_path / "call").mkdir()
    (tmp_path / "call" / "a.cpp").write_text(f'#include "call/plan.h"\n#include "{name}"\n')
    assert upward_includes(tmp_path) == [f"call/a.cpp includes {name}"]


def test_layers_below_graph_load_without_torch_and_cupy():
    """All of them are imported in a process where torch, numpy and cupy do not exist."""
    names = [".".join(("tsfuser",) + name_of(p)) for p in sorted(PACKAGE.rglob("*.py"))]
    low = [n for n in names if n != "tsfuser" and RANK[n.split(".")[1]] < STANDARD_LIBRARY_ONLY]
    source = f"""
import importlib, sys, types
for missing in ("torch", "numpy", "cupy"):
    sys.modules[missing] = None
package = types.ModuleType("tsfuser")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["tsfuser"] = package
for name in {low!r}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
