"""How many instances each version gets: Algorithm 1's arithmetic, as pure functions of numbers."""

from collections.abc import Mapping

from dora_rl.core.types import Version


def partition(work: Mapping[Version, int], instances: int, *, newest: Version) -> dict[Version, int]:
    """Whole instances by version, in proportion to the answers that each has left; they sum to `instances`.

    Every version with work has at least one while there are enough; otherwise the newest has one, then those whose
    deadline is earliest, and the others get none. Largest remainders round up; the newest wins ties. With no work at
    all nobody gets any.
    """
    wanting = sorted(version for version, answers in work.items() if answers > 0)
    if not wanting or instances <= 0:
        return {}
    if len(wanting) >= instances:
        first = [newest] if newest in wanting else []
        rest = [version for version in wanting if version != newest]
        return dict.fromkeys((first + rest)[:instances], 1)
    total = sum(work[version] for version in wanting)
    exact = {version: instances * work[version] / total for version in wanting}
    counts = {version: max(1, int(exact[version])) for version in wanting}
    by_remainder = sorted(wanting, key=lambda v: (exact[v] - counts[v], v == newest, v))
    while sum(counts.values()) < instances:
        counts[by_remainder.pop()] += 1
    while sum(counts.values()) > instances:  # floors of one took more than their share
        counts[max((v for v in wanting if counts[v] > 1), key=lambda v: (counts[v] - exact[v], v != newest))] -= 1
    return counts
