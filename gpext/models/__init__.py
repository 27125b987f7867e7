"""gpytorch models that infer with the rules of `gpext.inference`."""

from gpext.models.comparison import ComparedRule, Comparison, compare_inference
from gpext.models.effects import effect
from gpext.models.exportable import ExportablePrediction, exportable
from gpext.models.latent_gp import LatentGP
from gpext.models.regional import compact_subset, predict_by_regions

__all__ = [
    "ComparedRule",
    "Comparison",
    "ExportablePrediction",
    "LatentGP",
    "compact_subset",
    "compare_inference",
    "effect",
    "exportable",
    "predict_by_regions",
]
