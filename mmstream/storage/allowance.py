"""Storage: what may happen to a share of all requests, and not more often."""

from __future__ import annotations

__all__ = ["Allowance"]


class Allowance:
    """A share of what is earned may be spent, and after a pause a burst of it.

    Args:
        share: Of what is earned.
        burst: The most that is saved up. It is there at the start.

    Examples:
        >>> from mmstream.storage.allowance import Allowance
        >>> hedges = Allowance(share=0.5, burst=1)
        >>> hedges.spend(1), hedges.spend(1)
        (True, False)
        >>> hedges.earn(2)
        >>> hedges.spend(1)
        True
    """

    def __init__(self, share: float, burst: float) -> None:
        self._share, self._burst = share, burst
        self._saved = burst

    def earn(self, amount: float) -> None:
        """Note what happened, of which a share is allowed."""
        self._saved = min(self._burst, self._saved + self._share * amount)

    def has(self, amount: float) -> bool:
        """Tell whether so much may be spent. What is over the burst may be spent as a debt."""
        return self._saved > 0 and self._saved >= min(amount, self._burst)

    def spend(self, amount: float) -> bool:
        """Spend, if that is allowed. Return whether it was."""
        if not self.has(amount):
            return False
        self._saved -= amount
        return True
