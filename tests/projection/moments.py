"""What closed marginals and those of a hundred draws miss, against many projected draws."""

from __future__ import annotations

from torch import Tensor


def errors(law, draws: Tensor) -> tuple[float, float, float]:
    """Errors of a law's marginals against draws (count, n): of means and of variances, relative, and their CRPS."""
    laws, unit = law.marginals, draws.var(0).mean()
    gap = (laws.mean - draws.mean(0)).square().mean() / unit
    spread = (laws.variance - draws.var(0)).square().mean() / unit.square()
    return float(gap.sqrt()), float(spread.sqrt()), float(laws.crps(draws).sum(-1).mean())


def check_better(law, drawn, draws: Tensor, spread: float) -> None:
    """Check that a law is as good as another from a hundred draws, or nearly exact.

    Args:
        law: With closed marginals.
        drawn: Its peer.
        draws: 20 000 projected draws, whose own error is 0.007, (20000, n).
        spread: Error of the variances that counts as nearly exact.
    """
    ours, theirs = errors(law, draws), errors(drawn, draws)
    assert ours[0] <= max(theirs[0], 0.015)
    assert ours[1] <= max(theirs[1], spread)
    assert ours[2] <= theirs[2] * 1.001
