"""The densities that samplers draw from."""
