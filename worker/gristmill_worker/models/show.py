"""``gristmill-worker model show``: the forms of a model directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gristmill_worker.engines.choice import Wanted, variants
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.models.verdict import load_verdict


@dataclass(frozen=True, slots=True)
class FormRow:
    """One form, the reference among them."""

    name: str
    file: str
    size_bytes: int  # of its files alone; of the reference with tokenizer and settings
    precision: str
    sparsity: float
    engines: tuple[str, ...]  # () is any
    method: str
    verdicts: tuple[str, ...]  # on this CPU, by variant


def forms_of(model_dir: Path) -> tuple[Manifest, list[FormRow]]:
    """Return the manifest and a row a form; raise :class:`~.manifest.ModelRefusedError`."""
    manifest = manifests.load(model_dir)
    rows = []
    for name in manifest.form_names:
        form = manifest.forms.get(name)
        it = form or manifest
        if name in manifest.damaged:
            verdicts = [f"damaged: {manifest.damaged[name]}"]
        else:
            verdicts = _verdicts(model_dir, manifest, name)
        paths = [model_dir / file for file in it.files]
        rows.append(
            FormRow(
                name=name,
                file=it.file,
                size_bytes=sum(path.stat().st_size for path in paths if path.exists()),
                precision=it.precision,
                sparsity=it.sparsity,
                engines=it.engines,
                method="the imported model" if form is None else form.method,
                verdicts=tuple(verdicts),
            )
        )
    return manifest, rows


def _verdicts(model_dir: Path, manifest: Manifest, name: str) -> list[str]:
    found = []
    for variant in variants(model_dir, manifest, Wanted(form=name)):
        verdict = load_verdict(model_dir, variant.run_key())
        if verdict is not None:
            outcome = "passed" if verdict.passed else f"failed ({'; '.join(verdict.problems)})"
            found.append(f"{variant.engine} {variant.precision}: {outcome}")
    return found
