"""Mixing densities p(w) of scale mixtures that are known by name, with draws by a generator of the user's."""
