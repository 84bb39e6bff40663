"""The routing of a trained model on text, as a trace.

Legend: C calls, L MoE layers, S senders, E experts, N tokens of all calls, layers and senders,
K top_k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import ckpt
from ckpt import Location, Manifest
from convoy.sampling import forward_spec, read_checkpoint
from corpus.tokenizer import end_of_document, load_tokenizer
from moe import MoEAux, RoutingTrace
from pretrain.data import Corpora, open_corpora, read_batch
from pretrain.errors import InputError
from pretrain.job import RankModel, build_model
from pretrain.runtime import Runtime, start
from pretrain.spec import JobSpec


def trace_routing(
    location: Location,
    *,
    calls: int,
    senders: int,
    routes: bool = False,
    step: int | None = None,
    overrides: Sequence[str] = (),
) -> RoutingTrace:
    """What the routers of a checkpoint choose on the training samples that come after its step.

    A sender is a data-parallel rank: call c of sender s is the micro-batch c·S + s, so the senders
    have micro-batches as the ranks of a run have them, on any number of ranks. Nothing is trained,
    and nothing written. Every rank must call, and gets the trace.

    Args:
        location: a checkpoint folder or URL, or the path of a manifest.
        calls: micro-batches of each sender.
        senders: a multiple of the ranks.
        routes: whether the experts of each token are recorded too.
        step: of the checkpoint; None for the newest.
        overrides: ``section.field=value``, over the spec that the checkpoint holds; ``data.path``
            names another corpus that is prepared with the checkpoint's tokenizer.

    Raises InputError where the settings, the corpus or the layout do not fit, and CheckpointError
    where the checkpoint is not whole.
    """
    runtime = start(timeout_seconds=600.0)
    try:
        root, manifest = runtime.together(lambda: read_checkpoint(location, step))
        spec = runtime.together(lambda: _spec_of(manifest, overrides, senders, runtime.world))
        corpora = runtime.together(lambda: _corpora_of(spec, manifest))
        end_token = None
        if spec.data.document_mask:
            end_token = end_of_document(load_tokenizer(spec.data), spec.data.end_token)
        model = build_model(spec, runtime, end_token=end_token)
        runtime.together(lambda: ckpt.load(root, manifest, model.weights(), extra="ignore"))
        first_sample = int(manifest.state.get("consumed_samples", 0))
        reports = _forwards(model, corpora, first_sample, calls, senders)
        notes = {
            "corpus": corpora.fingerprint, "first_sample": first_sample,
            "sequences_per_call": spec.batch.micro_batch_size, "seq_len": spec.data.seq_len,
        }  # fmt: skip
        return _trace(reports, spec, runtime, routes=routes, step=manifest.step, notes=notes)
    finally:
        runtime.close()


def _spec_of(manifest: Manifest, overrides: Sequence[str], senders: int, world: int) -> JobSpec:
    spec = forward_spec(manifest, overrides)
    if spec.moe is None:
        raise InputError("moe (none) must be there: the model has no expert to trace")
    if senders % world:
        raise InputError(f"senders ({senders}) must be a multiple of the ranks ({world})")
    topology = spec.topology(world)
    if topology.pp * topology.cp * topology.tp > 1:
        raise InputError(
            f"parallel.pp ({topology.pp}), cp ({topology.cp}) and tp ({topology.tp}) must be 1: a "
            f"rank has whole layers and whole sequences in a trace"
        )
    return spec


def _corpora_of(spec: JobSpec, manifest: Manifest) -> Corpora:
    corpora = open_corpora(spec.data, spec.model.vocab_size)
    known = manifest.state.get("tokenizer")
    if known and known != corpora.tokenizer_fingerprint:
        raise InputError(
            f"data.path ({spec.data.path}) must be prepared with the tokenizer of the checkpoint "
            f"({known[:12]}), and is prepared with {corpora.tokenizer_fingerprint[:12]}"
        )
    return corpora


def _forwards(
    model: RankModel, corpora: Corpora, first_sample: int, calls: int, senders: int
) -> list[list[tuple[MoEAux, ...] | None]]:
    """The reports of the MoE layers by call and sender; None for senders of other ranks."""
    sequences, seed = corpora.train_sequences(), model.spec.train.seed
    order, device = corpora.order(corpora.blend(), sequences, seed), model.runtime.device
    size, rank, ranks = model.spec.batch.micro_batch_size, model.dims.dp_rank, model.dims.dp_size
    reports: list[list[tuple[MoEAux, ...] | None]] = []
    model.model.eval()
    with torch.no_grad():
        for call in range(calls):
            reports.append([None] * senders)
            # As many forwards on every rank: all exchange tokens.
            for sender in range(rank, senders, ranks):
                first = first_sample + (call * senders + sender) * size
                batch = read_batch(sequences, order.many(np.arange(first, first + size)))
                inputs_BS, _ = model.local_batch.inputs_and_targets(batch)
                out, _ = model.forward(
                    inputs_BS.clamp_min(0).to(device),
                    model.local_batch.documents(batch[:, :-1].to(device)),
                    model.local_batch.routed_tokens(batch),
                )
                assert out is not None
                reports[-1][sender] = out.aux
    return reports


def _trace(
    reports: Sequence[Sequence[tuple[MoEAux, ...] | None]],
    spec: JobSpec,
    runtime: Runtime,
    *,
    routes: bool,
    step: int,
    notes: dict[str, Any],
) -> RoutingTrace:
    """The trace of the reports of all ranks; every rank must call."""
    own = next(auxes for of_call in reports for auxes in of_call if auxes is not None)
    C, L, S, (T, K) = len(reports), len(own), len(reports[0]), own[0].topk_indices_TK.shape
    if len(own[0].tokens_per_expert_E) > np.iinfo(np.int16).max and routes:
        raise InputError(f"moe.num_experts ({len(own[0].tokens_per_expert_E)}) must be at most "
                         f"{np.iinfo(np.int16).max} for a trace with routes")  # fmt: skip

    def everywhere(values: list[Tensor], like: Tensor) -> np.ndarray:
        """[C, L, S, ...] of all ranks, each of which has zeros for the senders of others."""
        shape = (C, S, L, *like.shape)
        filled = torch.zeros(shape, dtype=torch.int64)
        mine = torch.tensor([[auxes is not None for auxes in of_call] for of_call in reports])
        filled[mine] = torch.stack(values).cpu().view(-1, L, *like.shape)
        return runtime.sum_in_training(filled).transpose(1, 2).numpy()

    auxes = [aux for of_call in reports for auxes in of_call if auxes for aux in auxes]
    counts = everywhere([a.tokens_per_expert_E for a in auxes], own[0].tokens_per_expert_E)
    chosen = None
    if routes:
        chosen = everywhere([a.topk_indices_TK for a in auxes], own[0].topk_indices_TK)
    return RoutingTrace(
        counts_CLSE=counts,
        step_C=np.full(C, step, np.int64),
        top_k=K,
        layers=tuple(spec.model.moe_layers[:L]),
        senders=tuple(range(S)),
        recipe=spec.name,
        seed=spec.train.seed,
        notes=notes,
        tokens_CLS=np.full((C, L, S), T, np.int64) if routes else None,
        routes_NK=None if chosen is None else chosen.reshape(-1, K).astype(np.int16),
    )
