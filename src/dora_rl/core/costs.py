"""What moving an answer costs, learnt from the moves and prefills that a run has seen.

Both ways of continuing elsewhere are lines over the prefix length: `fixed + slope * tokens` seconds, fitted by least
squares of relative errors (a second matters less where many are spent) with old observations fading out. Nothing is
assumed before there is something to learn from.
"""

from dataclasses import dataclass

_MEMORY = 128
"""Observations, of either way, after which one has faded to 1/e."""

_TRY_AGAIN = 128
"""Decisions after which the way never chosen is taken once: a single bad measurement must not last for ever."""


@dataclass(slots=True)
class Line:
    """One quantity over another, from observations of both: here seconds over tokens, or the reverse."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def observe(self, x: float, y: float) -> None:
        self.fade()
        counts = (1.0 + x) ** -2
        self.weight += counts
        self.x += counts * x
        self.y += counts * y
        self.xx += counts * x * x
        self.xy += counts * x * y

    def fade(self) -> None:
        """Something else was observed: all that is known here counts a little less beside what will come."""
        keep = 1.0 - 1.0 / _MEMORY
        self.weight *= keep
        self.x *= keep
        self.y *= keep
        self.xx *= keep
        self.xy *= keep

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

    not_moved: int = _TRY_AGAIN
    """Decisions since the last for moving KV."""
    not_computed: int = _TRY_AGAIN
    """Decisions since the last for computing again."""

    def moved(self, tokens: float, seconds: float) -> None:
        self.moving.observe(tokens, seconds)
        self.computing.fade()

    def computed(self, tokens: float, seconds: float) -> None:
        self.computing.observe(tokens, seconds)
        self.moving.fade()

    def keep_pays(self, tokens: float) -> bool:
        """Whether a prefix of this length is sooner moved than computed again; moved while one of them is unknown."""
        moving, computing = self.moving.at(tokens), self.computing.at(tokens)
        return moving is None or computing is None or moving <= computing

    def choose_keep(self, tokens: float) -> bool:
        """The sooner way, or the one that has not been taken for long."""
        if self.not_moved >= _TRY_AGAIN or self.not_computed >= _TRY_AGAIN:
            return self.not_moved >= _TRY_AGAIN
        return self.keep_pays(tokens)

    def chosen(self, *, keep: bool) -> None:
        self.not_moved = 0 if keep else self.not_moved + 1
        self.not_computed = self.not_computed + 1 if keep else 0

    def of_move(self, tokens: float) -> float:
        """Seconds that an answer stands still when it continues elsewhere, the cheaper way; 0: nothing is known."""
        known = [cost for cost in (self.moving.at(tokens), self.computing.at(tokens)) if cost is not None]
        return min(known, default=0.0)
