"""The kernels compiled for three generations of GPUs without one, as launches ask for them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from router import RouterConfig
from tests.support import kernels

kernels.need_triton(interpreter=False)
ARCHITECTURES = (80, 90, 100)
MOST_SHARED = 48 << 10
"""Bytes that a program may take on every device without asking for more."""
T, E, K, D, F = 4096, 128, 8, 2048, 768  # Qwen3-30B-A3B
R = T * K
POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int64: "*i64", torch.int32: "*i32",
    torch.bool: "*i1", torch.uint8: "*u8",
}  # fmt: skip


def calls() -> dict[str, list[tuple[Any, ...]]]:
    """By operator, arguments as the layer gives them; of a size in use, and of an odd one."""

    def rows(r: int, width: int) -> torch.Tensor:
        return torch.empty(r, width, dtype=torch.bfloat16)

    index, real = torch.zeros(R, dtype=torch.int64), torch.zeros((), dtype=torch.int32)
    ends, logits = torch.zeros(T + 1, dtype=torch.int64), torch.zeros(T, E)
    softmax, sigmoid = (K, False, False, True, 1.0), (K, True, False, True, 2.5)
    after = (K, False, True, False, 1.0)
    chosen, bias, weights = torch.zeros(T, K, dtype=torch.int64), torch.zeros(E), torch.zeros(T, K)
    wide, good, one = torch.zeros(T, 256), torch.zeros(T, dtype=torch.bool), torch.zeros(())
    weight = rows(R, 1)
    heads = rows(T, D).view(2, T // 2, 16, 128)
    turns, few = torch.zeros(T // 2, 64), torch.zeros(T // 2, 20)
    gates = [(rows(R, f), name) for f in (F, 1408, 50) for name in ("swiglu", "geglu")]
    plain = [(rows(R, F), name) for name in ("gelu", "relu2")]
    return {
        "take_rows": [(rows(T, D), index, real), (rows(T, 7168), index, None),
                      (rows(T, 100), index, real), (torch.zeros(T, K), index, None)],
        "sum_rows": [(rows(R, D), index, ends, real), (rows(R, 7168), index, ends, None),
                     (rows(R, 100), index, ends, real), (torch.zeros(R, K), index, ends, None)],
        "activate": [(x, x, weight, real, name) for x, name in gates]
                    + [(None, x, weight, real, name) for x, name in plain],
        "activate_backward": [(x, x, x, weight, real, name) for x, name in gates]
                             + [(x, None, x, weight, real, name) for x, name in plain],
        "sort_by_bin": [(index, E + 1), (index, 2), (index, 3), (index, 9), (index, 1024)],
        "sort_by_many_bins": [(index, T), (index, 1 << 20)],
        "sort_assignments": [(chosen, 0, 1, E, False), (chosen, 16, 16, 8, True),
                             (chosen, 5, 1, 1023, False), (chosen[:, :1], 0, 64, 2, True),
                             (torch.zeros(T, 32, dtype=torch.int64), 0, 1, 1, True)],
        "select_experts": [(logits, None, *softmax), (wide, torch.zeros(256), *sigmoid),
                           (logits, bias, *softmax), (logits, None, *after),
                           (torch.zeros(T, 1024), None, 32, *sigmoid[1:]),
                           (torch.zeros(T, 6), None, 2, *softmax[1:])],
        "select_experts_backward": [(logits, chosen, logits, weights, None, *softmax),
                                    (wide, chosen, wide, weights, logits[:, 0], *sigmoid),
                                    (logits, chosen, None, weights, None, *after),
                                    (logits, chosen, logits[:1].expand(T, E), weights,
                                     logits[:, 0].contiguous(), *softmax),
                                    (torch.zeros(T, 1024), chosen, None, weights, None, 32,
                                     *sigmoid[1:])],
        "balance": [(logits, logits[:, 0], logits[:, 0], good, index[:E], 1e-3, 0.0),
                    (wide, wide[:, 0], wide[:, 0], good, index[:256], 1e-3, 1e-3),
                    (torch.zeros(T, 1024), wide[:, 0], wide[:, 0], good, index[:1024], 0.1, 0.0),
                    (torch.zeros(T, 6), logits[:, 0], logits[:, 0], good, index[:6], 0.1, 0.0)],
        "balance_backward": [(logits[:, 0], index[:E], None, None, one, 1e-3, 0.0),
                             (logits[:, 0], index[:1024], one, one, one, 1e-3, 1e-3),
                             (logits[:, 0], index[:6], one, one, None, 1e-3, 1e-3)],
        "pack_rows": [(rows(T, D),), (rows(T, 7168),), (rows(T, 100),)],
        "rotate": [(heads, turns, turns, False, False, back) for back in (False, True)]
                  + [(heads[..., 16:56], few, few, True, False, False),
                     (heads[..., :40].contiguous(), few, few, False, True, True)],
    }  # fmt: skip


def launches_of(monkeypatch, name: str, arguments: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """What an operator launches: (kernel, arguments, constants, options)."""
    from triton.runtime.jit import JITFunction

    from moe.kernels import triton_activation, triton_float8, triton_rows
    from pretrain.kernels import triton_rotary
    from router.kernels import (
        triton_assignments,
        triton_balance,
        triton_selection,
        triton_sorting,
    )

    launch, noted = kernels.load_operators()[f"convoy::{name}"], []
    with monkeypatch.context() as patch:
        for module in (
            triton_activation, triton_assignments, triton_balance, triton_float8, triton_rotary,
            triton_rows, triton_selection, triton_sorting,
        ):  # fmt: skip
            for attribute, value in vars(module).items():
                if isinstance(value, JITFunction):
                    patch.setattr(module, attribute, kernels.Launch(value, noted))
        launch(*arguments)
    return noted


@dataclass(frozen=True)
class Compiled:
    ptx: str
    registers: int
    spills: int
    shared: int

    def widest(self, access: str) -> int:
        """The bytes of the widest access of a kind to global memory: ``ld`` or ``st``."""
        each = re.findall(rf"{access}\.global[.\w:]*?(?:\.v(\d))?\.[bfus](\d+)", self.ptx)
        return max((int(lanes or 1) * int(bits) // 8 for lanes, bits in each), default=0)


def compiled(launch: tuple[Any, ...], architecture: int, folder) -> Compiled:
    """Compile a launch to PTX by Triton, and by its ptxas to what a device runs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
    from triton.compiler import ASTSource

    kernel, arguments, constants, options = launch
    signature, constexprs, divisible = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = arguments[place] if place < len(arguments) else constants[name]
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
            # Memory from CUDA's allocator begins at multiples of 512; views may not.
            if value.storage_offset() * value.dtype.itemsize % 16 == 0:
                divisible[(place,)] = [["tt.divisibility", 16]]
        elif name in constants or value is None or (value == 1 and isinstance(value, int)):
            signature[name], constexprs[(place,)] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                divisible[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=divisible)
    target = GPUTarget("cuda", architecture, 32)
    done = triton.compile(source, target=target, options=options)
    path = folder / "kernel.ptx"
    path.write_text(done.asm["ptx"])
    words = [get_ptxas(architecture).path, "-v", f"-arch={sm_arch_from_capability(architecture)}"]
    said = subprocess.run(
        [*words, str(path), "-o", str(folder / "cubin")], capture_output=True, text=True, check=True
    ).stderr
    (registers,) = re.findall(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    assert len(spills) == 2
    return Compiled(done.asm["ptx"], int(registers), sum(map(int, spills)), done.metadata.shared)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


CASES = [(name, case) for name, cases in calls().items() for case in range(len(cases))]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("name", "case"), CASES)
def test_kernels_compile_without_spills(name, case, architecture, monkeypatch, tmp_path):
    for launch in launches_of(monkeypatch, name, calls()[name][case]):
        done = compiled(launch, architecture, tmp_path)
        told = f"{launch[0].__name__}: {done.registers} registers, {done.shared} B shared"
        print(told, f"{done.widest('ld')} B loads, {done.widest('st')} B stores")
        assert done.registers <= 255, told
        assert not done.spills, told
        assert done.shared <= MOST_SHARED, told


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "name", ["take_rows", "sum_rows", "activate", "activate_backward", "select_experts",
             "select_experts_backward", "pack_rows"]
)  # fmt: skip
def test_rows_of_a_model_are_read_and_written_by_sixteen_bytes(
    name, architecture, monkeypatch, tmp_path
):
    (launch,) = launches_of(monkeypatch, name, calls()[name][0])
    done = compiled(launch, architecture, tmp_path)
    assert (done.widest("ld"), done.widest("st")) == (16, 16)


def test_bfloat16_is_rounded_to_nearest(monkeypatch, tmp_path):
    # The interpreter rounds towards 0: its tests do not show it.
    for name in ("sum_rows", "activate", "activate_backward"):
        (launch,) = launches_of(monkeypatch, name, calls()[name][0])
        ptx = compiled(launch, 90, tmp_path).ptx
        assert set(re.findall(r"cvt\.(\w+)\.bf16x?2?\.f32", ptx)) == {"rn"}


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_table_of_launches_says_what_is_launched(name, case, monkeypatch):
    from router.kernels import LAUNCHES

    with kernels.Fills() as fills:
        launches = launches_of(monkeypatch, name, calls()[name][case])
    assert LAUNCHES[f"convoy::{name}"] == len(launches) + fills.count


def test_every_operator_is_compiled():
    assert {f"convoy::{name}" for name in calls()} == set(kernels.load_operators())


def test_the_router_of_a_config_is_a_case():
    # The flags are written out above; these are what a config of Qwen3 gives.
    config = RouterConfig(num_experts=E, top_k=K)
    flags = (config.score_func == "sigmoid", config.softmax_after_topk, config.norm_topk_prob)
    assert calls()["select_experts"][0][2:6] == (K, *flags)
