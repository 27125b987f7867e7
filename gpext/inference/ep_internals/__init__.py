"""How EP finds sites that match moments: sweeps, Newton steps, branches, the double loop, and their order."""
