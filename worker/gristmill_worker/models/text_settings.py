"""How a text model wants to be used, by the files that come with it: tokenizer, length, pooling, labels."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from tokenizers import Tokenizer
from tokenizers.implementations.bert_wordpiece import BertWordPieceTokenizer

from gristmill.errors import InputFileError
from gristmill_worker.models.checkpoint import read_json
from gristmill_worker.models.manifest import TOKENIZER_FILE, ModelRefusedError

Pooling = Literal["mean", "cls", "max"]
Activation = Literal["softmax", "sigmoid"]

_WORDPIECE_TYPES = frozenset({"bert", "distilbert"})
# Their positions start at pad_token_id + 1, so the table has that many rows that no token uses.
_OFFSET_TYPES = frozenset({"roberta", "xlm-roberta", "camembert", "mpnet"})
_DEFAULT_MAX_LENGTH = 512
_LONGEST_SANE = 100_000  # tokenizers without a limit of their own say 10**30
_POOLING_MODES: Mapping[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}


def read_optional(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``, empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def write_tokenizer(source: Path, out: Path, config: Mapping[str, Any]) -> bool:
    """Put ``tokenizer.json`` into ``out``, copied or made from ``vocab.txt``; say whether there was any.

    Raises :class:`InputFileError` for a tokenizer that cannot be read, and for vocabularies of other kinds.
    """
    path, vocabulary = source / TOKENIZER_FILE, source / "vocab.txt"
    if path.is_file():
        shutil.copyfile(path, out / TOKENIZER_FILE)
    elif vocabulary.is_file() and config.get("model_type") in _WORDPIECE_TYPES:
        settings = read_optional(source / "tokenizer_config.json")
        tokenizer = BertWordPieceTokenizer(
            str(vocabulary),
            lowercase=settings.get("do_lower_case", True),
            strip_accents=settings.get("strip_accents"),
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        )
        tokenizer.save(str(out / TOKENIZER_FILE))
    elif other := next(
        (
            name
            for name in ("merges.txt", "sentencepiece.bpe.model", "vocab.txt")
            if (source / name).is_file()
        ),
        None,
    ):
        raise InputFileError(
            f"{source} has {other} and no {TOKENIZER_FILE}: save it with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), which writes that file"
        )
    else:
        return False
    read_tokenizer(out)
    return True


def read_tokenizer(folder: Path) -> Tokenizer:
    """Load ``tokenizer.json``; raise :class:`InputFileError` if it is not valid."""
    try:
        return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    except Exception as error:  # the library raises bare Exceptions
        raise InputFileError(f"{TOKENIZER_FILE} is not valid: {error}") from error


def largest_token_id(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)


def given_pad_token_id(config: Mapping[str, Any]) -> int | None:
    """Return the padding token that the model's configuration names, None if it names none."""
    value = config.get("pad_token_id")
    if value is not None and (type(value) is not int or value < 0):
        raise ModelRefusedError(f"pad_token_id is {value!r} in the model's configuration, not a token")
    return value


def find_pad_token_id(config: Mapping[str, Any], tokenizer: Tokenizer | None) -> int:
    """Return the padding token's ID: the config's, else that of ``[PAD]`` or ``<pad>``, else 0."""
    if (given := given_pad_token_id(config)) is not None:
        return given
    names = ("[PAD]", "<pad>") if tokenizer is not None else ()
    found = (tokenizer.token_to_id(name) for name in names if tokenizer is not None)
    return next((value for value in found if value is not None), 0)


def find_max_length(source: Path, config: Mapping[str, Any], pad_token_id: int) -> int:
    """Return the most tokens (special ones too) that the model takes: the least of what its files say."""
    limits = [
        read_optional(source / "sentence_bert_config.json").get("max_seq_length"),
        read_optional(source / "tokenizer_config.json").get("model_max_length"),
    ]
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int):
        offset = pad_token_id + 1 if config.get("model_type") in _OFFSET_TYPES else 0
        limits.append(positions - offset)
    sane = [limit for limit in limits if isinstance(limit, int) and 0 < limit <= _LONGEST_SANE]
    return min(sane, default=_DEFAULT_MAX_LENGTH)


def find_pooling(source: Path) -> tuple[Pooling, bool]:
    """Return how token states become one embedding, and whether that is scaled to length 1.

    Read from the files of sentence-transformers (``modules.json`` and the pooling module's ``config.json``).
    An encoder without them gets mean pooling and normalisation, the usual choice for comparing by cosine.
    Raises :class:`ModelRefusedError` for modules and pooling modes that would be left out silently.
    """
    modules = _read_modules(source)
    if unknown := [kind for kind in modules if kind not in {"Transformer", "Pooling", "Normalize"}]:
        raise ModelRefusedError(
            f"{source / 'modules.json'} has a module {unknown[0]!r}, which is not supported"
        )
    normalize = "Normalize" in modules if modules else True
    settings = read_optional(source / modules.get("Pooling", "1_Pooling") / "config.json")
    if not settings:
        return "mean", normalize
    # Newer files name the mode, older ones have a flag for each.
    flags = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    chosen = [str(settings["pooling_mode"])] if settings.get("pooling_mode") else flags
    if len(chosen) != 1 or chosen[0] not in _POOLING_MODES:
        raise ModelRefusedError(
            f"pooling {', '.join(chosen) or 'of no kind'} is not supported: use mean, cls or max"
        )
    return _POOLING_MODES[chosen[0]], normalize


def _read_modules(source: Path) -> dict[str, str]:
    """Return the folder of each kind of module, in order."""
    path = source / "modules.json"
    if not path.is_file():
        return {}
    try:
        records = orjson.loads(path.read_bytes())
        return {str(record["type"]).rsplit(".", 1)[-1]: str(record["path"]) for record in records}
    except (orjson.JSONDecodeError, TypeError, KeyError) as error:
        raise InputFileError(f"{path} is not a list of modules: {error!r}") from error


@dataclass(frozen=True)
class Labels:
    names: tuple[str, ...]
    activation: Activation


def find_labels(config: Mapping[str, Any], count: int) -> Labels:
    """Return the names of ``count`` classes and the function that makes scores of their logits.

    Softmax; sigmoid where the config says that several labels may hold, and for a single label. Raises
    :class:`ModelRefusedError` if the config names another number of labels or a regression.
    """
    if config.get("problem_type") == "regression":
        raise ModelRefusedError(
            "problem_type 'regression' is not supported: the score would not be a probability"
        )
    named = config.get("id2label") or {str(index): f"LABEL_{index}" for index in range(count)}
    try:
        names = tuple(str(named[key]) for key in sorted(named, key=int))
    except (TypeError, ValueError) as error:
        raise ModelRefusedError(
            f"id2label in config.json is no table from numbers to names: {error}"
        ) from error
    if len(names) != count or len(set(names)) != count:
        raise ModelRefusedError(f"config.json has {len(set(names))} labels, the model answers {count} logits")
    several = config.get("problem_type") == "multi_label_classification" or count == 1
    return Labels(names, "sigmoid" if several else "softmax")
