"""Hugging Face Transformers: `attn_implementation="longring"` on stock models, alone or over the ranks of a group.

transformers asks for a mask once per forward, with a function of (query, key) that says which pairs count. Here the
mask is not a tensor but a `Request`: the pattern that this function stands for, and how the tokens are dealt. It
reaches every layer as the layer's attention mask, and again when a checkpointed layer is recomputed in the backward,
where no context of the forward is set any more. What is not understood is refused.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import ArgumentError, LayoutError, NotBuilt, PatternError, naming_rank
from ..functional import attention
from ..geometry.patterns import Dense, Problem
from ..nn.loss import next_tokens
from ..sharding import Sharding
from ..transport.contract import check_timeout
from .same_batch import check_same_batch

NEEDED = (
    "longring.integrations.transformers needs transformers of 5.8 or later; "
    "install it with: pip install 'longring[transformers]'"
)
try:
    import transformers
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

    from .bypass import Forwards, watching
except ImportError as error:
    raise ImportError(NEEDED) from error

NAME = "longring"
MASKS = "transformers.masking_utils"
SAY_DOCUMENTS = "say them to `sharded(longring.Sharding(n), documents=...)`, for which one rank is enough"
ALONE = "run it in one process"
INSTEAD = 'use another attn_implementation, as "eager"'
CROSS = (
    "cross-attention over ranks is not built: its keys are of another sequence, of which `sharded` says nothing; "
    "run the decoder in one process"
)


def register() -> None:
    """Make attn_implementation="longring" known to transformers. Calling it again changes nothing.

    It wraps one method, `PreTrainedModel.get_correct_attn_implementation`, which every model calls when it is built, so
    that a model that cannot attend by longring is refused there. `unregister` restores it.
    """
    if tuple(int(number) for number in re.findall(r"\d+", transformers.__version__)[:2]) < (5, 8):
        raise ImportError(f"{NEEDED} (this is transformers {transformers.__version__})")
    _wrap_the_check_of_names()
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, requested)


def unregister() -> None:
    """Undo `register`: transformers knows the name no longer, and has its own method again."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(NAME, None)
    current = getattr(PreTrainedModel, CHECK_OF_NAMES)
    if getattr(current, "_itself_of_longring", None) is current:  # else another has wrapped it, and is left alone
        setattr(PreTrainedModel, CHECK_OF_NAMES, current._original_of_longring)


CHECK_OF_NAMES = "get_correct_attn_implementation"


def _wrap_the_check_of_names() -> None:
    original = getattr(PreTrainedModel, CHECK_OF_NAMES, None)
    if hasattr(original, "_original_of_longring"):
        return
    found = [] if original is None else list(inspect.signature(original).parameters)
    if found[:2] != ["self", "requested_attention"]:
        raise NotBuilt(
            f"PreTrainedModel.{CHECK_OF_NAMES} of transformers {transformers.__version__} takes ({', '.join(found)}), "
            "not (self, requested_attention, ...) as longring needs; install a version that longring was tested with"
        )

    assert original is not None

    @functools.wraps(original)
    def checked(model: PreTrainedModel, requested_attention: str | None, *more: Any, **options: Any) -> str:
        name = original(model, requested_attention, *more, **options)
        if name == NAME and _attention_of(type(model)) == "its own":
            raise NotBuilt(
                f"{type(model).__name__} has attention that does not go through the AttentionInterface of "
                f"transformers, so longring cannot compute it; use {_instead(model)}; where only a part is like this, "
                'attn_implementation={"text_config": "longring"} and the like name the others'
            )
        return name

    # Who wraps this with functools.wraps copies both
    checked._original_of_longring, checked._itself_of_longring = original, checked  # type: ignore[attr-defined]
    setattr(PreTrainedModel, CHECK_OF_NAMES, checked)


def _instead(model: Any) -> str:
    return f'attn_implementation="{"sdpa" if getattr(model, "_supports_sdpa", False) else "eager"}"'


@functools.cache
def _attention_of(kind: type) -> str:
    """By a model's source: "the interface" if it asks the AttentionInterface, "its own", or "none" but its parts'."""
    parts: dict[str, str] = {}
    for base in kind.__mro__:
        if issubclass(base, PreTrainedModel) and base is not PreTrainedModel:
            parts |= _made_of(base.__module__, base.__name__)
    sources = "\n".join(parts.values())
    if re.search(r"_CLASSES\[[^\]]*_attn_implementation\]", sources):  # a table of classes, in which longring is not
        return "its own"
    if "ALL_ATTENTION_FUNCTIONS" in sources:
        return "the interface"
    return "its own" if any("Attention" in name for name in parts) else "none"


def _made_of(module: str, name: str) -> dict[str, str]:
    """The sources of a class, and of all in its module that its methods name, and theirs.

    Also of those of other modules that a class inherits from: attention may be there.
    """
    found, names, seen = dict[str, str](), [(module, name)], set[tuple[str, str]]()
    while names:
        module, name = place = names.pop()
        definitions = _definitions(module)
        if name not in definitions or place in seen:
            continue
        seen.add(place)
        source, more = definitions[name]
        found[name] = found.get(name, "") + source
        names += [(module, each) for each in more]
        kind = getattr(sys.modules[module], name, None)
        bases = kind.__bases__ if isinstance(kind, type) else ()
        names += [
            (base.__module__, base.__name__)
            for base in bases
            if base.__module__ != module
            and issubclass(base, torch.nn.Module)
            and base not in (PreTrainedModel, torch.nn.Module)
        ]
    return found


_parsing = threading.Lock()  # CPython's conversion to ast counts its depth for all threads together: gh-106905


@functools.cache
def _definitions(module: str) -> dict[str, tuple[str, set[str]]]:
    """Of each class, function and constant of a module: its source, and the names in its methods."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # made in a notebook, or by something that makes classes
        return {}
    with _parsing:
        body = ast.parse(source).body
    found = {}
    for node in body:
        bodies = [x for x in node.body if isinstance(x, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else [node]
        bodies += node.bases if isinstance(node, ast.ClassDef) else []
        names = {x.id for body in bodies for x in ast.walk(body) if isinstance(x, ast.Name)}
        text = "\n".join(ast.unparse(body) for body in bodies)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found[node.name] = text, names
        elif isinstance(node, ast.Assign):
            found |= {x.id: (text, names) for x in node.targets if isinstance(x, ast.Name)}
    return found


# ------------------------------------------------------------------------------------------------- how data is dealt


class Batch(NamedTuple):
    """This rank's part of a batch: `model(**inputs)` within `sharded(batch)`, and what its logits are to predict."""

    inputs: dict[str, Tensor]
    targets: Tensor
    sharding: Sharding
    documents: tuple[tuple[int, ...], ...] | None
    lengths: tuple[int, ...] | None


def shard_batch(
    input_ids: Tensor,
    sharding: Sharding,
    *,
    labels: Tensor | None = None,
    attention_mask: Tensor | None = None,
    documents: Any = None,
    ignore_index: int = -100,
    timeout: float | None = None,
) -> Batch:
    """This rank's part of a batch [batch, n] that every rank has whole.

    That all ranks were given the same batch is checked, by checksums: Disagreement names what differs. It costs a pass
    over the tokens and a small exchange, and on a GPU a wait for the device.

    Position ids are global, and restart at each document. Targets are shifted before they are dealt, so the loss is
    `longring.nn.loss.cross_entropy(logits, batch.targets, sharding=...)`, never the model's own, which would shift
    once more and lose a token at every border of a shard.

    labels:          as transformers takes them, not shifted; the input ids if left out. For models that predict the
                     token itself, as BERT does, deal labels with `sharding.shard` instead.
    attention_mask:  1 for tokens and 0 for padding behind them.
    documents:       boundaries [0, b1, ..., n] of packed documents, one list or one per row.
    timeout:         seconds after which a silent rank is an error.
    """
    if not isinstance(sharding, Sharding):
        raise ArgumentError(f"sharding must be a longring.Sharding, got {sharding!r}")
    with _telling_the_others(sharding):
        given = _given(input_ids, labels, attention_mask, documents)
        check_timeout(timeout)
        targets = next_tokens(
            input_ids if labels is None else labels,
            documents=given.documents,
            lengths=given.lengths,
            ignore_index=ignore_index,
        )
        if input_ids.shape[1] != sharding.length:
            raise LayoutError(f"input_ids hold {input_ids.shape[1]} tokens, but the sharding is of {sharding.length}")
    check_same_batch(
        sharding.transport,
        {"input_ids": input_ids, "labels": labels},
        {
            "attention_mask": given.lengths,
            "documents": given.documents,
            "ignore_index": ignore_index,
            "how tokens are dealt": sharding.shards,
        },
        timeout=timeout,
    )
    positions = _positions(sharding, given.documents).to(input_ids.device).expand(len(input_ids), -1)
    inputs = {"input_ids": sharding.shard(input_ids), "position_ids": positions.contiguous()}
    return Batch(inputs, sharding.shard(targets), sharding, given.documents, given.lengths)


def _given(input_ids: Tensor, labels: Tensor | None, attention_mask: Tensor | None, documents: Any) -> Dense:
    """The documents and lengths of a batch that does not contradict itself."""
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        got = list(input_ids.shape) if isinstance(input_ids, Tensor) else repr(input_ids)
        raise ArgumentError(f"input_ids must be [batch, n], got {got}")
    for name, x in (("labels", labels), ("attention_mask", attention_mask)):
        if x is not None and x.shape != input_ids.shape:
            raise ArgumentError(f"{name} must be {list(input_ids.shape)} as input_ids are, got {list(x.shape)}")
    given = Dense(
        documents=documents, lengths=None if attention_mask is None else _lengths(attention_mask.to(torch.bool))
    )
    batch, n = input_ids.shape
    given.check(Problem(batch, n, n, 1, 0))
    return given


class Dealt(NamedTuple):
    """What `sharded` says of the tokens that a model is given."""

    sharding: Sharding
    documents: tuple[tuple[int, ...], ...] | None
    lengths: tuple[int, ...] | None
    options: Mapping[str, Any]
    forwards: Forwards


_dealt: ContextVar[Dealt | None] = ContextVar("longring.integrations.transformers.sharded", default=None)
_was_ever_sharded = False


@contextmanager
def sharded(dealt: Sharding | Batch, *, documents: Any = None, lengths: Any = None, **options: Any) -> Iterator[None]:
    """Within it, models are given this rank's part of every sequence, and attend to the whole.

    dealt:      a Sharding, or what `shard_batch` gave, which knows its documents and lengths.
    documents:  boundaries [0, b1, ..., n] of packed documents, in the whole sequence.
    lengths:    one per batch row: tokens of the whole sequence at or beyond it are padding.
    options:    schedule, kernel, deterministic and timeout, as for `longring.attention`.

    The backward may run outside of it, gradient checkpointing of layers included. A model that attends by other means
    than longring would attend to this rank's tokens alone: it is refused where its forward ends, or its first layer's.
    """
    global _was_ever_sharded
    found = _understood(dealt, documents, lengths, options)
    _was_ever_sharded = _was_ever_sharded or found.sharding.ranks > 1
    before = _dealt.set(found)
    try:
        with watching(found.forwards):
            yield
    finally:
        _dealt.reset(before)


def _understood(dealt: Sharding | Batch, documents: Any, lengths: Any, options: dict[str, Any]) -> Dealt:
    if isinstance(dealt, Batch):
        if documents is not None or lengths is not None:
            raise ArgumentError("a batch of shard_batch knows its documents and lengths; pass it, or them, not both")
        dealt, documents, lengths = dealt.sharding, dealt.documents, dealt.lengths
    if not isinstance(dealt, Sharding):
        raise ArgumentError(f"sharded takes a longring.Sharding, or what shard_batch gave; got {dealt!r}")
    unknown = set(options) - {"schedule", "kernel", "deterministic", "timeout"}
    if unknown:
        raise TypeError(f"sharded() got an unexpected keyword argument {min(unknown)!r}")
    if not all(dealt.dealt.sizes):
        raise LayoutError(
            f"{dealt.layout} deals {dealt.length} tokens to {dealt.ranks} ranks, of which some get none; the models of "
            "transformers need at least one token on every rank"
        )
    pattern = Dense(documents=documents, lengths=lengths)
    if any(row[-1] != dealt.length for row in pattern.documents or ()):
        raise PatternError(f"documents must end at the {dealt.length} tokens of the sequence, got {pattern.documents}")
    return Dealt(dealt, pattern.documents, pattern.lengths, options, Forwards(functools.partial(_refuse_local, dealt)))


def _refuse_local(sharding: Sharding, model: torch.nn.Module, path: str) -> NoReturn:
    """Refuse a model, or the part of it at a path, whose forward within `sharded` ended without a call of longring."""
    part = model.get_submodule(path)
    above = [model.get_submodule(path[: dot.start()]) for dot in re.finditer(r"\.|$", path)]
    owner = next((x for x in reversed([model, *above]) if isinstance(x, PreTrainedModel)), model)
    models = [x for x in owner.modules() if isinstance(x, PreTrainedModel)]
    given = next((x.config._attn_implementation for x in models if x.config._attn_implementation != NAME), None)
    what = type(part).__name__ + (f" ({path} of {type(model).__name__})" if part is not model else "")
    remedy = "longring cannot compute it: use another model"
    if given is not None and any(_attention_of(type(x)) == "the interface" for x in models):
        remedy = (
            f'its attn_implementation is {given!r}: call model.set_attn_implementation("{NAME}"), or load it with '
            f'attn_implementation="{NAME}"'
        )
    with _telling_the_others(sharding):
        raise NotBuilt(
            f"{what} ran within `sharded` without calling longring, so it mixed no tokens but those of this rank; "
            f"{remedy}; what every rank is given whole, as images, is run outside of `sharded`"
        )


def _positions(sharding: Sharding, documents: tuple[tuple[int, ...], ...] | None) -> Tensor:
    """[1 or batch, tokens held here]: where they stand in the sequence, or in their documents."""
    return _restarting(sharding.positions, documents)


def _restarting(held: Tensor, documents: tuple[tuple[int, ...], ...] | None) -> Tensor:
    if documents is None:
        return held.unsqueeze(0)
    starts = [torch.tensor(row[:-1]) for row in documents]
    return torch.stack([held - row[torch.searchsorted(row, held, right=True) - 1] for row in starts])


# ----------------------------------------------------------------------------------------- what a mask would have said


class NoTensor(NotBuilt, AttributeError):
    """A model works on its attention mask as if it were a tensor. For `hasattr` the attribute is not there."""


class Request:
    """Which pairs count, and where the tokens are: what models hand from layer to layer as their attention mask.

    No dataclass: frameworks that look for tensors in what a layer is given would take it apart.
    """

    def __init__(self, pattern: Dense, queries: int, keys: int, query_offset: int, dealt: Dealt | None) -> None:
        self.pattern, self.dealt = pattern, dealt
        self.queries, self.keys, self.query_offset = queries, keys, query_offset  # on this rank
        self.first_position = 0  # the position id of a sequence's first token
        self.remedy = ""  # for documents that the mask says nothing of
        self._seen: list[Tensor] = []

    def contiguous(self) -> Request:
        """What `generate` asks of masks that it makes in advance and gives to the model as tensors."""
        if any(name.startswith("transformers.generation") for name in _modules_that_wait()):
            raise NotBuilt(
                "generating with a static cache is not built: transformers then makes masks in advance, as tensors "
                "alone; use the growing cache, which is the default"
            )
        _refuse_as_tensor("contiguous")

    def __getattr__(self, name: str) -> Any:
        _refuse_as_tensor(name)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_as_tensor(getattr(function, "__name__", str(function)))

    def check(self, given: Mapping[str, Any]) -> None:
        """Looks at what tells of positions once, not in every layer: on a GPU looking waits."""
        for name in ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"):
            x = given.get(name)
            if not isinstance(x, Tensor) or any(x is seen for seen in self._seen):
                continue
            if name == "position_ids":
                self._check_positions(x)
            else:
                self._refuse_other_boundaries(name, x)
            self._seen.append(x)

    def _check_positions(self, position_ids: Tensor) -> None:
        if position_ids.ndim != 2:  # of several kinds, as for images: all that can be told is who counted by itself
            counted = torch.arange(position_ids.shape[-1], device=position_ids.device)
            if self.dealt is not None and (position_ids == counted).all():
                _refuse_other_positions(position_ids.flatten(0, -2)[:1], self.dealt, self.first_position)
            return
        if self.dealt is None:
            self._refuse_documents_unseen(position_ids)
        else:
            _refuse_other_positions(position_ids, self.dealt, self.first_position)

    def _refuse_other_boundaries(self, name: str, boundaries: Tensor) -> None:
        length = self.keys if self.dealt is None else self.dealt.sharding.length
        documents = set(self.pattern.documents or ((0, length),))
        if documents != {tuple(boundaries.tolist())}:
            raise PatternError(
                f"{name} tells of documents {boundaries.tolist()}, but the mask is for {[list(x) for x in documents]}; "
                + "; ".join(filter(None, ("pass position_ids that restart with them", self.remedy)))
            )

    def _refuse_documents_unseen(self, position_ids: Tensor) -> None:
        if self.pattern.documents is not None or position_ids.shape[1] != self.queries:
            return
        restarts = position_ids.diff(dim=1) <= 0
        if self.pattern.lengths is not None:  # what stands in the padding does not matter
            restarts = restarts & _before(self.pattern.lengths, self.query_offset + 1, restarts)
        if restarts.any():
            raise PatternError(
                "position_ids restart within a row, as for packed documents, but the mask that transformers asked for "
                f"knows no documents: {self.remedy or SAY_DOCUMENTS}"
            )


def _refuse_as_tensor(what: str) -> NoReturn:
    found = None if torch.compiler.is_compiling() else _model_that_runs(inspect.currentframe())
    model = "this model" if found is None else type(found).__name__
    raise NoTensor(
        f"{model} works on its attention mask as a tensor ({what}), and those of longring are none; use "
        f"{_instead(found)}"
    )


def _operation(name: str) -> Callable[..., NoReturn]:
    def refused(mask: Request, *given: Any) -> NoReturn:
        _refuse_as_tensor(name.strip("_"))

    return refused


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "matmul"):
    for _side in ("", "r", "i"):
        setattr(Request, f"__{_side}{_name}__", _operation(_name))
for _name in ("getitem", "setitem", "len", "iter", "neg", "invert", "float", "int", "lt", "le", "gt", "ge"):
    setattr(Request, f"__{_name}__", _operation(_name))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _modules_that_wait() -> set[str]:
    return {str(frame.f_globals.get("__name__")) for frame in _frames(inspect.currentframe())}


def _model_that_runs(frame: FrameType | None) -> PreTrainedModel | None:
    """The outermost model whose forward is under way."""
    found = [x.f_locals["self"] for x in _frames(frame) if _is_forward(x)]
    return next((x for x in reversed(found) if isinstance(x, PreTrainedModel)), None)


def _is_token(dealt: Dealt, device: torch.device) -> Tensor:
    """[batch or 1, tokens held here]: whether they are tokens, not padding."""
    held = dealt.sharding.positions.to(device)
    return held < held.new_tensor(dealt.lengths or (dealt.sharding.length,)).unsqueeze(1)


def _before(lengths: tuple[int, ...], offset: int, like: Tensor) -> Tensor:
    """[batch, n]: whether column i, which stands at i + offset, is before the end of its row."""
    columns = torch.arange(like.shape[1], device=like.device) + offset
    return columns < torch.tensor(lengths, device=like.device).unsqueeze(1)


@torch.compiler.disable
def requested(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **not_needed: Any,
) -> Request:
    """What transformers calls for a mask: the pattern that its mask function and its padding mask stand for."""
    offset = int(q_offset) - int(kv_offset)
    dealt, here = _dealt.get(), sys._getframe(1)  # its own frame, kept here, would keep itself and all above it
    if dealt is not None:
        dealt.forwards.asked()
        with _telling_the_others(dealt.sharding):
            frame = _who_asks(here)
            _refuse_attentions(here)
            model, its = frame.f_locals["self"], frame.f_locals
            if dealt.sharding.ranks > 1:
                _refuse_own_loss(frame)
            _refuse_other_layers(config)
            _refuse_other_mixing(model)
            _refuse_frequencies_of_ranks(dealt, config)
            facts = _facts(mask_function)
            request = _requested_of_ranks(dealt, facts, batch_size, (q_length, kv_length, offset), attention_mask)
            _refuse_counting_of_its_own(model, its.get("position_ids"))
            request.first_position = _first_position(model)
            request.check(its)
            return request
    _refuse_recomputation()
    _refuse_attentions(here)
    facts = _facts(mask_function)
    lengths = None if attention_mask is None else _lengths(_columns(attention_mask, int(kv_offset), kv_length))
    documents = None if facts.packed is None else [_boundaries(row) for row in facts.packed.tolist()]
    pattern = Dense(causal=facts.causal, window=facts.window, documents=documents, lengths=lengths)
    request = Request(pattern, q_length, kv_length, offset, None)
    request.remedy = _remedy_for_documents(here)
    return request


def _refuse_attentions(frame: FrameType | None) -> None:
    """Some models keep `output_attentions` to themselves, and would return no weights without a word.

    It stands in a decorator of the forward, or among the forward's arguments. What f_locals shows lives as long as the
    frame, so no other frame is asked.
    """
    for each in _frames(frame):
        name, code = str(each.f_globals.get("__name__")), each.f_code
        is_decorator = name.startswith("transformers.utils.") and code.co_name == "wrapper"
        if not is_decorator and not (name.startswith("transformers.") and "output_attentions" in code.co_varnames):
            continue
        its = each.f_locals
        for given in (its, its.get("kwargs"), its.get("recordable_keys")):
            if isinstance(given, dict) and given.get("output_attentions") is True:
                _refuse_argument("output_attentions")


def _remedy_for_documents(frame: FrameType | None) -> str:
    """Why transformers saw no documents in position ids, if there are any."""
    its = next((x.f_locals for x in _frames(frame) if x.f_globals.get("__name__") == MASKS), {})
    if its.get("position_ids") is None:
        return f"this model does not tell transformers its position_ids when it asks; {SAY_DOCUMENTS}"
    wrong = [
        said
        for name, said in (("attention_mask", "leave attention_mask out"), ("past_key_values", "pass use_cache=False"))
        if its.get(name) is not None
    ]
    return " and ".join(wrong)


def _requested_of_ranks(
    dealt: Dealt, facts: _Facts, batch_size: int, lengths: tuple[int, int, int], attention_mask: Tensor | None
) -> Request:
    s = dealt.sharding
    _refuse_other_lengths(s, *lengths)
    if attention_mask is not None:
        _refuse_other_padding(dealt, attention_mask)
    if facts.packed is not None:
        _refuse_other_documents(dealt, facts.packed)
    pattern = Dense(causal=facts.causal, window=facts.window, documents=dealt.documents, lengths=dealt.lengths)
    pattern.check(Problem(batch_size, s.length, s.length, 1, 0))
    return Request(pattern, s.local_length, s.local_length, 0, dealt)


@contextmanager
def _telling_the_others(sharding: Sharding | None) -> Iterator[None]:
    """What this rank refuses, the others hear of, instead of waiting for its attention."""
    if sharding is None:
        yield
        return
    try:
        with naming_rank(sharding.rank, sharding.ranks):
            yield
    except ArgumentError as error:
        sharding.transport.decline(error)
        raise


def _refuse_recomputation() -> None:
    """Somebody recomputes a whole model in the backward, where nobody can tell how its tokens were dealt."""
    if _was_ever_sharded and torch._C._current_graph_task_id() != -1:
        raise NotBuilt(
            "a whole model is recomputed in the backward outside of `sharded`, so it is not known how its tokens were "
            "dealt; checkpoint its layers (model.gradient_checkpointing_enable()), or call backward within `sharded`"
        )


# ------------------------------------------------------------------------------------------ reading mask functions


class _Facts(NamedTuple):
    """What a mask function of transformers says."""

    causal: bool
    window: tuple[int | None, int | None] | None
    packed: Tensor | None  # [batch, n]: the number of the document


def _facts(function: Callable[..., Any] | None) -> _Facts:
    """Mask functions are closures; what they close over is what they say. One that is not known is refused."""
    causal, window, packed = False, None, None
    for name, given in _parts(function):
        match name:
            case "causal_mask_function":
                causal = True
            case "bidirectional_mask_function":
                pass
            case "sliding_window_overlay":
                window = (given["sliding_window"] - 1, None)  # of so many tokens, the query's own among them
            case "sliding_window_bidirectional_overlay":
                window = (given["sliding_window"], given["sliding_window"])
            case "packed_sequence_mask_function":
                packed = given["packed_sequence_mask"]
            case _:
                raise NotBuilt(
                    f"the model asks for a mask by {name}, which is not built: longring knows causal and bidirectional "
                    f"attention, sliding windows, packed documents and padding behind the tokens; {INSTEAD}"
                )
    return _Facts(causal, window, packed)


def _parts(function: Callable[..., Any] | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name of the maker, what it was given) of each function in an intersection."""
    name = getattr(function, "__qualname__", repr(function))
    if getattr(function, "__module__", None) != MASKS or not inspect.isfunction(function):
        yield f"a function of its own ({name})", {}
        return
    maker, given = name.partition(".")[0], inspect.getclosurevars(function).nonlocals
    if maker == "and_masks":
        for part in given["mask_functions"]:
            yield from _parts(part)
    else:
        yield maker, given


def _columns(attention_mask: Tensor, first: int, count: int) -> Tensor:
    """Those of the keys; columns that are not there are keys that do not exist yet."""
    if attention_mask.ndim != 2:
        raise NotBuilt(f"attention_mask must be [batch, keys], got shape {list(attention_mask.shape)}")
    held = attention_mask[:, first : first + count].to(torch.bool)
    return torch.nn.functional.pad(held, (0, count - held.shape[1]))


def _lengths(mask: Tensor) -> tuple[int, ...] | None:
    """How many tokens each row has before its padding; None where there is no padding."""
    if mask.ndim != 2:
        raise NotBuilt(f"attention_mask must be [batch, keys], got shape {list(mask.shape)}")
    if mask.all():
        return None
    lengths = tuple(mask.sum(1).tolist())
    wrong = (mask != _before(lengths, 0, mask)).any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        is_left = torch.equal(mask[row].flip(0), _before(lengths, 0, mask)[row])
        where = "before its tokens (left padding)" if is_left else "between its tokens"
        raise NotBuilt(
            f"attention_mask has zeros in row {row} {where}; longring knows padding behind the tokens only: "
            'set tokenizer.padding_side = "right"'
        )
    return lengths


def _boundaries(numbers: list[int]) -> list[int]:
    """[0, b1, ..., n], from the number of each token's document."""
    changes = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1]]
    return [0, *changes, len(numbers)]


# ------------------------------------------------------------------------------- what contradicts how data is dealt


def _refuse_other_lengths(s: Sharding, queries: int, keys: int, offset: int) -> None:
    if offset != 0:
        raise NotBuilt(f"decoding over a group is not built: {queries} queries stand behind {offset} cached tokens")
    for what, got in (("the model is given", queries), ("its keys or its attention_mask hold", keys)):
        if got != s.local_length:
            raise LayoutError(
                f"{what} {got} tokens, but {s.layout} deals {s.local_length} of {s.length} to this rank; "
                "use shard_batch"
            )


def _refuse_other_padding(dealt: Dealt, attention_mask: Tensor) -> None:
    expected = _is_token(dealt, attention_mask.device)
    if attention_mask.shape[-1] != expected.shape[1]:
        raise LayoutError(
            f"attention_mask has shape {list(attention_mask.shape)}, but {dealt.sharding.layout} deals "
            f"{expected.shape[1]} of {dealt.sharding.length} tokens to this rank; give it to shard_batch instead"
        )
    if (attention_mask.bool() != expected).any():
        raise PatternError(
            "attention_mask says otherwise than the lengths of `sharded`; give the mask of the whole batch to "
            "shard_batch, or lengths to `sharded`, and none to the model"
        )


def _refuse_other_documents(dealt: Dealt, packed: Tensor) -> None:
    """transformers takes every jump in the position ids for a new document: the dealing must explain all of them."""
    positions = _positions(dealt.sharding, dealt.documents).to(packed.device)
    expected = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1).expand_as(packed)
    if not torch.equal(packed, expected):
        raise LayoutError(
            f"position_ids are not those that {dealt.sharding.layout} deals to this rank, or restart where `sharded` "
            "was told of no document; give the model the position_ids of shard_batch, and `sharded` its batch"
        )


def _refuse_other_positions(position_ids: Tensor, dealt: Dealt, first: int) -> None:
    expected = _positions(dealt.sharding, dealt.documents).to(position_ids.device) + first
    if position_ids.shape[1] != expected.shape[1]:
        raise LayoutError(
            f"position_ids hold {position_ids.shape[1]} tokens, but "
            f"{dealt.sharding.layout} deals {expected.shape[1]} of {dealt.sharding.length} to this rank"
        )
    differ = position_ids != expected
    if dealt.lengths is not None:
        differ = differ & _is_token(dealt, position_ids.device)
    if differ.any():
        row, column = (int(i) for i in differ.nonzero()[0])
        got, want = (int(x.expand_as(differ)[row, column]) for x in (position_ids, expected))
        more = f" + {first}, since this model's first token has position id {first}" if first else ""
        raise LayoutError(
            f"token {column} of row {row} has position id {got}, but {dealt.sharding.layout} deals the one at {want} "
            f"there; give the model the position_ids of shard_batch{more}"
        )


def _who_asks(frame: FrameType | None) -> FrameType:
    """The forward of the model. transformers does not say for whom a mask is; the stack does."""
    while frame is not None:
        if _is_forward(frame):
            return frame
        if frame.f_globals.get("__name__") == MASKS and frame.f_locals.get("encoder_hidden_states") is not None:
            raise NotBuilt(CROSS)
        frame = frame.f_back
    raise NotBuilt("a mask is asked for outside of any model's forward, so over ranks it cannot be known for whom")


def _is_forward(frame: FrameType) -> bool:
    return frame.f_code.co_name == "forward" and isinstance(frame.f_locals.get("self"), torch.nn.Module)


def _refuse_own_loss(frame: FrameType | None) -> None:
    """Of stock models around the one that asks; whoever wraps them may well be given labels, and do right by them."""
    while frame is not None:
        of_transformers = str(frame.f_globals.get("__name__")).startswith("transformers.")
        if of_transformers and _is_forward(frame) and frame.f_locals.get("labels") is not None:
            raise NotBuilt(
                f"{type(frame.f_locals['self']).__name__} is given labels, but its own loss would know of this rank's "
                "tokens alone; leave labels out, and give its logits and the targets of shard_batch to "
                "longring.nn.cross_entropy"
            )
        frame = frame.f_back


def _refuse_counting_of_its_own(model: torch.nn.Module, position_ids: Tensor | None) -> None:
    """A model that counts the tokens it is given would count from 0 on every rank."""
    name = type(model).__name__
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise NotBuilt(f"{name} takes no position_ids, so over ranks it would count every shard from 0; {ALONE}")
    if position_ids is None:
        raise LayoutError(f"{name} was given no position_ids; over ranks it needs those of shard_batch")


def _first_position(model: torch.nn.Module) -> int:
    """RoBERTa, Kosmos and their like leave the positions up to that of the padding to no token."""
    for name, table in model.named_modules():
        if name.endswith(("position_embeddings", "embed_positions")):
            padding = getattr(table, "padding_idx", None)
            return 0 if padding is None else padding + 1
    return 0


def _refuse_other_mixing(model: torch.nn.Module) -> None:
    """Convolutions, which all recurrent layers of transformers bring along, would run over this rank's tokens alone."""
    for name, part in model.named_modules():
        if isinstance(part, (torch.nn.Conv1d, torch.nn.Conv2d)):
            raise NotBuilt(
                f"{type(model).__name__} has a convolution ({name}), which mixes tokens by other means than attention, "
                f"and so cannot be dealt over ranks; {ALONE}"
            )


def _refuse_other_layers(config: Any) -> None:
    """Layers that say themselves that they are no attention, or tokens that look at their neighbours."""
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        raise NotBuilt(
            f"{type(config).__name__} has layers of type {min(others)!r}, which mix tokens by other means than "
            f"attention, and so cannot be dealt over ranks; {ALONE}"
        )
    if getattr(config, "trigram_input", False):
        raise NotBuilt(
            f"{type(config).__name__}: trigram_input mixes neighbouring tokens, which ranks do not have; {ALONE}"
        )


def _refuse_frequencies_of_ranks(dealt: Dealt, config: Any) -> None:
    """Some rotary embeddings turn by the largest position id in sight, and every rank sees another one."""
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [given, *(value for value in given.values() if isinstance(value, dict))]:
        kind = str(rope.get("rope_type", "default"))
        if kind == "longrope":
            limit = rope["original_max_position_embeddings"]
            ends = [min(end, limit + 1) for end in _ends_in_sight(dealt)]  # it asks no more than whether they exceed
        elif "dynamic" in kind:
            limit = config.max_position_embeddings
            ends = _ends_in_sight(dealt)
        else:
            continue
        if max(ends) > limit and len(set(ends)) > 1:
            raise NotBuilt(
                f"rotary embeddings of type {kind!r} depend on the longest sequence in sight beyond {limit} tokens, "
                f"and ranks see different ones of these {dealt.sharding.length}; use another rope_type"
            )


def _ends_in_sight(dealt: Dealt) -> list[int]:
    """The largest position id of each rank, and one more."""
    of_ranks = (torch.cat([torch.arange(r.start, r.stop, r.step) for r in shard]) for shard in dealt.sharding.shards)
    return [int(_restarting(held, dealt.documents).max()) + 1 for held in of_ranks]


# ----------------------------------------------------------------------------------------------------- attention itself

# What reaches attention from above and changes nothing in it
HARMLESS = {
    "cache_position",
    "encoder_attention_mask",
    "encoder_hidden_states",
    "layer_past",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "return_dict",
    "use_cache",
}
# What is honoured, or held against the pattern
CHECKED = {"cu_seq_lens_k", "cu_seq_lens_q", "deterministic", "is_causal", "position_ids", "sliding_window"}
REFUSED = {
    "alibi": "a bias on the scores",
    "attention_bias": "a bias on the scores",
    "head_mask": "a mask over heads",
    "output_attentions": "returning the attention weights, which are never there as a whole,",
    "position_bias": "a bias on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "softcap": "softcap",
}


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Request | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer, with [batch, heads, n, d]; it wants [batch, n, heads, d] back."""
    dealt = attention_mask.dealt if isinstance(attention_mask, Request) else _dealt.get()
    with _telling_the_others(None if dealt is None else dealt.sharding):
        request = _request(module, query, key, attention_mask, given)
        _refuse(module, dropout, given, request.pattern)
        if key.shape[-1] != value.shape[-1]:
            raise NotBuilt(
                f"heads have keys of {key.shape[-1]} numbers and values of {value.shape[-1]}, which is not built yet; "
                f"{INSTEAD}"
            )
    q, k, v = (_as_autocast(x).transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"query_offset": request.query_offset}
    if request.dealt is not None:
        request.dealt.forwards.attended()
        options = {"sharding": request.dealt.sharding, **request.dealt.options}
    if given.get("deterministic"):
        options["deterministic"] = True
    return attention(q, k, v, pattern=request.pattern, scale=scaling, **options), None


def _as_autocast(x: Tensor) -> Tensor:
    """In its dtype, as torch's own attention: rotary embeddings leave q and k in float32, where v has 16 bits."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def _request(
    module: torch.nn.Module, query: Tensor, key: Tensor, mask: Request | Tensor | None, given: Mapping[str, Any]
) -> Request:
    queries, keys = query.shape[2], key.shape[2]
    if _dealt.get() is not None and getattr(module, "is_cross_attention", "Cross" in type(module).__name__):
        raise NotBuilt(CROSS)
    if mask is None:
        return _request_without_mask(module, queries, keys, given)
    if not isinstance(mask, Request):
        what = f"a tensor of shape {list(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise NotBuilt(f"attention_mask is {what}: a bias or a mask given as a tensor is not built yet; {INSTEAD}")
    if (queries, keys) != (mask.queries, mask.keys):
        raise LayoutError(
            f"attention meets {queries} queries and {keys} keys, but its mask was made for {mask.queries} and "
            f"{mask.keys}"
        )
    mask.check(given)
    return mask


def _request_without_mask(module: torch.nn.Module, queries: int, keys: int, given: Mapping[str, Any]) -> Request:
    """Of models that never ask for a mask, as those of images: all they say is whether they are causal."""
    if not torch.compiler.is_compiling():
        _refuse_attentions(inspect.currentframe())
    if _dealt.get() is not None:
        raise NotBuilt(
            f"{type(module).__name__} attends without asking transformers for a mask, so over ranks it cannot be known "
            "which pairs count; what every rank is given whole, as images, is run outside of `sharded`"
        )
    causal = given.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    if causal and queries not in (1, keys):
        raise NotBuilt(
            f"causal attention of {queries} queries over {keys} keys without a mask: nobody said where they are"
        )
    if given.get("sliding_window") is not None:
        raise NotBuilt(f"a sliding window of {given['sliding_window']} without a mask that has it")
    return Request(Dense(causal=causal), queries, keys, keys - queries, None)


def _refuse(module: torch.nn.Module, dropout: float, given: Mapping[str, Any], pattern: Dense) -> None:
    """What attention cannot honour; a word that nobody here knows may change what is computed, and is refused too."""
    if dropout:
        _refuse_dropout(module, dropout)
    for name, value in given.items():
        if value is None or value is False or name in HARMLESS or name in CHECKED:
            continue
        _refuse_argument(name)
    _check_given(given, pattern)


def _refuse_argument(name: str) -> NoReturn:
    if name in REFUSED:
        raise NotBuilt(f"{name}: {REFUSED[name]} is not built yet, and is never silently ignored; {INSTEAD}")
    raise NotBuilt(
        f"{name}: it is not known what it would change in attention, and it is never silently ignored; leave it out, "
        f"or {INSTEAD}"
    )


def _refuse_dropout(module: torch.nn.Module, dropout: float) -> NoReturn:
    config = getattr(module, "config", None)
    names = [name for name, x in vars(config).items() if "drop" in name and x == dropout] if config is not None else []
    names = [name for name in names if "att" in name] or names or ["attention_dropout"]
    raise NotBuilt(
        f"dropout={dropout}: dropout of attention weights in training is not built yet; load the model with "
        f"{' or '.join(f'{name}=0.0' for name in names)}, or call model.eval()"
    )


def _check_given(given: Mapping[str, Any], pattern: Dense) -> None:
    """What layers say once more must be what the mask has said."""
    is_causal, window = given.get("is_causal"), given.get("sliding_window")
    if is_causal is not None and bool(is_causal) != pattern.causal:
        raise NotBuilt(
            f"is_causal={is_causal}, but the model's mask is for causal={pattern.causal}; set config.is_causal"
        )
    reaches = () if window is None else (window - 1, window - pattern.causal)  # both ways, some count by one more
    if window is not None and (pattern.window is None or pattern.window[0] not in reaches):
        raise NotBuilt(f"sliding_window={window}, but the model's mask is for the window {pattern.window}")
