"""Losses of instances in a row, each by a batch of one request."""

from dataclasses import dataclass

from loong.core.positions import EMPTY, intersection


@dataclass(slots=True, eq=False)
class LossRow:
    """The losses in a row of instances that were computing a request, or served its KV.

    Each of the `num_losses` came while some of the `suspected` positions were in computation. None of these
    has been computed since. `num_others` counts the losses since the request arrived that are not in the row.
    """

    num_losses: int = 0
    suspected: range = EMPTY
    num_others: int = 0

    def suspect(self, positions: range) -> None:
        """Count the loss of an instance by a batch that was to compute these positions.

        The loss is one in a row only if the batches before it failed at some of the same positions.
        """
        common = intersection(self.suspected, positions)
        if not common:
            self.clear()
        self.num_losses, self.suspected = self.num_losses + 1, common or positions

    def clear(self) -> None:
        """End the row."""
        self.num_others += self.num_losses
        self.num_losses, self.suspected = 0, EMPTY

    def clear_computed(self, num_computed: int) -> None:
        """End the suspicion of positions that were computed since the last loss: all below `num_computed`.

        KV that is computed again clears no others.
        """
        self.suspected = range(max(self.suspected.start, num_computed), self.suspected.stop)
        if not self.suspected:
            self.clear()

    def take_over(self, other: "LossRow") -> None:
        """Continue the row of another choice of the same prompt."""
        self.num_losses, self.suspected = other.num_losses, other.suspected
