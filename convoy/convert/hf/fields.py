"""Lines of a family's declaration. Each says a value of config.json and fields of a spec at once:
what is read and what is written come from one line, and cannot disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from convoy.convert.hf.expressed import Expressed
from convoy.convert.hf.model_config import HFConfig
from pretrain.errors import InputError

Values = dict[str, Any]
Names = Mapping[str, tuple[str, ...]]
Kind = Literal["size", "number", "flag"]


class Line:
    """One line of a declaration. A subclass overrides what it has to say."""

    @property
    def names(self) -> Names:
        """By the fields of a spec that the line speaks for, what a config.json may call each."""
        return {}

    @property
    def defaults(self) -> Values:
        """By a name in config.json, the family's value where it is left out."""
        return {}

    def read(self, config: HFConfig) -> Values:
        """Fields of a spec, by ``section.field``. Raises InputError for what Convoy has not."""
        return {}

    def needs(self) -> Mapping[str, tuple[Any, ...]]:
        """By a field of a spec, the values that the family can express."""
        return {}

    def write(self, decoder: Expressed) -> Values:
        """The inverse of :meth:`read`. Raises InputError for what the family has not."""
        return {}


@dataclass(frozen=True)
class Same(Line):
    """A value that both sides have."""

    theirs: str
    ours: str
    kind: Kind = "size"
    default: Any = None
    """Of a config.json that leaves it out; None where it must be there."""
    null: Any = None
    """What a null says; None where a null is as good as nothing."""
    least: float = 0
    also: tuple[str, ...] = ()
    """Other names that are read."""

    @property
    def names(self) -> Names:
        return {self.ours: (self.theirs, *self.also)}

    @property
    def defaults(self) -> Values:
        return {} if self.default is None else {self.theirs: self.default}

    def read(self, config: HFConfig) -> Values:
        theirs = next((n for n in (self.theirs, *self.also) if n in config.values), self.theirs)
        if self.null is not None and config.is_null(theirs):
            return {self.ours: self.null}
        default = () if self.default is None else (self.default,)
        return {self.ours: getattr(config, self.kind)(theirs, *default)}

    def write(self, decoder: Expressed) -> Values:
        value = decoder.value(self.ours)
        if value < self.least:
            raise decoder.wrong(self.ours, f"be at least {self.least}")
        return {self.theirs: None if self.null is not None and value == self.null else value}


@dataclass(frozen=True)
class Table(Line):
    """A value for each value of the other side; by default the first."""

    theirs: str
    ours: str
    pairs: tuple[tuple[Any, Any], ...]
    """Theirs, ours."""

    @property
    def names(self) -> Names:
        return {self.ours: (self.theirs,)}

    @property
    def defaults(self) -> Values:
        return {self.theirs: self.pairs[0][0]}

    def read(self, config: HFConfig) -> Values:
        config.must(self.theirs, *(theirs for theirs, _ in self.pairs))
        return {self.ours: dict(self.pairs)[config.values.get(self.theirs, self.pairs[0][0])]}

    def needs(self) -> Mapping[str, tuple[Any, ...]]:
        return {self.ours: tuple(ours for _, ours in self.pairs)}

    def write(self, decoder: Expressed) -> Values:
        inverse = {ours: theirs for theirs, ours in self.pairs}
        return {self.theirs: inverse[decoder.value(self.ours)]}


class Must(Line):
    """A value that config.json must have, where it has it: the first of ``allowed``, or another."""

    def __init__(self, theirs: str, *allowed: Any, written: bool = True) -> None:
        self.theirs, self.allowed, self.written = theirs, allowed, written

    @property
    def defaults(self) -> Values:
        return {self.theirs: self.allowed[0]} if self.written else {}

    def read(self, config: HFConfig) -> Values:
        config.must(self.theirs, *self.allowed)
        return {}

    def write(self, decoder: Expressed) -> Values:
        return {self.theirs: self.allowed[0]} if self.written else {}


@dataclass(frozen=True)
class Null(Line):
    """A value that config.json must not have."""

    theirs: str
    why: str = "be null"
    written: bool = True

    def read(self, config: HFConfig) -> Values:
        if self.theirs in config.values:
            raise config.wrong(self.theirs, self.why)
        return {}

    def write(self, decoder: Expressed) -> Values:
        return {self.theirs: None} if self.written else {}


class Always(Line):
    """A field of a spec that has one value in the family, of which config.json does not speak."""

    def __init__(self, ours: str, value: Any) -> None:
        self.ours, self.value = ours, value

    @property
    def names(self) -> Names:
        return {self.ours: ()}

    def read(self, config: HFConfig) -> Values:
        return {self.ours: self.value}

    def needs(self) -> Mapping[str, tuple[Any, ...]]:
        return {self.ours: (self.value,)}


class Only(Line):
    """What a decoder must be to be expressed; ``ours`` may be a name that follows from fields."""

    def __init__(self, ours: str, *allowed: Any) -> None:
        self.ours, self.allowed = ours, allowed

    def needs(self) -> Mapping[str, tuple[Any, ...]]:
        return {self.ours: self.allowed}


class Start(Line):
    """A field of training that no config.json has: where an imported spec begins."""

    def __init__(self, ours: str, value: Any) -> None:
        self.ours, self.value = ours, value

    def read(self, config: HFConfig) -> Values:
        return {self.ours: self.value}


class Written(Line):
    """What every config.json has, and no spec."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def write(self, decoder: Expressed) -> Values:
        return dict(self.values)


@dataclass(frozen=True)
class KeyValueHeads(Line):
    """As many as queries have where it is left out."""

    names: ClassVar[Names] = {"model.num_kv_heads": ("num_key_value_heads",)}

    def read(self, config: HFConfig) -> Values:
        heads = config.size("num_attention_heads")
        return {"model.num_kv_heads": config.size("num_key_value_heads", heads)}

    def write(self, decoder: Expressed) -> Values:
        return {"num_key_value_heads": decoder.model.num_kv_heads}


@dataclass(frozen=True)
class HeadDim(Line):
    """The size of a head. ``own``: the family has a name for it; otherwise it is hidden_size /
    num_attention_heads, and another one is read where a config.json has it."""

    own: bool = True
    default: int | None = None
    names: ClassVar[Names] = {"model.head_dim": ("head_dim",)}

    @property
    def defaults(self) -> Values:
        return {} if self.default is None else {"head_dim": self.default}

    def read(self, config: HFConfig) -> Values:
        if "head_dim" in config.values:
            return {"model.head_dim": config.size("head_dim")}
        known = self.default is not None and not config.is_null("head_dim")
        return {"model.head_dim": self.default} if known else {}

    def write(self, decoder: Expressed) -> Values:
        model = decoder.model
        if self.own:
            return {"head_dim": model.qk_head_dim}
        if model.qk_head_dim * model.num_heads != model.d_model:
            raise InputError(
                f"model.head_dim ({model.qk_head_dim}) must be model.d_model / model.num_heads "
                f"({model.d_model} / {model.num_heads}) to be a {decoder.model_type} model"
            )
        return {}


@dataclass(frozen=True)
class Longest(Line):
    """The longest sequence; a decoder that names none is meant for those of its training, or of
    YaRN."""

    names: ClassVar[Names] = {"model.max_seq_len": ("max_position_embeddings",)}

    def read(self, config: HFConfig) -> Values:
        return {"model.max_seq_len": config.size("max_position_embeddings", 0)}

    def write(self, decoder: Expressed) -> Values:
        model = decoder.model
        longest = model.max_seq_len
        if not longest and model.yarn is not None:
            longest = round(model.yarn.factor * model.yarn.original_seq_len)
        return {"max_position_embeddings": longest or decoder.seq_len}


@dataclass(frozen=True)
class Window(Line):
    """Sliding windows, which Convoy's attention has not: as wide as the longest sequence at least,
    or none."""

    default: int | None = None
    flag: bool = False
    """Whether ``use_sliding_window`` says that the window is used. Qwen names windows without using
    them."""
    since: int | None = None
    """The default of ``max_window_layers``, the layer from which on the window is used; None where
    every layer has it."""

    @property
    def defaults(self) -> Values:
        return {} if self.default is None else {"sliding_window": self.default}

    def read(self, config: HFConfig) -> Values:
        if set(config.values.get("layer_types", [])) - {"full_attention"}:
            raise config.wrong("layer_types", "be full_attention alone")
        if "use_sliding_window" in config.values:
            config.must("use_sliding_window", False)
            return {}
        if self.since is not None:
            used = config.size("max_window_layers", self.since) < config.size("num_hidden_layers")
            if not used:
                return {}
        default = 0 if config.is_null("sliding_window") else self.default or 0
        window, longest = (
            config.size("sliding_window", default),
            config.size("max_position_embeddings", 0),
        )
        if 0 < window < longest and not self.flag:
            raise config.wrong(
                "sliding_window", f"be null or at least max_position_embeddings ({longest})"
            )
        return {}

    def write(self, decoder: Expressed) -> Values:
        return {"sliding_window": None, **({"use_sliding_window": False} if self.flag else {})}


class FullLayers(Line):
    """``layer_types`` of a family whose sliding windows are of layers that Convoy has not."""

    def read(self, config: HFConfig) -> Values:
        if set(config.values.get("layer_types", [])) - {"full_attention"}:
            raise config.wrong("layer_types", "be full_attention alone")
        return {}

    def write(self, decoder: Expressed) -> Values:
        return {"layer_types": ["full_attention"] * decoder.model.num_layers}


@dataclass(frozen=True)
class Multipliers(Line):
    """Granite's constant factors."""

    names: ClassVar[Names] = {"model.multipliers": ()}
    _PAIRS: ClassVar[Mapping[str, str]] = {
        "embedding": "embedding_multiplier", "attention": "attention_multiplier",
        "residual": "residual_multiplier", "logits": "logits_scaling",
    }  # fmt: skip

    @property
    def defaults(self) -> Values:
        return dict.fromkeys(self._PAIRS.values(), 1.0)

    def read(self, config: HFConfig) -> Values:
        given = {ours: config.number(theirs, 1.0) for ours, theirs in self._PAIRS.items()}
        return {"model.multipliers": given}

    def write(self, decoder: Expressed) -> Values:
        factors = decoder.model.multipliers
        ours = {} if factors is None else factors.model_dump()
        ours["attention"] = ours.get("attention") or decoder.model.qk_head_dim**-0.5
        return {theirs: ours.get(name, 1.0) for name, theirs in self._PAIRS.items()}
