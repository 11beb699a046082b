"""From settings to an engine that answers as the model does: the best way to run it, or else the next."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import measured_speed
from gristmill_worker.batching.sizing import Sizing
from gristmill_worker.engines.base import SHARED_COMPILATION, Engine, EngineError
from gristmill_worker.engines.choice import choose
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.models.self_test import agrees_in_one, ensure_agreement
from gristmill_worker.settings import Settings
from gristmill_worker.telemetry import logger


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run."""

    variant: Variant
    sizing: Sizing
    engine: Engine
    whole: bool  # as the settings say; else one compilation for all shapes, see Settings.soon

    @property
    def manifest(self) -> Manifest:
        """Of the form that was chosen."""
        return self.variant.manifest


def load_model(settings: Settings) -> Loaded:
    """Load the best variant; one that cannot be loaded, or answers otherwise, gives way to the next.

    What the settings name is never replaced by something else. Raises InputFileError (of the last one tried).
    """
    forms = manifests.load(settings.model)
    choice = choose(
        settings.model,
        forms,
        settings.wanted,
        measured=partial(measured_speed, threads=settings.threads),
    )
    logger().info(
        "engine_chosen", variant=str(choice.variant), reason=choice.reason, passed_over=choice.rejected
    )
    for variant, following in zip(choice.ranked, [*choice.ranked[1:], None], strict=True):
        sizing = Sizing.of(settings, variant)  # what is wrong with the settings is so for every variant
        try:
            return _load(settings, forms, variant, sizing)
        except (InputFileError, EngineError) as error:
            if following is None:
                raise
            logger().warning(
                "engine_passed_over", variant=str(variant), error=str(error), instead=str(following)
            )
    raise AssertionError("choose() gives one variant at least")


def _load(settings: Settings, forms: Manifest, variant: Variant, sizing: Sizing) -> Loaded:
    load = partial(variant.load, sizing.shapes, settings.threads, cache_dir=settings.cache_dir)
    in_one = agrees_in_one(variant, sizing.shapes, settings.threads)
    soon = settings.soon and in_one and settings.engine_memory_mb > 0
    engine = load(memory_mb=0 if soon else settings.engine_memory_mb)
    try:
        ensure_agreement(engine, variant, forms, settings.threads)
    except BaseException:
        engine.close()
        raise
    if not in_one and variant.engine == SHARED_COMPILATION and os.access(settings.model, os.W_OK):
        _try_in_one(load, variant, forms, settings.threads)
    return Loaded(variant, sizing, engine, whole=not soon)


def _try_in_one(load: Callable[..., Engine], variant: Variant, forms: Manifest, threads: int) -> None:
    """Try all shapes in one compilation, so that a later worker may serve with it; see Settings.soon."""
    try:
        with closing(load(memory_mb=0)) as engine:
            ensure_agreement(engine, variant, forms, threads)
    except (InputFileError, EngineError) as error:
        logger().warning("not_in_one_compilation", variant=str(variant), error=str(error))
