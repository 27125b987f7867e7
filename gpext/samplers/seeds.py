"""Generators from generators: some algorithms want one on the CPU whatever device a chain is on."""

from __future__ import annotations

import torch


def child_on_cpu(generator: torch.Generator) -> torch.Generator:
    """Return a generator on the CPU, seeded from another on any device."""
    seed = int(torch.randint(2**62, (), device=generator.device, generator=generator))
    return torch.Generator().manual_seed(seed)
