"""Adapters of the library peft on adopted models, and Convoy's adapters in peft's files.

Run as ``python -m tests.support.peers.peft_adapters WHAT FOLDER``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import moe
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp, clip_grad_norm
from tests.support.hf import load_theirs, logits_of, make_model, tokens

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@torch.no_grad()
def randomized(model: Any) -> Any:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.normal_(std=0.1)
    return model


def files(folder: Path) -> None:
    """Convoy's adapters load in peft, and a merged model loads in transformers."""
    everything = ("experts", "router", "attention", "dense")
    for case, on in (
        ("mixtral", ("experts", "attention")),
        ("qwen3_moe", everything),
        ("deepseek_v3", everything),
        ("llama", ("attention", "dense")),
    ):
        model = make_model(case) if case == "llama" else moe.adopt(make_model(case))
        before = logits_of(model)
        randomized(moe.add_lora(model, rank=3, alpha=5, on=on))
        wanted = logits_of(model)
        assert (wanted - before).abs().max() > 0.1
        adapter = moe.peft_adapter(model)
        into = folder / case
        into.mkdir()
        save_file(adapter.tensors, into / "adapter_model.safetensors")
        (into / "adapter_config.json").write_text(json.dumps(adapter.config))
        theirs = PeftModel.from_pretrained(make_model(case), into)
        torch.testing.assert_close(theirs(tokens()).logits, wanted, rtol=1e-4, atol=1e-4)
        moe.merge_lora(model).save_pretrained(into / "merged")
        torch.testing.assert_close(logits_of(load_theirs(into / "merged")), wanted,
                                   rtol=1e-4, atol=1e-4)  # fmt: skip


def loaded(folder: Path) -> None:
    """An adapter that peft has made, with its one A for gate and up, computes as in peft."""
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "v_proj"],
        target_parameters=[*EXPERTS, "mlp.gate.weight"],
    )  # fmt: skip
    theirs = randomized(get_peft_model(make_model("mixtral"), config))
    wanted = theirs(tokens()).logits
    theirs.save_pretrained(folder)
    model = moe.adopt(make_model("mixtral"))
    moe.add_lora(model, rank=4, alpha=16, on=["experts", "router", "*.q_proj", "*.v_proj"])
    stored = json.loads((folder / "adapter_config.json").read_text())
    moe.load_peft_adapter(model, load_file(folder / "adapter_model.safetensors"), stored)
    torch.testing.assert_close(logits_of(model), wanted, rtol=1e-4, atol=1e-4)


def refused(_: Path) -> None:
    """What peft does to experts is refused by name, before anything is computed or sharded."""
    config = LoraConfig(r=4, target_modules=[], target_parameters=EXPERTS)
    model = get_peft_model(moe.adopt(make_model("mixtral")), config)
    for wrong, words in (
        (lambda: model(tokens()), ["ParamWrapper", "moe.add_lora(model, on=['experts'])"]),
        (lambda: apply_expert_parallel(model, _mesh()), ["ParamWrapper", "moe.add_lora"]),
    ):
        said = _error_of(wrong)
        assert all(word in said for word in words), said
        assert "\n" not in said
    # The other way around adapters of experts would be frozen without a word.
    model = moe.add_lora(moe.adopt(make_model("mixtral")), on=["experts"])
    model = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    watch = moe.watch_parameters(model, optimizer)
    model(tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    said = _error_of(watch.report().check)
    assert "mlp.experts.lora." in said
    assert "(frozen)" in said


def _error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def _mesh() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def _both(theirs: bool = False) -> Any:
    """peft's adapters on attention, and Convoy's on experts."""
    model = make_model("mixtral")
    if not theirs:
        moe.adopt(model)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION))
    if not theirs:
        moe.add_lora(model, rank=4, on=["experts"], also_train=["*.lora_A.*", "*.lora_B.*"])
    return randomized(model)


def _train(model: Any, batches: list[Tensor], dims: ParallelDims | None) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    numbers = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for ids in batches:
            each = model(ids, labels=ids).loss / 2
            each.backward()
            loss = loss + each.detach()
        if dims is not None:
            dist.all_reduce(loss)
        watch = moe.watch_parameters(model, optimizer)
        norm = clip_grad_norm(model, dims, 0.5)
        optimizer.step()
        watch.report().check(["*base_layer*", "*norm*", "*embed*", "*head*", "*proj.weight"])
        numbers += [loss.item(), norm]
    return numbers


def ranks(_: Path) -> None:
    """peft on attention beside Convoy on experts, on two ranks with expert parallelism and FSDP."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    model = _both()
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=list(model.base_model.model.model.layers))
    got = _train(model, [tokens()[rank : rank + 1]], dims)
    wanted = _train(_both(), [tokens()[i : i + 1] for i in range(2)], None)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
    refused(_)
    dist.destroy_process_group()


def attention(_: Path) -> None:
    """peft's adapters of attention compute and learn on an adopted model as on the original."""
    losses = []
    for adopted in (False, True):
        model = make_model("mixtral")
        if adopted:
            moe.adopt(model)
        model = randomized(get_peft_model(model, LoraConfig(r=4, target_modules=ATTENTION)))
        losses.append(_train_plain(model))
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=1e-5)


def _train_plain(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"files": files, "loaded": loaded, "ranks": ranks, "attention": attention}[sys.argv[1]](
        Path(sys.argv[2])
    )
