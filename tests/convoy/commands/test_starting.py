"""How commands are started, what ``--help`` costs, and how wrong words are answered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from convoy.commands.command_line import main
from convoy.commands.convert import FAMILIES
from convoy.commands.reshard import DTYPES
from convoy.local_ranks import run_local_ranks

ROOT = Path(__file__).parents[3]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {
    **os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PYTHONPATH": str(ROOT),
}  # fmt: skip


@pytest.fixture(scope="module")
def convoy(tmp_path_factory) -> Path:
    """The command that an installation makes of pyproject's entry point."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["convoy"].partition(":")
    path = tmp_path_factory.mktemp("bin") / "convoy"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n"
        f"if __name__ == '__main__':\n    sys.exit({function}())\n"
    )
    path.chmod(0o755)
    return path


def run(
    command: list[str | Path], cwd: Path = ROOT, env: dict[str, str] = ENVIRONMENT
) -> subprocess.CompletedProcess:
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


COMMANDS = [
    [], ["pretrain"], ["prepare"], ["status"], ["inspect"], ["reshard"], ["convert"],
    ["simulate"], ["launch"],
    ["inspect", "show"], ["inspect", "verify"], ["inspect", "diff"], ["inspect", "history"],
    ["inspect", "gc"], ["reshard", "layout"], ["reshard", "weights"], ["reshard", "surgery"],
    ["convert", "import"], ["convert", "export"], ["convert", "upcycle"],
    ["convert", "move"], ["convert", "certificate"],
]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_examples_and_exit_codes(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(None, [*words, "--help"])
    assert end.value.code == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"usage: {' '.join(['convoy', *words])}")
    if words:
        assert "\nexample" in out
        assert "\nexit codes" in out
    assert max(map(len, out.splitlines())) <= 100


def test_help_and_wrong_words_need_no_heavy_package():
    code = (
        "import sys\n"
        "from convoy.commands import main\n"
        f"for words in {COMMANDS}:\n"
        "    for last in ('--help', '--no-such-flag'):\n"
        "        try:\n"
        "            main(None, [*words, last])\n"
        "        except SystemExit:\n"
        "            pass\n"
        "        else:\n"
        "            sys.exit(f'{words} {last} went on')\n"
        "sys.exit(str({'torch', 'numpy', 'rich', 'ckpt'} & set(sys.modules)))\n"
    )
    result = run([sys.executable, "-c", code])
    assert result.stderr.splitlines()[-1] == "set()", result.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_openmp_is_told_how_long_to_spin_before_pytorch_is_there(given, expected):
    code = (
        "import os, sys\n"
        "from convoy.commands import main\n"
        "sys.argv = ['convoy', '--version']\n"
        "main()\n"
        "print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
    )
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    clean = {name: value for name, value in ENVIRONMENT.items() if name not in names}
    result = run([sys.executable, "-c", code], env=clean | given)
    assert result.stdout.splitlines()[-1] == f"{expected} False", result.stderr


def test_choices_that_are_written_out_are_those_of_the_library():
    from convoy.convert.hf.families import FAMILIES as KNOWN_FAMILIES
    from convoy.convert.sources import DTYPES as KNOWN_DTYPES

    assert set(FAMILIES) == set(KNOWN_FAMILIES)
    assert set(DTYPES) == set(KNOWN_DTYPES)


WRONG = [
    ("", "a command is missing: the commands are pretrain, launch"),
    ("train spec.toml", "train is no command: the commands are pretrain"),
    ("pretrain", "the following arguments are required: SPEC"),
    ("pretrain s.toml --sets a=1", "unrecognized arguments: --sets"),
    ("pretrain s.toml --prin", "unrecognized arguments: --prin"),
    ("prepare s.toml --reset --load-step 3", "not allowed with argument --reset"),
    ("inspect", "arguments are missing: the subcommands are show"),
    ("inspect history CKPT --step 3", "unrecognized arguments: --step 3"),
    ("reshard surgry a b drop=1", "no path that exists: did you mean surgery?"),
    ("reshard weights a b --noise 1", "unrecognized arguments: --noise 1"),
    ("convert grow a b", "grow is no subcommand: the subcommands are import, export, upcycle"),
    ("status", "the following arguments are required: RUN_DIR"),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_a_wrong_word_ends_with_2_and_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(None, words.split())
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_only_rank_0_answers_a_wrong_word(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as end:
        main(None, ["pretrain", "s.toml", "--sets"])
    assert end.value.code == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["pretrain", "reshard", "inspect_ckpt"])
def test_a_tool_is_started_as_a_file_from_anywhere_and_as_a_module(name, tmp_path):
    """tools/pretrain.py has the name of the package that each of these scripts imports."""
    by_file = run([sys.executable, ROOT / f"tools/{name}.py", "--help"], tmp_path)
    by_name = run([sys.executable, "-m", f"tools.{name}", "--help"])
    assert by_file.returncode == by_name.returncode == 0, by_file.stderr + by_name.stderr
    assert by_file.stdout == by_name.stdout


def test_scripts_leave_pythons_path_alone():
    for folder in ("tools", "bench", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name in ("forked.py", "sitecustomize.py"):
                continue  # stand in for a new interpreter's beginning, and set its path
            changes = [
                line for line in path.read_text().splitlines()
                if "sys.path" in line and "sys.path_" not in line and path != Path(__file__)
            ]  # fmt: skip
            expected = 1 if path.parent == ROOT / "tools" else 0
            assert len(changes) == expected, (path, changes)


def test_the_command_is_a_program(convoy, tmp_path):
    result = run([convoy, "--version"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", result.stdout)
    assert run([convoy, "status", tmp_path / "nowhere"]).returncode == 2


def test_output_that_nobody_reads_to_its_end_is_no_error(convoy, tmp_path):
    words = [convoy, "simulate", "--print-scenario"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # before the first word: the process has still to start
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_ranks_of_one_command_show_a_line_once(capfd):
    code = "import os, sys; print('all', file=sys.stderr); sys.exit('rank ' + os.environ['RANK'])"
    assert run_local_ranks(["-c", code], 3) == 1
    assert sorted(capfd.readouterr().err.split("\n")) == ["", "all", "rank 0", "rank 1", "rank 2"]


def test_torchrun_starts_the_command(convoy):
    """test_tools.py starts the file and the module."""
    result = run([sys.executable, *TORCHRUN, "--no-python", convoy, "pretrain", "--help"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("usage: convoy pretrain") == 2, "two ranks were started"
