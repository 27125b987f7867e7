"""gpytorch models that infer with the rules of `gpext.inference`."""

from gpext.models.comparison import ComparedRule, Comparison, compare_inference
from gpext.models.effects import effect
from gpext.models.exportable import ExportablePrediction, exportable
from gpext.models.latent_gp import LatentGP

__all__ = [
    "ComparedRule",
    "Comparison",
    "ExportablePrediction",
    "LatentGP",
    "compare_inference",
    "effect",
    "exportable",
]
