"""Rules that turn current marginals into Gaussian sites, and their drivers."""

from gpext.inference.cavi import CAVI, augmented_sites, require_augmentation
from gpext.inference.result import InferenceResult, Status

__all__ = ["CAVI", "InferenceResult", "Status", "augmented_sites", "require_augmentation"]
