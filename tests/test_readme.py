"""What README.md and docs/ show is run: every block of Python, TOML and commands."""

from __future__ import annotations

import io
import os
import re
import shlex
import tomllib
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from convoy.commands.command_line import main
from pretrain.spec import resolve_spec
from tests.support.jobs import write_corpus
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parent.parent
PAGES = {
    path.name if path.parent == ROOT else str(path.relative_to(ROOT)): path.read_text()
    for path in [
        ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench" / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
    ]
}  # fmt: skip
RECIPE = "tools/recipes/stdlib-tiny.toml"
# A program of its own in test_docs_checkpoint_format.py.
NOT_HERE = {"docs/checkpoint-format.md", "docs/tuning.md"}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of every block of a language, in order."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(page, block) for page, text in PAGES.items() for block in pattern.findall(text)]


def commands() -> list[str]:
    """Every command of the sh blocks once, without comments, continued lines joined."""
    lines = [
        " ".join(shlex.split(line, comments=True))
        for _, block in blocks("sh")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    return list(dict.fromkeys(line for line in lines if line))


# ------------------------------------------------------------------------------------------------
# A folder in which commands and blocks find what they name.

SMALL = {
    "vocab_size": 320, "d_model": 24, "d_ff": 16, "ep": 1, "seq_len": 32, "steps": 3,
    "eval_interval_steps": 2, "interval_steps": 1, "warmup_steps": 1, "tokens": 4,
    "source": '"my-texts"',
}  # fmt: skip


def small_recipe() -> str:
    """The recipe with sizes that take no time; all its sections and names are kept."""
    text = (ROOT / RECIPE).read_text()
    for field, value in SMALL.items():
        text = re.sub(rf"^{field} = .*$", f"{field} = {value}", text, flags=re.MULTILINE)
    return text


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    write_corpus(folder / "my-texts", files=20)
    (folder / RECIPE).parent.mkdir(parents=True)
    (folder / RECIPE).write_text(small_recipe())
    (spec,) = [text for _, text in blocks("toml") if text.startswith("name = ")]
    (folder / "mine.toml").write_text(spec)
    with chdir(folder):
        assert main(arguments=["prepare", RECIPE]) == 0
    convoy(folder, "pretrain", RECIPE)
    return folder


def convoy(folder: Path, *words: str) -> None:
    """In a process of its own: a run changes signal handlers and process groups."""
    ((code, said),) = run_ranks(main_on_rank, 1, folder, words, group=False)
    assert code == 0, said


def main_on_rank(rank: int, folder: Path, words: list[str]) -> tuple[int, str]:
    said = io.StringIO()
    with chdir(folder), redirect_stdout(said), redirect_stderr(said):
        return main(arguments=words), said.getvalue()


# ------------------------------------------------------------------------------------------------
# Commands.


@dataclass(frozen=True)
class Run:
    """How a documented command is run here."""

    replaced: tuple[tuple[str, str], ...] = ()
    """Words, and what stands for them here."""
    more: str = ""
    """Words behind the others."""
    code: int = 0
    process: bool = False


# In this order: later ones need what earlier ones made.
RUN = {
    f"convoy prepare {RECIPE}": Run(),
    "convoy pretrain mine.toml --print-spec": Run(),
    "convoy prepare mine.toml": Run(more="--set model.vocab_size=320"),
    "convoy pretrain mine.toml": Run(
        more="--set model.vocab_size=320 --set train.steps=1 --set checkpoint.interval_steps=1",
        process=True,
    ),
    "convoy sample runs/stdlib-tiny/checkpoints --prompt import --tokens 80": Run(process=True),
    "convoy trace runs/stdlib-tiny/checkpoints natural.npz --calls 4 --senders 2 --routes": Run(
        process=True
    ),
    "convoy status runs/stdlib-tiny": Run(),
    "convoy report runs/stdlib-tiny": Run(),
    "convoy inspect runs/stdlib-tiny/checkpoints": Run(),
    "convoy inspect verify runs/stdlib-tiny/checkpoints": Run(),
    "convoy inspect history runs/stdlib-tiny/checkpoints": Run(),
    "convoy reshard runs/stdlib-tiny/checkpoints runs/stdlib-tiny/checkpoints-ep4 "
    "--layout ep=4": Run(),
    "convoy inspect diff runs/stdlib-tiny/checkpoints runs/stdlib-tiny/checkpoints-ep4": Run(),
    "convoy inspect gc runs/stdlib-tiny/checkpoints --dry-run": Run(),
    "convoy reshard weights runs/stdlib-tiny/checkpoints weights-bf16 --dtype bf16": Run(),
    "convoy reshard surgery runs/stdlib-tiny/checkpoints grown duplicate=2 --noise 0.02": Run(),
    "convoy convert export runs/stdlib-tiny/checkpoints HF_DIR": Run(),
    "convoy inspect doctor runs/stdlib-tiny/checkpoints": Run(),
    "convoy inspect doctor runs/stdlib-tiny/checkpoints --json": Run(),
    "convoy inspect doctor HF_DIR --against runs/stdlib-tiny/checkpoints": Run(),
    "convoy convert import HF_DIR OUT": Run(),
    f"convoy prepare {RECIPE} --load-step 160": Run((("160", "2"),)),
    "convoy inspect gc runs/stdlib-tiny/checkpoints --unlisted --dry-run": Run(),
    "convoy inspect gc runs/stdlib-tiny/checkpoints --unlisted": Run(),
    f"convoy launch {RECIPE} --on torchrun --set launch.ranks_per_node=2": Run(),
    f"convoy launch {RECIPE} --on slurm --set launch.nodes=2": Run(),
    f"convoy launch {RECIPE} --on ray --set launch.ranks_per_node=2": Run(),
    f"convoy launch {RECIPE} --on kubernetes --set launch.nodes=2 "
    "--set launch.image=convoy:0.1.0": Run(),
    "convoy plan --validate": Run(),
    "convoy plan tools/recipes/mixtral-8x7b.toml --cluster h100 --gpus 128": Run(
        (("tools/recipes/mixtral-8x7b.toml", str(ROOT / "tools/recipes/mixtral-8x7b.toml")),)
    ),
    "convoy plan tools/recipes/mixtral-8x7b.toml --cluster h100 --gpus 128 --layout pp=2,ep=8 "
    "--loads zipf:1.2": Run(
        (("tools/recipes/mixtral-8x7b.toml", str(ROOT / "tools/recipes/mixtral-8x7b.toml")),)
    ),
    "convoy plan tools/recipes/mixtral-8x7b.toml --cluster h100 --gpus 128 --layout "
    "pp=2,ep=8 --tokens 2e12 --json plan.json": Run(
        (("tools/recipes/mixtral-8x7b.toml", str(ROOT / "tools/recipes/mixtral-8x7b.toml")),)
    ),
    "convoy simulate": Run(more="--set run.repetitions=2 --set run.days=2"),
    "convoy simulate --gpus 1000,4096,16384,65536,100000 --json simulate.json": Run(
        more="--set run.repetitions=2 --set run.days=2"
    ),
}

# Run by another test, which is named.
ELSEWHERE = {
    **dict.fromkeys(
        (
            "python talks.py",
            "convoy prepare tune.toml",
            "torchrun --standalone --nproc-per-node 2 tools/pretrain.py tune.toml",
            "convoy convert export runs/tuned/checkpoints tuned-hf",
            "python ask.py",
        ),
        "tests/test_docs_tuning.py",
    ),
    "convoy report runs/stdlib-tiny runs/other --output report.html": (
        "tests/convoy/report/test_report.py"
    ),
    "convoy chaos spec.toml runs/kills --kills 200 --set train.exact=true --json kills.json "
    "--layout parallel.dp_shard=2 parallel.ep=2 elastic.recovery=warm "
    "--layout parallel.dp_replicate=2 elastic.recovery=heal": "tests/convoy/chaos/test_kills.py",
    f"convoy chaos {RECIPE} runs/chaos --faults 30 --machines 3 --json chaos.json": (
        "tests/convoy/chaos/test_campaign.py"
    ),
    f"convoy launch {RECIPE} --on torchrun --set launch.ranks_per_node=2 --submit": (
        "tests/convoy/commands/test_launch.py"
    ),
    f"convoy launch {RECIPE} --on slurm --set launch.nodes=2 --submit": (
        "tests/cluster/test_slurm.py"
    ),
    f"convoy launch {RECIPE} --on ray --set launch.ranks_per_node=2 --submit": (
        "tests/cluster/test_ray.py"
    ),
    "convoy pretrain tools/recipes/deepseek-v3.toml --shrink": "tests/pretrain/spec/test_shrink.py",
    "torchrun --standalone --nproc-per-node 4 -m convoy burn-in --quick": (
        "tests/cluster/test_burnin.py"
    ),
    "torchrun --standalone --nproc-per-node 2 -m convoy plan --calibrate here.toml": (
        "tests/convoy/plan/test_calibrate.py"
    ),
    **dict.fromkeys(
        (
            "convoy prepare texts.toml",
            "convoy prepare texts.toml --verify",
            "convoy pretrain texts.toml",
            "convoy audit-data runs/texts --tokens texts.toml",
        ),
        "tests/test_docs_data.py",
    ),
    "convoy inspect flight runs/stdlib-tiny": "tests/cluster/test_flight_recorder.py",
    "convoy convert move outputs/checkpoint/step-1000 weights --to convoy": (
        "tests/interop/test_torchtitan.py"
    ),
    "convoy convert move checkpoints/iter_0001000 weights --to convoy --num-heads 32": (
        "tests/interop/test_megatron.py"
    ),
    **dict.fromkeys(
        (
            "convoy convert move SRC DST --to megatron --num-heads 32",
            "convoy convert certificate SRC DST",
        ),
        "tests/convoy/convert/test_formats.py",
    ),
    "convoy reshard DCP_DIR moved-checkpoints": "tests/ckpt/test_interop.py",
    "convoy convert upcycle SRC OUT --num-experts 8 --top-k 2": (
        "tests/convoy/convert/test_convert.py"
    ),
    f"torchrun --standalone --nproc-per-node 2 tools/pretrain.py {RECIPE}": "Makefile",
    "torchrun --nproc-per-node 2 tools/pretrain.py mine.toml": (
        "tests/convoy/commands/test_tools.py"
    ),
    "torchrun --nproc-per-node 2 -m tools.pretrain mine.toml": (
        "tests/convoy/commands/test_tools.py"
    ),
    "torchrun --nproc-per-node 2 --no-python convoy pretrain mine.toml": (
        "tests/convoy/commands/test_starting.py"
    ),
}

# Of a shell, git or a package index; the benchmarks take minutes. What torchrun does on several
# machines is in tests/runs/test_elastic_agents.py, with agents on one machine.
OUTSIDE = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2:4 --nproc-per-node=8 "
    "--max-restarts=100 --rdzv-backend=convoy --rdzv-endpoint=HOST:29400 --rdzv-id=my-run "
    "--rdzv-conf=last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3,"
    "run_dir=runs/mine tools/pretrain.py mine.toml --set elastic.enabled=true",
    "torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    "-m convoy burn-in spec.toml --exclude-list runs/mine/exclude.json "
    "--json burnin.json",
    "pip install -e .[etcd]",
    "torchrun --nnodes 16 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
    "-m convoy burn-in spec.toml --expect h100",
    # tests/deploy starts a Prometheus with these rules and targets of its own.
    "prometheus --config.file=deploy/prometheus/prometheus.yml",
    "etcd --enable-v2 --listen-client-urls http://0.0.0.0:2379 "
    "--advertise-client-urls http://HOST:2379",
    "git clone REPOSITORY convoy", "cd convoy", "source .venv/bin/activate", "pip install -e .",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.learning half-hour",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.learning one-curve",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.learning moe-dense",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.learning balancing",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.learning quantile",
    "PYTHONPATH=build/peers OMP_NUM_THREADS=1 .venv/bin/python -m bench.moe_layer --only small",
    "PYTHONPATH=build/peers OMP_NUM_THREADS=2 .venv/bin/python -m bench.moe_layer --only large "
    "--samples 3",
    "PYTHONPATH=build/peers OMP_NUM_THREADS=1 .venv/bin/python -m bench.train_step",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.dispatch",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.scaling --samples 5",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.growth --samples 3 --json growth.json",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.recovery --samples 9",
    "PYTHONPATH=build/peers OMP_NUM_THREADS=1 .venv/bin/python -m bench.checkpoint --samples 5",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.memory",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.learning.trainer",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.optimizers --json bench/results/optimizers.json",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.float8_loss --json bench/results/float8_loss.json",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.moe_layer --quick",
    "OMP_NUM_THREADS=1 .venv/bin/python -m bench.moe_layer --json layer.json",
    ".venv/bin/python -m pip install --no-deps --ignore-requires-python --target build/peers "
    "-r bench/requirements-peers.txt",
    "PYTHONPATH=build/peers OMP_NUM_THREADS=1 .venv/bin/python -m bench.moe_layer --quick",
}  # fmt: skip


def test_every_command_is_run_somewhere():
    tables = RUN.keys() | ELSEWHERE.keys() | OUTSIDE
    found = {command for command in commands() if not command.startswith("make ")}
    assert found == tables


def test_commands_that_other_tests_run_are_in_them():
    for command, where in ELSEWHERE.items():
        text = (ROOT / where).read_text()
        for word in (
            "upcycle",
            "chaos",
            "--submit",
            "--no-python",
            "tools.pretrain",
            "tools/pretrain.py",
            "burn-in",
            "--calibrate",
        ):
            if word in command:
                assert word in text, (command, where)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    shown = [c for c in commands() if c.startswith("make ")]
    inline = [span for text in PAGES.values() for span in re.findall(r"`(make [^`]+)`", text)]
    assert "make pretrain" in shown
    for command in shown + inline:
        target, *settings = shlex.split(command)[1:]
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), command
        for setting in settings:
            assert f"$({setting.partition('=')[0]}" in makefile, command


def test_commands_about_a_run_do_their_work(workplace, monkeypatch, capsys):
    # One test: commands come in order, and the run is made once.
    monkeypatch.chdir(workplace)
    for command, how in RUN.items():
        words = [dict(how.replaced).get(word, word) for word in shlex.split(command)[1:]]
        words += shlex.split(how.more)
        if how.process:
            convoy(workplace, *words)
            continue
        code, said = main(arguments=words), capsys.readouterr()
        assert (code, said.err) == (how.code, ""), (command, said.out)


def test_flags_in_the_text_exist(capsys):
    spans = {
        re.sub(r"\s+", " ", span)
        for text in PAGES.values()
        for span in re.findall(r"`(convoy [a-z][^`]*)`", text)
    }
    assert spans
    for span in spans:
        words = shlex.split(span)[1:]
        command = [word for word in words[:2] if re.fullmatch(r"[a-z]+", word)]
        with pytest.raises(SystemExit) as ended:
            main(arguments=[*command, "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0, span
        for word in words:
            if word.startswith("--"):
                assert word in shown, span


# ------------------------------------------------------------------------------------------------
# Python and TOML.


def programs() -> list[tuple[str, str]]:
    """(page, text) of every Python block, in the order of the pages."""
    return [(page, block) for page, block in blocks("python") if page not in NOT_HERE]


def on_rank(rank: int, folder: str, block: str) -> float:
    os.chdir(folder)
    namespace: dict[str, Any] = {}
    exec(compile(block, "block", "exec"), namespace)
    parameters = list(namespace["model"].parameters())
    assert parameters
    return sum(float(p.detach().to_local().square().sum()) for p in parameters)


@pytest.mark.parametrize("order", ["as in the pages", "reversed"])
def test_the_python_blocks_run_in_one_folder(order, workplace, tmp_path, monkeypatch):
    """No program stops, or damages, what another one has left."""
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(workplace / "runs")
    stored: dict[Path, bytes] = {}
    for page, block in programs() if order == "as in the pages" else programs()[::-1]:
        program = f"{page}: {block[:300]}"
        try:
            if "init_process_group" in block:
                sums = run_ranks(on_rank, 2, str(tmp_path), block, group=False)
                assert all(each > 0 for each in sums)
            else:
                exec(compile(block, page, "exec"), {"__name__": "__main__"})
        except Exception as error:
            raise AssertionError(f"{program}\nends with {error}") from error
        now = {file: file.read_bytes() for file in manifests(tmp_path)}
        gone = {str(file) for file in stored if now.get(file) != stored[file]}
        assert not gone, f"{program}\nremoves {gone}"
        stored = now


def manifests(folder: Path) -> list[Path]:
    """Of every checkpoint in the folders that programs make."""
    return [file for file in folder.glob("*/manifests/*") if file.parts[-3] != "runs"]


def lines_on_rank(rank: int, folder: str, block: str) -> str:
    os.chdir(folder)
    said = io.StringIO()
    with redirect_stdout(said):
        exec(compile(block, "block", "exec"), {})
    return said.getvalue()


def test_what_the_readme_saves_on_two_ranks_loads_on_one_and_four(tmp_path):
    (block,) = [b for page, b in blocks("python") if page == "README.md" and "load_state" in b]
    shown = re.findall(r"`rank 0 of (\d): step (\d), loss ([\d.]+)`", PAGES["README.md"])
    assert [(ranks, step) for ranks, step, _ in shown] == [("2", "1"), ("1", "2"), ("4", "3")]
    for ranks, step, loss in shown:
        said = run_ranks(lines_on_rank, int(ranks), str(tmp_path), block, group=False)
        for rank, line in enumerate(said):
            start, _, printed = line.rpartition(" ")
            assert start == f"rank {rank} of {ranks}: step {step}, loss"
            assert float(printed) == pytest.approx(float(loss), abs=2e-4)
    assert ckpt.committed_steps(tmp_path / "step-checkpoints") == [1, 2, 3]


def test_the_own_model_of_checkpoints_goes_on_as_if_it_had_not_stopped(tmp_path):
    page, block = next(
        (page, block) for page, block in blocks("python") if page == "docs/checkpoints.md"
    )
    assert "optimizer.load_state_dict" in block, page
    training = block[block.index("model(torch") : block.index("epoch += 1")]

    def run(folder: str, text: str) -> dict[str, Any]:
        torch.manual_seed(0)
        (tmp_path / folder).mkdir(exist_ok=True)
        namespace: dict[str, Any] = {}
        with chdir(tmp_path / folder):
            exec(compile(text.replace("AdamW(", "AdamW(lr=0.1, params="), page, "exec"), namespace)
        return namespace

    whole = run("whole", block.replace(training, 2 * f"optimizer.zero_grad()\n{training}"))
    run("cut", block)
    cut = run("cut", block)
    assert cut["epoch"] == 2
    assert torch.equal(cut["model"].weight, whole["model"].weight)
    (moments, *_), (others, *_) = (one["optimizer"].state.values() for one in (cut, whole))
    assert torch.equal(moments["exp_avg_sq"], others["exp_avg_sq"])


def test_the_layer_fits_in_ten_lines():
    (block,) = [b for page, b in blocks("python") if page == "README.md" and "aux_loss:" in b]
    assert len(block.strip().splitlines()) <= 10


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=f"{p}-{i}") for i, (p, b) in enumerate(blocks("toml"))]
)
def test_a_toml_block_is_a_spec(block):
    sections = tomllib.loads(block)
    data = tomllib.loads((ROOT / RECIPE).read_text())
    if "name" in sections:
        data = {}
    for name, values in sections.items():
        data[name] = data.get(name, {}) | values if name == "model" else values
    spec = resolve_spec(data, "block")
    said = re.search(r"(\d+) ranks", block.splitlines()[0])
    if said:
        assert spec.topology(int(said[1])).world == int(said[1])
