"""Generated survival data with ties, censoring and late entry, and the likelihood of a piecewise constant hazard."""

import torch


def generated(number=60, columns=2, seed=0, late=False):
    """Times rounded so that some are equal, events, covariates, and times of entry."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, columns, generator=generator, dtype=torch.float64)
    slope = torch.linspace(0.8, -0.5, columns, dtype=torch.float64)
    hazard = 0.5 * torch.exp(x @ slope)
    uniform = torch.rand(3, number, generator=generator, dtype=torch.float64)
    latent = -uniform[0].log() / hazard
    censored = 6 * uniform[1]
    event = (latent <= censored).double()
    time = (torch.minimum(latent, censored) * 10).ceil() / 10
    entry = (time * uniform[2] * 0.9) if late else torch.zeros_like(time)
    return time, event, x, entry


def log_likelihood(time, event, entry, breaks, log_hazard):
    """log prod h(t)^d exp(-int_entry^t h), subject by subject, log_hazard (N, J) of each in each interval."""
    total = log_hazard.new_zeros(())
    for i in range(len(time)):
        for j in range(len(breaks) - 1):
            low, high = float(breaks[j]), float(breaks[j + 1])
            spent = max(min(float(time[i]), high) - max(float(entry[i]), low), 0.0)
            total = total - spent * log_hazard[i, j].exp()
            if event[i] and low < float(time[i]) <= high:
                total = total + log_hazard[i, j]
    return total
