"""Scale-mixture identities: phi, its moments, and the conditionally conjugate likelihood built on it [GWO20]."""

from gpext.augmentations.augmentation import Augmentation
from gpext.augmentations.automatic import AutomaticRadial
from gpext.augmentations.complete_monotonicity import check_completely_monotone
from gpext.augmentations.exponential import ExponentialRadial
from gpext.augmentations.matern32 import Matern32Radial
from gpext.augmentations.power import PowerRadial
from gpext.augmentations.radial import RadialFunction
from gpext.augmentations.sech import SechRadial
from gpext.augmentations.student_t import StudentTRadial

__all__ = [
    "Augmentation",
    "AutomaticRadial",
    "ExponentialRadial",
    "Matern32Radial",
    "PowerRadial",
    "RadialFunction",
    "SechRadial",
    "StudentTRadial",
    "check_completely_monotone",
]
