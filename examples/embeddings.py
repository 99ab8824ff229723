"""Embeddings of texts by sentence-transformers: which of some texts is nearest to a question.

python examples/embeddings.py checkpoints/spade-encoder-books "the sea" TEXTS.txt
"""

import argparse
from pathlib import Path

from sentence_transformers import SentenceTransformer

import hf_hybrid_ssm  # noqa: F401  registers the families

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("model")
parser.add_argument("question")
parser.add_argument("texts", help="a file, a text a line")
args = parser.parse_args()

# the mean of what a bidirectional encoder makes of each token
embedder = SentenceTransformer(args.model, model_kwargs={"dtype": "float32"})
embedder.max_seq_length = 512
texts = Path(args.texts).read_text(encoding="utf-8").splitlines()
found = embedder.similarity(embedder.encode([args.question]), embedder.encode(texts))[0]
for score, text in sorted(zip(found.tolist(), texts), reverse=True):
    print(f"{score:.3f}  {text}")
