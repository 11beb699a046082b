"""Real English that is on every machine, to measure models with."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_SHORTEST: Final = 5  # words of a paragraph

_OWN: Final = (  # for a Python that was packaged without its documentation
    "The mill stands where the river is narrow and the water runs fast.",
    "Grain is brought by cart in the autumn, and by boat when the roads are under water.",
    "A stone that was dressed last week grinds finer flour than one that has run all winter.",
    "Please send the invoice again: the address on the first one was wrong.",
    "What time does the last train leave on Sundays?",
    "The parcel arrived on time, but two of the glasses in it were broken.",
    "Nobody answered the telephone, so I am writing to ask what became of my order.",
    "Her new book is shorter than the others and much the best of them.",
    "After the update the printer prints every page twice, whatever the settings are.",
    "It rained for three days; on the fourth the harvest could begin.",
    "We measured the temperature every hour and found no difference between the two rooms.",
    "The committee meets on the first Tuesday of the month, except in August.",
    "Bread needs flour, water, salt and time, and of these time is the one that cannot be bought.",
    "The password was changed without notice, and since then nobody can sign in.",
    "An old bridge of wood was replaced by one of stone, which the flood of that year carried away.",
    "If the light stays red, switch the machine off, wait a minute and switch it on again.",
    "The children counted eleven horses, four dogs and a goose that followed them home.",
    "Prices rose by two per cent in spring, fell in summer and have not moved since.",
    "Thank you for the quick help: everything works as it should now.",
    "The museum is closed on Mondays, and on other days it opens at ten in the morning.",
    "Which of the two routes is shorter depends on whether the pass is open.",
    "A good summary leaves out what the reader knows and keeps what he will need.",
    "The engine starts in the cold, runs for a minute or so and then stops without any sound.",
    "They agreed on everything except the price, and on that they agreed a week later.",
)


def documentation() -> Iterator[str]:
    """Yield paragraphs of the language reference that Python carries for ``help()``, else a few sentences."""
    try:
        from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte
    except ImportError:
        return iter(_OWN)
    blocks = (" ".join(block.split()) for text in topics.values() for block in re.split(r"\n\s*\n", text))
    return (block for block in dict.fromkeys(blocks) if len(block.split()) >= _SHORTEST)
