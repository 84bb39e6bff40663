"""MoE layers in the place of dense feed-forward modules, with new experts or with copies of them.

Legend: T tokens, D d_model, F d_ff, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations
from typing import Any, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn

from moe.adoption.attention_masks import watch_attention
from moe.adoption.dense import DenseMLP, Matrix, chosen_mlps, output_in_float64
from moe.adoption.listening import InPlaceMoE
from moe.config import GATED, ActivationName, MoEConfig
from moe.experts import ACTIVATIONS

Model = TypeVar("Model", bound=nn.Module)
Modules = str | Iterable[str | int] | None


def replace_mlp(
    model: Model,
    config: MoEConfig | None = None,
    *,
    modules: Modules = None,
    first_k_dense: int = 0,
    **fields: Any,
) -> Model:
    """Put MoE layers with new experts in the place of a model's dense feed-forward modules.

    A feed-forward module is one whose parameters are two or three linear layers, D -> F (two with a
    gate) and F -> D, and that takes one tensor: the ``mlp`` of models of ``transformers``, or a
    ``nn.Sequential`` of a model of one's own. The model still gets a tensor from each layer.
    :func:`moe.collect_aux` collects the auxiliary losses, which must be added to the loss. Where
    the model is called with an ``attention_mask``, its padding is no token of the layers.
    ``model.generate``, gradient checkpointing, ``parallel.apply_expert_parallel`` and
    ``apply_fsdp`` work on the result. Dropout within the replaced modules is dropped.

    A state dict of the model has new names in the place of each module: ``router.weight`` and
    ``experts.w_up``, among others. To load it, build the dense model, call this function with the
    same arguments, and load then.

    Args:
        model: a model, changed in place.
        config: of every layer; its ``d_model`` must be the modules'. None for a config of
            ``fields``, with each module's own ``d_model``, and its ``d_ff`` unless it is given.
        modules: which modules: patterns of their names as ``*.3.mlp``, or their numbers among the
            feed-forward modules, from 0; None for all.
        first_k_dense: so many of these stay dense, the first ones (DeepSeekMoE, arXiv 2401.06066,
            section 5.1.2).
        fields: of :class:`moe.MoEConfig`, without ``config``.

    Returns:
        The model.

    Raises ValueError, and changes nothing, where the model has no such module, where ``modules``
    fits none, for sizes that do not fit, and for parameters that are sharded or quantized.

    Example::

        model = moe.replace_mlp(model, num_experts=8, top_k=2, d_ff=512, first_k_dense=1)
        with moe.collect_aux(model) as auxes:
            loss = model(**batch).loss
        (loss + sum(aux.aux_loss for aux in auxes)).backward()
    """
    if config is not None and fields:
        raise ValueError(f"{min(fields)} must be left out with a config: it is a field of it")
    chosen = chosen_mlps(model, modules, first_k_dense)
    planned = []
    for mlp in chosen:
        _check(mlp)
        if config is not None and config.d_model != mlp.d_model:
            raise ValueError(
                f"config.d_model ({config.d_model}) must be that of {mlp.name} ({mlp.d_model})"
            )
        sizes = {"d_model": mlp.d_model, "d_ff": mlp.d_ff}
        planned.append((mlp, config or _config(mlp, sizes | fields)))
    for mlp, own_config in planned:
        _put(model, mlp, _layer(mlp, own_config))
    return model


def upcycle(
    model: Model,
    *,
    modules: Modules = None,
    first_k_dense: int = 0,
    **fields: Any,
) -> Model:
    """Replace dense feed-forward modules by MoE layers whose experts are copies of them.

    This is sparse upcycling (Komatsuzaki et al., arXiv 2212.05055): the routers are new, and all
    experts of a layer begin equal. As long as the weights of a token's experts sum to 1, which
    ``norm_topk_prob`` makes true and which is the default here, the output of the model is the
    dense model's. With ``top_k`` 1 the caller says which weight a token's expert has. The gate and
    the activation function are those with which an expert gives the module's output for random
    inputs: no name is trusted.

    For the rest, see :func:`replace_mlp`.

    Args:
        model: a model, changed in place. Its parameters must have values.
        modules: see :func:`replace_mlp`.
        first_k_dense: see :func:`replace_mlp`.
        fields: of :class:`moe.MoEConfig` beside those that the modules determine: ``num_experts``
            and ``top_k``, and others such as ``aux_loss_coeff`` or ``capacity``.

    Returns:
        The model.

    Raises ValueError, and changes nothing, where :func:`replace_mlp` does, and for a module whose
    output no expert gives, as one with another activation function.

    Example::

        dense = AutoModelForCausalLM.from_pretrained(folder)
        model = moe.upcycle(dense, num_experts=8, top_k=2, aux_loss_coeff=0.01)
    """
    taken = fields.keys() & {"d_model", "d_ff", "activation", "ffn_bias", "num_shared_experts"}
    if taken:
        raise ValueError(f"{min(taken)} is the dense modules' and must be left out")
    if fields.get("top_k") == 1 and not fields.keys() & _WEIGHTS:
        raise ValueError(
            "top_k (1) must be at least 2 for the output to begin as the dense model's, or say "
            "what the weight of a single expert is: norm_topk_prob=False is its score, and with "
            "softmax_after_topk=True too it is 1, which gives the router no gradient of the loss"
        )
    planned = []
    for mlp in chosen_mlps(model, modules, first_k_dense):
        _check(mlp)
        shape = _shape_of(mlp)
        bias = any(matrix.bias is not None for matrix in (*mlp.ups, mlp.down))
        defaults = {} if fields.keys() & _WEIGHTS else {"norm_topk_prob": True}
        config = _config(mlp, {
            "d_model": mlp.d_model, "d_ff": mlp.d_ff, "activation": shape.activation,
            "ffn_bias": bias, **defaults, **fields,
        })  # fmt: skip
        planned.append((mlp, shape, config))
    for mlp, shape, config in planned:
        layer = _layer(mlp, config)
        _copy(shape, layer)
        _put(model, mlp, layer)
    return model


_WEIGHTS = {"norm_topk_prob", "softmax_after_topk", "score_func"}


class _Shape(NamedTuple):
    """A dense module as one expert."""

    activation: Any
    gate: Matrix | None
    up: Matrix
    down: Matrix


def _config(mlp: DenseMLP, fields: dict[str, Any]) -> MoEConfig:
    try:
        return MoEConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{mlp.name}: {error}") from None


def _check(mlp: DenseMLP) -> None:
    for name, parameter in mlp.module.named_parameters():
        if hasattr(parameter, "to_local") or not parameter.is_floating_point():
            raise ValueError(
                f"{mlp.name}.{name} ({type(parameter).__name__}, {parameter.dtype}) must be a "
                f"plain floating-point parameter: replace modules before the model is sharded, and "
                f"load it without quantization"
            )


def _layer(mlp: DenseMLP, config: MoEConfig) -> InPlaceMoE:
    """A layer with initial values, in the device, the dtype and the mode of a module."""
    like = mlp.down.module.get_parameter("weight")
    with like.device:
        layer = InPlaceMoE(config)
    return layer.to(like.dtype).train(mlp.module.training)


def _put(model: nn.Module, mlp: DenseMLP, layer: InPlaceMoE) -> None:
    parent_name, _, last = mlp.name.rpartition(".")
    parent = model.get_submodule(parent_name)
    setattr(parent, last, layer)
    watch_attention(parent, layer, layer._last_mask)


_TOKENS = 16
_CLOSE = 1e-9


def _shape_of(mlp: DenseMLP) -> _Shape:
    """The activation function and the gate with which an expert gives the module's output.

    Raises ValueError where there are none.
    """
    if mlp.down.module.get_parameter("weight").is_meta:
        raise ValueError(f"{mlp.name} must have values: load the dense model before it is upcycled")
    device = mlp.down.module.get_parameter("weight").device
    x_TD = torch.randn(
        _TOKENS, mlp.d_model, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).to(device)
    wanted_TD = output_in_float64(mlp, x_TD)
    if not isinstance(wanted_TD, Tensor) or wanted_TD.shape != x_TD.shape:
        raise ValueError(
            f"{mlp.name} ({type(mlp.module).__name__}) must give one tensor of its input's shape"
        )
    shapes = [
        _Shape(name, ups[0] if len(ups) == 2 else None, ups[-1], down)
        for name in get_args(ActivationName)
        for *ups, down in permutations((*mlp.ups, mlp.down))
        # Of square matrices each may be the last one.
        if (name in GATED) == (len(ups) == 2)
        and (down.inputs, down.outputs) == (mlp.d_ff, mlp.d_model)
    ]
    for shape in shapes:
        difference = (_output(shape, x_TD) - wanted_TD).norm()
        if difference <= _CLOSE * wanted_TD.norm():
            return shape
    tried = " or ".join(dict.fromkeys(str(shape.activation) for shape in shapes))
    matrices = ", ".join(f"{m.name} {m.inputs} -> {m.outputs}" for m in (*mlp.ups, mlp.down))
    raise ValueError(
        f"{mlp.name} ({type(mlp.module).__name__}: {matrices}) must compute what an expert with "
        f"activation {tried} does, which it does not for random inputs; moe.replace_mlp takes it"
    )


@torch.no_grad()
def _output(shape: _Shape, x_TD: Tensor) -> Tensor:
    def product(x: Tensor, matrix: Matrix) -> Tensor:
        y = x @ matrix.weight_DF().double()
        return y if matrix.bias is None else y + matrix.bias.double()

    gate = None if shape.gate is None else product(x_TD, shape.gate)
    hidden = ACTIVATIONS[shape.activation].hidden(gate, product(x_TD, shape.up))
    return product(hidden, shape.down)


@torch.no_grad()
def _copy(shape: _Shape, layer: InPlaceMoE) -> None:
    """Give every expert of a layer the weights of a dense module."""
    for name, matrix in (("gate", shape.gate), ("up", shape.up), ("down", shape.down)):
        if matrix is None:
            continue
        getattr(layer.experts, f"w_{name}").copy_(matrix.weight_DF())
        bias_EF: Tensor | None = getattr(layer.experts, f"b_{name}")
        if bias_EF is not None:
            # A module may have a bias in some of its layers alone.
            bias_EF.copy_(torch.zeros(()) if matrix.bias is None else matrix.bias)
