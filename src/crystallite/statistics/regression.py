"""The best dense layer from sums over samples, and how much worse any other is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from crystallite.core.errors import InvalidOption
from crystallite.statistics.moments import Moments

__all__ = ["Regression", "Weighed"]

_ROWS = 256  # of weights at once: products with all at a time would be as large as they are


@dataclass(frozen=True)
class Weighed:
    """A layer's weight, and what it costs to change it: tr (W − weight) metric (W − weight)ᵀ."""

    weight: Tensor  # (outputs, inputs)
    metric: Tensor  # (inputs, inputs) positive definite

    @classmethod
    def spend(cls, moments: Moments, own: Tensor, ridge: float) -> Weighed:
        """The metric of `Regression.of_layer` for a layer without bias, in the memory of the moments, which are gone.

        >>> x = torch.randn(50, 3)
        >>> one, other = Moments("a"), Moments("a")
        >>> one.add(x, x[:, :0]); other.add(x, x[:, :0])
        >>> expected = Regression.of_layer(one, one, torch.eye(3), None, 0.01).metric
        >>> torch.equal(Weighed.spend(other, torch.eye(3), 0.01).metric, expected)
        True
        """
        mean_x, none = moments.means
        return cls(own.double(), _with_ridge_(moments.around(torch.zeros_like(mean_x), none, spend=True)[0], ridge))


@dataclass(frozen=True)
class Regression:
    """The best dense layer for some samples, and how much worse any other is.

    ‖Wx + b − t‖² summed over the samples is tr (W − weight) metric (W − weight)ᵀ and a constant. The ridge pulls
    towards the layer's own weight, not to zero: where the data says nothing, the layer stays as it was.
    """

    weight: Tensor  # (outputs, inputs) the best one
    metric: Tensor  # (inputs, inputs) positive definite
    mean_x: Tensor  # (inputs,) zeros for a layer without bias
    mean_t: Tensor  # (outputs,)
    held_xx: Tensor  # (inputs, inputs) Σ xxᵀ over held-out samples, as deviations from these means
    held_xt: Tensor  # (inputs, outputs)
    held_tt: float
    variance: float  # of the held-out targets, all outputs together
    output_factor: Tensor | None = None  # (outputs, outputs) L: all but `own` is of outputs times Lᵀ

    @classmethod
    def solve(cls, fitted: Moments, held_out: Moments, own: Tensor, with_bias: bool, ridge: float) -> Regression:
        """own: the layer's weight (outputs, inputs), which the ridge pulls to; ridge: share of the mean variance.

        >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        >>> both = Moments("a"); both.add(x, x @ torch.eye(3) + 1)
        >>> found = Regression.solve(both, both, torch.eye(3), True, 0.01)
        >>> torch.allclose(found.weight, torch.eye(3).double(), atol=1e-5), found.error(found.weight) < 1e-6
        (True, True)
        """
        own = own.double()
        mean_x, mean_t = fitted.means
        if not with_bias:  # nothing may be added to the outputs, so means are part of what is to be explained
            mean_x, mean_t = torch.zeros_like(mean_x), torch.zeros_like(mean_t)
        gram, cross, _ = fitted.around(mean_x, mean_t)
        left_over = cross - gram @ own.T
        metric = _with_ridge_(gram, ridge)
        # only what the layer's own weight leaves over is solved for: a layer that fits already stays as it is
        weight = own + torch.cholesky_solve(left_over, _cholesky(metric, fitted.name)).T
        xx, xt, tt = held_out.around(mean_x, mean_t)
        variance = float((held_out.tt - held_out.t**2 / held_out.samples).sum().clamp_min(0))
        return cls(weight, metric, mean_x, mean_t, xx, xt, float(tt.sum()), variance)

    @classmethod
    def spend(cls, fitted: Moments, held_out: Moments, own: Tensor, ridges: Sequence[float]) -> Regression:
        """`solve` without bias, in the memory of the moments, which are gone; of some ridges that which does best.

        Best on the held-out samples. Beside the moments' own, one matrix of inputs × inputs is held at a time. All
        outputs must be looked at: 128 random sums of them miss the best ridge where few outputs are most of the error.
        """
        own = own.double()
        mean_x, mean_t = (torch.zeros_like(mean) for mean in fitted.means)
        metric, cross, _ = fitted.around(mean_x, mean_t, spend=True)
        plain, left_over = metric.diagonal().clone(), cross.addmm_(metric, own.T, alpha=-1).mT  # (outputs, inputs)
        xx, xt, tt = held_out.around(mean_x, mean_t, spend=True)
        variance = float((held_out.tt - held_out.t**2 / held_out.samples).sum().clamp_min(0))

        best = cls(own, metric, mean_x, mean_t, xx, xt, float(tt.sum()), variance)
        least = chosen = math.inf
        for ridge in ridges:
            metric.diagonal().copy_(plain)
            factor, weight = _cholesky(_with_ridge_(metric, ridge), fitted.name), left_over.clone()
            for half, upper in ((factor.mT, True), (factor, False)):  # cholesky_solve copies the factor
                torch.linalg.solve_triangular(half, weight, upper=upper, left=False, out=weight)
            del factor, half
            if (error := best.error(weight.add_(own))) < least:
                best, least, chosen = replace(best, weight=weight), error, ridge
        metric.diagonal().copy_(plain)
        _with_ridge_(metric, chosen)
        return best

    @classmethod
    def of_layer(cls, fitted: Moments, held_out: Moments, own: Tensor, bias: Tensor | None, ridge: float) -> Regression:
        """The same for a layer that shall go on writing what it writes: its targets need not be looked at.

        >>> x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
        >>> both = Moments("a"); both.add(x, x[:, :0])
        >>> found = Regression.of_layer(both, both, torch.eye(3), torch.ones(3), 0.01)
        >>> found.error(found.weight), found.bias(found.weight).tolist()
        (0.0, [1.0, 1.0, 1.0])
        """
        own = own.double()
        mean_x, none = fitted.means
        mean_x = torch.zeros_like(mean_x) if bias is None else mean_x
        xx, _, _ = held_out.around(mean_x, none)
        xt, mean_t = xx @ own.T, own @ mean_x
        written, between = float((own.T * xt).sum()), own @ (held_out.means[0] - mean_x)
        variance = max(written - held_out.samples * float((between**2).sum()), 0.0)
        metric = _with_ridge_(fitted.around(mean_x, none)[0], ridge)
        return cls(own, metric, mean_x, mean_t if bias is None else mean_t + bias.double(), xx, xt, written, variance)

    @property
    def own(self) -> Tensor:
        """The best weight, of the outputs as they are."""
        return self.unwhiten(self.weight)

    @property
    def output_metric(self) -> Tensor | None:
        """(outputs, outputs) LLᵀ, which weighs errors of the outputs as they are; None: all alike."""
        return None if self.output_factor is None else self.output_factor @ self.output_factor.T

    def whiten(self, values: Tensor) -> Tensor:
        """(outputs, …) so that the length of an error is what it adds to the output error."""
        return values if self.output_factor is None else self.output_factor.T @ values

    def unwhiten(self, values: Tensor) -> Tensor:
        """The way back."""
        if self.output_factor is None:
            return values
        columns = values if values.ndim > 1 else values[:, None]
        return torch.linalg.solve_triangular(self.output_factor.T, columns, upper=True).view(values.shape)

    @property
    def constant(self) -> bool:
        """Whether the layer writes the same on all held-out samples, so that there is no error to measure."""
        return self.variance <= torch.finfo(torch.float32).eps ** 2 * max(self.held_tt, torch.finfo(torch.float32).tiny)

    def bias(self, weight: Tensor) -> Tensor:
        """(outputs,) what goes best with a weight; zeros for a layer that has none."""
        return self.mean_t - weight @ self.mean_x

    def error(self, weight: Tensor, columns: Tensor | None = None) -> float:
        """Share of the outputs' variance on held-out samples that a layer with this weight gets wrong.

        columns: all that it reads, where these are few.
        """
        xx, xt = self.held_xx, self.held_xt
        if columns is not None:
            weight, xx, xt = weight[:, columns], xx[columns][:, columns], xt[columns]
        parts = zip(weight.split(_ROWS), xt.mT.split(_ROWS), strict=True)
        return self._share(sum(float(((rows @ xx) * rows).sum() - 2 * (rows * goal).sum()) for rows, goal in parts))

    def rank_errors(self, up: Tensor, down: Tensor) -> list[float]:
        """`error` of up[:, :r] @ down[:r] for r = 1, 2, …; the columns of `up` are orthonormal."""
        gains = ((down @ self.held_xx) * down).sum(1) - 2 * (down * (self.held_xt @ up).T).sum(1)
        return [self._share(gain) for gain in gains.cumsum(0).tolist()]

    def restricted(self, columns: Tensor) -> Regression:
        """The same for a layer that reads some of the inputs only."""
        inner = self.metric[columns][:, columns]
        return replace(
            self,
            weight=torch.cholesky_solve((self.weight @ self.metric[:, columns]).T, _cholesky(inner, "")).T,
            metric=inner,
            mean_x=self.mean_x[columns],
            held_xx=self.held_xx[columns][:, columns],
            held_xt=self.held_xt[columns],
        )

    def _share(self, products: float) -> float:
        return max(self.held_tt + products, 0.0) / max(self.variance, torch.finfo(torch.float64).tiny)


def _with_ridge_(gram: Tensor, ridge: float) -> Tensor:
    gram.diagonal().add_((ridge * gram.diagonal().mean()).clamp_min(torch.finfo(torch.float32).tiny))
    return gram


def _cholesky(metric: Tensor, name: str) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(metric)
    if failed:
        raise InvalidOption(f"{name}: its inputs depend on each other too much to be fitted; pass a larger ridge=")
    return factor
