"""Reference models in flax nnx that tests, notebooks and benchmarks share.

No model knows of a mesh: the rules that shard its parameters lie beside, in
`meshpar.models.sharding`.
"""

from meshpar.models.decoder import Decoder as Decoder
from meshpar.models.decoder import DecoderConfig as DecoderConfig
from meshpar.models.decoder import llama3_8b as llama3_8b
from meshpar.models.decoder import llama3_70b as llama3_70b
from meshpar.models.decoder import tiny_lm as tiny_lm
from meshpar.models.losses import cross_entropy as cross_entropy
from meshpar.models.mlp import MLP as MLP
from meshpar.models.mlp import MLPConfig as MLPConfig
