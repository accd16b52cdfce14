"""Fine-tune with Hugging Face `Trainer` and learn the regularisation strength in the same run."""

from .callbacks import PriorVarianceCallback
from .config import DEELBoConfig
from .objective import DEELBo
from .priors import GaussianPrior, IsotropicPrior
from .sharing.posteriors import GaussianPosterior
from .sharing.priors import LowRankPrior
from .swag import SWAGCallback
from .trainer import DEELBoTrainer

__version__ = "0.1.0"

__all__ = [
    "DEELBo",
    "DEELBoConfig",
    "DEELBoTrainer",
    "GaussianPosterior",
    "GaussianPrior",
    "IsotropicPrior",
    "LowRankPrior",
    "PriorVarianceCallback",
    "SWAGCallback",
]
