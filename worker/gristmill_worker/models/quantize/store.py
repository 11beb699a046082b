"""Adding a form to a model directory: all of it, or nothing."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from gristmill.errors import InputFileError
from gristmill.folders import scratch
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import (
    FILE_NAME,
    Form,
    FormName,
    Manifest,
    ModelRefusedError,
    digest_files,
)
from gristmill_worker.models.quantize.job import Made

_PREFIX = ".quantize-"
_DIGITS = 8  # of a digest, in file names


@contextmanager
def working_folder(model_dir: Path) -> Iterator[Path]:
    """Yield an empty folder inside ``model_dir``, which is removed at the end; raise InputFileError.

    Folders of processes that were killed are removed, too.
    """
    with ExitStack() as stack:
        try:
            with _locked(model_dir):
                for stale in model_dir.glob(f"{_PREFIX}*"):
                    _remove_stale(stale)
                folder = stack.enter_context(scratch(model_dir, _PREFIX))
                stack.callback(os.close, _lock(folder))
        except OSError as error:
            raise InputFileError(
                f"{model_dir} cannot be written ({error.strerror}): use a copy of the model that can be"
            ) from error
        yield folder


def _remove_stale(folder: Path) -> None:
    """Remove a working folder unless its process is alive, which holds a lock on it."""
    try:
        held = _lock(folder)
    except OSError:  # it is in use, or gone
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)


def _lock(folder: Path) -> int:
    """Lock ``folder`` until this process ends or closes what is returned; OSError if another holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_free(manifest: Manifest, name: str, *, force: bool) -> None:
    """Raise :class:`InputFileError` if ``manifest`` can have no form ``name``, or may not have another."""
    try:
        TypeAdapter(FormName).validate_python(name)
    except ValidationError:
        raise InputFileError(f"{name!r} cannot name a form: use a-z, 0-9, '.', '_' and '-'") from None
    if name == manifest.precision:
        raise InputFileError(f"{name!r} is the reference, which other forms are made from: use another name")
    if name in manifest.forms and not force:
        raise InputFileError(f"{manifest.name} has a form {name!r} already: replace it with --force")


def describe(made: Made, name: str, precision: str, folder: Path) -> Form:
    """Give the files in ``folder`` the names that they will have in the model directory; return the form.

    The names carry a digest of the content: a form that is made again never overwrites the files of the old
    one, which is whole until the manifest names the new one.
    """
    digests = digest_files(folder, made.files)
    whole = hashlib.sha256("".join(digests[file] for file in sorted(digests)).encode("ascii")).hexdigest()
    renamed = {file: f"{name}-{whole[:_DIGITS]}{Path(file).suffix}" for file in made.files}
    for old, new in renamed.items():
        (folder / old).rename(folder / new)
    return Form(
        file=renamed[made.file],
        precision=precision,
        sparsity=made.sparsity,
        engines=made.engines,
        method=made.method,
        files={renamed[file]: digest for file, digest in digests.items()},
    )


def add_form(
    model_dir: Path, reference: Manifest, name: str, form: Form, folder: Path, *, force: bool
) -> Manifest:
    """Move the form's files from ``folder`` into ``model_dir``; as the last step name them in the manifest.

    Raises :class:`InputFileError` if the directory holds another model by now, or such a form.
    """
    with _locked(model_dir):
        before = (model_dir / FILE_NAME).read_bytes()
        current = manifests.load(model_dir)
        if current.select(current.precision).digest != reference.digest:
            raise ModelRefusedError(f"{model_dir} was changed meanwhile: nothing was added to it")
        check_free(current, name, force=force)
        changed = Manifest.model_validate(current.model_dump() | {"forms": {**current.forms, name: form}})
        added = [file for file in form.files if file not in current.all_files]
        try:
            for file in form.files:
                (folder / file).replace(model_dir / file)
            changed.write(folder)
            (folder / FILE_NAME).replace(model_dir / FILE_NAME)
        except BaseException:
            if (model_dir / FILE_NAME).read_bytes() == before:
                _remove(model_dir, added)
            raise
        _remove(model_dir, [file for file in current.all_files if file not in changed.all_files])
    return changed


def _remove(model_dir: Path, files: list[str]) -> None:
    for file in files:
        (model_dir / file).unlink(missing_ok=True)


@contextmanager
def _locked(model_dir: Path) -> Iterator[None]:
    """Let one process at a time change the directory."""
    descriptor = os.open(model_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
