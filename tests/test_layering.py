"""The laws of the house; every import is looked at, in functions and type checks too.

A package imports packages below it. In a package, a room is a folder, or a file beside folders, and
imports rooms of lower floors. A room is entered by its door: from another room one imports names of
``ckpt.format``, never of ``ckpt.format.manifest``. ``pretrain`` is what a training rank imports.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.support.jobs import write_corpus, write_spec

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "router": set(),
    "parallel": set(),
    "moe": {"router", "parallel"},
    "ckpt": {"parallel"},
    "cluster": {"parallel"},
    "corpus": {"ckpt"},
    "pretrain": {"router", "parallel", "moe", "ckpt", "cluster", "corpus"},
    "convoy": {"router", "parallel", "moe", "ckpt", "cluster", "corpus", "pretrain"},
    "tools": {"convoy"},
}
"""The packages that each package may import."""
FLOORS = {
    "parallel": [
        "layout version", "placements config crossing", "mesh dtensor expert_parallel", "comm",
        "exact", "apply",
    ],
    "moe": ["config", "kernels", "rows stopwatch transforms uncompiled", "float8 copies",
            "experts dispatch", "layer", "adapters adoption testing traces"],
    "ckpt": [
        "errors", "store", "format", "lifecycle local_array", "write read", "background rewrite",
        "interop state_dict testing",
    ],
    "cluster": ["detect members", "launch burnin"],
    "corpus": ["errors", "config", "location", "documents", "tokenizer", "manifest",
               "prepare"],
    "pretrain": [
        "errors section", "kernels", "model data parts.playbook parts.verify tune", "optim",
        "state spec",
        "parallelize runtime observe", "elastic parts.step parts.faults",
        "parts.capacity parts.stragglers parts.rank_watch parts.testing",
        "job", "checkpoint", "train",
    ],
    "convoy": [
        "local_ranks", "preparation plan convert.hf report audit", "sampling convert chaos",
        "doctor tracing", "commands",
    ],
}  # fmt: skip
"""The rooms of each package from the ground up. A room imports rooms of lower floors only."""
ROOMS = {f"{top}.{room}": floor for top, floors in FLOORS.items()
         for floor, rooms in enumerate(floors) for room in rooms.split()}  # fmt: skip
CKPT_OF_PARALLEL = {"parallel.layout", "parallel.placements", "parallel.version"}
"""What ckpt may import of parallel: plain arithmetic of layouts, and a constant."""
HOUSE = {*PACKAGES, "tests", "bench"}
SHIPPED = [package for package in PACKAGES if package != "tools"]
OUTSIDE = {
    "router": {"torch", "pydantic", "lazy_loader"},
    "parallel": {"torch", "pydantic", "lazy_loader"},
    "moe": {"torch", "pydantic", "lazy_loader"},
    "cluster": {"torch", "pydantic", "lazy_loader", "pynvml", "yaml"},  # NVML: optional, on demand
}
RANK_ROOTS = {
    "pretrain.train.entry": "a rank",
    "pretrain.elastic.recovery": "the process that ranks are forked from",
    "pretrain.observe.metrics_server": "the process of a rank that answers scrapes",
    "pretrain.spec.read": "what makes a rank's JobSpec of a file",
}
"""The modules that processes of a training run start with."""
ONLY_THERE = {
    # Its grouped GEMM has its own name.
    "moe.experts.megablocks_backend": {"megablocks", "grouped_gemm"},
    "moe.dispatch.deep_ep": {"deep_ep"},
    **{
        f"router.kernels.triton_{name}": {"triton"}
        for name in ("assignments", "balance", "selection", "sorting")
    },
    **{f"moe.kernels.triton_{name}": {"triton"} for name in ("activation", "float8", "rows")},
    "pretrain.kernels.triton_rotary": {"triton"},
    "cluster.launch.ray": {"ray"},
    # A trace is read by numpy alone.
    **{f"moe.traces.{name}": {"numpy"} for name in ("file", "recorder")},
}
KIND = r"[\w.]+:[A-Za-z]\w*"
"""The class of an open kind, ``package.module:Class``."""
Modules = Mapping[str, str]
"""Source text by full dotted name; a folder's ``__init__`` has the folder's name."""


def read_modules(*tops: str) -> dict[str, str]:
    found = {}
    for top in tops:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            stub = path.with_suffix(".pyi")
            found[name] = stub.read_text() if stub.exists() else path.read_text()
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


def room_of(module: str, rooms: Mapping[str, int]) -> str:
    """The innermost room of the table that holds a module; its package where none does."""
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        if ".".join(parts[:end]) in rooms:
            return ".".join(parts[:end])
    return parts[0]


def is_config(module: str) -> bool:
    """A config is data: it imports other configs only, and every room may import it."""
    return module.endswith(".config")


def wrong_arrows(
    modules: Modules, packages: Mapping[str, set[str]], rooms: Mapping[str, int]
) -> list[str]:
    """Imports of a package that the importing package may not import, and of a room that is not on
    a lower floor of the same package."""
    wrong = []
    for name, target in arrows(modules):
        here, there = name.split(".")[0], target.split(".")[0]
        if here != there:
            if there not in packages[here]:
                wrong.append(f"{name} imports {target}")
            continue
        if is_config(target):
            continue
        room, other = room_of(name, rooms), room_of(target, rooms)
        if name in packages or name.endswith(".__main__") or room == other:
            continue  # the door of a package
        if room not in rooms or other not in rooms or rooms[other] >= rooms[room]:
            wrong.append(f"{name} imports {target}")
    return wrong


def passed_doors(modules: Modules, rooms: Mapping[str, int]) -> list[str]:
    """Imports of a file inside a folder that the importing file is not in.

    A file that is a room by itself is its own door.
    """
    folders, found = folders_of(modules), []
    for name, target in arrows(modules):
        folder = target.rpartition(".")[0]
        if target in folders or target in rooms or name.count(".") == 0 or is_config(target):
            continue
        home = name if name in folders else name.rpartition(".")[0]
        if home != folder and not home.startswith(f"{folder}."):
            found.append(f"{name} imports {target}, past the door {folder}")
    return found


def closure(modules: Modules, roots: Iterable[str]) -> set[str]:
    """The modules that some modules load, whatever their functions import.

    A name that a door has is followed to the module that defines the name.
    """
    folders = folders_of(modules)
    exported = {door: _exports(door, modules[door]) for door in folders if door in modules}
    seen, queue = set(), list(roots)
    while queue:
        name = queue.pop()
        if name in seen or name not in modules:
            continue
        seen.add(name)
        if name in folders:
            continue
        for node in ast.walk(ast.parse(modules[name])):
            if isinstance(node, ast.Import):
                queue += [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and re.fullmatch(KIND, str(node.value)):
                queue.append(str(node.value).partition(":")[0])  # the class of an open kind
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    home = node.module or ""
                    while alias.name in exported.get(home, {}):
                        home = exported[home][alias.name]
                    queue += [home, f"{home}.{alias.name}"]
    return seen


def _exports(door: str, source: str) -> dict[str, str]:
    """The module of each name that a door imports from its own folder."""
    homes = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            base = f"{door}.{node.module}" if node.level else node.module
            homes |= {alias.asname or alias.name: base for alias in node.names if base != door}
    return homes


def circles(modules: Modules) -> list[str]:
    """Circles of modules at any depth; a door's own imports of its folder's files are the door."""
    folders = folders_of(modules)
    graph: dict[str, set[str]] = {}
    for name, target in arrows(modules):
        if name not in folders:
            graph.setdefault(name, set()).add(target)
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


def test_packages_and_rooms_import_what_is_below_them():
    assert not wrong_arrows(HOUSE_MODULES, PACKAGES, ROOMS)


def test_every_room_has_a_floor_and_there_is_no_other():
    tops = {name for name in HOUSE_MODULES if name.count(".") == 1}
    there = {name for name in tops if name.split(".")[0] in FLOORS}
    nested = {room for room in ROOMS if room.count(".") > 1}
    ignored = {"convoy.__main__", "convoy.convert", "pretrain.parts"} - set(ROOMS)
    assert there - ignored == set(ROOMS) - nested
    assert nested <= set(HOUSE_MODULES)


def test_ckpt_knows_layouts_alone():
    wrong = {
        f"{name} imports {target}"
        for name, target in arrows(HOUSE_MODULES)
        if name.startswith("ckpt") and target.startswith("parallel")
        and target not in CKPT_OF_PARALLEL
    }  # fmt: skip
    assert not wrong


def test_rooms_are_entered_by_their_doors():
    assert not passed_doors(HOUSE_MODULES, ROOMS)


def test_there_are_no_circles_of_modules():
    assert not circles(HOUSE_MODULES)


def test_pretrain_is_what_a_rank_imports_and_nothing_else():
    imported = closure(HOUSE_MODULES, RANK_ROOTS)
    folders = folders_of(HOUSE_MODULES)
    there = {
        name
        for name in HOUSE_MODULES
        if name.startswith("pretrain.") and name not in folders and not name.endswith(".testing")
    }
    assert there <= imported, sorted(there - imported)
    assert not [name for name in imported if name.split(".")[0] in {"convoy", "tools"}]
    assert set(RANK_ROOTS) <= there


def test_a_module_that_no_rank_imports_is_seen():
    unused = HOUSE_MODULES | {"pretrain.data.unused": "import pretrain.data.loader"}
    assert "pretrain.data.unused" not in closure(unused, RANK_ROOTS)
    lazily = unused | {
        "pretrain.train.entry": HOUSE_MODULES["pretrain.train.entry"]
        + "\ndef f():\n    from pretrain.data.unused import g"
    }
    assert "pretrain.data.unused" in closure(lazily, RANK_ROOTS)


TABLE = {"a": set(), "b": {"a"}}
SMALL_ROOMS = {"a.x": 0, "a.y": 1, "b.one": 0}
SOUND = {
    "a": "from .x.one import f",
    "a.x": "from .one import f\nfrom .two import g",
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
    assert not wrong_arrows(SOUND, TABLE, SMALL_ROOMS)
    assert not passed_doors(SOUND, SMALL_ROOMS)
    assert not circles(SOUND)
    assert closure(SOUND, ["b.one"]) == {"b.one", "a.x.one"}


@pytest.mark.usefixtures("_small_house")
@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("a.x.one", "from b.one import k\ndef f(): ..."),
        ("a.x.one", "def f():\n    from a.y import h"),
        ("a.x.one", "if TYPE_CHECKING:\n    from ..y import h\ndef f(): ..."),
        ("a.x.one", "import importlib\nimportlib.import_module('a.y')\ndef f(): ..."),
        ("a.x.one", "from a.z import k\ndef f(): ..."),
    ],
)
def test_an_arrow_that_points_up_is_seen(module, source):
    broken = SOUND | {module: source, "a.z": "def k(): ..."}
    assert wrong_arrows(broken, TABLE, SMALL_ROOMS)
    assert all(
        line.startswith(f"{module} imports ") for line in wrong_arrows(broken, TABLE, SMALL_ROOMS)
    )


@pytest.mark.usefixtures("_small_house")
@pytest.mark.parametrize(
    "source", ["from a.x.two import g", "import a.x.two", "def f():\n    from a.x import two"]
)
def test_a_room_entered_past_its_door_is_seen(source):
    assert passed_doors(SOUND | {"a.y.one": source}, SMALL_ROOMS)
    assert passed_doors(SOUND | {"b.one.file": source}, SMALL_ROOMS)
    assert not passed_doors(SOUND | {"a.x.three": source}, SMALL_ROOMS)


@pytest.mark.usefixtures("_small_house")
def test_circles_inside_a_folder_are_seen():
    inside = SOUND | {"a.x.one": "from a.x.two import g\ndef f(): ..."}
    assert circles(inside) == ["a.x.one -> a.x.two -> a.x.one"]


@pytest.mark.parametrize("package", OUTSIDE)
def test_the_lower_rooms_need_torch_and_pydantic_alone(package):
    modules = read_modules(package)
    assert modules
    wrong = [
        f"{name} imports {module}"
        for name, source in modules.items()
        for module in imports(source, package, modules)
        if (top := module.split(".")[0]) not in HOUSE | OUTSIDE[package] | sys.stdlib_module_names
        and top not in ONLY_THERE.get(name, ())
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
    modules = {name for name in names if isinstance(getattr(module, name), types.ModuleType)}
    rooms = {name for name in modules if f"{door}.{name}" in ROOMS}
    assert modules == rooms
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_a_layout_and_a_format_need_no_torch():
    source = (
        "import sys, ckpt, parallel.layout, ckpt.format, ckpt.write, ckpt.background.writer\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=True, timeout=60)


CONFIGS = sorted(name for name in HOUSE_MODULES if is_config(name))


PURE = {"parallel.layout", "pretrain.section", "router"}
"""What configs import besides: bases of sections, and arithmetic without any import."""


def test_a_config_imports_pydantic_and_other_configs_alone():
    wrong = [
        f"{name} imports {target}"
        for name in CONFIGS
        for target in imports(HOUSE_MODULES[name], name.rpartition(".")[0], HOUSE_MODULES)
        if target.split(".")[0] not in sys.stdlib_module_names | {"pydantic", "typing_extensions"}
        and not is_config(target)
        and target not in PURE
        and not target.startswith("router.")
    ]
    assert not wrong
    code = (
        "import importlib, sys\n"
        f"for name in {CONFIGS}: importlib.import_module(name)\n"
        "heavy = {'torch', 'zarr', 'tokenizers', 'prometheus_client'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_spec_plan_launch_and_prepare_load_no_torch(tmp_path):
    write_corpus(tmp_path / "text")
    spec, tiny = write_spec(tmp_path), "tools/recipes/stdlib-tiny.toml"
    words = [
        ["plan", "tools/recipes/mixtral-8x7b.toml", "--cluster", "h100", "--gpus", "64"],
        ["launch", tiny, "--on", "torchrun", "--set", "parallel.ep=1"],
        ["prepare", str(spec)],
    ]
    code = (
        "import sys\n"
        "from convoy.commands import main\n"
        "from pretrain import JobSpec, load_spec\n"
        f"codes = [main(words[0], words[1:]) for words in {words}]\n"
        "assert codes == [0, 0, 0], codes\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_command_starts_without_torchs_compiler():
    code = "import sys, pretrain.train; sys.exit('torch._dynamo.convert_frame' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def takers_of_a_job(modules: Modules) -> list[str]:
    """The functions that take a whole Job, by module and name."""
    return [
        f"{name}.{node.name}"
        for name, source in modules.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for argument in (*node.args.args, *node.args.kwonlyargs)
        if argument.annotation is not None and ast.unparse(argument.annotation) == "Job"
    ]


def test_few_functions_take_a_whole_job():
    """A function takes the values that it reads: what takes the Job depends on all of a run."""
    modules = {
        name: source for name, source in HOUSE_MODULES.items() if name.startswith("pretrain.")
    }
    assert len(takers_of_a_job(modules)) <= 24
    assert takers_of_a_job(
        {"a": "def f(job: Job, *, other: int): ...\ndef g(job: RankModel): ..."}
    ) == ["a.f"]


def test_there_is_no_drawer_for_odds_and_ends():
    names = {part for name in HOUSE_MODULES for part in name.split(".")}
    assert not names & {"utils", "common", "helpers", "misc"}
