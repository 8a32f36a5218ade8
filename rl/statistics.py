"""How sure a measured share is: confidence intervals for proportions and for the difference of two."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from scipy.stats import binomtest


@dataclass(frozen=True)
class Difference:
    """How much a share changed, with its interval and the exact p-value of no change.

    Example: `Difference(0.35, 0.27, 0.43, 1e-9)`: 35 percentage points up, 27 to 43 at the chosen confidence.
    """

    value: float
    low: float
    high: float
    p_value: float


def proportion_interval(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of a proportion.

    Raises ValueError when n is 0 or successes is not between 0 and n.
    Source: Wilson, J. Am. Stat. Assoc. 22 (1927); it stays inside [0, 1] and is sensible at 0 and n successes.
    """
    if n < 1:
        raise ValueError(f"an interval needs at least one episode, got {n}: nothing was graded")
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and {n}, got {successes}")
    interval = binomtest(successes, n).proportion_ci(confidence_level=confidence, method="wilson")
    return float(interval.low), float(interval.high)


def paired_difference(before: Sequence[bool | None], after: Sequence[bool | None], confidence: float = 0.95) -> Difference:
    """Return how much the share of successes changed between two evaluations of the same tasks.

    before, after: outcome by task, in one order; a pair in which either is None (the episode failed) is left out.
    The same tasks are hard both times; pairing takes that out of the interval.
    Raises ValueError on unequal lengths, or when no pair is left.
    Source: Newcombe, Statistics in Medicine 17 (1998) 2635-2650, method 10; p-value: McNemar's exact test.
    """
    if len(before) != len(after):
        raise ValueError(f"paired outcomes must be of the same tasks, got {len(before)} before and {len(after)} after")
    pairs = [(bool(old), bool(new)) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    if not pairs:
        raise ValueError("a difference needs at least one task that was graded before and after, got none")
    both, lost, gained, neither = (pairs.count(pair) for pair in ((True, True), (True, False), (False, True), (False, False)))
    n = len(pairs)
    old_share, new_share = (both + lost) / n, (both + gained) / n
    old_low, old_high = proportion_interval(both + lost, n, confidence)
    new_low, new_high = proportion_interval(both + gained, n, confidence)
    correlation = _corrected_correlation(both, lost, gained, neither)

    def spread(up: float, down: float) -> float:
        return sqrt(max(up**2 - 2 * correlation * up * down + down**2, 0.0))

    value = new_share - old_share
    low = value - spread(new_share - new_low, old_high - old_share)
    high = value + spread(new_high - new_share, old_share - old_low)
    changed = lost + gained
    p_value = float(binomtest(gained, changed).pvalue) if changed else 1.0
    return Difference(value, low, high, p_value)


def _corrected_correlation(both: int, lost: int, gained: int, neither: int) -> float:
    """Return the phi coefficient of the two outcomes; a positive one is shrunk by Newcombe's continuity correction."""
    margins = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    if not margins:
        return 0.0
    n = both + lost + gained + neither
    covariance = both * neither - lost * gained
    if covariance > 0:
        covariance = max(covariance - n / 2, 0)
    return covariance / sqrt(margins)
