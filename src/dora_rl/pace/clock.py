"""Makes work that takes less time last as long as the law says, and counts what took longer."""

import time

MAX_OVERRUNS = 0.01
"""Share of overrunning pieces above which a run says more of this machine than of the law."""


class Pacer:
    """One per process that works; for one thing after the other.

    Time that one piece of work loses to bookkeeping before the next begins is made up for, so that pieces which follow
    one another last together what the law says.
    """

    def __init__(self) -> None:
        self.pieces = 0
        self.overruns = 0
        """Pieces of work that took longer than the law says: their time is this machine's, not the law's."""
        self._due = 0.0

    def stretch(self, seconds: float, *, began: float) -> None:
        """Return when work that began at `began` (time.monotonic) has lasted `seconds`, at once if it already has.

        Work to which the law gives no time at all is none of its business.
        """
        if not seconds:
            return
        continues = 0.0 <= began - self._due < 0.5 * seconds
        due = (self._due if continues else began) + seconds
        left = due - time.monotonic()
        self.pieces += 1
        if left < 0.0:
            self.overruns += 1
            self._due = due - left
        else:
            self._due = due
            time.sleep(left)
