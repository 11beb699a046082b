"""Where a model to import comes from: a local folder, an installed package or the Hugging Face hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from gristmill.errors import InputFileError
from gristmill_worker.models.checkpoint import has_weights
from gristmill_worker.models.manifest import MODEL_FILE

LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "LICENCE.md")

_HUB_FILES = (
    "*.json",
    "model*.safetensors",
    "1_Pooling/config.json",
    "vocab.txt",
    "README.md",
    "model.onnx",
    "model.onnx*data",
    *LICENCE_FILES,
)


@dataclass(frozen=True)
class Origin:
    """A folder with a model's files; ``source`` is what the user named, ``licence`` an identifier."""

    folder: Path
    name: str
    source: str
    licence: str

    @property
    def licence_file(self) -> Path | None:
        return next((self.folder / name for name in LICENCE_FILES if (self.folder / name).is_file()), None)


def find_origin(src: str) -> Origin:
    """Find a folder, ``pkg:NAME`` or ``hf:org/name``; raise :class:`InputFileError` if it is not there."""
    kind, _, rest = src.partition(":")
    if kind == "pkg":
        folder, package_licence = _find_package(rest)
        return Origin(
            folder, rest.replace("_", "-"), src, _read_licence(folder) or package_licence or "unknown"
        )
    if kind == "hf":
        folder = _download(rest)
        return Origin(folder, rest.rsplit("/", 1)[-1], src, _read_licence(folder) or "unknown")
    folder = Path(src)
    if not folder.is_dir():
        raise InputFileError(
            f"{src} is no folder: name a folder with a model, pkg:NAME (an installed package) or hf:org/name"
        )
    name = folder.resolve().name
    return Origin(folder, name, name, _read_licence(folder) or "unknown")


def _find_package(name: str) -> tuple[Path, str | None]:
    """Find the package's files without running its code, which may import frameworks that are not here."""
    try:
        spec = util.find_spec(name) if name.isidentifier() else None
    except ValueError:
        spec = None
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise InputFileError(
            f"package {name!r} is not installed for {sys.executable}: install it with pip "
            "(--no-deps avoids frameworks that are not needed to read its files)"
        )
    folders = sorted({folder for location in locations for folder in _model_folders(Path(location))})
    if not folders:
        raise InputFileError(
            f"package {name!r} carries no model: no folder in it has safetensors weights or {MODEL_FILE}"
        )
    if len(folders) > 1:
        listed = ", ".join(str(folder) for folder in folders)
        raise InputFileError(f"package {name!r} carries several models: import one of the folders {listed}")
    return folders[0], _package_licence(name)


def _model_folders(root: Path) -> Iterator[Path]:
    folders = {
        path.parent
        for pattern in ("*.safetensors", "*.safetensors.index.json", MODEL_FILE)
        for path in root.rglob(pattern)
    }
    for folder in folders:
        if (folder / MODEL_FILE).is_file() or ((folder / "config.json").is_file() and has_weights(folder)):
            yield folder


def _package_licence(name: str) -> str | None:
    for distribution in metadata.packages_distributions().get(name, ()):
        fields = metadata.metadata(distribution)
        for key in ("License-Expression", "License"):
            if key in fields and 0 < len(fields[key]) < 80:  # some put the whole text there
                return fields[key].strip().lower()
    return None


def _read_licence(folder: Path) -> str | None:
    """Return ``license`` from the front matter of the model card."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license:[ \t]*(\S.*?)[ \t]*$", front.group(1), re.MULTILINE) if front else None
    return found.group(1).strip("'\"") if found else None


def _download(repository: str) -> Path:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w.-]+", repository):
        raise InputFileError(f"hf:{repository} does not name a model: use hf:org/name")
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - needed for hf: only
        from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415
    except ImportError as error:
        raise InputFileError(
            "hf: needs a package that is missing: pip install 'gristmill[models]'"
        ) from error
    try:
        return Path(snapshot_download(repository, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise InputFileError(
            f"hf:{repository} cannot be downloaded ({type(error).__name__}: {lines[0][:200]}). "
            "Check the name and the network, or copy the model's folder here and import that"
        ) from error
