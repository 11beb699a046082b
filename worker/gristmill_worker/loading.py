"""From settings to an engine that answers as the model does: the best way to run it, or else the next."""

from __future__ import annotations

import os
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
from gristmill_worker.models.self_test import agrees_in_one, ensure_agreement, note_not_in_one
from gristmill_worker.settings import Settings
from gristmill_worker.telemetry import logger


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run."""

    variant: Variant
    sizing: Sizing
    engine: Engine
    whole: bool  # as the settings say; else one compilation for all shapes, which is there soon

    @property
    def manifest(self) -> Manifest:
        """Of the form that was chosen."""
        return self.variant.manifest


def load_model(settings: Settings, *, soon: bool | None = None) -> Loaded:
    """Load the best variant; one that cannot be loaded, or answers otherwise, gives way to the next.

    ``soon``: if need be with one compilation for all shapes, as a whole one is to follow. None: nobody would
    replace it; else that compilation is tried, once, for who may need it later.

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
            return _load(settings, forms, variant, sizing, soon)
        except (InputFileError, EngineError) as error:
            if following is None:
                raise
            logger().warning(
                "engine_passed_over", variant=str(variant), error=str(error), instead=str(following)
            )
    raise AssertionError("choose() gives one variant at least")


def _load(settings: Settings, forms: Manifest, variant: Variant, sizing: Sizing, soon: bool | None) -> Loaded:
    load = partial(variant.load, sizing.shapes, settings.threads, cache_dir=settings.cache_dir)
    several = variant.engine == SHARED_COMPILATION and settings.engine_memory_mb > 0
    of_use = several and soon is not None
    in_one = agrees_in_one(variant, sizing.shapes, settings.threads) if of_use else False
    whole = not (soon and in_one)
    engine = load(memory_mb=settings.engine_memory_mb if whole else 0)
    try:
        ensure_agreement(engine, variant, forms, settings.threads)
    except BaseException:
        engine.close()
        raise
    if in_one is None and os.access(settings.model, os.W_OK):
        try:
            with closing(load(memory_mb=0)) as shared:
                ensure_agreement(shared, variant, forms, settings.threads)
        except (InputFileError, EngineError) as error:
            logger().warning("not_in_one_compilation", variant=str(variant), error=str(error))
            note_not_in_one(variant, sizing.shapes, settings.threads)
    return Loaded(variant, sizing, engine, whole)
