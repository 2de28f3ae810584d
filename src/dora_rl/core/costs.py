"""What moving an answer costs, learnt from the moves and prefills that a run has seen.

Both ways of continuing elsewhere are lines over the prefix length: `fixed + slope * tokens` seconds, fitted by least
squares of relative errors (a second matters less where many are spent) with old observations fading out. Nothing is
assumed before there is something to learn from.
"""

from dataclasses import dataclass

_MEMORY = 64
"""Observations after which one has faded to 1/e."""


@dataclass(slots=True)
class Line:
    """One quantity over another, from observations of both: here seconds over tokens, or the reverse."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, x: float, y: float) -> None:
        keep, counts = 1.0 - 1.0 / _MEMORY, (1.0 + x) ** -2
        self.weight = self.weight * keep + counts
        self.x = self.x * keep + counts * x
        self.y = self.y * keep + counts * y
        self.xx = self.xx * keep + counts * x * x
        self.xy = self.xy * keep + counts * x * y

    def at(self, x: float) -> float | None:
        """The expected y, never negative; None before the first observation."""
        if not self.weight:
            return None
        spread = self.weight * self.xx - self.x * self.x
        # One length alone tells a level, not a slope; nor does a slope that points down.
        slope = (
            max(0.0, (self.weight * self.xy - self.x * self.y) / spread)
            if spread > 1e-9 * self.weight * self.xx
            else 0.0
        )
        return max(0.0, (self.y - slope * self.x) / self.weight + slope * x)


@dataclass(slots=True)
class Costs:
    moving: Line
    """Keeping KV, and the first token of the next segment that loads it."""
    computing: Line
    """The first token of a next segment that computes its prefix again."""

    def keep_pays(self, tokens: float) -> bool:
        """Whether a prefix of this length is sooner moved than computed again; unknown ones are tried."""
        moving, computing = self.moving.at(tokens), self.computing.at(tokens)
        return moving is None or computing is None or moving <= computing

    def of_move(self, tokens: float) -> float:
        """Seconds that an answer stands still when it continues elsewhere, the cheaper way; 0: nothing is known."""
        known = [cost for cost in (self.moving.at(tokens), self.computing.at(tokens)) if cost is not None]
        return min(known, default=0.0)
