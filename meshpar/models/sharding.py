"""How the parameters of each model are split over a mesh: rules of dotted parameter path to axes.

The mesh axes are "tp" (tensor parallel, as in "Megatron-LM", arXiv:1909.08053: column-parallel
matrices into a block, row-parallel ones out of it, so that a block costs one all-reduce) and "fsdp"
(the other dim of every matrix, gathered before use, as in "ZeRO", arXiv:1910.02054). "dp" and "sp"
split data only, and so occur in no rule. Whoever applies the rules skips the axes a mesh lacks.
"""

import re
from dataclasses import dataclass

from flax import nnx

from meshpar.models.decoder import Decoder
from meshpar.models.encoder import Encoder
from meshpar.models.gpt2 import GPT2
from meshpar.models.mlp import MLP
from meshpar.models.resnet import ResNet


@dataclass(frozen=True, slots=True)
class ParamRule:
    """The parameters whose path matches `pattern` have dim `d` split over `axis`.

    Example:
      >>> rule = ParamRule(r"head.kernel", ((0, "fsdp"), (1, "tp")))
      >>> axes_for("head.kernel", 2, (rule,), scanned=False)
      ('fsdp', 'tp')
    """

    pattern: str  # a regex that must match the whole dotted path
    dims: tuple[tuple[int, str], ...]  # (dim, axis); dims without the dim of scanned layers


_COLUMN = ((0, "fsdp"), (1, "tp"))
_ROW = ((0, "tp"), (1, "fsdp"))
# "layers.3." of unrolled layers, "layers." of scanned ones.
_LAYER = r"layers\.(\d+\.)?"

_DECODER = (
    # The vocabulary is the long dim, and sharded logits never meet (see losses.cross_entropy).
    ParamRule(r"embed\.embedding", _ROW),
    ParamRule(r"head\.kernel", _COLUMN),
    ParamRule(_LAYER + r"attention\.[qkv]\.kernel", _COLUMN),
    ParamRule(_LAYER + r"attention\.o\.kernel", _ROW),
    ParamRule(_LAYER + r"mlp\.(gate|up)\.kernel", _COLUMN),
    ParamRule(_LAYER + r"mlp\.down\.kernel", _ROW),
)
_GPT2 = (
    ParamRule(r"embed\.embedding", _ROW),
    ParamRule(r"positions\.embedding", ((1, "fsdp"),)),
    ParamRule(_LAYER + r"attention\.[qkv]\.kernel", _COLUMN),
    ParamRule(_LAYER + r"attention\.[qkv]\.bias", ((0, "tp"),)),
    ParamRule(_LAYER + r"attention\.o\.kernel", _ROW),
    ParamRule(_LAYER + r"mlp\.up\.kernel", _COLUMN),
    ParamRule(_LAYER + r"mlp\.up\.bias", ((0, "tp"),)),
    ParamRule(_LAYER + r"mlp\.down\.kernel", _ROW),
)
# Positions and segments are GPT-2's positions: short, and added to what is whole.
_ENCODER = (*_GPT2, ParamRule(r"segments\.embedding", ((1, "fsdp"),)))
# Layers in pairs: into the hidden dim by column, out of it by row.
_MLP = (
    ParamRule(r"layers\.\d*[02468]\.kernel", _COLUMN),
    ParamRule(r"layers\.\d*[02468]\.bias", ((0, "tp"),)),
    ParamRule(r"layers\.\d*[13579]\.kernel", _ROW),
)
# Kernels are (height, width, in, out). The channels between a block's convolutions are split.
_RESNET = (
    ParamRule(r"(stem|blocks\.\d+\.shortcut)\.kernel", ((3, "fsdp"),)),
    ParamRule(r"blocks\.\d+\.conv1\.kernel", ((2, "fsdp"), (3, "tp"))),
    ParamRule(r"blocks\.\d+\.norm1\.(scale|bias|mean|var)", ((0, "tp"),)),
    ParamRule(r"blocks\.\d+\.conv2\.kernel", ((2, "tp"), (3, "fsdp"))),
    ParamRule(r"head\.kernel", ((0, "fsdp"),)),
)
_RULES: dict[type[nnx.Module], tuple[ParamRule, ...]] = {
    Decoder: _DECODER,
    Encoder: _ENCODER,
    GPT2: _GPT2,
    MLP: _MLP,
    ResNet: _RESNET,
}


def rules_for(model: nnx.Module) -> tuple[ParamRule, ...]:
    """The rules of a reference model.

    Args:
      model: a `Decoder`, `Encoder`, `GPT2`, `MLP` or `ResNet`.

    Returns:
      Rules of which at most one matches any parameter; what none matches is replicated.

    Raises:
      TypeError: another model; write `ParamRule`s for it.
    """
    if type(model) not in _RULES:
        known = ", ".join(kind.__name__ for kind in _RULES)
        raise TypeError(
            f"rules_for(model): no rules for {type(model).__name__}, only for {known}; give yours "
            'as a tuple, as in (ParamRule(r"head\\.kernel", ((1, "tp"),)),)'
        )
    return _RULES[type(model)]


def axes_for(
    path: str, ndim: int, rules: tuple[ParamRule, ...], *, scanned: bool
) -> tuple[str | None, ...]:
    """The mesh axis that splits each dim of a parameter.

    Args:
      path: the parameter's path in the nnx state, joined by dots: "layers.0.mlp.up.kernel".
      ndim: its number of dims.
      rules: as from `rules_for`.
      scanned: the model stacks its layers: parameters below "layers." have one more dim in front,
        which is not split.

    Returns:
      One axis name, or None, per dim; all None if no rule matches.

    Raises:
      ValueError: two rules match, or a rule names a dim that the parameter does not have.

    Example:
      >>> axes_for("layers.mlp.up.kernel", 3, _DECODER, scanned=True)
      (None, 'fsdp', 'tp')
    """
    matching = [rule for rule in rules if re.fullmatch(rule.pattern, path)]
    if len(matching) > 1:
        raise ValueError(
            f"axes_for({path!r}): {len(matching)} rules match, and a parameter has one layout: "
            f"{', '.join(repr(rule.pattern) for rule in matching)}; narrow all patterns but one"
        )
    leading = 1 if scanned and path.startswith("layers.") else 0
    axes: list[str | None] = [None] * ndim
    for rule in matching:
        for dim, axis in rule.dims:
            if not 0 <= dim < ndim - leading:
                raise ValueError(
                    f"axes_for({path!r}): {rule} splits dim {dim}, but the parameter has "
                    f"{ndim - leading} dims, so dim < {ndim - leading}"
                    + (" (the dim of scanned layers is not counted)" if leading else "")
                )
            axes[leading + dim] = axis
    return tuple(axes)
