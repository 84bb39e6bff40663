"""One way: router, parallel <- moe; parallel.layout <- ckpt; all <- pretrain <- tools."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = {"router", "parallel", "moe", "ckpt", "pretrain", "tools", "tests", "bench"}
MAY_IMPORT = {
    "router": set(),
    "parallel": set(),
    "moe": {"router", "parallel"},
    "ckpt": {"parallel.layout"},
    "pretrain": {"router", "parallel", "moe", "ckpt"},
    "tools": {"router", "parallel", "moe", "ckpt", "pretrain"},
}
OUTSIDE = {
    "router": {"torch", "pydantic"},
    "parallel": {"torch", "pydantic"},
    "moe": {"torch", "pydantic"},
}


def imports(source: str, package: str) -> set[str]:
    """Every module named by an import, wherever it stands: in functions and type checks too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names if base == "parallel" or node.level else {base}
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and getattr(node.func, "attr", getattr(node.func, "id", ""))
            in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    return found


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def allowed(module: str, permitted: set[str]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in permitted)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_no_arrow_goes_the_wrong_way(package):
    assert files(package), f"{package}/ has no files"
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files(package)
        for module in imports(path.read_text(), package)
        if module.split(".")[0] in HOUSE - {package} and not allowed(module, MAY_IMPORT[package])
    ]
    assert not wrong


CUDA_ONLY = {"megablocks", "grouped_gemm"}  # megablocks' grouped GEMM has a name of its own


@pytest.mark.parametrize("package", OUTSIDE)
def test_the_lower_rooms_need_torch_and_pydantic_alone(package):
    import sys

    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files(package)
        for module in imports(path.read_text(), package)
        if (top := module.split(".")[0]) not in HOUSE | OUTSIDE[package] | sys.stdlib_module_names
        and not (top in CUDA_ONLY and path.name == "megablocks_backend.py")
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_no_circles_within_a_package(package):
    graph = {}
    for path in files(package):
        if path.name != "__init__.py":
            graph[f"{package}.{path.stem}"] = imports(path.read_text(), package)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
        if module in done or module not in graph:
            return
        for target in graph[module]:
            name = ".".join(target.split(".")[:2])
            visit(name, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_the_walk_sees_hidden_imports():
    source = "def f():\n    import moe.layer\nif TYPE_CHECKING:\n    from ckpt import save\n"
    assert imports(source, "router") == {"moe.layer", "ckpt"}


def test_the_wheel_ships_the_five_packages_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == [
        "router", "parallel", "moe", "ckpt", "pretrain",
    ]  # fmt: skip


@pytest.mark.parametrize("package", ["parallel", "ckpt"])
def test_no_module_hides_a_name_that_comes_on_demand(package):
    # An import of parallel.x sets the attribute x of the package, and hides a function of the name.
    import importlib

    names = importlib.import_module(f"{package}.api").__all__
    assert not {path.stem for path in files(package)} & set(names)


def test_a_layout_and_a_format_need_no_torch():
    source = (
        "import sys, ckpt.format, parallel.layout, ckpt.plan; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, timeout=60)


def test_the_command_starts_without_torchs_compiler():
    code = "import sys, tools.pretrain; sys.exit('torch._dynamo.convert_frame' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_there_is_no_drawer_for_odds_and_ends():
    names = {p.stem for package in MAY_IMPORT for p in files(package)}
    assert not names & {"utils", "common", "helpers", "misc"}
