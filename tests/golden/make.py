"""Makes the golden numbers in this folder; see README.md. Needs torch and transformers; the tests do not.

python tests/golden/make.py FOLDER_OF_ALL_MINILM_L6_V2
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from checkpoints import write_checkpoint  # noqa: E402

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")

FAMILIES = ("bert", "distilbert", "roberta")
LABELS = ("bad", "fine", "good")
# Unequal lengths, so that the batch has padding, and one pair.
BATCH = (
    "the mill grinds corn",
    ("is the flour good?", "it is not"),
    "water",
    "the old horse never carries a sack of barley on the cold road to the river; it waits.",
)


def pack(array: Any) -> dict[str, Any]:
    array = np.ascontiguousarray(array, dtype="<f4")
    return {"shape": list(array.shape), "float32": base64.b64encode(array.tobytes()).decode()}


def encode(tokenizer: Tokenizer, texts: Any, pad: int, max_length: int) -> dict[str, Any]:
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(pad_id=pad)
    rows = tokenizer.encode_batch(list(texts))
    fields = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    return {name: [getattr(row, field) for row in rows] for name, field in fields.items()}


def run(model: Any, inputs: dict[str, Any], *, token_types: bool) -> Any:
    names = ("input_ids", "attention_mask", *(("token_type_ids",) if token_types else ()))
    with torch.no_grad():
        return model.eval()(**{name: torch.tensor(inputs[name]) for name in names})


def tiny() -> dict[str, Any]:
    """Outputs of transformers for the checkpoints of tests/checkpoints.py."""
    cases = {}
    for family in FAMILIES:
        for head in (None, LABELS):
            with tempfile.TemporaryDirectory() as temporary:
                folder = write_checkpoint(Path(temporary), family, head)
                kind = transformers.AutoModelForSequenceClassification if head else transformers.AutoModel
                model, report = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
                missing = [name for name in report["missing_keys"] if "pooler" not in name]
                if missing or report["unexpected_keys"]:
                    raise SystemExit(f"{family}: weights do not match: {report}")
                tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
                inputs = encode(tokenizer, BATCH, model.config.pad_token_id, 48)
            output = run(model, inputs, token_types=family == "bert")
            value = output.logits if head else output.last_hidden_state
            cases[f"{family}-{'classifier' if head else 'encoder'}"] = {
                "inputs": inputs,
                "output": pack(value),
            }
    return cases


def minilm(folder: Path, texts: list[str]) -> dict[str, Any]:
    """Embeddings of the sentences: mean over the mask, then length 1."""
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    inputs = encode(Tokenizer.from_file(str(folder / "tokenizer.json")), texts, 0, 256)
    states = run(model, inputs, token_types=True).last_hidden_state
    mask = torch.tensor(inputs["attention_mask"]).unsqueeze(-1).float()
    means = (states * mask).sum(1) / mask.sum(1)
    return pack(torch.nn.functional.normalize(means, dim=1))


def save(name: str, data: dict[str, Any]) -> None:
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    text = json.dumps({"versions": versions} | data)
    (HERE / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    sentences = json.loads((HERE / "sentences.json").read_text(encoding="utf-8"))
    save("tiny.json", {"cases": tiny()})
    save("minilm.json", {"embeddings": minilm(Path(sys.argv[1]), sentences)})
