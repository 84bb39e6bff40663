"""Checkpoints that megatron-core itself has written are read, and its options that Convoy lacks are
refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.rewrite import SourceArray
from convoy.commands.command_line import main
from convoy.commands.pretrain import main as pretrain
from convoy.convert.formats import Training, move
from convoy.convert.formats.megatron import KINDS, refuse
from convoy.convert.formats.opened import Opened, Raw, opened
from pretrain.errors import InputError
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec
from tests.support.peers import documented, run_script
from tests.support.peers.compare import assert_same_logits, assert_same_training, model_of
from tests.support.ranks import run_ranks
from tests.support.sources import MemorySource

REAL = [pytest.mark.slow, pytest.mark.peers, pytest.mark.timeout(900)]
MODEL = {
    "vocab_size": 320, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 12, "qk_norm": "head", "rope_theta": 700.0, "norm_eps": 1e-5, "d_ff": 0,
    "first_k_dense": 0,
}  # fmt: skip
MOE = {"num_experts": 8, "top_k": 2, "d_ff": 16, "aux_loss_coeff": 0.0}
MIXED = {
    "model": {**MODEL, "d_ff": 40, "first_k_dense": 1},
    "moe": {
        **MOE, "score_func": "sigmoid", "expert_bias": True, "route_scale": 2.5,
        "num_shared_experts": 2, "shared_expert_gate": True, "bias_update_rate": 0.0,
    },
}  # fmt: skip
SECTIONS = {
    "stacked": {"model": {**MODEL, "qk_norm": "none"}, "moe": MOE},
    "layers": MIXED,
    "singles": MIXED,
}


def take_over(kind: str, folder: Path, *changes: str) -> int:
    run_script("megatron", "megatron", kind, folder, *changes)
    return convert(folder)


def convert(folder: Path) -> int:
    """The command of the documentation, with the heads of the tiny model."""
    places = {"checkpoints/iter_0001000": "checkpoint", "weights": "weights"}
    places_here = {word: folder / to for word, to in places.items()}
    words = documented("checkpoints/iter_0001000 weights", places_here)
    assert words[-2:] == ["--num-heads", "32"]
    return main(arguments=[*words[:-1], "4"])


@pytest.fixture(scope="module", params=SECTIONS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def taken_over(kind, tmp_path_factory) -> Path:
    """A folder with Megatron's checkpoint, and with ``weights``, what the command makes of it."""
    folder = tmp_path_factory.mktemp(kind)
    assert take_over(kind, folder) == 0
    return folder


class TestReal:
    pytestmark = REAL

    def test_logits_and_training_are_those_of_megatron(self, kind, taken_over, tmp_path):
        spec = make_spec(tmp_path, **SECTIONS[kind])
        model = model_of(spec, taken_over / "weights")
        assert_same_logits(model, taken_over / "expected.pt")
        assert_same_training(model, taken_over / "expected.pt")

    def test_a_run_begins_with_the_weights(self, kind, taken_over, tmp_path):
        """On two ranks with half of the experts each, with text of its own."""
        job = prepare_job(tmp_path / "job")
        weights = {"checkpoint": str(taken_over / "weights")}
        spec = write_spec(
            tmp_path, data=data_of(job), init=weights, parallel={"ep": 2}, train={"steps": 12},
            **SECTIONS[kind],
        )  # fmt: skip
        assert run_ranks(train, 2, str(spec), group=False) == [0, 0]
        losses = [event["loss"] for event in events(tmp_path / "run", "step")]
        assert losses[-1] < losses[0] - 0.3

    def test_a_save_of_four_ranks_has_the_same_weights(self, kind, taken_over, tmp_path):
        """Which Megatron itself loads from the save of one rank: tensor, pipeline and expert
        parallelism of 2."""
        sizes = ("tensor_model", "pipeline_model", "expert_model")
        changes = [f"{size}_parallel_size=2" for size in sizes]
        changes += ["expert_tensor_parallel_size=1", f'from="{taken_over / "checkpoint"}"']
        run_script("megatron", "megatron", kind, tmp_path, *changes, ranks=4)
        assert len(list((tmp_path / "checkpoint").glob("*.distcp"))) == 4
        assert convert(tmp_path) == 0
        both = [str(folder / "weights") for folder in (taken_over, tmp_path)]
        assert main("inspect", ["diff", *both]) == 0

    @pytest.mark.parametrize(
        ("change", "line"),
        [
            ("add_bias_linear=true", "with add_bias_linear; it must be false"),
            ("add_qkv_bias=true", "with add_bias_linear or add_qkv_bias; it must be false"),
            ('normalization="LayerNorm"', "with normalization = LayerNorm; it must be RMSNorm"),
            ("gated_linear_unit=false", "gated_linear_unit must be true (--swiglu)"),
        ],
    )
    def test_an_option_is_refused(self, tmp_path, capsys, change, line):
        assert take_over("stacked", tmp_path, change, "only_save=true") == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert line in error
        assert not (tmp_path / "weights").exists()


@pytest.mark.parametrize("kind_of_names", ["stacked", "layers", "singles"])
@pytest.mark.parametrize("way", [["torchtitan"], ["deepspeed", "automodel"]])
@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.timeout(900)
def test_megatron_goes_on_after_a_way_through_others(kind_of_names, way, tmp_path):
    """With moments, experts' biases, counters and schedule: its next losses are the same."""
    if way == ["torchtitan"] and kind_of_names != "stacked":
        way = ["convoy"]  # torchtitan has no gate of shared experts
    run_script("megatron", "megatron", kind_of_names, tmp_path, "trained=true")
    last = tmp_path / "checkpoint"
    for to in way:
        move(last, tmp_path / to, to, num_heads=4)
        last = tmp_path / to
    move(last, tmp_path / "back", f"megatron:{kind_of_names}-local", num_heads=4)
    run_script("megatron", "megatron", kind_of_names, tmp_path, f'resume="{tmp_path / "back"}"')
    found = torch.load(tmp_path / "resumed.pt")["continued"]
    expected = torch.load(tmp_path / "expected.pt")["continued"]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def train(rank: int, spec: str) -> int:
    return pretrain([spec])


def arrays(kind: str, H: int = 4, G: int = 2, C: int = 6) -> dict[str, SourceArray]:
    """Names and shapes of a tiny model as megatron-core 0.19 has them, in one of its three ways."""
    shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (40, 10)}
    fc1 = {"linear_fc1.weight_w": (7, 10), "linear_fc1.weight_v": (7, 10)}
    if kind != "singles":
        fc1 = {"linear_fc1.weight": (14, 10)}
    for layer in range(2):
        inner = {
            "self_attention.linear_qkv.layer_norm_weight": (10,),
            "self_attention.linear_qkv.weight": ((H + 2 * G) * C, 10),
            "self_attention.linear_proj.weight": (10, H * C),
            "pre_mlp_layernorm.weight": (10,),
            "mlp.router.weight": (3, 10),
        }
        experts = {**fc1, "linear_fc2.weight": (10, 7)}
        for name, shape in experts.items():
            if kind == "singles":
                inner |= {f"mlp.experts.experts.{e}.{name}": shape for e in range(3)}
            else:
                inner[f"mlp.experts.experts.{name}"] = (3, *shape)
        for name, shape in inner.items():
            if kind == "stacked":
                shapes[f"decoder.layers.{name}"] = (2, *shape)
            else:
                shapes[f"decoder.layers.{layer}.{name}"] = shape
    shapes["decoder.final_layernorm.weight"] = (10,)
    found = {name: SourceArray(shape, "float32") for name, shape in shapes.items()}
    return {**found, "optimizer.state.exp_avg.decoder.final_layernorm.weight": found[
        "decoder.final_layernorm.weight"
    ]}  # fmt: skip


def read(source, name: str, box=None) -> np.ndarray:
    return source.read_box(name, box or tuple((0, size) for size in source.arrays[name].shape))


def from_megatron(source: MemorySource, num_heads: int | None = None) -> Opened:
    """The source's arrays as Convoy's, moments and all."""
    for name in source.arrays:
        refuse(name)
    raw = Raw(source, lambda links: Training(), [])
    return opened("megatron", KINDS, raw, "here", num_heads)


def test_queries_keys_and_values_are_taken_apart_by_groups():
    """As attention.py of megatron-core 0.19 does: [G, H / G queries, a key and a value] heads."""
    theirs = MemorySource(arrays("stacked"))
    ours = from_megatron(theirs, num_heads=4)
    fused = read(theirs, "decoder.layers.self_attention.linear_qkv.weight").reshape(2, 2, 4, 6, 10)
    parts = {"wq": fused[:, :, :2], "wk": fused[:, :, 2:3], "wv": fused[:, :, 3:]}
    for name, part in parts.items():
        array = f"model/layers/attention/{name}/weight"
        whole = part.reshape(2, -1, 10)
        assert np.array_equal(read(ours, array).view(np.uint32), whole.view(np.uint32))
        box = ((1, 2), (3, whole.shape[1] - 2), (4, 9))  # cut within heads
        some = whole[1:2, 3:-2, 4:9]
        assert np.array_equal(read(ours, array, box).view(np.uint32), some.view(np.uint32))
    moments = [name for name in ours.arrays if "optimizer" in name]
    assert moments == ["optimizer/exp_avg/norm/weight"]


@pytest.mark.parametrize("kind_of_names", ["stacked", "layers", "singles"])
def test_every_way_of_names_gives_the_same_arrays(kind_of_names):
    theirs = MemorySource(arrays(kind_of_names))
    ours = from_megatron(theirs, num_heads=4)
    shapes = {
        name.removeprefix("model/"): array.shape
        for name, array in ours.arrays.items()
        if name.startswith("model/")
    }
    assert shapes == {
        "embed/weight": (40, 10), "norm/weight": (10,), "layers/attention_norm/weight": (2, 10),
        "layers/ffn_norm/weight": (2, 10), "layers/attention/wq/weight": (2, 24, 10),
        "layers/attention/wk/weight": (2, 12, 10), "layers/attention/wv/weight": (2, 12, 10),
        "layers/attention/wo/weight": (2, 10, 24), "layers/moe/router/weight": (2, 3, 10),
        "layers/moe/experts/w_gate": (2, 3, 10, 7), "layers/moe/experts/w_up": (2, 3, 10, 7),
        "layers/moe/experts/w_down": (2, 3, 7, 10),
    }  # fmt: skip
    of_layers = [array for name, array in ours.arrays.items() if "layers/" in name]
    assert all(array.attributes == {"layers": [0, 1]} for array in of_layers)
    room, whole = "decoder.layers.{}mlp.experts.experts.", None
    if kind_of_names == "layers":
        whole = read(theirs, room.format("1.") + "linear_fc1.weight")[2]
    elif kind_of_names == "stacked":
        whole = read(theirs, room.format("") + "linear_fc1.weight")[1, 2]
    for role, end, rows in (("gate", "w", slice(7)), ("up", "v", slice(7, 14))):
        found = read(ours, f"model/layers/moe/experts/w_{role}")[1, 2]
        if whole is None:
            expected = read(theirs, room.format("1.") + f"2.linear_fc1.weight_{end}")
        else:
            expected = whole[rows]
        assert np.array_equal(found.view(np.uint32), expected.T.view(np.uint32))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mtp.layers.0.eh_proj.weight", "mtp_num_layers"),
        ("embedding.position_embeddings.weight", "learned_absolute; it must be rope"),
        ("decoder.layers.self_attention.linear_kv_up_proj.weight", "multi_latent_attention"),
        ("decoder.layers.0.mixer.in_proj.weight", "hybrid layers"),
        ("decoder.layers.0.self_attention.core_attention.softmax_offset", "softmax_type"),
        ("decoder.layers.0.odd.weight", "array decoder.layers.0.odd.weight is of no model"),
    ],
)
def test_another_model_is_refused_in_one_line(name, line):
    with pytest.raises(InputError, match=line) as error:
        from_megatron(MemorySource({**arrays("stacked"), name: SourceArray((2,), "float32")}), 4)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("heads", "line"),
    [
        (None, "--num-heads must be given: 24 numbers of all query heads"),
        (5, r"--num-heads \(5\) must divide 24"),
        (3, r"--num-heads \(3\) must fit query heads of 24 numbers"),
    ],
)
def test_heads_that_do_not_fit_are_refused(heads, line):
    with pytest.raises(InputError, match=line):
        from_megatron(MemorySource(arrays("layers")), heads)


def test_an_expert_that_is_missing_is_an_error():
    found = arrays("singles")
    del found["decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight"]
    line = "decoder.layers.1.mlp.experts.experts.2.linear_fc2.weight is missing"
    with pytest.raises(InputError, match=line):
        from_megatron(MemorySource(found), 4)


def test_the_former_format_is_refused_by_name(tmp_path, capsys):
    (tmp_path / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    assert main("convert", ["move", str(tmp_path), str(tmp_path / "out"), "--to", "convoy"]) == 2
    assert "sharded_backend zarr; it must be torch_dist" in capsys.readouterr().err
