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
from pretrain.model import DecoderOutput, Drafting
from pretrain.rank_model import RankModel
from pretrain.spec import SampleConfig
from pretrain.train.evaluate import inference

_UNFINISHED = "\ufffd"
"""What a decoder writes for the first bytes of a letter."""


@dataclass(frozen=True)
class Generated:
    """A text, and what the model computed for it."""

    text: str
    """The prompt and what the model makes of it."""
    tokens: int
    """Tokens that were generated, the end of a document among them."""
    forwards: int
    """Forwards of the whole model."""
    drafted: int
    """Tokens that layers of multi-token prediction drafted."""
    accepted: int
    """Drafted tokens that are the model's own."""


def generate(
    job: RankModel,
    tokenizer: Tokenizer,
    sample: SampleConfig,
    seen: Callable[[str], None] | None = None,
) -> Generated:
    """The prompt of ``sample`` and what the model makes of it; every rank must call.

    All ranks compute the same text, each what it holds of the model. Deterministic: the generator
    is seeded with ``train.seed``. At most ``data.seq_len`` tokens are in the model's view; when
    there are more, the view goes on from the newer half. The text ends where the model ends a
    document.

    Keys and values of earlier tokens are kept, unless a token's output depends on the tokens that
    are routed with it: then every token is computed again for each new one.

    With ``sample.drafts`` layers of multi-token prediction draft tokens, and one forward of the
    model computes the logits behind all of them (Leviathan et al., arXiv 2211.17192). A draft and
    the model's own token at a position are drawn with the same noise, and a draft is accepted where
    the two are equal (Daliri et al., arXiv 2408.07978). So the text does not depend on the drafts,
    unless two tokens have nearly equal scores.

    Args:
        job: the model, with values.
        tokenizer: of the model.
        sample: the prompt, and how tokens are drawn.
        seen: called with the text so far, where it has grown.
    """
    writer = _Writer(job, tokenizer, sample)
    kept = job.spec.data.seq_len if writer.keeps else 0
    with inference(job.parallel_model), full_sequences(job.model, kept) as cache:
        while not writer.ended:
            cache.keep(writer.write(cache.length))
            if seen is not None and not (text := writer.text).endswith(_UNFINISHED):
                seen(text)
    return Generated(
        writer.text, writer.generated, writer.forwards, writer.drafted, writer.accepted
    )


class _Writer:
    """A text that grows, equal on all ranks."""

    def __init__(self, job: RankModel, tokenizer: Tokenizer, sample: SampleConfig) -> None:
        spec = job.spec
        self.job, self.tokenizer, self.sample = job, tokenizer, sample
        self.view = spec.data.seq_len
        self.end = end_of_document(tokenizer, spec.data.end_token)
        self.tokens: list[int] = tokenizer.encode(sample.prompt, add_special_tokens=False).ids
        # A text without a prompt follows another document's end. The end token is of the document
        # before, and so not in view where documents do not see each other.
        self.begins = not self.tokens
        self.tokens = self.tokens or [self.end]
        self.first = max(0, len(self.tokens) - self.view)
        self.keeps = spec.moe is None or spec.moe.independent_tokens
        self.drafts: list[int] = []
        self.ended = sample.tokens == 0
        self.generated = self.forwards = self.drafted = self.accepted = 0
        # The first rank of those that have logits.
        pipeline = job.parallel_model.pipeline
        place = 0 if pipeline is None else pipeline.last_place
        self.source = place * (job.runtime.world // job.topology.pp)

    @property
    def text(self) -> str:
        return str(self.tokenizer.decode(self.tokens))

    def write(self, computed: int) -> int:
        """Add the model's next token, and drafts that are equal to the model's tokens.

        Args:
            computed: of so many tokens in view keys and values are kept.

        Returns:
            Of how many tokens they are to be kept.
        """
        self.job.runtime.heartbeat.beat("evaluate", self.job.spec.train.steps)
        start = self.first + computed
        out = self._forward([*self.tokens[start:], *self.drafts])
        found = self._of_the_source(self._found(out, len(self.tokens) - 1 - start))
        self.forwards += 1
        self.drafted += len(self.drafts)
        self.accepted += len(found) - 1
        self.generated += len(found)
        self.drafts = []
        self.ended = found[-1] == self.end or self.generated >= self.sample.tokens
        self.tokens += found[:-1] if found[-1] == self.end else found
        begins, self.begins = self.begins, False
        if begins and self.job.spec.data.document_mask:
            self.tokens = self.tokens[1:]
            return 0
        if len(self.tokens) - self.first > self.view:
            self.first = len(self.tokens) - (self.view + 1) // 2
            return 0
        if self.ended or not self.keeps:
            return 0
        self._draft(start, out)
        # The last token is not computed yet. The k-th layer of multi-token prediction computed the
        # k - 1 positions before with drafts, which may be wrong.
        return max(0, len(self.tokens) - self.first - max(1, self.sample.drafts))

    def _found(self, out: DecoderOutput | None, last: int) -> list[int]:
        """The model's tokens: those that are equal to the drafts, and the next one. ``last`` is the
        place of the last known token in the forward."""
        found: list[int] = []
        for draft in [*self.drafts, None]:
            if out is not None:
                logits_V = _logits(out, last + len(found))
                found.append(self._drawn(logits_V, self.generated + len(found)))
                if found[-1] != draft or found[-1] == self.end:
                    break
        return found

    def _of_the_source(self, tokens: list[int]) -> list[int]:
        """The tokens of the first rank that has logits, on all ranks."""
        room = self.sample.drafts + 1
        words = self.job.runtime.broadcast_all([*tokens, *[-1] * (room - len(tokens))], self.source)
        return [word for word in words if word >= 0]

    def _draft(self, start: int, out: DecoderOutput | None) -> None:
        """Draft tokens behind the known ones, each by one more layer of multi-token prediction.

        Args:
            start: the position of the first token of the last forward.
            out: what the forward gave; None on ranks without the last stage.
        """
        last = len(self.tokens) - 2 - start  # the forward has hidden states up to here
        count = min(
            self.sample.drafts,
            self.sample.tokens - self.generated - 1,  # a forward gives one token besides drafts
            self.view - (len(self.tokens) - self.first),
        )
        hidden = None if out is None else out.hidden
        for layer in range(count):
            known = [*self.tokens, *self.drafts]
            out = self._forward(known[start + layer + 1 :], Drafting(layer, hidden))
            draft = [-1]
            if out is not None:
                logits_V = _logits(out, last)
                hidden, draft = out.hidden, [self._drawn(logits_V, self.generated + layer)]
            self.drafts += self.job.runtime.broadcast_all(draft, self.source)

    def _drawn(self, logits_V: Tensor, number: int) -> int:
        """The token that the noise of the text's token ``number`` takes, where these are the
        logits."""
        noise_V = None
        if self.sample.temperature:
            # A function of seed and number: a draft and the model's token have equal noise.
            noise = Generator(Philox(key=[self.job.spec.train.seed, number]))
            noise_V = torch.from_numpy(noise.gumbel(size=len(logits_V)))
        return next_token(logits_V, self.sample, noise_V)

    def _forward(self, tokens: list[int], drafting: Drafting | None = None) -> DecoderOutput | None:
        """A forward of ``tokens``; with ``drafting`` of as many positions as the forward before."""
        if drafting is None:
            # Ranks of tensor parallelism have equal parts. What follows a token does not change
            # the token's output, but where experts have a capacity, or choose their tokens.
            self.size = len(tokens) + -len(tokens) % self.job.topology.tp
        padding = [self.end] * (self.size - len(tokens))
        inputs_BS = torch.tensor([[*tokens, *padding]], device=self.job.runtime.device)
        return self.job.forward(inputs_BS, drafting=drafting)[0]


def _logits(out: DecoderOutput, place: int) -> Tensor:
    """[V] behind the token at ``place`` of the forward, on the host."""
    logits_V = out.logits[0, place]
    whole: Tensor = logits_V.full_tensor() if isinstance(logits_V, DTensor) else logits_V
    return whole.double().cpu()


def next_token(logits_V: Tensor, sample: SampleConfig, noise_V: Tensor | None) -> int:
    """The token with the highest score: logit / temperature + noise, among the nucleus.

    With noise of the standard Gumbel distribution the token is drawn from the softmax of the
    scaled logits.

    Args:
        logits_V: [V] float64.
        sample: temperature and top_p.
        noise_V: [V] float64; None with a temperature of 0.
    """
    if noise_V is None:
        return int(logits_V.argmax())
    scaled_V = logits_V / max(sample.temperature, 1e-3)
    if sample.top_p < 1:
        # The nucleus: the likeliest tokens until their probabilities reach top_p (Holtzman et al.,
        # arXiv 1904.09751).
        sorted_V, order_V = scaled_V.softmax(-1).sort(descending=True, stable=True)
        others = order_V[sorted_V.cumsum(-1) - sorted_V >= sample.top_p]
        scaled_V[others] = -torch.inf
    return int((scaled_V + noise_V).argmax())
