"""BASE_URL=: servers that already run, as arms.

``BASE_URL=http://host:port`` measures one deployment; ``BASE_URL=base=http://a:1,mtp=http://b:2`` compares
deployments, the first being the baseline. What differs between them is read from what they report.
"""

from __future__ import annotations

import re

from kit.cards import ArmCard, Experiment, ModelCard
from kit.errors import KitError

_ARM = re.compile(r"^(?:(?P<name>[a-z0-9][a-z0-9.+-]*)=)?(?P<url>https?://\S+)$")


def parse_base_url(text: str) -> dict[str, str]:
    """``{arm: url}`` of BASE_URL=. Raises KitError saying the form."""
    arms: dict[str, str] = {}
    for part in text.split(","):
        match = _ARM.match(part.strip())
        if match is None:
            raise KitError(
                f"BASE_URL={text}: {part.strip()!r} is neither http://HOST:PORT nor NAME=http://HOST:PORT "
                "(NAME: lower-case letters, digits, . + -)"
            )
        name = match["name"] or "attached"
        if name in arms:
            raise KitError(f"BASE_URL={text}: two servers are called {name!r}; give each a NAME= of its own")
        arms[name] = match["url"]
    return arms


def attached_card(card: ModelCard, base_url: str) -> ModelCard:
    """The card with one closed-loop experiment whose arms are the attached servers.

    Weights and other experiments are left out: the kit did not start these servers. The result is not a stand-in unless
    the card says so, since only the card's author knows what the servers run.
    """
    arms = parse_base_url(base_url)
    common = {k: v for e in card.experiments.values() if e.engine == "openai" for k, v in e.settings.items()}
    experiment = Experiment(
        engine="openai",
        notebook="concurrency",
        arms={name: ArmCard(label=name, settings={"base_url": url}) for name, url in arms.items()},
        settings=common,
        baseline=next(iter(arms)),
    )
    return card.model_copy(update={"experiments": {"concurrency": experiment}})
