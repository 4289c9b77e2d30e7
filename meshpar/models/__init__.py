"""Reference models in flax nnx that tests, notebooks and benchmarks share.

No model knows of a mesh: the rules that shard its parameters lie beside, in
`meshpar.models.sharding`.
"""

from meshpar.models.bert_weights import load_bert_weights as load_bert_weights
from meshpar.models.decoder import Decoder as Decoder
from meshpar.models.decoder import DecoderConfig as DecoderConfig
from meshpar.models.decoder import llama3_8b as llama3_8b
from meshpar.models.decoder import llama3_70b as llama3_70b
from meshpar.models.decoder import tiny_lm as tiny_lm
from meshpar.models.encoder import Encoder as Encoder
from meshpar.models.encoder import EncoderConfig as EncoderConfig
from meshpar.models.encoder import mean_embedding as mean_embedding
from meshpar.models.generate import generate as generate
from meshpar.models.gpt2 import GPT2 as GPT2
from meshpar.models.gpt2 import GPT2Config as GPT2Config
from meshpar.models.losses import cross_entropy as cross_entropy
from meshpar.models.mlp import MLP as MLP
from meshpar.models.mlp import MLPConfig as MLPConfig
from meshpar.models.resnet import ResNet as ResNet
from meshpar.models.resnet import ResNetConfig as ResNetConfig
from meshpar.models.sharding import ParamRule as ParamRule
from meshpar.models.sharding import axes_for as axes_for
from meshpar.models.sharding import rules_for as rules_for
