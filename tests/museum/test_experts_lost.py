"""Experts lost, swapped or transposed.

These are checkpoints of layers, and weights of other trainers that become Convoy's.

Legend: E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ckpt
from ckpt.rewrite.reshard import write_checkpoint
from convoy.commands.command_line import main
from parallel import Topology
from tests.museum.cases import Edit, case
from tests.museum.shared_experts import (
    MIXTRAL,
    E,
    layer,
    load_layer,
    save_layer,
    save_pruned,
    write_mixtral,
)
from tests.support.ranks import run_ranks
from tests.support.trained import checkpoint

_OWN_CELL = "if flat_index(coordinates, grid) % count == index:"


def _assert_saved_whole(root: Path) -> None:
    """The checkpoint has each weight of the layer, as one process has it."""
    opened = ckpt.open(root)
    for name, value in layer().state_dict().items():
        assert np.array_equal(opened[f"model/0.{name}"][:], value.numpy()), name


@case(
    "KempnerInstitute/KempnerForge#202",
    "Each rank kept its own experts and numbered them from 0, so that ranks saved other experts "
    "under the same names, and those of one rank came back on every rank.",
    Edit("ckpt/state_dict/held.py", "if one.crc32c != other.crc32c:", "if False:"),
)
def test_other_experts_under_one_name_are_refused(tmp_path):
    """A save in which two ranks have other experts under one name is refused on every rank, with
    the name, and no checkpoint is made."""
    said = run_ranks(save_pruned, 2, str(tmp_path))
    for words in said:
        assert "tensor experts.0.w_down has other numbers on rank 1 than on rank 0" in words
    assert ckpt.committed_steps(tmp_path) == []


@case(
    "verl-project/verl#2086",
    "Only the first rank of data parallelism saved its weights, and the experts that other ranks "
    "held were in no file.",
    Edit("ckpt/write/ownership.py", _OWN_CELL, f"{_OWN_CELL[:-1]} and rank == 0:"),
)
def test_a_checkpoint_has_the_experts_of_every_rank(tmp_path):
    """A checkpoint of two ranks that share the experts has every expert, with the numbers that one
    process has."""
    run_ranks(save_layer, 2, str(tmp_path), 2)
    assert ckpt.open(tmp_path)["model/0.experts.w_gate"].shape[0] == E
    _assert_saved_whole(tmp_path)


@case(
    "NVIDIA/Megatron-LM#1836",
    "Halves of an expert's matrices on two ranks counted as copies of each other, so that a "
    "checkpoint had the first rank's half alone.",
    Edit(
        "ckpt/state_dict/held.py",
        "None if isinstance(placement, Replicate) else placement.dim)",
        "None if isinstance(placement, Replicate) or tensor.ndim == 3 else placement.dim)",
    ),
)
def test_a_checkpoint_has_both_halves_of_every_expert(tmp_path):
    """A checkpoint of two ranks that hold half of each expert's matrices has the whole matrices."""
    run_ranks(save_layer, 2, str(tmp_path), 1)
    _assert_saved_whole(tmp_path)


@case(
    "deepspeedai/DeepSpeed#6589",
    "With experts over two ranks, both ranks loaded the first half of the experts.",
    Edit(
        "ckpt/state_dict/load.py",
        "*pieces(layout, tensor, ranks.rank))",
        "*pieces(layout, tensor, 0))",
    ),
)
def test_each_rank_loads_its_own_experts(tmp_path):
    """Two ranks that share the experts load a checkpoint of one process, and each has the experts
    of its own half."""
    ckpt.save_state_dict(
        tmp_path, {"model": {f"0.{n}": v for n, v in layer().state_dict().items()}}, step=1
    )
    halves = run_ranks(load_layer, 2, str(tmp_path))
    assert torch.equal(torch.cat(halves), layer().state_dict()["experts.w_down"])


@case(
    "NVIDIA-NeMo/Automodel#2682",
    "A load wrote each expert into a copy that a cast had made, and not into the layer, which kept "
    "its random weights and counted as loaded.",
    Edit(
        "ckpt/state_dict/load.py",
        "target = slices.pieces[slices.boxes.index(box)]",
        "target = slices.pieces[slices.boxes.index(box)].clone()",
    ),
)
def test_a_load_into_views_of_stacked_experts_fills_the_stack(tmp_path):
    """A state whose tensors are transposed views of one stack of experts fills the stack itself,
    and a view in another dtype is refused."""
    experts_EFD = torch.randn(E, 24, 16)
    saved = {f"experts.{i}": weight.t().contiguous() for i, weight in enumerate(experts_EFD)}
    ckpt.save_state_dict(tmp_path, saved, step=1)
    stack_EFD = torch.zeros(E, 24, 16)
    ckpt.load_state_dict(tmp_path, {f"experts.{i}": stack_EFD[i].t() for i in range(E)})
    assert torch.equal(stack_EFD, experts_EFD)
    cast = {f"experts.{i}": stack_EFD[i].t().to(torch.float8_e4m3fn) for i in range(E)}
    with pytest.raises(ckpt.CheckpointError, match="dtype float8_e4m3fn, and float32 in the check"):
        ckpt.load_state_dict(tmp_path, cast)


def _import(folder: Path, out: Path) -> int:
    return main("convert", ["import", str(folder), str(out)])


def _assert_experts(out: Path, tensors: dict[str, Tensor]) -> None:
    """The imported matrices of each expert are those of the files, from input to output."""
    opened = ckpt.open(out / "checkpoints")
    for theirs, ours in MIXTRAL.items():
        array = opened[f"model/layers/moe/experts/{ours}"]
        for e in range(E):
            name = f"model.layers.0.block_sparse_moe.experts.{e}.{theirs}.weight"
            assert np.array_equal(array[0, e], tensors[name].t().numpy()), name


@case(
    "NVIDIA/Megatron-LM#5844",
    "A converter looked for the experts' weights under names that its reader never sent, skipped "
    "them all, and reported success for a model with random experts.",
    Edit(
        "convoy/convert/hf/files.py",
        "    for name, shape in wanted.items():\n",
        "    for name in wanted.keys() - source.arrays.keys():\n"
        "        for known in (source.arrays, source.places):\n"
        "            known[name] = known[name.replace('.2.', '.0.')]\n"
        "    for name, shape in wanted.items():\n",
    ),
)
def test_an_import_without_an_expert_is_refused(tmp_path, capsys):
    """An import of a folder in which the weights of one expert have another name is refused, and
    the line names the weights; with all weights there, each expert is that of the files."""
    tensors = write_mixtral(tmp_path / "theirs", D=16, F=24)
    assert _import(tmp_path / "theirs", tmp_path / "ours") == 0
    _assert_experts(tmp_path / "ours", tensors)
    name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
    kept = {other: value for other, value in tensors.items() if other != name}
    save_file(kept, tmp_path / "theirs" / "model.safetensors")
    capsys.readouterr()
    assert _import(tmp_path / "theirs", tmp_path / "again") == 2
    assert f"tensor {name} is missing" in capsys.readouterr().err
    assert not (tmp_path / "again" / "checkpoints").exists()


@case(
    "huggingface/transformers#47031",
    "Whether an expert's matrix was to be transposed was told by its shape; square matrices were "
    "loaded transposed, without a warning.",
    Edit(
        "convoy/convert/hf/files.py",
        "_parts(source, tensors), [tensor.name for tensor in tensors if tensor.transposed]",
        "_parts(source, tensors),\n"
        "        [t.name for t in tensors if t.transposed and len({*t.shape}) > 1],",
    ),
)
def test_square_experts_are_imported_as_they_are_meant(tmp_path):
    """An import turns square matrices of experts as it turns all others: which way a matrix lies
    follows from the family of the files, and never from its shape."""
    tensors = write_mixtral(tmp_path / "theirs", D=16, F=16)
    assert _import(tmp_path / "theirs", tmp_path / "ours") == 0
    _assert_experts(tmp_path / "ours", tensors)


@case(
    "pytorch/torchtitan#3554",
    "Converted to the names of transformers and back, a model lost the biases by which its routers "
    "balance the experts.",
    Edit(
        "convoy/convert/hf/tensors.py",
        "        inner = name_in_layer(array)\n        if inner is None:\n            first =",
        "        inner = name_in_layer(array)\n"
        "        if inner == 'moe.router.expert_bias':\n            continue\n"
        "        if inner is None:\n            first =",
    ),
)
def test_an_export_has_the_biases_that_balance_the_experts(tmp_path, capsys):
    """An export has the routers' biases bit by bit, and a family of models that has no such biases
    is refused by name."""
    opened = checkpoint(tmp_path, "shared experts and a bias")
    root = tmp_path / "ours"
    write_checkpoint(opened.source, root, Topology())
    assert main("convert", ["export", str(root), str(tmp_path / "theirs")]) == 0
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    biases = ckpt.open(root)["model/layers/moe/router/expert_bias"][:]
    for layer_number, bias in enumerate(biases):
        name = f"model.layers.{layer_number}.mlp.gate.e_score_correction_bias"
        assert name in tensors
        assert np.array_equal(tensors[name].numpy(), bias, equal_nan=True)
    capsys.readouterr()
    words = ["export", str(root), str(tmp_path / "other"), "--family", "qwen3_moe"]
    assert main("convert", words) == 2
    assert "moe." in capsys.readouterr().err
