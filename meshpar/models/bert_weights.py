"""Trained weights of BERT's family, under the names that their files use, for an `Encoder`.

The files are read by whoever calls, as in `safetensors.numpy.load_file("model.safetensors")`: this
module knows names and shapes only.
"""

import re
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshpar.models.encoder import Encoder

_UNUSED = r"embeddings\.position_ids|pooler\..*"  # a counter, and what sentences do not use
_MODULES = {
    "embed": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings",
    "embed_norm": "embeddings.LayerNorm",
    "attention.q": "attention.self.query",
    "attention.k": "attention.self.key",
    "attention.v": "attention.self.value",
    "attention.o": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def load_bert_weights(model: Encoder, weights: Mapping[str, np.ndarray]) -> Encoder:
    """Puts trained weights into an encoder, in place.

    Args:
      model: the encoder; its layers may be scanned.
      weights: name -> array, named as in BERT's files: "encoder.layer.0.output.dense.weight".

    Returns:
      The same model.

    Raises:
      KeyError: a weight is missing, or has no place in the model.
      ValueError: a weight of another shape than the model's.
    """
    left = {name for name in weights if not re.fullmatch(_UNUSED, name)}
    for path, variable in nnx.iter_graph(model):
        if not isinstance(variable, nnx.Param):
            continue
        names = _names_of(path, model.config.num_layers)
        arrays = [_read(name, weights, path) for name in names]
        value = arrays[0] if len(names) == 1 else np.stack(arrays)
        if value.shape != variable.shape:
            raise ValueError(
                f"load_bert_weights(model, weights): {names[0]} makes {_dotted(path)} of shape "
                f"{value.shape}, and the model's is {variable.shape}; the sizes in EncoderConfig "
                "must be those of the file"
            )
        variable.set_value(jnp.asarray(value, variable.dtype))
        left -= set(names)
    if left:
        raise KeyError(
            f"load_bert_weights(model, weights): {len(left)} weights have no place in the model: "
            f"{', '.join(sorted(left)[:5])}; EncoderConfig(num_layers=...) may be too small"
        )
    return model


def _names_of(path: tuple[object, ...], num_layers: int) -> list[str]:
    """The names in the file of a parameter: one, or one per layer for stacked layers."""
    parts = list(map(str, path))
    leaf = "bias" if parts.pop() == "bias" else "weight"
    if parts[0] != "layers":
        return [f"{_MODULES['.'.join(parts)]}.{leaf}"]
    numbers = [parts[1]] if parts[1].isdigit() else list(map(str, range(num_layers)))
    module = _MODULES[".".join(parts[2 if parts[1].isdigit() else 1 :])]
    return [f"encoder.layer.{number}.{module}.{leaf}" for number in numbers]


def _read(name: str, weights: Mapping[str, np.ndarray], path: tuple[object, ...]) -> np.ndarray:
    if name not in weights:
        raise KeyError(
            f"load_bert_weights(model, weights): no {name!r}, which {_dotted(path)} is made of; "
            f"there are {', '.join(sorted(weights)[:5])}, ..."
        )
    # The files hold matrices as (out, in).
    return weights[name].T if path[-1] == "kernel" else weights[name]


def _dotted(path: tuple[object, ...]) -> str:
    return ".".join(map(str, path))
