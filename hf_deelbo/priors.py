"""Gaussian priors over named parameters, p(w) = N(mu_p, v Sigma_p); their variance v (lambda or tau) is learned.

| prior   | mu_p             | Sigma_p                                | class                   |
|---------|------------------|----------------------------------------|-------------------------|
| L2-zero | 0                | I                                      | `IsotropicPrior.l2_zero`|
| L2-SP   | pretrained value | I                                      | `IsotropicPrior.l2_sp`  |
| PTYL    | pretrained value | S_diag/2 + eps I + Q Q^T / (2K - 2)    | `LowRankGaussian`          |

No D x D matrix is ever formed. Sums over D terms are taken pairwise within a block of them, over the blocks in
float64, and over the processes if the parameters are sharded.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch

from .objective import gaussian_kl, optimal_variance
from .weights.blocks import Block, Piece, Tensors, blocks_of, local, on_all_cores, squared_distance, subtract, total
from .weights.shards import copy_whole_, gathered, shard_like


class PriorKind(NamedTuple):
    """What people read of a prior that they can choose by its name.

    Attributes:
        label: in tables.
        description: in cards.
        is_saved: whether it is loaded from somewhere.
    """

    label: str
    description: str
    is_saved: bool = False


PRIORS = {
    "l2-zero": PriorKind("L2-zero", "L2-zero: around zero"),
    "l2-sp": PriorKind("L2-SP", "L2-SP: around the pretrained weights"),
    "ptyl": PriorKind("PTYL", "PTYL: around the pretrained weights, with a covariance from the source task", True),
    "posterior": PriorKind("posterior", "the posterior of an earlier task", True),
}
# what is found of Q once takes matrices of K x K
MOST_DEVIATIONS = 1000
SAVED_PRIORS = tuple(name for name, kind in PRIORS.items() if kind.is_saved)

# Sigma_p^-1 (w - mu_p) of each piece of a block
PrecisionProduct = Callable[[Block], Iterable[torch.Tensor]]


def wide_dtype(device: torch.device) -> torch.dtype:
    """Where sums over millions of terms are held: float64, or float32 on Apple's GPUs, which have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class GaussianPrior(ABC):
    """N(mu_p, v Sigma_p) over named parameters.

    In a prior that is `grouped`, each group of parameters has a variance v_g of its own; then `group_sizes`,
    `trace_inverse`, `log_det` and what depends on v, sigma or distances are vectors, a number for each group.

    Attributes:
        shapes: the shape of each parameter, by name.
        num_parameters: D, how many numbers they are together.
        group_sizes: D, or how many numbers are in each group.
        blocks: the pieces in which passes over them are made.
        trace_inverse: tr(Sigma_p^-1).
        log_det: log det Sigma_p.
        separable: whether Sigma_p ties no two parameters, so that the prior can be `grouped`.
    """

    separable = False

    def __init__(self, parameters: Tensors, trace_inverse: torch.Tensor, log_det: torch.Tensor):
        self.shapes = {name: tensor.shape for name, tensor in parameters.items()}
        self.num_parameters = sum(shape.numel() for shape in self.shapes.values())
        self.group_sizes: int | torch.Tensor = self.num_parameters
        self.blocks = blocks_of(parameters)
        self.trace_inverse = trace_inverse
        self.log_det = log_det

    def grouped(self, groups: Sequence[Sequence[str]], parameters: Tensors) -> "GaussianPrior":
        """The same prior with a variance for each of these groups of names; itself if there is but one."""
        if len(groups) > 1:
            raise ValueError(f"groups: the prior {self.config['kind']!r} ties all parameters, so they are one group.")
        return self

    @abstractmethod
    def mahalanobis(self, w: Tensors) -> torch.Tensor:
        """(mu_p - w)^T Sigma_p^-1 (mu_p - w)."""

    @abstractmethod
    def precision_product(self, w: Tensors) -> PrecisionProduct:
        """Sigma_p^-1 (w - mu_p), half the gradient of the Mahalanobis distance, as a function of the block."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Its `kind`, and what its tensors do not tell; `prior_from` takes it back."""

    @abstractmethod
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors this prior is made of, under names that say what they are."""

    def load_state_dict(self, state: Tensors) -> None:
        """Copy the tensors of `state_dict` back."""
        for name, tensor in self.state_dict().items():
            copy_whole_(tensor, state[name])

    def optimal_variance(self, w: Tensors, sigma: torch.Tensor) -> torch.Tensor:
        """lambda* = [ sigma^2 tr(Sigma_p^-1) + (mu_p - w)^T Sigma_p^-1 (mu_p - w) ] / D."""
        return optimal_variance(
            sigma, mahalanobis=self.mahalanobis(w), trace_inverse=self.trace_inverse, num_parameters=self.group_sizes
        )

    def kl(self, w: Tensors, sigma: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        """KL( N(w, sigma^2 I) || N(mu_p, variance * Sigma_p) ); see `objective.gaussian_kl`."""
        return gaussian_kl(
            sigma,
            variance,
            mahalanobis=self.mahalanobis(w),
            trace_inverse=self.trace_inverse,
            log_det=self.log_det,
            num_parameters=self.group_sizes,
        )

    def check_matches(self, parameters: Tensors) -> None:
        """Raise a `ValueError` unless this prior is over exactly these names and shapes."""
        missing = sorted(parameters.keys() - self.shapes.keys())
        unknown = sorted(self.shapes.keys() - parameters.keys())
        if missing or unknown:
            raise ValueError(
                "prior: its parameter names are not those of the model's trainable backbone. "
                f"Not in the prior: {_some(missing)}. Not in the backbone: {_some(unknown)}. "
                "Use a prior learned on this architecture, and check `head_names`."
            )
        for name, shape in self.shapes.items():
            if parameters[name].shape != shape:
                raise ValueError(
                    f"prior: {name!r} has shape {tuple(shape)}, but {tuple(parameters[name].shape)} in the model. "
                    "Use a prior learned on this architecture."
                )


class IsotropicPrior(GaussianPrior):
    """N(mu_p, v I): tr(Sigma_p^-1) = D, log det Sigma_p = 0, Mahalanobis = |w - mu_p|^2.

    With `scales` it is N(mu_p, v diag(r)), r constant over each parameter, as a posterior with a lambda for each group
    leaves it to the next task: tr(Sigma_p^-1) = sum 1/r, log det Sigma_p = sum log r.

    Args:
        parameters: by name.
        mean: mu_p; zero if not given.
        scales: r > 0 of each parameter, by name; 1 if not given.

    Example:
        >>> prior = IsotropicPrior.l2_zero({"w": torch.zeros(2)})
        >>> prior.optimal_variance({"w": torch.tensor([3.0, 4.0])}, sigma=torch.tensor(0.0)).item()
        12.5
    """

    separable = True

    def __init__(self, parameters: Tensors, mean: Tensors | None = None, scales: Mapping[str, float] | None = None):
        if scales is not None and scales.keys() != parameters.keys():
            different = sorted(scales.keys() ^ parameters.keys())
            raise ValueError(f"scales: their parameter names are not those of the prior: {_some(different)}.")
        for name, scale in (scales or {}).items():
            if not (isinstance(scale, float) and math.isfinite(scale) and scale > 0):
                raise ValueError(f"scales: must be positive numbers, got {scale!r} for {name!r}.")
        device = next((tensor.device for tensor in parameters.values()), torch.device("cpu"))
        sizes = {name: tensor.numel() for name, tensor in parameters.items()}
        sums = torch.tensor(_trace_and_log_det(sizes, scales), dtype=wide_dtype(device), device=device)
        super().__init__(parameters, *sums)
        self.mean, self.scales = mean, scales

    def grouped(self, groups: Sequence[Sequence[str]], parameters: Tensors) -> "IsotropicPrior":
        """The same prior with a variance for each of these groups of parameters, which are named.

        Example:
            >>> w = {"w": torch.full((2,), 3.0), "b": torch.ones(1)}
            >>> prior = IsotropicPrior.l2_zero(w).grouped([["w"], ["b"]], w)
            >>> prior.optimal_variance(w, sigma=torch.zeros(2))
            tensor([9., 1.], dtype=torch.float64)
        """
        if len(groups) == 1:
            return self
        grouped = copy(self)
        grouped.blocks = blocks_of(parameters, groups=groups)
        sizes = [{name: self.shapes[name].numel() for name in names} for names in groups]
        grouped.group_sizes = self.trace_inverse.new_tensor([sum(numbers.values()) for numbers in sizes])
        sums = [_trace_and_log_det(numbers, self.scales) for numbers in sizes]
        grouped.trace_inverse, grouped.log_det = self.trace_inverse.new_tensor(sums).reshape(-1, 2).T
        return grouped

    @classmethod
    def l2_zero(cls, parameters: Tensors) -> "IsotropicPrior":
        """N(0, v I)."""
        return cls(parameters)

    @classmethod
    def l2_sp(cls, parameters: Tensors) -> "IsotropicPrior":
        """N(mu, v I) with mu the present values of `parameters` ("starting point"), which are copied."""
        return cls(parameters, mean={name: tensor.detach().clone() for name, tensor in parameters.items()})

    def mahalanobis(self, w: Tensors) -> torch.Tensor:
        """|w - mu_p|^2, each parameter's divided by its r."""

        def of_block(block: Block) -> torch.Tensor:
            if self.scales is not None and len(block.pieces) > 1:
                return torch.stack([of_block(Block((piece,))) for piece in block.pieces]).sum()
            mean = None if self.mean is None else block.of(self.mean)
            distance = squared_distance(block.of(w), mean, self.trace_inverse.dtype)
            return distance if self.scales is None else distance / self.scales[block.pieces[0].name]

        zeros = torch.zeros_like(self.trace_inverse)
        groups = [block.group for block in self.blocks] if zeros.dim() else None
        return total(on_all_cores(of_block, self.blocks), w, zeros, groups)

    def precision_product(self, w: Tensors) -> PrecisionProduct:
        """w - mu_p, each parameter's divided by its r."""

        def product(block: Block) -> Iterable[torch.Tensor]:
            differences = block.of(w) if self.mean is None else subtract(block.of(w), block.of(self.mean))
            if self.scales is None:
                return differences
            return (d / self.scales[piece.name] for d, piece in zip(differences, block.pieces, strict=True))

        return product

    @property
    def config(self) -> dict[str, Any]:
        """`l2-zero` without a mean, `l2-sp` with one; and the scales."""
        kind = {"kind": "l2-zero" if self.mean is None else "l2-sp"}
        return kind if self.scales is None else kind | {"scales": dict(self.scales)}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`mean.<name>`, or nothing for L2-zero."""
        return {f"mean.{name}": tensor for name, tensor in (self.mean or {}).items()}


class LowRankGaussian(GaussianPrior):
    """N(mu, v Sigma_p), Sigma_p = A + U U^T with A = S_diag/2 + eps I and U = Q / sqrt(2K - 2): PTYL's prior.

    With the K x K matrix M = I + U^T A^-1 U (Woodbury, matrix determinant lemma):

        tr(Sigma_p^-1)  = tr(A^-1) - tr(M^-1 U^T A^-2 U)
        log det Sigma_p = log det A + log det M
        Sigma_p^-1 d    = A^-1 (d - U c),    c = M^-1 U^T A^-1 d

    M itself is not formed, which would square the condition of U. With the singular values s and right singular
    vectors V of A^-1/2 U, found once in float64, M^-1 = V diag(1 / (1 + s^2)) V^T.

    The passes over w that each step makes multiply in the precision of w and add up in float64. They read Q where it
    lies and copy nothing of it.

    Args:
        mean: mu, by parameter name.
        diagonal: S_diag, SWAG's variances, with the same names and shapes.
        deviations: Q, SWAG's K >= 2 deviations stacked along a new first dimension of each parameter.
        eps: what is added to the diagonal.

    Example:
        >>> w = {"w": torch.zeros(3)}
        >>> prior = LowRankGaussian(mean=w, diagonal={"w": torch.ones(3)}, deviations={"w": torch.eye(3)[:2]}, eps=0.5)
        >>> round(prior.log_det.item(), 12)  # Sigma_p = diag(1.5, 1.5, 1)
        0.810930216216
    """

    def __init__(self, mean: Tensors, diagonal: Tensors, deviations: Tensors, eps: float = 0.1):
        self.rank = _check_low_rank(mean, diagonal, deviations, eps)
        self.mean, self.diagonal, self.deviations, self.eps = mean, diagonal, deviations, eps
        self._wide = wide_dtype(next(iter(mean.values())).device)
        self._scale = (2 * self.rank - 2) ** -0.5
        self._last_coefficients: tuple[torch.Tensor, torch.Tensor] | None = None
        small_blocks = blocks_of(mean, size=2**16)  # they hold K times as much, in float64

        def sums_and_root(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
            a, u = self._factors(block)
            sums = torch.stack([(1 / a).sum(), a.log().sum()])
            return sums, torch.linalg.qr((u / a.sqrt()).T, mode="r").R

        sums_and_roots = on_all_cores(sums_and_root, small_blocks)
        zeros = torch.zeros(self.rank, self.rank, dtype=self._wide, device=next(iter(mean.values())).device)
        root = torch.linalg.qr(torch.cat([zeros, *(root for _, root in sums_and_roots)]), mode="r").R
        _, s, self._vt = torch.linalg.svd(gathered(root, mean), full_matrices=False)
        self._shrinkage = 1 / (1 + s**2)

        def rotated_squares(block: Block) -> torch.Tensor:
            a, u = self._factors(block)
            return (self._vt @ u / a).square().sum(1)

        squares = total(on_all_cores(rotated_squares, small_blocks), mean, torch.zeros_like(s))
        inverse_a, log_a = total([sums for sums, _ in sums_and_roots], mean, torch.zeros_like(s[:2]))
        super().__init__(
            mean,
            trace_inverse=inverse_a - torch.dot(self._shrinkage, squares),
            log_det=log_a + torch.log1p(s**2).sum(),
        )

    def mahalanobis(self, w: Tensors) -> torch.Tensor:
        """d^T A^-1 d - b^T c, with d = w - mu, b = U^T A^-1 d and c = M^-1 b.

        Where that difference cancels, because d lies nearly in the span of U, the same is computed as a sum of
        squares, in a second pass: r^T A^-1 r + c^T c with r = d - U c.
        """

        def sums_and_checksum(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
            distances, projections = [], []
            for piece, weight in zip(block.pieces, block.of(w), strict=True):
                d = self._difference(weight, piece)
                whitened = self._a(piece, d.dtype)
                torch.div(d, whitened, out=whitened)
                distances.append(torch.dot(d, whitened))
                projections.append(torch.mv(self._q(piece, d.dtype), whitened))
            sums = [torch.stack(terms).to(self._wide).sum(0) for terms in (distances, projections)]
            return torch.cat([sums[0][None], sums[1]]), checksum(block.of(w))

        terms = on_all_cores(sums_and_checksum, self.blocks)
        sums = total([sums for sums, _ in terms], w, self._shrinkage.new_zeros(1 + self.rank))
        distance, b = sums[0], self._scale * sums[1:]
        c = self._vt.T @ (self._shrinkage * (self._vt @ b))
        self._last_coefficients = self._total_checksum([term for _, term in terms], w), c
        difference = distance - torch.dot(b, c)
        return difference if difference >= 0.1 * distance else self._sum_of_squares(w, c)

    def precision_product(self, w: Tensors) -> PrecisionProduct:
        """A^-1 (d - U c), with d = w - mu and c = M^-1 U^T A^-1 d."""
        c = self._coefficients(w)

        def product(block: Block) -> Iterator[torch.Tensor]:
            for piece, weight, r in zip(block.pieces, block.of(w), self._residuals(w, c, block), strict=True):
                yield r.div_(self._a(piece, r.dtype)).to(weight.dtype).view(weight.shape)

        return product

    @property
    def config(self) -> dict[str, Any]:
        """`ptyl`, with eps."""
        return {"kind": "ptyl", "eps": self.eps}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`mean.<name>`, `diagonal.<name>` and `deviations.<name>`."""
        parts = {"mean": self.mean, "diagonal": self.diagonal, "deviations": self.deviations}
        return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def load_state_dict(self, state: Tensors) -> None:
        """Copy the tensors back, and compute s, V, the trace and the determinant anew."""
        super().load_state_dict(state)
        self.__init__(self.mean, self.diagonal, self.deviations, self.eps)

    def _coefficients(self, w: Tensors) -> torch.Tensor:
        """c; a training step asks for the distance (lambda*) and then for the gradient at the same w, and finds it."""
        checksums = on_all_cores(lambda block: checksum(block.of(w)), self.blocks)
        if self._last_coefficients is None or self._last_coefficients[0] != self._total_checksum(checksums, w):
            self.mahalanobis(w)
        return self._last_coefficients[1]

    def _total_checksum(self, checksums: list[torch.Tensor], w: Tensors) -> torch.Tensor:
        return total(checksums, w, torch.zeros((), dtype=torch.int64, device=self._shrinkage.device))

    def _sum_of_squares(self, w: Tensors, c: torch.Tensor) -> torch.Tensor:
        def squares(block: Block) -> torch.Tensor:
            residuals = zip(block.pieces, self._residuals(w, c, block), strict=True)
            terms = [torch.dot(r, r / self._a(piece, r.dtype)) for piece, r in residuals]
            return torch.stack(terms).to(self._wide).sum()

        return total(on_all_cores(squares, self.blocks), w, torch.zeros_like(self._shrinkage[0])) + torch.dot(c, c)

    def _residuals(self, w: Tensors, c: torch.Tensor, block: Block) -> Iterator[torch.Tensor]:
        """r = d - U c, of each piece."""
        for piece, weight in zip(block.pieces, block.of(w), strict=True):
            d = self._difference(weight, piece)
            yield d.addmv_(self._q(piece, d.dtype).T, c.to(d.dtype), alpha=-self._scale)

    def _factors(self, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """A as a vector and U^T as a K x D matrix, of one block, in float64."""
        a = torch.cat([self._a(piece, self._wide) for piece in block.pieces])
        return a, self._scale * torch.cat([self._q(piece, self._wide) for piece in block.pieces], dim=1)

    def _difference(self, weight: torch.Tensor, piece: Piece) -> torch.Tensor:
        return (weight - local(self.mean[piece.name])[piece.rows]).flatten()

    def _a(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        diagonal = local(self.diagonal[piece.name])[piece.rows].flatten().to(dtype)
        return (0.5 * diagonal).add_(self.eps)

    def _q(self, piece: Piece, dtype: torch.dtype) -> torch.Tensor:
        """Columns of Q^T; a view, unless the types differ."""
        rows = local(self.deviations[piece.name])[:, piece.rows]
        return rows.reshape(self.rank, -1).to(dtype)


def checksum(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum of their bits, read as integers: other weights give another one, but for one case in billions.

    Example:
        >>> checksum([torch.ones(2)]).item() == checksum([torch.tensor([1.0, 1.0000001])]).item()
        False
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [tensor.view(integers[tensor.itemsize]) for tensor in tensors]
    return torch.stack([integer.sum(dtype=integer.dtype) for integer in bits]).sum()


def prior_from(config: Mapping[str, Any], state: Tensors, parameters: Tensors) -> GaussianPrior:
    """The prior over `parameters` whose `config` and `state_dict` these are; sharded if they are.

    Example:
        >>> w = {"w": torch.ones(2)}
        >>> saved = IsotropicPrior.l2_sp(w)
        >>> loaded = prior_from(saved.config, saved.state_dict(), {"w": torch.zeros(2)})
        >>> loaded.mahalanobis(w).item()
        0.0
    """

    def part(prefix: str, dim: int = 0) -> dict[str, torch.Tensor]:
        """In the order of `parameters`, as sums depend on the order in their last bit."""
        known = [name for name in parameters if f"{prefix}.{name}" in state]
        return {name: shard_like(state[f"{prefix}.{name}"], parameters[name], dim) for name in known}

    kind, scales = config.get("kind"), config.get("scales")
    if kind == "l2-zero":
        prior = IsotropicPrior(parameters, scales=scales)
    elif kind == "l2-sp":
        mean = part("mean")
        prior = IsotropicPrior(mean, mean=mean, scales=scales)
    elif kind == "ptyl":
        eps = config.get("eps")
        if not isinstance(eps, float):
            raise ValueError(f"prior: its eps must be a number, got {eps!r}.")
        prior = LowRankGaussian(part("mean"), part("diagonal"), part("deviations", dim=1), eps)
    else:
        raise ValueError(f"prior: unknown kind {kind!r}; known are l2-zero, l2-sp and ptyl.")
    if unknown := sorted(state.keys() - prior.state_dict().keys()):
        raise ValueError(f"prior: a prior of kind {kind!r} has no tensor {unknown[0]!r}.")
    prior.check_matches(parameters)
    return prior


def _trace_and_log_det(sizes: Mapping[str, int], scales: Mapping[str, float] | None) -> tuple[float, float]:
    """tr(Sigma_p^-1) and log det Sigma_p of diag(r), r constant over each parameter."""
    if scales is None:
        return sum(sizes.values()), 0.0
    numbers = [(size, scales[name]) for name, size in sizes.items()]
    return sum(size / scale for size, scale in numbers), sum(size * math.log(scale) for size, scale in numbers)


def _check_low_rank(mean: Tensors, diagonal: Tensors, deviations: Tensors, eps: float) -> int:
    """K, or a `ValueError` that says which argument is wrong."""
    for argument, tensors in (("diagonal", diagonal), ("deviations", deviations)):
        if tensors.keys() != mean.keys():
            different = sorted(tensors.keys() ^ mean.keys())
            raise ValueError(f"{argument}: its parameter names differ from those of `mean`: {_some(different)}.")
    ranks = {tensor.shape[0] if tensor.dim() else 0 for tensor in deviations.values()}
    if len(ranks) != 1 or min(ranks) < 2:
        raise ValueError(
            f"deviations: every tensor needs the same first dimension K >= 2, got {sorted(ranks)}. "
            "Sigma_p divides by 2K - 2."
        )
    if min(ranks) > MOST_DEVIATIONS:
        raise ValueError(f"deviations: K must be at most {MOST_DEVIATIONS:,}, got {min(ranks):,}. Take fewer of them.")
    if not math.isfinite(eps):
        raise ValueError(f"eps: must be a finite number, got {eps}.")
    for name, tensor in mean.items():
        if diagonal[name].shape != tensor.shape or deviations[name].shape[1:] != tensor.shape:
            raise ValueError(
                f"{name!r}: mean {tuple(tensor.shape)}, diagonal {tuple(diagonal[name].shape)} and deviations "
                f"{tuple(deviations[name].shape)} do not fit; the last should be (K, *mean.shape)."
            )
        if not bool((local(diagonal[name]) / 2 + eps > 0).all()):
            raise ValueError(f"diagonal: S_diag/2 + eps must be positive, but is not in {name!r} (eps={eps}).")
    return ranks.pop()


def _some(names: list[str], limit: int = 3) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(repr(name) for name in names[:limit]) + more
