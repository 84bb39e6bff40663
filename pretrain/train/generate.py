"""Text from the model while it is spread over ranks.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel import full_sequences
from pretrain.data import end_of_document
from pretrain.rank_model import RankModel
from pretrain.spec import JobSpec, SampleConfig
from pretrain.train.evaluate import inference

_UNFINISHED = "\ufffd"
"""What a decoder writes for the first bytes of a letter."""


def generate(
    job: RankModel,
    tokenizer: Tokenizer,
    sample: SampleConfig,
    seen: Callable[[str], None] | None = None,
) -> str:
    """The prompt of ``sample`` and what the model makes of it; every rank must call.

    All ranks compute the same text, each what it holds of the model. Deterministic: the generator
    is seeded with ``train.seed``. At most ``data.seq_len`` tokens are in the model's view; when
    there are more, the view goes on from the newer half. The text ends where the model ends a
    document.

    Keys and values of earlier tokens are kept, unless experts have a capacity or choose their
    tokens: then a token's output depends on the tokens that are routed with it, and every token is
    computed again for each new one.

    Args:
        job: the model, with values.
        tokenizer: of the model.
        sample: the prompt, and how tokens are drawn.
        seen: called with the text so far, where it has grown.
    """
    spec, view = job.spec, job.spec.data.seq_len
    end = end_of_document(tokenizer, spec.data.end_token)
    tokens: list[int] = tokenizer.encode(sample.prompt, add_special_tokens=False).ids
    begins = not tokens
    tokens = tokens or [end]  # a text without a prompt follows another document's end
    generator = torch.Generator().manual_seed(spec.train.seed)
    # The first rank of those that have logits.
    last = 0 if job.parallel_model.pipeline is None else job.parallel_model.pipeline.last_place
    source = last * (job.runtime.world // job.topology.pp)
    first = max(0, len(tokens) - view)
    kept = view if _keeps(spec) else 0
    with inference(job.parallel_model), full_sequences(job.model, kept) as cache:
        for _ in range(sample.tokens):
            job.runtime.heartbeat.beat("evaluate", spec.train.steps)
            if len(tokens) - first > view:
                first = len(tokens) - (view + 1) // 2
                cache.clear()
            new = tokens[first + cache.length :]
            logits_V = _last_logits(job, new, end)
            token = end
            if logits_V is not None:
                token = _next_token(logits_V, sample, generator)
            token = job.runtime.broadcast(token, source)
            if token == end:
                break
            tokens.append(token)
            if begins and spec.data.document_mask:
                tokens = tokens[1:]  # the end token is of the document before
            elif kept:
                cache.advance(len(new))
            begins = False
            if seen is not None:
                text = str(tokenizer.decode(tokens))
                if not text.endswith(_UNFINISHED):
                    seen(text)
    return str(tokenizer.decode(tokens))


def _keeps(spec: JobSpec) -> bool:
    """Whether a token's output depends on no other tokens than those before it."""
    m = spec.moe
    return m is None or (m.capacity.policy == "dropless" and m.routing in ("top_k", "sinkhorn"))


def _last_logits(job: RankModel, tokens: list[int], end: int) -> Tensor | None:
    """[V] after the last of ``tokens``, where the last stage is."""
    # Ranks of tensor parallelism have equal parts. What follows a token does not change it, but
    # where experts have a capacity, or choose: then the padding takes part.
    padding = [end] * (-len(tokens) % job.topology.tp)
    inputs = torch.tensor([tokens + padding], device=job.runtime.device)
    logits_BSV, _ = job.forward(inputs)
    if logits_BSV is None:
        return None
    logits_V = logits_BSV[0, len(tokens) - 1]
    return logits_V.full_tensor() if isinstance(logits_V, DTensor) else logits_V


def _next_token(logits_V: Tensor, sample: SampleConfig, generator: torch.Generator) -> int:
    logits_V = logits_V.float().cpu()
    if sample.temperature == 0:
        return int(logits_V.argmax())
    probs_V = (logits_V / max(sample.temperature, 1e-3)).softmax(-1)
    if sample.top_p < 1:
        # The nucleus: the likeliest tokens until their probabilities reach top_p (Holtzman et al.,
        # arXiv 1904.09751).
        sorted_V, order_V = probs_V.sort(descending=True, stable=True)
        sorted_V[sorted_V.cumsum(-1) - sorted_V >= sample.top_p] = 0
        probs_V = torch.zeros_like(probs_V).scatter(0, order_V, sorted_V)
    return int(torch.multinomial(probs_V, 1, generator=generator))
