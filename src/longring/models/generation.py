"""Generation: a prompt read at once, then one token after the other, over a context that ranks hold together.

The prompt goes through the model as in training, by a ring or whatever its schedule is, and leaves its keys and
values where they are. Every further token is on all ranks: each computes the same, but for attention, where it asks
its own keys; one small message between any two ranks for a layer and a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from typing import Any, Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..nn.cache import Cache, sizes_in_the_end
from ..nn.checks import check_size
from ..sharding import Sharding

SPELLED = {"max_new_tokens": "new_tokens", "eos_token_id": "end", "do_sample": "temperature"}  # elsewhere


class Words(TypedDict, total=False):
    """What may be said to `generate`."""

    new_tokens: Required[int]
    sharding: Sharding | None
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    end: int | None


class Model(Protocol):
    """A language model as generation needs it: `longring.models.Decoder` or `LongNetLM`."""

    embedding: nn.Embedding

    @property
    def timeout(self) -> float | None: ...

    @property
    def longest(self) -> int | None: ...

    def __call__(self, tokens: Tensor, **words: Any) -> Tensor: ...


def generate(model: Model, tokens: Tensor, **words: Unpack[Words]) -> Tensor:
    """Further tokens [batch, up to new_tokens] for prompts [batch, n] of one length, the same on every rank.

    sharding:     tokens are this rank's part of the prompts, as `Sharding.shard` gives it; without it, all of them.
    temperature:  0, the default, takes the likeliest token; otherwise tokens are drawn, by probabilities of logits
                  divided by it.
    top_k, top_p: draw among the top_k likeliest, and of these among the fewest that have a probability of top_p.
    seed:         of the draws, the same on all ranks.
    end:          a token that ends a row, which is filled up with it; where all rows have ended nothing more is made.
    """
    try:
        _refuse_unknown(words)
        asked = _Generation(**words)
        asked.check_vocabulary(model.embedding.num_embeddings)
        asked.check_length(tokens, model.longest)
        _check_prompt(tokens, model.embedding.num_embeddings)
    except (ArgumentError, TypeError) as error:
        if isinstance(sharding := words.get("sharding"), Sharding):
            sharding.transport.decline(error)  # or the others would wait for this rank's first answer
        raise
    return asked.run(model, tokens)


def _refuse_unknown(words: Words) -> None:
    for name in words.keys() - Words.__annotations__.keys():
        hint = f"; it is {SPELLED[name]}= here" if name in SPELLED else ""
        raise TypeError(f"generate() got an unexpected keyword argument {name!r}{hint}")


def _check_prompt(tokens: Tensor, vocabulary: int) -> None:
    """Where a table is read on a GPU, a token that it has not ends the process's use of that GPU."""
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or not tokens.numel():  # the model's to refuse
        return
    least, most = (int(end) for end in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        raise ArgumentError(
            f"the prompt has token {most if most >= vocabulary else least}, but there are {vocabulary}, from 0"
        )


@dataclass(frozen=True, kw_only=True)
class _Generation:
    new_tokens: int
    sharding: Sharding | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        check_size("new_tokens", self.new_tokens)
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ArgumentError(f"temperature must be 0, for the likeliest token, or above; got {self.temperature!r}")
        drawn = {"top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        given = [name for name, value in drawn.items() if value is not None]
        if self.temperature == 0 and given:
            raise ArgumentError(f"{' and '.join(given)} for tokens that are drawn, which needs a temperature above 0")
        if self.temperature > 0 and not _is_whole(self.seed):
            raise ArgumentError(f"seed must be a whole number, for all ranks to draw the same; got {self.seed!r}")
        if self.top_k is not None:
            check_size("top_k", self.top_k)
        if self.top_p is not None and not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise ArgumentError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if self.sharding is not None and not isinstance(self.sharding, Sharding):
            raise ArgumentError(f"sharding must be a longring.Sharding, or None; got {self.sharding!r}")

    @torch.no_grad()
    def run(self, model: Model, tokens: Tensor) -> Tensor:
        self._agree(model, "generate")
        draw = torch.Generator().manual_seed(self.seed or 0)
        cache = Cache(capacity=self._capacity(tokens))
        found: list[Tensor] = []
        logits = model(tokens, sharding=self.sharding, cache=cache)
        while True:
            found.append(self._continued(self._next(logits[:, -1], draw).to(tokens), found))
            if len(found) == self.new_tokens or self._have_all_ended(found[-1]):
                break
            logits = model(found[-1], sharding="replicated", cache=cache)
        made = torch.cat(found, 1)
        self._agree(model, "generate, at its end", tokens=blake2b(repr(made.tolist()).encode()).hexdigest())
        return made

    def _next(self, logits: Tensor, draw: torch.Generator) -> Tensor:
        """[batch, 1]; drawn on the host, where a seed means the same on every machine."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        chances = likely(logits.double().cpu() / self.temperature, top_k=self.top_k, top_p=self.top_p)
        return torch.multinomial(chances, 1, generator=draw)

    def _continued(self, token: Tensor, found: list[Tensor]) -> Tensor:
        """A row that has ended stays so."""
        return token.where(found[-1] != self.end, found[-1]) if found and self.end is not None else token

    def _have_all_ended(self, token: Tensor) -> bool:
        return self.end is not None and bool((token == self.end).all())

    def _capacity(self, tokens: Tensor) -> int | None:
        """Exactly what this rank will hold; the last token is not read any more."""
        if not isinstance(tokens, Tensor) or tokens.ndim != 2:
            return None  # the model refuses them
        s = self.sharding
        sizes, rank = ([tokens.shape[1]], 0) if s is None else (s.dealt.sizes, s.rank)
        return max(1, sizes_in_the_end(sizes, self.new_tokens - 1)[rank])

    def check_length(self, tokens: Tensor, longest: int | None) -> None:
        if longest is None or not isinstance(tokens, Tensor) or tokens.ndim != 2:  # which the model refuses
            return
        prompt = tokens.shape[1] if self.sharding is None else self.sharding.length
        if prompt + self.new_tokens - 1 > longest:
            raise ArgumentError(
                f"a prompt of {prompt:,} tokens and {self.new_tokens - 1:,} that are read behind it, but xPos was made "
                f"for a length of {longest:,}"
            )

    def check_vocabulary(self, size: int) -> None:
        if self.top_k is not None and self.top_k > size:
            raise ArgumentError(f"top_k is {self.top_k}, but there are {size} tokens")
        if self.end is not None and not (_is_whole(self.end) and 0 <= self.end < size):
            raise ArgumentError(f"end must be a token, 0 to {size - 1}; got {self.end!r}")

    def _agree(self, model: Model, call: str, **more: object) -> None:
        """All ranks were asked for the same, and in the end have found the same: or each would go on alone."""
        if self.sharding is None:
            return
        names = ("new_tokens", "temperature", "top_k", "top_p", "seed", "end")
        terms = {"call": call, **{name: getattr(self, name) for name in names}, **more}
        transport = self.sharding.transport
        with transport.converse(terms, timeout=model.timeout) as talk:
            if transport.size > 1:  # where ranks are threads, terms are compared when a letter is opened
                rank, device = transport.rank, model.embedding.weight.device
                mine, its = torch.zeros(1, device=device), torch.zeros(1, device=device)
                to, fro = (rank + 1) % transport.size, (rank - 1) % transport.size
                talk.post([(to, mine)], [(fro, its)], what=call).wait()


def likely(logits: Tensor, *, top_k: int | None, top_p: float | None) -> Tensor:
    """Probabilities [batch, vocabulary], 0 for all but the likeliest; those that are left are not scaled up again."""
    chances = logits.softmax(-1)
    if top_k is None and top_p is None:
        return chances
    ordered, tokens = torch.sort(chances, dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[:, top_k:] = 0
    if top_p is not None:
        share = ordered / ordered.sum(-1, keepdim=True)
        ordered[share.cumsum(-1) - share >= top_p] = 0  # those before have it already
    return torch.zeros_like(chances).scatter_(-1, tokens, ordered)


def last_token(x: Tensor, sharding: Sharding | None, *, timeout: float | None = None) -> Tensor:
    """[batch, 1, dim] of the sequence's last token, on every rank, from [batch, n, dim] of this rank's tokens."""
    if sharding is None:
        return x[:, -1:]
    holder = next(rank for rank, shard in enumerate(sharding.shards) if shard and shard[-1][-1] == sharding.length - 1)
    alone = Sharding.from_ranges(
        [[range(1)] if rank == holder else [] for rank in range(sharding.ranks)], group=sharding.group
    )
    return alone.unshard(x[:, -1:] if sharding.rank == holder else x[:, :0], timeout=timeout)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
