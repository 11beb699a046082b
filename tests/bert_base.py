"""Writes a checkpoint of BERT-base's shape with random weights, and texts: for measurements of speed.

python tests/bert_base.py FOLDER TEXTS.csv
"""

import random
import sys
from pathlib import Path

from checkpoints import vocabulary, write_checkpoint

TEXTS = 160
LONGEST = 120  # words


def write_texts(path: Path) -> None:
    """Write lengths as real texts have them: many short, few long."""
    rng = random.Random(5)
    words = [word for word in vocabulary() if word.isalpha() and len(word) > 1]
    lengths = [min(LONGEST, max(3, round(rng.lognormvariate(3.2, 0.8)))) for _ in range(TEXTS)]
    rows = [" ".join(rng.choices(words, k=length)) for length in lengths]
    path.write_text("\n".join(["text", *rows]) + "\n", "utf-8")


if __name__ == "__main__":
    write_checkpoint(Path(sys.argv[1]), hidden=768, layers=12, heads=12, inner=3072, max_length=512)
    write_texts(Path(sys.argv[2]))
