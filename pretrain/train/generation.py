"""Text from the model while it is spread over ranks.

Legend: V vocabulary, B batch, S tokens of a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from numpy.random import Generator, Philox
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.tensor import DTensor

from corpus.tokenizer import end_of_document
from parallel import full_sequences
from pretrain.job import RankModel
from pretrain.parallelize import RoutedTokens
from pretrain.spec import SampleConfig
from pretrain.train.evaluate import inference
from router import LEAST_ROWS

_UNFINISHED = "\ufffd"
"""What a decoder writes for the first bytes of a letter."""


@dataclass(frozen=True)
class Drawing:
    """How the next token is drawn from the logits."""

    temperature: float = 0.8
    """Divides the logits; 0 always takes the token with the highest logit."""
    top_p: float = 1.0
    """Only the likeliest tokens are drawn whose probabilities reach this sum (nucleus sampling,
    Holtzman et al., arXiv 1904.09751)."""


DRAWING = Drawing()
"""Of the text in a run's summary."""


@dataclass(frozen=True)
class Generated:
    """A text, and what the model computed for it."""

    text: str
    """The prompt and what the model makes of it."""
    tokens: int
    """Tokens that were generated, the end of a document among them."""
    token_ids: tuple[int, ...]
    """The text's tokens, and the end of a document where the model has ended the text."""
    log_probs: tuple[float, ...]
    """The natural logarithm of the model's probability of each generated token, whatever the
    temperature was."""


def generate(
    job: RankModel,
    tokenizer: Tokenizer,
    sample: SampleConfig,
    drawing: Drawing = DRAWING,
    seen: Callable[[str], None] | None = None,
) -> Generated:
    """The prompt of ``sample`` and what the model makes of it; every rank must call.

    All ranks compute the same text, each what it holds of the model. Deterministic: the generator
    is seeded with ``train.seed``. At most ``data.seq_len`` tokens are in the model's view; when
    there are more, the view goes on from the newer half. The text ends where the model ends a
    document.

    On a CPU the log-probabilities of an exact run are those of a forward of training, bit for bit:
    of a sequence that begins as the view does. For that ``data.seq_len`` must be a multiple of 32,
    ``data.document_mask`` false, and tokens must not depend on others that are routed with them.

    Keys and values of earlier tokens are kept, unless a token's output depends on the tokens that
    are routed with it: then every token is computed again for each new one.

    Args:
        job: the model, with values.
        tokenizer: of the model.
        sample: the prompt, and how many tokens.
        drawing: how tokens are drawn.
        seen: called with the text so far, where it has grown.
    """
    writer = _Writer(job, tokenizer, sample, drawing)
    cache_length = job.spec.data.seq_len if writer.uses_cache else 0
    contexts = full_sequences(job.model, cache_length, like_whole=writer.like_whole)
    with inference(job.parallel_model), contexts as cache:
        while not writer.ended:
            cache.keep(writer.write(cache.length))
            if seen is not None and not (text := writer.text).endswith(_UNFINISHED):
                seen(text)
    return Generated(
        writer.text, len(writer.log_probs), tuple(writer.all_ids), tuple(writer.log_probs)
    )


class _Writer:
    """A text that grows, equal on all ranks."""

    def __init__(
        self, job: RankModel, tokenizer: Tokenizer, sample: SampleConfig, drawing: Drawing
    ) -> None:
        spec = job.spec
        self.job, self.tokenizer, self.sample, self.drawing = job, tokenizer, sample, drawing
        self.view_length = spec.data.seq_len
        self.end_id = end_of_document(tokenizer, spec.data.end_token)
        self.token_ids: list[int] = tokenizer.encode(sample.prompt, add_special_tokens=False).ids
        # A text without a prompt follows another document's end. The end token is of the document
        # before, and so not in view where documents do not see each other.
        self.begins = not self.token_ids
        self.token_ids = self.token_ids or [self.end_id]
        self.all_ids = list(self.token_ids)
        self.view_start = max(0, len(self.token_ids) - self.view_length)
        self.uses_cache = spec.moe is None or spec.moe.independent_tokens
        self.like_whole = (
            spec.train.exact
            and self.uses_cache
            and not spec.data.document_mask  # keys are then those of a document, of any length
            and self.view_length % LEAST_ROWS == 0
        )
        self.ended = sample.tokens == 0
        self.log_probs: list[float] = []
        # The first rank of those that have logits.
        pipeline = job.parallel_model.pipeline
        stage_place = 0 if pipeline is None else pipeline.last_place
        self.source = stage_place * (job.runtime.world // job.topology.pp)

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.token_ids))

    def write(self, num_cached: int) -> int:
        """Add the model's next token.

        Args:
            num_cached: of so many tokens in view keys and values are kept.

        Returns:
            Of how many tokens they are to be kept.
        """
        self.job.runtime.heartbeat.beat("evaluate", self.job.spec.train.steps)
        token_id, log_prob = self._next_token(self.token_ids[self.view_start + num_cached :])
        self.log_probs.append(log_prob)
        self.ended = token_id == self.end_id or len(self.log_probs) >= self.sample.tokens
        self.all_ids.append(token_id)
        if token_id != self.end_id:
            self.token_ids.append(token_id)
        begins, self.begins = self.begins, False
        if begins and self.job.spec.data.document_mask:
            self.token_ids = self.token_ids[1:]
            return 0
        if len(self.token_ids) - self.view_start > self.view_length:
            self.view_start = len(self.token_ids) - (self.view_length + 1) // 2
            return 0
        if self.ended or not self.uses_cache:
            return 0
        in_view = len(self.token_ids) - self.view_start
        # The last token is not computed yet; of a forward's fewest rows the others are once more.
        return max(0, in_view - LEAST_ROWS) if self.like_whole else in_view - 1

    def _next_token(self, token_ids: list[int]) -> tuple[int, float]:
        """The token behind ``token_ids`` and what is kept of earlier tokens, on all ranks; and its
        log-probability."""
        inputs_BS, routed = self._padded(token_ids)
        output, _ = self.job.forward(inputs_BS, routed=routed)
        token_id, log_prob = -1, 0.0
        if output is not None:
            logits_V = output.logits[0, len(token_ids) - 1]
            if isinstance(logits_V, DTensor):
                logits_V = logits_V.full_tensor()
            noise_V = self._noise(len(logits_V))
            token_id = next_token(logits_V.double().cpu(), self.drawing, noise_V)
            log_prob = float(logits_V.float().log_softmax(-1)[token_id])
        bits = torch.tensor(log_prob, dtype=torch.float64).view(torch.int64)
        token_id, sent = self.job.runtime.broadcast_all([token_id, int(bits)], self.source)
        return token_id, float(torch.tensor(sent).view(torch.float64))

    def _padded(self, token_ids: list[int]) -> tuple[Tensor, RoutedTokens | None]:
        """[1, S] the tokens of a forward, and which of them MoE layers route."""
        # Ranks of tensor parallelism have equal parts. Of few rows, products have other bits, and
        # attention takes blocks of queries, of which the last one must not be short.
        missing = -len(token_ids) % (
            LEAST_ROWS if self.like_whole else self.job.local_batch.tp_degree
        )
        padding = [self.end_id] * missing
        inputs_BS = torch.tensor([[*token_ids, *padding]], device=self.job.runtime.device)
        if self.like_whole or not padding:
            return inputs_BS, None
        return inputs_BS, self._routed(inputs_BS.numel(), len(token_ids))  # padding is no token

    def _routed(self, size: int, count: int) -> RoutedTokens:
        """What this rank's MoE layers route of ``size`` positions, of which the first ``count`` are
        tokens."""
        dims, tp = self.job.dims, self.job.local_batch.tp_degree
        mask_BS = (torch.arange(size) < count).unsqueeze(0)
        mask_BS = mask_BS.chunk(tp, 1)[dims.tp_mesh.get_local_rank() if tp > 1 else 0]
        own_tokens = int(mask_BS.sum())
        return RoutedTokens(mask_BS, own_tokens, own_tokens, own_tokens)

    def _noise(self, vocab_size: int) -> Tensor | None:
        """[V] for the next token of the text: a function of the seed and the token's number."""
        if not self.drawing.temperature:
            return None
        noise = Generator(Philox(key=[self.job.spec.train.seed, len(self.log_probs)]))
        return torch.from_numpy(noise.gumbel(size=vocab_size))


def next_token(logits_V: Tensor, drawing: Drawing, noise_V: Tensor | None) -> int:
    """The token with the highest score: logit / temperature + noise, among the nucleus.

    With noise of the standard Gumbel distribution the token is drawn from the softmax of the
    scaled logits.

    Args:
        logits_V: [V] float64.
        drawing: temperature and top_p.
        noise_V: [V] float64; None with a temperature of 0.
    """
    if noise_V is None:
        return int(logits_V.argmax())
    scaled_V = logits_V / max(drawing.temperature, 1e-3)
    if drawing.top_p < 1:
        # The nucleus: the likeliest tokens until their probabilities reach top_p.
        sorted_V, order_V = scaled_V.softmax(-1).sort(descending=True, stable=True)
        others = order_V[sorted_V.cumsum(-1) - sorted_V >= drawing.top_p]
        scaled_V[others] = -torch.inf
    return int((scaled_V + noise_V).argmax())
