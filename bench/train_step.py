"""A whole training step of a tiny Qwen3-MoE against a dense model of the same active FLOPs.

    OMP_NUM_THREADS=2 python -m bench.train_step [--quick] [--kept] [--json FILE]

Forward, loss, backward, one gradient norm, AdamW. The limit is the same decoder with dense layers
whose hidden size is what a token's experts have together. Peers that are installed
(bench/README.md) have the same weights, and are held to Convoy's loss and gradient norm before they
are timed; all of them take torch's fused AdamW and a plain loop. Everybody has a process, as it
comes: Convoy's (and the limit's) keeps freed memory, as pretraining does on a CPU; with ``--kept``
all do.

Legend: B batch, S sequence, V vocab.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import ckpt
from bench.harness import Row, arguments, finish, interleave
from bench.peers import titan_experts_in_float32
from convoy.convert import import_hf
from moe import MoEConfig
from parallel import Topology, clip_grad_norm
from pretrain.model import Decoder, ModelConfig, forward_flops, meta_decoder, peak_flops_per_second
from pretrain.parallelize import forward_backward, parameter_layouts
from pretrain.runtime import keep_freed_memory
from pretrain.state import model_arrays

NAMES = ["convoy", "transformers grouped_mm", "transformers eager", "torchtitan", "limit"]
PACKAGES = ["torch", "numpy", "transformers", "torchtitan"]
B, S = 8, 512
MODEL = ModelConfig(vocab_size=2048, d_model=256, num_layers=4, num_heads=4, num_kv_heads=4,
                    rope_theta=1e6)  # fmt: skip
MOE = MoEConfig(d_model=256, d_ff=512, num_experts=8, top_k=2, aux_loss_coeff=0.0)

Gradient = Callable[[], float]
"""Zero the gradients, run a forward and backward, and give the loss."""


def ours(model: Decoder, batch: Tensor) -> Gradient:
    """Convoy's own step."""

    def run() -> float:
        model.zero_grad()
        result = forward_backward(model, [batch], B * S, device=batch.device)
        return float(result.loss_sum) / (B * S)

    return run


def theirs(model: nn.Module, forward: Callable[[Tensor], Tensor], batch: Tensor) -> Gradient:
    """A plain loop around a model's logits."""
    inputs_BS, targets_BS = batch[:, :-1], batch[:, 1:]

    def run() -> float:
        model.zero_grad()
        logits_TV = forward(inputs_BS).flatten(0, 1).float()
        loss = F.cross_entropy(logits_TV, targets_BS.flatten())
        loss.backward()
        return loss.item()

    return run


def stepper(model: nn.Module, gradient: Gradient) -> Callable[[], None]:
    """With one norm over all gradients, and the update; its rate keeps the weights as they are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, fused=True)

    def step() -> None:
        gradient()
        clip_grad_norm(model, None, 1.0)
        optimizer.step()

    return step


def transformers_model(how: str, folder: Path | None = None) -> Any:
    """transformers' Qwen3-MoE, saved or new; ``how`` is ``eager`` or ``grouped_mm``."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    c = MODEL
    make: Any = Qwen3MoeConfig
    config = make(
        vocab_size=c.vocab_size, hidden_size=c.d_model, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.qk_head_dim, moe_intermediate_size=MOE.d_ff, num_experts=MOE.num_experts,
        num_experts_per_tok=MOE.top_k, norm_topk_prob=True, rope_theta=c.rope_theta,
        max_position_embeddings=S, tie_word_embeddings=False, rms_norm_eps=c.norm_eps,
        use_cache=False,
    )  # fmt: skip
    config._experts_implementation = how
    if folder is not None:
        return Qwen3MoeForCausalLM.from_pretrained(folder, config=config).train()
    return Qwen3MoeForCausalLM(config)


def ours_of(folder: Path) -> Decoder:
    """Convoy's decoder with the weights of a transformers model, by way of the converter."""
    root = folder / "ours" / "checkpoints"
    model = meta_decoder(MODEL, MOE).to_empty(device="cpu")
    layouts = parameter_layouts(model, Topology())
    ckpt.load(root, ckpt.read_manifest(root), model_arrays(model, model, layouts, 0))
    return model


def torchtitan_model(weights: dict[str, Tensor]) -> Any:
    """torchtitan's Qwen3-MoE with Hugging Face weights.

    Its experts are in float32, and its attention is its own ScaledDotProductAttention, which it
    keeps for other models: the kinds that its language models take need a GPU or a compiler.
    """
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.qwen3 import Qwen3Model, _build_qwen3_moe_layers, _qwen3_norm
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    c, made = MODEL, {"weight": nn.init.zeros_}
    rope = CosSinRoPE.Config(dim=c.qk_head_dim, max_seq_len=S, theta=c.rope_theta)
    config = Qwen3Model.Config(
        vocab_size=c.vocab_size, dim=c.d_model, norm=_qwen3_norm(c.d_model),
        tok_embeddings=Embedding.Config(
            num_embeddings=c.vocab_size, embedding_dim=c.d_model, param_init=made
        ),
        lm_head=Linear.Config(in_features=c.d_model, out_features=c.vocab_size, param_init=made),
        layers=_build_qwen3_moe_layers(
            n_layers=c.num_layers, dim=c.d_model, n_heads=c.num_heads, n_kv_heads=c.num_kv_heads,
            head_dim=c.qk_head_dim, moe_hidden_dim=MOE.d_ff, num_experts=MOE.num_experts,
            top_k=MOE.top_k, fuse_qkv=False, attn_backend="flex", moe_comm_backend="standard",
            rope=rope,
        ),
    )  # fmt: skip
    model = Qwen3Model(config)
    state = Qwen3StateDictAdapter(config, None).from_hf(weights)
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys, missing
    titan_experts_in_float32(model)
    for layer in model.layers.values():
        layer.attention.inner_attention = ScaledDotProductAttention.Config().build()
    return model


def build(name: str, folder: Path) -> tuple[nn.Module, Gradient]:
    """A subject with the weights in ``folder``. Raises ImportError where it is not installed."""
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(MODEL.vocab_size, (B, S + 1), generator=generator)
    if name == "limit":
        dense = Decoder(MODEL.model_copy(update={"d_ff": MOE.top_k * MOE.d_ff}), None)
        return dense, ours(dense, batch)
    if name == "convoy":
        decoder = ours_of(folder)
        return decoder, ours(decoder, batch)
    weights = load_file(folder / "hf" / "model.safetensors")
    if name == "torchtitan":
        titan = torchtitan_model(weights)
        return titan, theirs(titan, titan, batch)
    model = transformers_model(name.removeprefix("transformers "), folder / "hf")
    return model, theirs(model, lambda tokens_BS: model(tokens_BS).logits, batch)


def work(name: str, folder: Path, keeps: bool, pipe: Any) -> None:
    """A subject's process: says its loss and gradient norm, then takes a step for every word."""
    if keeps:
        keep_freed_memory()
    try:
        model, gradient = build(name, folder)
    except ImportError as error:
        pipe.send(str(error))
        return
    pipe.send((gradient(), clip_grad_norm(model, None, 1e9)))
    step = stepper(model, gradient)
    with contextlib.suppress(EOFError):  # the end
        while pipe.recv():
            step()
            pipe.send(None)


class Subject:
    """A process that takes steps when it is called."""

    def __init__(self, name: str, folder: Path, keeps: bool) -> None:
        context = mp.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(name, folder, keeps, theirs), daemon=True)
        self.process.start()
        self.first: Any = self.pipe.recv()

    def __call__(self) -> None:
        """Take one."""
        self.pipe.send(True)
        self.pipe.recv()


def bench(samples: int, kept: bool) -> list[Row]:
    """Tokens per second of everybody, and of the limit."""
    subjects: dict[str, Callable[[], None]] = {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        transformers_model("eager").save_pretrained(folder / "hf")
        import_hf(folder / "hf", folder / "ours")
        wanted: Any = None
        for name in NAMES:
            subject = Subject(name, folder, kept or name in ("convoy", "limit"))
            if isinstance(subject.first, str):
                print(f"{name} is left out: {subject.first}", file=sys.stderr)
                continue
            wanted = wanted or subject.first
            for a, b in zip(subject.first, wanted, strict=True):
                same = name == "limit" or abs(a - b) <= 1e-4 * abs(b)
                assert same, f"{name} has {subject.first}, convoy {wanted}"
            subjects[name] = subject
    case = f"tiny {torch.get_num_threads()} threads{' kept' if kept else ''}"
    rows = interleave(case, "step_seconds", subjects, samples)
    flops = B * S * forward_flops(MODEL, MOE, S).training
    peak = peak_flops_per_second(torch.device("cpu"), torch.float32)
    for row in rows:
        speed, mfu = B * S / row.value, flops / row.value / peak
        print(f"{row.subject:<24} {speed:8,.0f} tokens/s  MFU {mfu:.0%}")
    return rows + [
        replace(
            row, metric="tokens_per_second", value=B * S / row.value, unit="1/s",
            samples=[B * S / seconds for seconds in row.samples],
        )
        for row in rows
    ]  # fmt: skip


def main() -> None:
    """The command."""
    kept = "--kept" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--kept"]
    args = arguments(__doc__ or "")
    rows = bench(3 if args.quick else args.samples, kept)
    finish("train_step", rows, PACKAGES, args.json)


if __name__ == "__main__":
    main()
