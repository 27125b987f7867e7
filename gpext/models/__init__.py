"""gpytorch models that infer with the rules of `gpext.inference`."""

from gpext.models.latent_gp import LatentGP

__all__ = ["LatentGP"]
