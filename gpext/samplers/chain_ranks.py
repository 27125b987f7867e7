"""The processes that run a sampler: chains of their own each, or the same chains with products that they share out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpext.distributions import InversionError
from gpext.kernels.keops import sharing_ranks
from gpext.parallel import Ranks, interrupts
from gpext.progress import Progress
from gpext.samplers.status import SamplingStatus


class BreakdownError(ArithmeticError):
    """A step came upon a matrix that has no factor."""


@dataclass(frozen=True)
class ChainRanks:
    """The processes of a run.

    Attributes:
        spread: over whom chains are spread; one rank where all run the same.
        everyone: all of them, of whom the first alone writes and shows progress.
    """

    spread: Ranks
    everyone: Ranks

    @classmethod
    def of(cls, ranks: Ranks | None, model: torch.nn.Module | None) -> ChainRanks:
        """Return the processes that run a sampler of a model.

        Raises:
            ValueError: chains are to be spread, and products are shared out.
        """
        ranks = Ranks.alone() if ranks is None else ranks
        sharing = Ranks.alone() if model is None else sharing_ranks(model)
        if ranks.size == 1:
            return cls(Ranks.alone(), sharing)
        if sharing.size > 1:
            raise ValueError(
                "expected either chains spread over ranks or products of kernels shared out among them; got `ranks` "
                "and a model to which share_products was applied. Leave one of them out."
            )
        return cls(ranks, ranks)

    def check(self, number: int, what: str) -> None:
        """Refuse fewer items to spread than ranks.

        Raises:
            ValueError: there are.
        """
        if number < self.spread.size:
            raise ValueError(
                f"expected a chain for each of {self.spread.size} ranks at least; got {number} {what}. Start fewer "
                "ranks, or ask for more chains."
            )

    def agree_on(self, generator: torch.Generator) -> torch.Generator:
        """Return the generator, on every rank in the state of the first."""
        generator.set_state(self.everyone.gather(generator.get_state())[0])
        return generator

    def drive(
        self, steps: Iterable[None], total: int, *, name: str, progress: bool
    ) -> tuple[SamplingStatus | None, str]:
        """Take steps until they end, or for what they come to; return the status, None if they ended, and a note.

        Args:
            steps: each the same on all ranks, and whole or undone wherever it is interrupted.
            total: their number.
            name: of the sampler.
            progress: show a bar on a terminal, or lines in the log "gpext".
        """
        bar = Progress(name, total, shown=progress and self.everyone.rank == 0)
        with bar, interrupts(self.everyone) as interrupted:
            try:
                for _ in steps:
                    bar.update()
                    if self.everyone.any(interrupted()):
                        return SamplingStatus.INTERRUPTED, ""
            except KeyboardInterrupt:
                if self.everyone.size > 1:  # pressed twice; the others may be in another step
                    raise
                return SamplingStatus.INTERRUPTED, ""
            except OSError as error:
                return SamplingStatus.NOT_WRITTEN, str(error)
            except InversionError as error:
                return SamplingStatus.NOT_INVERTED, str(error)
            except BreakdownError as error:
                return SamplingStatus.BREAKDOWN, str(error)
            except FloatingPointError as error:
                return SamplingStatus.DIVERGED, str(error)
        return None, ""
