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
        selected = manifest.select(name)
        files = manifest.files if form is None else form.files
        rows.append(
            FormRow(
                name=name,
                file=selected.file,
                size_bytes=sum((model_dir / file).stat().st_size for file in files),
                precision=selected.precision,
                sparsity=selected.sparsity,
                engines=selected.engines,
                method="the imported model" if form is None else form.method,
                verdicts=tuple(_verdicts(model_dir, manifest, name)),
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
