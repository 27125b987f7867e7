"""The algorithms by which EP finds sites that match moments: sweeps, Newton steps, branches, and their order."""
