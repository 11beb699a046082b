"""``model fit-head``: a classifier from a frozen encoder and labelled rows, as one ONNX graph."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score
from threadpoolctl import threadpool_limits

from gristmill.errors import InputFileError
from gristmill_worker.models import inspect_onnx
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.batch_run import Progress, run_texts
from gristmill_worker.models.graph_builder import Linear, save_model
from gristmill_worker.models.importer import CONFIG_FILE
from gristmill_worker.models.labelled import Labelled
from gristmill_worker.models.manifest import MODEL_FILE, Manifest, ModelRefusedError, digest_files
from gristmill_worker.models.pooling_onnx import append_head
from gristmill_worker.models.publish import staged
from gristmill_worker.tasks import embeddings, text_classification

SEED = 20
# Inverse strength of the L2 penalty, for features of length 1. On sentence embeddings accuracy is flat from
# 5 to 100; less of it underfits many-class problems.
REGULARISATION_C = 10.0
_MAX_ITERATIONS = 2000
_CHECKED_ROWS = 64
_TOLERANCE = 1e-4  # of probabilities, graph against scikit-learn

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Confusion:
    """``count`` held-out rows of ``label`` were taken for ``predicted``."""

    label: str
    predicted: str
    count: int


@dataclass(frozen=True)
class Evaluation:
    """How good a head is on rows that it was not fitted on."""

    held_out_rows: int
    accuracy: float
    macro_f1: float
    confusions: tuple[Confusion, ...]  # the most frequent first


@dataclass(frozen=True)
class Report:
    """What was fitted, how good it is and what it cost."""

    labels: tuple[str, ...]
    fitted_rows: int  # by the head that was evaluated; without a test file the final one is fitted on all
    evaluation: Evaluation
    embed_s: float
    fit_s: float


def fit_head(
    encoder: Path,
    rows: Labelled,
    out: Path,
    *,
    test: Labelled | None = None,
    holdout: float = 0.2,
    threads: int = 1,
    force: bool = False,
    progress: Progress | None = None,
) -> tuple[Manifest, Report]:
    """Fit a logistic regression on the encoder's embeddings and write a text-classification model to ``out``.

    Without ``test``, a stratified ``holdout`` share of the rows is kept apart to measure the head, which is
    then fitted again on all rows; with ``test``, all of ``rows`` are fitted and ``test`` is only measured.
    Before ``out`` appears, the finished graph's probabilities are compared with scikit-learn's, through the
    same code that serves requests. Raises :class:`InputFileError` for rows that cannot be used and an ``out``
    that exists, :class:`ModelRefusedError` for an encoder that is not one.
    """
    source = manifests.load(encoder)
    if source.task != "embeddings":
        raise ModelRefusedError(
            f"{encoder} has the task {source.task}: fit-head needs an encoder (embeddings)"
        )
    _check_rows(rows, test, holdout)
    with staged(out, force=force) as folder:
        started = time.monotonic()
        vectors = _embed(encoder, source, [*rows.texts, *(test.texts if test else ())], threads, progress)
        embedded = time.monotonic()
        given, held_out = vectors[: len(rows.texts)], vectors[len(rows.texts) :]
        labels = np.array(rows.labels)
        with threadpool_limits(threads):
            if test is not None:
                model = _Head.fit(given, labels)
                evaluation = _evaluate(model, held_out, test.labels)
            else:
                kept = _stratified(rows.labels, holdout)
                trial = _Head.fit(given[~kept], labels[~kept])
                evaluation = _evaluate(trial, given[kept], labels[kept].tolist())
                model = _Head.fit(given, labels)
        fitted = time.monotonic()
        manifest = _write(encoder, source, model, rows, out.absolute().name, folder)
        _check(folder, manifest, model, rows.texts, given, threads)
        manifest.write(folder)
    fitted_rows = len(rows.texts) - (0 if test else evaluation.held_out_rows)
    return manifest, Report(model.labels, fitted_rows, evaluation, embedded - started, fitted - embedded)


def _check_rows(rows: Labelled, test: Labelled | None, holdout: float) -> None:
    counts = Counter(rows.labels)
    if len(counts) < 2:
        raise InputFileError(
            f"{rows.source} has the single label {rows.labels[0]!r}: at least two are needed"
        )
    if test is not None:
        if unknown := sorted(set(test.labels) - set(counts)):
            raise InputFileError(f"{test.source} has the label {unknown[0]!r}, which {rows.source} has not")
        return
    if not 0.0 < holdout < 1.0:
        raise InputFileError(f"a hold-out share of {holdout} is not possible: use one between 0 and 1")
    label, fewest = min(counts.items(), key=lambda entry: (entry[1], entry[0]))
    if fewest < 2:
        raise InputFileError(
            f"{rows.source} has one row of label {label!r}: each needs two or more, to fit and to measure "
            "(or give a file of its own to measure with --test)"
        )


def _stratified(labels: Sequence[str], share: float) -> NDArray[np.bool_]:
    """Return which rows to hold out: ``share`` of every label, at least one row and never all."""
    random = np.random.default_rng(SEED)
    array = np.array(labels)
    kept = np.zeros(len(array), dtype=np.bool_)
    for label in np.unique(array):
        members = random.permutation(np.flatnonzero(array == label))
        kept[members[: min(max(1, round(share * len(members))), len(members) - 1)]] = True
    return kept


def _embed(
    encoder: Path, manifest: Manifest, texts: Sequence[str], threads: int, progress: Progress | None
) -> Vectors:
    """Return the texts' embeddings, (texts, hidden); equal texts are computed once."""
    unique = list(dict.fromkeys(texts))
    task = embeddings.Embeddings(encoder, manifest, truncate=True)
    bodies = [{"text": text} for text in unique]
    vectors = run_texts(encoder, manifest, task, bodies, task.vectors, threads, progress)
    table = dict(zip(unique, vectors, strict=True))
    return np.stack([table[text] for text in texts])


@dataclass(frozen=True)
class _Head:
    """A fitted logistic regression: softmax(vectors @ linear.weight.T + linear.bias)."""

    labels: tuple[str, ...]
    linear: Linear
    regression: Any  # what scikit-learn fitted, on vectors * scale
    scale: float

    @classmethod
    def fit(cls, vectors: Vectors, labels: NDArray[np.str_]) -> _Head:
        # Bring the features to an average length of 1, so that one C suits every encoder.
        scale = 1.0 / float(np.linalg.norm(vectors, axis=1).mean())
        regression = LogisticRegression(C=REGULARISATION_C, max_iter=_MAX_ITERATIONS)
        regression.fit(vectors * scale, labels)
        weight, bias = regression.coef_ * scale, regression.intercept_
        if len(regression.classes_) == 2:
            # One logit z: the softmax of (-z/2, z/2) is its sigmoid.
            weight, bias = np.concatenate([-weight, weight]) / 2, np.concatenate([-bias, bias]) / 2
        linear = Linear(weight.astype(np.float32), bias.astype(np.float32))
        return cls(tuple(str(label) for label in regression.classes_), linear, regression, scale)

    def probabilities(self, vectors: Vectors) -> NDArray[np.float64]:
        """As scikit-learn computes them, (vectors, labels)."""
        scores: NDArray[np.float64] = self.regression.predict_proba(vectors * self.scale)
        return scores


def _evaluate(head: _Head, vectors: Vectors, labels: Sequence[str]) -> Evaluation:
    predicted = [head.labels[index] for index in head.probabilities(vectors).argmax(axis=1)]
    wrong = Counter(pair for pair in zip(labels, predicted, strict=True) if pair[0] != pair[1])
    ordered = sorted(wrong.items(), key=lambda entry: (-entry[1], entry[0]))
    return Evaluation(
        held_out_rows=len(labels),
        accuracy=1.0 - wrong.total() / len(labels),
        macro_f1=float(f1_score(labels, predicted, average="macro", zero_division=0)),
        confusions=tuple(Confusion(label, taken, count) for (label, taken), count in ordered),
    )


def _write(encoder: Path, source: Manifest, head: _Head, rows: Labelled, name: str, folder: Path) -> Manifest:
    """Write everything but the manifest, and return that."""
    graph = inspect_onnx.read_graph(encoder / source.file)
    append_head(graph, source, head.linear)
    sparsity = inspect_onnx.sparsity(graph)
    files = save_model(graph, folder / MODEL_FILE)
    graph_files = {source.file, *inspect_onnx.external_files(encoder / source.file)}
    for extra in sorted(set(source.files) - graph_files):
        shutil.copyfile(encoder / extra, folder / extra)
        files.append(extra)
    if CONFIG_FILE in files:
        _name_labels(folder / CONFIG_FILE, head.labels)
    changes: dict[str, Any] = {
        "name": name,
        "task": "text-classification",
        "file": MODEL_FILE,
        "sparsity": sparsity,
        "outputs": [{"name": "logits", "dtype": "float32", "shape": ["batch", len(head.labels)]}],
        "pooling": None,
        "normalize": False,
        "labels": head.labels,
        "activation": "softmax",
        "source": f"fit-head on {source.id} with {len(rows.texts)} rows of {rows.source}",
        "files": digest_files(folder, files),
    }
    return Manifest.model_validate(source.model_dump() | changes)


def _name_labels(config: Path, labels: Sequence[str]) -> None:
    data = orjson.loads(config.read_bytes())
    data["id2label"] = {str(index): label for index, label in enumerate(labels)}
    data["label2id"] = {label: index for index, label in enumerate(labels)}
    config.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2) + b"\n")


def _check(
    folder: Path, manifest: Manifest, head: _Head, texts: Sequence[str], vectors: Vectors, threads: int
) -> None:
    """Serve some of the texts from the new graph, padded and batched, and compare with scikit-learn."""
    random = np.random.default_rng(SEED)
    sample = random.permutation(len(texts))[:_CHECKED_ROWS]
    task = text_classification.make(folder, manifest, truncate=True)
    bodies = [{"text": texts[index], "options": {"top_k": None}} for index in sample]
    answers = run_texts(folder, manifest, task, bodies, task.decode, threads)
    expected = head.probabilities(vectors[sample])
    for answer, row in zip(answers, expected, strict=True):
        scores = {entry["label"]: entry["score"] for entry in answer}
        found = np.array([scores[label] for label in head.labels])
        if np.abs(found - row).max() > _TOLERANCE:
            raise ModelRefusedError(
                f"the graph answers {found.max():.6f} where the fitted head answers {row.max():.6f}: "
                "this encoder cannot carry a head (its outputs depend on padding, or on the batch)"
            )
