"""``convoy plan``: its tables, recipes at full size, and one line for what cannot be planned."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import tomli_w

from convoy.commands.command_line import main
from convoy.plan import MEMORY_ERROR, load_cluster, plan_of, search_layouts, validate
from convoy.plan.search import work_of
from convoy.plan.shape import ModelShape
from pretrain.spec import JobSpec, load_spec

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "tools" / "recipes"
TINY = str(RECIPES / "stdlib-tiny.toml")
V3 = str(RECIPES / "deepseek-v3.toml")


def shown(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main("plan", [*words]) == 0, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture, *words: str) -> str:
    try:
        code = main("plan", [*words])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert code == 2, out
    assert err.count("\n") == 1, err
    return err


def test_a_search_is_shown_and_written(capsys, tmp_path):
    file = tmp_path / "plan.json"
    out = shown(capsys, TINY, "--cluster", "cpu", "--json", str(file))
    assert out.startswith("| | seconds of a step | GiB of a GPU | layout |")
    for word in ("\n| optimizer |", "MFU", "GPU-hours", "dollars", "MWh", "layouts keep the rules"):
        assert word in out
    assert "layout 2 takes " in out
    found = json.loads(file.read_text())
    assert found["gpus"] == 2
    plans = found["plans"]
    seconds = [plan["step_seconds"] for plan in plans]
    assert seconds == sorted(seconds)
    assert len(plans) == 5
    for plan in plans:
        assert sum(plan["seconds"].values()) == pytest.approx(plan["step_seconds"])
        spec = found["spec"] | {"parallel": plan["parallel"]}
        spec["batch"] |= {"micro_batch_size": plan["micro_batch_size"]}
        # What is planned can be run: the spec takes it.
        JobSpec.model_validate(spec).topology(2)
    out = shown(capsys, TINY, "--cluster", "cpu", "--layout", "ep=2", "--tokens", "1e6")
    assert out.startswith("layout  dp_shard=2 ep=2 micro_batch_size=4")
    assert "0.001 billion tokens in" in out


def test_a_spec_whose_layout_the_planner_chooses_can_be_planned(capsys, tmp_path):
    written = tmp_path / "planned.toml"
    data = load_spec(RECIPES / "mixtral-8x7b.toml").as_dict()
    data |= {"parallel": {}, "plan": {"cluster": "h100"}}
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(data))
    shown(capsys, str(spec), "--cluster", "h100", "--gpus", "128", "--write", str(written))
    assert load_spec(written).plan.cluster is None


def test_a_plan_with_recomputation_in_some_layers_can_be_written(capsys, tmp_path):
    written = tmp_path / "planned.toml"
    words = [str(ROOT / "tools/recipes/olmoe-1b-7b.toml"), "--cluster", "h100", "--gpus", "64"]
    settings = ['recompute="full"', "recompute_layer_freq=4"]
    some = [w for each in settings for w in ("--set", f"parallel.memory.{each}")]
    assert main("plan", [*words, *some, "--write", str(written)]) == 0
    memory = load_spec(written).parallel.memory
    assert memory.recompute_layer_freq == (1 if memory.recompute == "none" else 4)


MIXTRAL = str(RECIPES / "mixtral-8x7b.toml")


@pytest.mark.parametrize(
    "settings",
    [
        ("parallel.pp=4", "parallel.pipeline.stages_per_rank=2"),
        ("parallel.dp_replicate=2", "parallel.gradient_compression=one_bit"),
        ("train.exact=true", "data.seq_len=1024", "batch.global_batch_size=64"),
    ],
    ids=lambda settings: settings[0].partition("=")[0],
)
def test_every_plan_that_is_ranked_can_be_written(settings, capsys, tmp_path):
    written, listed = tmp_path / "planned.toml", tmp_path / "plans.json"
    gpus = "16"
    sets = [word for each in settings for word in ("--set", each)]
    files = ["--write", str(written), "--json", str(listed)]
    shown(capsys, MIXTRAL, "--cluster", "h100", "--gpus", gpus, *sets, *files)
    found = json.loads(listed.read_text())
    for plan in found["plans"]:
        data = found["spec"] | {"parallel": plan["parallel"]}
        data["batch"] = data["batch"] | {"micro_batch_size": plan["micro_batch_size"]}
        spec = JobSpec.model_validate(data)
        spec.check_nodes(spec.topology(int(gpus)), 8)
        if plan is found["plans"][0]:
            assert load_spec(written) == spec


@pytest.mark.parametrize(
    ("setting", "taken"),
    [
        ("train.compile=false", "selective"),
        ("train.compile=true", "full"),
        ("parallel.memory.offload_activations=true", "full"),
    ],
)
def test_a_recomputation_that_the_spec_refuses_is_not_planned(setting, taken, capsys, tmp_path):
    olmoe, h200 = RECIPES / "olmoe-1b-7b.toml", load_cluster("h200")
    small = ["parallel.ep=1", "batch.micro_batch_size=1"]
    needed = {}
    for how in ("none", "selective"):
        spec = load_spec(olmoe, [*small, f"parallel.memory.recompute={how}"])
        needed[how] = plan_of(spec, 1, h200).memory.total
    # A chip on which selective recomputation fits, and none does not.
    file, written = tmp_path / "chip.toml", tmp_path / "planned.toml"
    data = h200.model_dump()
    room = (needed["none"] + needed["selective"]) / 2 / 2**30
    data["chip"]["memory_gib"] = room + h200.chip.reserved_gib
    file.write_text(tomli_w.dumps(data))
    words = [str(olmoe), "--cluster", str(file), "--gpus", "1", "--imbalance", "1"]
    shown(capsys, *words, "--set", setting, "--write", str(written))
    assert load_spec(written).parallel.memory.recompute == taken


def test_a_named_layout_is_put_in_before_the_spec_is_checked(capsys, tmp_path):
    written = tmp_path / "planned.toml"
    h100 = ["--cluster", "h100", "--gpus", "128", "--write", str(written)]
    stages = ["--set", "parallel.pipeline.stages_per_rank=2"]
    out = shown(capsys, MIXTRAL, *h100, *stages, "--layout", "pp=8")
    assert out.startswith("layout  pp=8 dp_shard=16 ep=8 ")
    assert "stages_per_rank=2" in out
    assert load_spec(written).parallel.pipeline.stages_per_rank == 2
    out = shown(capsys, str(written), *h100, "--layout", "pp=1")
    assert out.startswith("layout  dp_shard=128 ep=8 ")
    assert load_spec(written).parallel.pipeline.stages_per_rank == 1
    replicas = ["--set", "parallel.dp_replicate=2", "--set", "parallel.pp=1"]
    replicas += ["--set", "parallel.gradient_compression=bfloat16"]
    shown(capsys, MIXTRAL, *h100, *replicas, "--layout", "dp_replicate=1,dp_shard=128,ep=8")
    assert load_spec(written).parallel.gradient_compression == "none"


def test_a_layout_slightly_above_the_memory_is_shown_with_a_warning(capsys, tmp_path):
    spec, cluster = load_spec(Path(MIXTRAL)), load_cluster("h100")
    needed = plan_of(spec, 16, cluster, 1.1).memory.total / 2**30
    file, written = tmp_path / "small.toml", tmp_path / "planned.toml"
    words = [MIXTRAL, "--cluster", str(file), "--gpus", "16", "--layout", "ep=8"]
    for times in (1.05, 1.2):
        data = cluster.model_dump()
        data["chip"]["memory_gib"] = needed / times + cluster.chip.reserved_gib
        file.write_text(tomli_w.dumps(data))
        code = main("plan", [*words, "--write", str(written)])
        out, err = capsys.readouterr()
        assert f"| all, of {needed / times:.1f} | {needed:.2f} |" in out
        said = f"needs {needed:.1f} GiB of {needed / times:.1f} GiB on a GPU of H100"
        if times < 1 + MEMORY_ERROR:
            assert (code, err) == (0, "")
            assert "warning: dp_shard=16 ep=8 " in out
            assert said in out
            assert load_spec(written).parallel.dp_shard == 16
            written.unlink()
        else:
            assert code == 2
            assert said in err
            assert not written.exists()


def test_the_planners_own_errors_are_beside_the_ranking(capsys, tmp_path):
    listed = tmp_path / "plans.json"
    search = ("--gpus", "16", "--json", str(listed))
    out = shown(capsys, MIXTRAL, "--cluster", "h100", *search)
    rows = [row for row in validate.compare() if row.group.kind == "moe"]
    errors = sorted(row.error for row in rows)
    known = json.loads(listed.read_text())["accuracy"]
    assert known["rows"] == len(rows)
    assert known["bias"] == pytest.approx(statistics.median(errors))
    median = statistics.median(map(abs, errors))
    assert f"the median error is {median:.0%}" in out
    for row in rows:
        if row.error in (errors[0], errors[-1]):
            way = "high" if row.error > 0 else "low"
            assert f"{abs(row.error):.0%} too {way} ({row.name})" in out
    seconds = [plan["step_seconds"] for plan in json.loads(listed.read_text())["plans"]]
    close = [n for n, s in enumerate(seconds, 1) if s <= seconds[0] * (1 + median)]
    assert f"layouts {', '.join(map(str, close))} are within that error" in out
    # Of one layout there is no ranking; the errors are shown too.
    out = shown(capsys, MIXTRAL, "--cluster", "b200", "--gpus", "64", "--layout", "pp=2")
    assert "published MoE runs, none of them on B200" in out
    assert "are within that error" not in out


def test_saves_are_whole_steps_apart(capsys, tmp_path):
    listed = tmp_path / "plans.json"
    large = ("--gpus", "65536", "--set", "batch.global_batch_size=1048576")
    layout = ("--layout", "pp=16,ep=64", "--tokens", "1e13", "--json", str(listed))
    out = shown(capsys, V3, "--cluster", "h100", *large, *layout)
    (plan,) = json.loads(listed.read_text())["plans"]
    cost = plan["cost"]
    assert cost["checkpoint_interval_steps"] == 1
    assert cost["checkpoint_interval_seconds"] == plan["step_seconds"]
    assert "a save every step (" in out


def test_a_layout_is_drawn_over_nodes_and_ranks(capsys, tmp_path):
    file = tmp_path / "layout.svg"
    layout = ["--gpus", "32", "--layout", "pp=2,tp=2,ep=4", "--tokens", "1e12", "--draw", str(file)]
    recipe = str(RECIPES / "qwen3-30b-a3b.toml")
    shown(capsys, recipe, "--cluster", "h100", *layout)
    texts = [each.text for each in ElementTree.parse(file).iter() if each.tag.endswith("}text")]
    joined = " ".join(text for text in texts if text)
    for word in ("node 0", "node 3", "rank 31", "stage 1", "shard 7", "tp 1", "experts 3"):
        assert word in joined
    assert "node 4" not in joined
    first = file.read_bytes()
    shown(capsys, recipe, "--cluster", "h100", *layout)
    assert file.read_bytes() == first, "equal layouts give equal bytes"
    assert "--draw (layout.gif) must be a file named *.svg" in refused(
        capsys, recipe, "--cluster", "h100", "--draw", "layout.gif"
    )


def test_the_best_layout_is_the_best_of_all_layouts():
    # By force: every layout that the spec takes, with every option, and none is faster.
    spec, cluster = load_spec(Path(TINY)), load_cluster("h100")
    spec = JobSpec.model_validate(spec.as_dict() | {"precision": {"compute": "bfloat16"}})
    found = search_layouts(spec, 8, cluster)
    assert found.complete
    best = found.best[0].seconds
    tried = 0
    for pp in (1, 2, 4):
        for tp in (1, 2):
            for ep in (1, 2, 4, 8):
                for zero in (1, 2, 3):
                    data = spec.as_dict()
                    data["parallel"] |= {"pp": pp, "tp": tp, "ep": ep, "dp_shard": -1}
                    data["parallel"]["memory"] |= {"zero_stage": zero}
                    data["batch"] |= {"micro_batch_size": 1}
                    try:
                        other = plan_of(JobSpec.model_validate(data), 8, cluster)
                    except ValueError:
                        continue
                    tried += 1
                    assert other.seconds >= best * (1 - 1e-9)
    assert tried > 30


@pytest.mark.slow
def test_a_hundred_thousand_gpus_in_seconds(capsys):
    words = ("--set", "batch.global_batch_size=100000", "--tokens", "1e13")
    began = time.process_time()
    out = shown(capsys, V3, "--cluster", "h100", "--gpus", "100000", *words)
    # Of this process, whatever else the machine does; a search without bounds takes minutes.
    assert time.process_time() - began < 60
    assert "GPU-hours" in out


PUBLISHED = {
    # Billions of parameters in all, and that a token meets; the sources are in the recipes.
    "mixtral-8x7b": (46.7, 12.9, 128), "deepseekmoe-16b": (16.4, 2.8, 64),
    "olmoe-1b-7b": (6.9, 1.3, 64), "qwen3-30b-a3b": (30.5, 3.3, 64),
    "qwen3-235b-a22b": (235.0, 22.0, 512), "deepseek-v3": (671.0, 37.5, 2048),
}  # fmt: skip


LARGE = {"qwen3-235b-a22b", "deepseek-v3"}  # whose search takes ten seconds


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in LARGE else n for n in PUBLISHED],
)
def test_recipes_have_the_published_sizes_and_plan_at_full_size(name):
    total, active, gpus = PUBLISHED[name]
    spec, cluster = load_spec(RECIPES / f"{name}.toml"), load_cluster("h200")
    shape = ModelShape.of(spec.model, spec.moe)
    assert shape.parameters / 1e9 == pytest.approx(total, abs=0.06 if total < 200 else 0.5)
    assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.06 if active < 20 else 0.3)
    own = work_of(spec, gpus)
    assert own.topology.world == gpus
    assert own.topology.ep == 8
    found = search_layouts(spec, gpus, cluster, 1.1)
    assert len(found.best) == 5
    for plan in found.best:
        assert plan.memory.total <= cluster.chip.memory_bytes
        assert plan.work.topology.world == gpus
    flops = shape.token_flops(spec.data.seq_len) * spec.global_batch_tokens
    share = flops / found.best[0].seconds / gpus / cluster.chip.peak("bfloat16")
    assert 0.15 < share < 0.65


@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_recipes_have_the_published_sizes(name):
    total, active, gpus = PUBLISHED[name]
    spec = load_spec(RECIPES / f"{name}.toml")
    shape = ModelShape.of(spec.model, spec.moe)
    assert shape.parameters / 1e9 == pytest.approx(total, abs=0.5)
    assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.3)
    assert plan_of(spec, gpus, load_cluster("h200")).seconds > 0


def test_every_recipe_is_here():
    assert {path.stem for path in RECIPES.glob("*.toml")} == {
        *PUBLISHED,
        "stdlib-tiny",
        "stdlib-half-hour",
    }


def test_validate_shows_the_table_and_fails_where_a_bound_is_missed(capsys, monkeypatch, tmp_path):
    file = tmp_path / "validation.json"
    out = shown(capsys, "--validate", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert len([line for line in out.splitlines() if line.endswith(("| left out |", "| yes |"))])
    assert len(rows) == 24
    for row in rows:
        assert f"| {row['group']}, {row['run']} |" in out
        assert f"{100 * row['error']:+.1f} %" in out
    # The page has this table, of these numbers.
    page = (ROOT / "docs" / "planning.md").read_text()
    for line in out.splitlines():
        if line.startswith("| ") and "TFLOP/s" not in line:
            assert line in page
    monkeypatch.setitem(validate.BOUNDS["dense"], "median", 0.001)
    assert main("plan", ["--validate"]) == 1
    assert "dense rows: the median error is" in capsys.readouterr().err


def test_what_cannot_be_planned_is_one_line(capsys, tmp_path):
    h100 = ("--cluster", "h100")
    said = refused(capsys, V3, *h100, "--gpus", "8")
    assert "fits on no layout of 8 GPUs of H100" in said
    assert "largest part is optimizer" in said
    assert "GPUs would fit" in said
    said = refused(capsys, V3, *h100, "--gpus", "16", "--layout", "pp=4,ep=4")
    assert "GiB of 76.0 GiB" in said
    assert refused(capsys, V3, *h100, "--gpus", "0").startswith("error: --gpus (0) must be a whole")
    assert "8.5" in refused(capsys, V3, *h100, "--gpus", "8.5")
    said = refused(capsys, V3, *h100, "--gpus", "2048", "--layout", "tp=16")
    assert said.startswith("error: parallel.tp (16) must divide the ranks of a node (8)")
    said = refused(capsys, V3, *h100, "--gpus", "2048", "--layout", "ep=7,tp=8")
    assert "ep (7) must divide dp_shard x cp x tp" in said
    said = refused(capsys, V3, *h100, "--gpus", "2048", "--layout", "pp=3")
    assert "layouts that work on 2048 ranks" in said
    assert "not bfloat16" in refused(capsys, V3, "--cluster", "cpu")
    assert "must be a file, or one of a100" in refused(capsys, V3, "--cluster", "h1000")
    assert "needs SPEC and --cluster" in refused(capsys, V3)
    assert "at most 3,650" in refused(
        capsys, V3, *h100, "--gpus", "2048", "--layout", "pp=16,ep=64", "--tokens", "1e17"
    )
    bad = tmp_path / "bad.toml"
    bad.write_text("name = 'x'\nnodes = 0\n")
    assert refused(capsys, V3, "--cluster", str(bad)).startswith(f"error: cluster {bad}: ")
    assert "its folder does not exist" in refused(
        capsys, TINY, "--cluster", "cpu", "--json", str(tmp_path / "no" / "x.json")
    )
