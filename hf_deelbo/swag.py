"""SWAG (Maddox et al. 2019): a Gaussian fitted to the weights that training passes through.

It turns a run on a source task into an informative prior for others: PTYL's prior, `priors.LowRankPrior`. When the
weights are collected is the matter of `callbacks.SWAGCallback`.
"""

import os

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from .sharing.files import whole_file
from .sharing.hub import by_first_word
from .sharing.priors import LowRankPrior
from .weights.blocks import Tensors


class SWAGMoments:
    """The mean, the variances and the last K deviations of named weights, collected one set w_n at a time.

        mean_n = mean_{n-1} + (w_n - mean_{n-1}) / n
        m2_n   = m2_{n-1} + (1 - 1/n) (w_n - mean_{n-1})^2,    S_diag = m2_n / n
        Q      = [ w_{n-K+1} - mean_{n-K+1}, ..., w_n - mean_n ]

    S_diag is the mean of the squares minus the square of the mean, in a form that does not cancel and is never
    negative. Each deviation is from the mean of its time, as SWAG has it; the very first is zero. All is held in
    float32, or float64 for such weights, and takes K + 2 times the memory of the weights.

    Args:
        num_deviations: K >= 2.

    Example:
        >>> moments = SWAGMoments(num_deviations=2)
        >>> for number in (1.0, 3.0, 5.0):
        ...     moments.collect({"w": torch.tensor([number])})
        >>> prior = moments.to_prior()
        >>> prior.mean["w"], prior.diagonal["w"], prior.deviations["w"].flatten()
        (tensor([3.]), tensor([2.6667]), tensor([1., 2.]))
    """

    def __init__(self, num_deviations: int = 5):
        if not isinstance(num_deviations, int) or num_deviations < 2:
            raise ValueError(
                f"num_deviations: must be a whole number >= 2, got {num_deviations!r}; Sigma_p divides by 2K - 2."
            )
        self.num_deviations = num_deviations
        self.num_collected = 0
        self.mean: dict[str, torch.Tensor] = {}
        self._m2: dict[str, torch.Tensor] = {}
        self._deviations: dict[str, torch.Tensor] = {}  # a ring: that of w_n is in row (n - 1) mod K

    @torch.no_grad()
    def collect(self, weights: Tensors) -> None:
        """Take one more set of weights into account; the same names and shapes each time."""
        if self.num_collected == 0:
            self._allocate(weights)
        self._check_names(weights)
        row = self.num_collected % self.num_deviations
        self.num_collected += 1
        n = self.num_collected
        for name, weight in weights.items():
            mean = self.mean[name]
            step = weight - mean
            self._m2[name].addcmul_(step, step, value=1 - 1 / n)
            mean.add_(step, alpha=1 / n)
            torch.sub(weight, mean, out=self._deviations[name][row])

    @torch.no_grad()
    def copy_mean_to(self, weights: Tensors) -> None:
        """Make these weights the mean, in place."""
        self._check_names(weights)
        for name, weight in weights.items():
            weight.copy_(self.mean[name])

    def to_prior(self, eps: float = 0.1) -> LowRankPrior:
        """PTYL's prior: N(mean, lambda Sigma_p) with Sigma_p = S_diag/2 + eps I + Q Q^T / (2K - 2).

        It holds copies: collecting may go on.
        """
        if self.num_collected < self.num_deviations:
            raise ValueError(
                f"num_deviations: a prior with K = {self.num_deviations} needs as many collections of the weights, "
                f"but there were {self.num_collected}. Train longer, collect more often (`collect_every`) or sooner "
                "(`start`), or ask for fewer deviations."
            )
        oldest = self.num_collected % self.num_deviations
        return LowRankPrior(
            mean={name: tensor.clone() for name, tensor in self.mean.items()},
            diagonal={name: tensor / self.num_collected for name, tensor in self._m2.items()},
            deviations={name: tensor.roll(-oldest, dims=0) for name, tensor in self._deviations.items()},
            eps=eps,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`num_collected`, and `mean.<name>`, `m2.<name>` and `deviations.<name>`."""
        parts = {"mean": self.mean, "m2": self._m2, "deviations": self._deviations}
        tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        return {"num_collected": torch.tensor(self.num_collected), **tensors}

    def load_state_dict(self, state: Tensors) -> None:
        """The inverse of `state_dict`; the tensors are taken over, not copied."""
        parts = by_first_word(state, ("mean", "m2", "deviations"))
        ranks = {len(tensor) for tensor in parts["deviations"].values()}
        if ranks - {self.num_deviations}:
            raise ValueError(
                f"num_deviations: the saved moments have K = {ranks.pop()}, this is for K = {self.num_deviations}. "
                "Use the same number as in the saved run."
            )
        self.num_collected = int(state["num_collected"])
        self.mean, self._m2, self._deviations = parts["mean"], parts["m2"], parts["deviations"]

    def save(self, path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
        """Write `state_dict` and `metadata` to a safetensors file, which is there as a whole or not at all."""
        with whole_file(path) as new:
            save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, new, metadata)

    def load(self, path: str | os.PathLike, device: str | torch.device = "cpu") -> dict[str, str]:
        """Read what `save` wrote, and return its metadata."""
        self.load_state_dict(load_file(path, device=str(device)))
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}

    def _check_names(self, weights: Tensors) -> None:
        ours, theirs = ({name: tensor.shape for name, tensor in part.items()} for part in (self.mean, weights))
        if ours != theirs:
            different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise ValueError(
                f"weights: {len(different)} of their names or shapes are not those of the {self.num_collected} "
                f"collections so far, such as {different[0]!r}. The trainable backbone must stay the same."
            )

    def _allocate(self, weights: Tensors) -> None:
        for name, weight in weights.items():
            zeros = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            self.mean[name], self._m2[name] = zeros, zeros.clone()
            self._deviations[name] = zeros.new_zeros((self.num_deviations, *zeros.shape))
