"""Adapters of PEFT: merged, combined and added, each gives the numbers of its formula.

Legend: B batch, I inputs, O outputs, E experts, F hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from bench.museum_peers.frame import Answer, peer_case

FIRST_16 = ("transformers==4.51.3", "huggingface_hub==0.30.2", "tokenizers==0.21.1")
FIRST_17 = ("transformers==4.55.4", "huggingface_hub==0.34.4", "tokenizers==0.21.4")
FIRST_18 = ("transformers==4.57.1", "huggingface_hub==0.35.3", "tokenizers==0.22.1")
RANK = 4


class _Line(nn.Module):
    """One linear layer with a name that adapters can target."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(16, 8)

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        y_BO: torch.Tensor = self.line(x_BI)
        return y_BO


class _Experts(nn.Module):
    """Experts whose weights are two parameters, as in transformers 5."""

    def __init__(self) -> None:
        super().__init__()
        self.up_EIF = nn.Parameter(torch.randn(3, 16, 8))
        self.down_EFI = nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eif,efo->bo", x_BI, self.up_EIF, self.down_EFI)


class _Layer(nn.Module):
    """A layer that has experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = _Experts()

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        y_BO: torch.Tensor = self.experts(x_BI)
        return y_BO


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two outputs, as a share of the largest output."""
    return float((one - other).abs().max() / other.abs().max())


def _line(**options: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A layer with an adapter "first", an input, and the layer's output with the adapter."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    x_BI = torch.randn(32, 16)
    config = LoraConfig(r=RANK, target_modules=["line"], init_lora_weights=False, **options)
    model = get_peft_model(_Line(), config, adapter_name="first").eval()
    with torch.no_grad():
        return model, x_BI, model(x_BI)


@peer_case(
    "huggingface/peft#2486",
    went_wrong="merge() added the adapter's bias without its scaling, which the forward applies.",
    wrong=("peft==0.15.1", *FIRST_16),
    fixed=("peft==0.16.0", *FIRST_16),
)
def a_merged_adapter_with_a_bias_gives_what_the_adapter_gave() -> Answer:
    model, x_BI, before_BO = _line(lora_alpha=32, lora_bias=True)
    merged = model.merge_and_unload()
    with torch.no_grad():
        distance = _distance(merged(x_BI), before_BO)
    return Answer(distance < 1e-5, f"outputs before and after the merge differ by {distance:.1e}")


@peer_case(
    "huggingface/peft#3761",
    went_wrong="A combination of adapters lost the bias, and the scaling of another formula.",
    wrong=("peft==0.21.2",),
    fixed=None,
    no_fix="The issue is open; 0.21.2 is the newest release.",
)
def an_adapter_combined_with_weight_one_is_that_adapter() -> Answer:
    seen = {}
    for name, options in (("plain", {}), ("rslora", {"use_rslora": True}),
                          ("bias", {"lora_bias": True})):  # fmt: skip
        model, x_BI, before_BO = _line(lora_alpha=16, **options)
        model.add_weighted_adapter(["first"], [1.0], "combined", combination_type="linear")
        model.set_adapter("combined")
        with torch.no_grad():
            seen[name] = _distance(model.eval()(x_BI), before_BO)
    words = ", ".join(f"{name} {distance:.1e}" for name, distance in seen.items())
    return Answer(max(seen.values()) < 1e-5, f"outputs differ by: {words}")


@peer_case(
    "huggingface/peft#3756",
    went_wrong="A layer with one merged adapter left out the other active adapter.",
    wrong=("peft==0.21.2",),
    fixed=None,
    no_fix="The maintainers documented it and plan a change in 1.0; 0.21.2 is the newest release.",
)
def merging_one_of_two_active_adapters_changes_no_output() -> Answer:
    from peft import LoraConfig

    model, x_BI, _ = _line()
    model.add_adapter(
        "second", LoraConfig(r=RANK, target_modules=["line"], init_lora_weights=False)
    )
    model.base_model.set_adapter(["first", "second"])
    with torch.no_grad():
        both_BO = model.eval()(x_BI)
        model.merge_adapter(adapter_names=["first"])
        distance = _distance(model(x_BI), both_BO)
    active = "+".join(model.active_adapters)
    return Answer(distance < 1e-5, f"active: {active}; outputs differ by {distance:.1e}")


@peer_case(
    "huggingface/peft#3774",
    went_wrong="The output projection of an attention layer got its adapter twice.",
    wrong=("peft==0.21.2",),
    fixed=None,
    no_fix="The pull request with the fix is open; 0.21.2 is the newest release.",
)
def an_adapter_of_an_attention_is_added_once() -> Answer:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    mixer = nn.MultiheadAttention(16, 2)
    plain_OI = mixer.out_proj.weight.detach().clone()
    config = LoraConfig(r=RANK, target_modules=["mixer"], init_lora_weights=False)
    model: Any = get_peft_model(nn.ModuleDict({"mixer": mixer}), config)
    projection = model.base_model.model["mixer"].base_layer.out_proj
    once_OI = projection.get_delta_weight("default").detach().clone()
    merged = model.merge_and_unload()
    added_OI = merged["mixer"].out_proj.weight.detach() - plain_OI
    times = float((added_OI * once_OI).sum() / (once_OI * once_OI).sum())
    return Answer(abs(times - 1) < 1e-4, f"the merge added the adapter {times:.3f} times")


@peer_case(
    "huggingface/peft#2710",
    went_wrong="A second adapter was accepted, and adapted one of the two parameters of experts.",
    wrong=("peft==0.17.0", *FIRST_17),
    fixed=("peft==0.17.1", *FIRST_17),
)
def a_second_adapter_adapts_each_parameter_of_experts_or_is_refused() -> Answer:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=RANK, target_modules=[], target_parameters=["experts.up_EIF", "experts.down_EFI"],
        init_lora_weights=False,
    )  # fmt: skip
    model = get_peft_model(_Layer(), config, adapter_name="first").eval()
    try:
        model.add_adapter("second", config)
    except ValueError as error:
        return Answer(True, f"refused: {str(error)[:60]}")
    model.set_adapter("second")
    x_BI = torch.randn(32, 16)
    acts = {}
    with torch.no_grad():
        before_BO = model(x_BI)
        for adapter in ("first", "second"):
            names = [n for n, _ in model.named_parameters() if f"lora_B.{adapter}." in n]
            acts[adapter] = len(names)
        for name, parameter in model.named_parameters():
            if "lora_B.second." in name:
                parameter.zero_()
        distance = _distance(model(x_BI), before_BO)
    return Answer(
        acts["second"] == 2,
        f"parameters that an adapter adapts: first {acts['first']}, second {acts['second']}; "
        f"the second changes outputs by {distance:.1e}",
    )


@peer_case(
    "huggingface/peft#3533",
    went_wrong="A second adapter whose target matches no layer was accepted and adapted nothing.",
    wrong=("peft==0.20.0",),
    fixed=("peft==0.21.2",),
)
def a_second_adapter_that_matches_no_layer_is_refused() -> Answer:
    from peft import LoraConfig

    model, _, _ = _line()
    try:
        model.add_adapter("second", LoraConfig(target_modules=["no_such_layer"]))
    except ValueError as error:
        return Answer(True, f"refused: {str(error)[:90]}")
    names = [name for name, _ in model.named_parameters() if ".second." in name]
    return Answer(False, f"accepted, with {len(names)} parameters")
