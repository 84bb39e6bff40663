"""Which room may import which; every import is looked at, in functions and type checks too.

A room is a folder with an ``__init__``, or a file beside such folders. ``MAY_IMPORT`` names every
room and the rooms that the room may enter. A room is entered by its door: from another room one
imports names of ``ckpt.format``, never of ``ckpt.format.manifest``.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CKPT = {
    "ckpt.errors": set(),
    "ckpt.store": {"ckpt.errors"},
    "ckpt.format": {"ckpt.errors", "ckpt.store", "parallel.layout", "parallel.placements"},
    "ckpt.lifecycle": {"ckpt.errors", "ckpt.store", "ckpt.format", "parallel.layout"},
    "ckpt.local_array": {
        "ckpt.errors", "ckpt.store", "ckpt.format", "parallel.layout", "parallel.placements",
    },
    "ckpt.write": {
        "ckpt.errors", "ckpt.store", "ckpt.format", "ckpt.lifecycle", "ckpt.local_array",
        "parallel.layout", "parallel.placements", "parallel.version",
    },
    "ckpt.read": {
        "ckpt.errors", "ckpt.store", "ckpt.format", "ckpt.local_array", "parallel.layout",
    },
    "ckpt.background": {
        "ckpt.errors", "ckpt.store", "ckpt.format", "ckpt.lifecycle", "ckpt.local_array",
        "ckpt.write", "parallel.layout", "parallel.on_demand",
    },
    "ckpt.rewrite": {
        "ckpt.errors", "ckpt.store", "ckpt.format", "ckpt.read", "ckpt.write", "parallel.layout",
        "parallel.placements",
    },
    "ckpt.interop": {
        "ckpt.errors", "ckpt.store", "ckpt.format", "ckpt.rewrite", "parallel.layout",
        "parallel.on_demand",
    },
    "ckpt.state_dict": {
        "ckpt.errors", "ckpt.store", "ckpt.format", "ckpt.lifecycle", "ckpt.local_array",
        "ckpt.write", "ckpt.read", "ckpt.background", "parallel.layout", "parallel.placements",
    },
}  # fmt: skip
LIBRARY = {"router", "parallel", "moe", "ckpt", "cluster"}
PRETRAIN = {
    "pretrain.errors": set(),
    "pretrain.model": set(),
    "pretrain.health": {"pretrain.errors"},
    "pretrain.data": {"pretrain.errors"},
    "pretrain.optim": {"pretrain.model"},
    "pretrain.state": {"pretrain.optim", "pretrain.health"},
    "pretrain.spec": {
        "pretrain.errors", "pretrain.model", "pretrain.data", "pretrain.optim", "pretrain.health",
    },
    "pretrain.parallelize": {"pretrain.model", "pretrain.state"},
    "pretrain.runtime": {"pretrain.errors", "pretrain.spec"},
    "pretrain.observe": {"pretrain.errors", "pretrain.spec"},
    "pretrain.observe.report": {"pretrain.errors", "pretrain.observe"},
    "pretrain.elastic": {
        "pretrain.errors", "pretrain.spec", "pretrain.runtime", "pretrain.observe",
    },
    "pretrain.faults": {
        "pretrain.errors", "pretrain.spec", "pretrain.runtime", "pretrain.observe",
    },
    "pretrain.plan": {
        "pretrain.errors", "pretrain.spec", "pretrain.model", "pretrain.parallelize",
        "pretrain.optim",  # what an optimizer keeps, and the products of its update
    },
    "pretrain.convert.hf": {"pretrain.errors", "pretrain.model", "pretrain.state"},
    "pretrain.convert": {
        "pretrain.errors", "pretrain.model", "pretrain.data", "pretrain.state", "pretrain.spec",
        "pretrain.convert.hf",
    },
    "pretrain.rank_model": {
        "pretrain.errors", "pretrain.model", "pretrain.state", "pretrain.spec",
        "pretrain.parallelize", "pretrain.runtime",
    },
    "pretrain.job": {
        "pretrain.errors", "pretrain.model", "pretrain.data", "pretrain.optim", "pretrain.state",
        "pretrain.spec", "pretrain.health", "pretrain.parallelize", "pretrain.runtime",
        "pretrain.observe", "pretrain.rank_model",
    },
    "pretrain.checkpoint": {
        "pretrain.errors", "pretrain.model", "pretrain.data", "pretrain.optim", "pretrain.state",
        "pretrain.spec",
        "pretrain.runtime", "pretrain.observe", "pretrain.plan", "pretrain.job", "pretrain.health",
    },
    "pretrain.train": {
        "pretrain.errors", "pretrain.model", "pretrain.data", "pretrain.optim", "pretrain.state",
        "pretrain.health",
        "pretrain.spec", "pretrain.parallelize", "pretrain.runtime", "pretrain.observe",
        "pretrain.job", "pretrain.checkpoint", "pretrain.elastic", "pretrain.faults",
        "pretrain.rank_model",
    },
    "pretrain.commands": {
        "pretrain.errors", "pretrain.model", "pretrain.spec", "pretrain.data",
        "pretrain.runtime", "pretrain.observe", "pretrain.observe.report", "pretrain.convert",
        "pretrain.plan", "pretrain.train", "pretrain.elastic", "pretrain.faults",
    },
}  # fmt: skip
MAY_IMPORT: dict[str, set[str]] = {
    "router": set(),
    "parallel": set(),
    "moe": {"router", "parallel"},
    "ckpt": {*CKPT, "parallel.on_demand"},
    **CKPT,
    "cluster": {"cluster.detect", "cluster.members", "cluster.launch", "cluster.burnin"},
    "cluster.detect": {"parallel"},
    "cluster.members": {"parallel.on_demand"},
    "cluster.launch": {"cluster.members"},
    "cluster.burnin": {"cluster.members"},
    "pretrain": set(PRETRAIN),
    **{room: rooms | LIBRARY for room, rooms in PRETRAIN.items()},
    "tools": {"pretrain.commands"},
}
HOUSE = {"router", "parallel", "moe", "ckpt", "cluster", "pretrain", "tools", "tests", "bench"}
SHIPPED = ["router", "parallel", "moe", "ckpt", "cluster", "pretrain"]
OUTSIDE = {
    "router": {"torch", "pydantic"},
    "parallel": {"torch", "pydantic"},
    "moe": {"torch", "pydantic"},
    "cluster": {"torch", "pydantic", "pynvml"},  # NVML: optional, on demand
}
CUDA_ONLY = {
    "moe.megablocks_backend": {"megablocks", "grouped_gemm"},  # its grouped GEMM has its own name
    "moe.deep_ep": {"deep_ep"},
}
OPEN_FILES = {
    # Plain arithmetic of layouts, for rooms that do without torch.
    "parallel.layout",
    "parallel.placements",
    # What the doors of several rooms do; it imports nothing.
    "parallel.on_demand",
    # A constant.
    "parallel.version",
    # For layers: an MoE layer's dispatcher, attention, and experts need files of parallel
    # in depth, whose names mean little in the door beside those of a whole model.
    "parallel.collectives",
    "parallel.context_parallel",
    "parallel.delayed_weight_grad",
    "parallel.host_buffers",
    "parallel.unit_sums",
    # The door would load DTensor and FSDP, which a layer in one process does without.
    "parallel.dtensor",
    # For what starts collectives of its own, as pipelines, and for what installs the monitor.
    "parallel.comm_watch",
}

Modules = Mapping[str, str]
"""Source text by full dotted name; a folder's ``__init__`` has the folder's name."""


def read_modules(*tops: str) -> dict[str, str]:
    found = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path.read_text()
    return found


def folders_of(modules: Modules) -> set[str]:
    return {name.rpartition(".")[0] for name in modules} - {""} | {
        name for name in modules if any(other.startswith(f"{name}.") for other in modules)
    }


def imports(source: str, package: str, modules: Modules) -> Iterator[str]:
    """The full dotted name of every module that an import loads, wherever the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in modules and alias.name not in bound(modules[base]) else base
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and getattr(node.func, "attr", getattr(node.func, "id", ""))
            in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


@cache
def bound(source: str) -> frozenset[str]:
    """What a door imports: ``save`` is its function, not the file of that name."""
    return frozenset(
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


def arrows(modules: Modules) -> Iterator[tuple[str, str]]:
    """(importing module, imported module), both of the house."""
    folders = folders_of(modules)
    for name, source in modules.items():
        package = name if name in folders else name.rpartition(".")[0]
        for target in imports(source, package, modules):
            if target.split(".")[0] in HOUSE and target != name:
                yield name, target


def room_of(module: str, rooms: Mapping[str, object]) -> str:
    """The innermost room of the table that holds a module."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in rooms:
            return ".".join(parts[:end])
    return parts[0]


def wrong_arrows(modules: Modules, may_import: Mapping[str, set[str]]) -> list[str]:
    found = []
    for name, target in arrows(modules):
        here, there = room_of(name, may_import), room_of(target, may_import)
        if here == there:
            continue
        allowed = any(target == each or there == each for each in may_import.get(here, set()))
        allowed |= there.split(".")[0] != here.split(".")[0] and (
            there.split(".")[0] in may_import.get(here, set())
        )
        if not allowed:
            found.append(f"{name} imports {target}")
    return found


def passed_doors(modules: Modules, rooms: Mapping[str, object]) -> list[str]:
    """Imports of a file inside a folder that the importing file is not in.

    A file that is a room by itself is its own door.
    """
    folders, found = folders_of(modules), []
    for name, target in arrows(modules):
        folder = target.rpartition(".")[0]
        if target in OPEN_FILES or target in folders or target in rooms:
            continue
        home = name if name in folders else name.rpartition(".")[0]
        inside = home == folder or home.startswith(f"{folder}.")
        if not inside:
            found.append(f"{name} imports {target}, past the door {folder}")
    return found


def circles(modules: Modules) -> list[str]:
    """Circles of modules at any depth; a door's own imports of its folder's files are the door."""
    folders = folders_of(modules)
    graph: dict[str, set[str]] = {}
    for name, target in arrows(modules):
        if name not in folders:
            graph.setdefault(name, set()).add(target)
    return _circles(graph)


def room_circles(modules: Modules, rooms: Mapping[str, object]) -> list[str]:
    """Circles of rooms."""
    graph: dict[str, set[str]] = {}
    for name, target in arrows(modules):
        here, there = room_of(name, rooms), room_of(target, rooms)
        if here != there and "." in name:
            graph.setdefault(here, set()).add(there)
    return _circles(graph)


def _circles(graph: Mapping[str, set[str]]) -> list[str]:
    found, done = [], set()

    def visit(node: str, trail: tuple[str, ...]) -> None:
        if node in trail:
            found.append(" -> ".join((*trail[trail.index(node) :], node)))
            return
        if node in done:
            return
        for target in sorted(graph.get(node, ())):
            visit(target, (*trail, node))
        done.add(node)

    for node in sorted(graph):
        visit(node, ())
    return found


HOUSE_MODULES = read_modules(*SHIPPED, "tools")


def test_no_room_imports_a_room_that_the_table_does_not_name():
    assert not wrong_arrows(HOUSE_MODULES, MAY_IMPORT)


def test_the_table_names_every_room_and_no_other():
    folders = {n for n in folders_of(HOUSE_MODULES) if not n.startswith("tools")}
    assert folders == {r for r in MAY_IMPORT if r in folders}
    missing = [room for room in MAY_IMPORT if room not in HOUSE_MODULES and room != "tools"]
    assert not missing


def test_rooms_are_entered_by_their_doors():
    assert not passed_doors(HOUSE_MODULES, MAY_IMPORT)


def test_there_are_no_circles_of_modules_or_of_rooms():
    assert not circles(HOUSE_MODULES)
    assert not room_circles(HOUSE_MODULES, MAY_IMPORT)


TABLE = {"a": {"a.x", "a.y"}, "a.x": set(), "a.y": {"a.x"}, "b": {"a"}}
SOUND = {
    "a": "from a.x import f",
    "a.x": "from a.x.one import f\nfrom a.x.two import g",
    "a.x.one": "def f(): ...",
    "a.x.two": "from a.x.one import f\ndef g(): ...",
    "a.y": "from a.y.one import h",
    "a.y.one": "from a.x import g\ndef h(): ...",
    "b": "",
    "b.one": "from a import f",
}


@pytest.fixture
def _small_house(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "HOUSE", {"a", "b"})


@pytest.mark.usefixtures("_small_house")
def test_a_small_house_is_sound():
    assert not wrong_arrows(SOUND, TABLE)
    assert not passed_doors(SOUND, TABLE)
    assert not circles(SOUND)
    assert not room_circles(SOUND, TABLE)


@pytest.mark.usefixtures("_small_house")
@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("a.x.one", "from b.one import k\ndef f(): ..."),
        ("a.x.one", "def f():\n    from a.y import h"),
        ("a.x.one", "if TYPE_CHECKING:\n    from ..y import h\ndef f(): ..."),
        ("a.x.one", "import importlib\nimportlib.import_module('a.y')\ndef f(): ..."),
    ],
)
def test_an_arrow_that_the_table_does_not_name_is_seen(module, source):
    broken = SOUND | {module: source}
    assert wrong_arrows(broken, TABLE)
    assert all(line.startswith(f"{module} imports ") for line in wrong_arrows(broken, TABLE))


@pytest.mark.usefixtures("_small_house")
@pytest.mark.parametrize(
    "source", ["from a.x.two import g", "import a.x.two", "def f():\n    from a.x import two"]
)
def test_a_room_entered_past_its_door_is_seen(source):
    assert passed_doors(SOUND | {"a.y.one": source}, TABLE)
    assert passed_doors(SOUND | {"b.one": source}, TABLE)
    assert not passed_doors(SOUND | {"a.x.three": source}, TABLE)


@pytest.mark.usefixtures("_small_house")
def test_circles_inside_a_folder_and_between_rooms_are_seen():
    inside = SOUND | {"a.x.one": "from a.x.two import g\ndef f(): ..."}
    assert circles(inside) == ["a.x.one -> a.x.two -> a.x.one"]
    # Two files of one name are two modules.
    between = SOUND | {"a.x.one": "from a.y import h\ndef f(): ..."}
    assert not circles(between)
    assert room_circles(between, TABLE) == ["a.x -> a.y -> a.x"]


@pytest.mark.parametrize("package", OUTSIDE)
def test_the_lower_rooms_need_torch_and_pydantic_alone(package):
    modules = read_modules(package)
    assert modules
    wrong = [
        f"{name} imports {module}"
        for name, source in modules.items()
        for module in imports(source, package, modules)
        if (top := module.split(".")[0]) not in HOUSE | OUTSIDE[package] | sys.stdlib_module_names
        and top not in CUDA_ONLY.get(name, ())
    ]
    assert not wrong


def test_the_wheel_ships_every_room_and_neither_tools_nor_tests():
    from setuptools import find_packages

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["setuptools"]["packages"]["find"]["include"]
    found = find_packages(str(ROOT), include=include)
    folders = {n for n in folders_of(HOUSE_MODULES) if n.split(".")[0] in SHIPPED}
    assert set(found) == folders
    assert set(project["tool"]["setuptools"]["package-data"]) == set(SHIPPED)


@pytest.mark.parametrize(
    "door", sorted(n for n in folders_of(HOUSE_MODULES) if n.split(".")[0] in SHIPPED)
)
def test_every_name_of_a_door_is_there_and_listed(door):
    # An import of a.b.save sets the attribute save of the door a.b, and can hide a function.
    module = importlib.import_module(door)
    names = getattr(module, "__all__", [])
    assert set(names) <= set(dir(module))
    hidden = [name for name in names if isinstance(getattr(module, name), types.ModuleType)]
    assert not hidden
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_a_layout_and_a_format_need_no_torch():
    source = (
        "import sys, ckpt, parallel.layout, ckpt.format, ckpt.write, ckpt.background.writer\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, timeout=60)


def test_the_command_starts_without_torchs_compiler():
    code = "import sys, pretrain.train; sys.exit('torch._dynamo.convert_frame' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_there_is_no_drawer_for_odds_and_ends():
    names = {part for name in HOUSE_MODULES for part in name.split(".")}
    assert not names & {"utils", "common", "helpers", "misc"}
