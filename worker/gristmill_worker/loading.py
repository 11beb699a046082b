"""From settings to an engine that answers as the model does: the best way to run it, or else the next."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gristmill.errors import InputFileError
from gristmill_worker.batching.costs import measured_speed
from gristmill_worker.batching.sizing import Sizing
from gristmill_worker.engines.base import Engine, EngineError
from gristmill_worker.engines.choice import choose
from gristmill_worker.engines.variant import Variant
from gristmill_worker.models import manifest as manifests
from gristmill_worker.models.manifest import Manifest
from gristmill_worker.models.self_test import ensure_agreement
from gristmill_worker.settings import Settings
from gristmill_worker.telemetry import logger


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run."""

    variant: Variant
    sizing: Sizing
    engine: Engine

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
    engine = variant.load(
        sizing.shapes, settings.threads, memory_mb=settings.engine_memory_mb, cache_dir=settings.cache_dir
    )
    try:
        ensure_agreement(engine, variant, forms, settings.threads)
    except BaseException:
        engine.close()
        raise
    return Loaded(variant, sizing, engine)
