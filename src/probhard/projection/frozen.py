"""Projections as modules of buffers and matrix products, for ONNX and other exports."""

from __future__ import annotations

from torch import Tensor, nn

from probhard.errors import ParameterError


class FrozenProjection(nn.Module):
    """``u = P z + c``, one matrix product, for ONNX and other exports.

    Args:
        matrix: P, (n, n).
        offset: c, (*batch, n).
    """

    matrix: Tensor
    offset: Tensor

    def __init__(self, matrix: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.register_buffer("offset", offset)

    def forward(self, z: Tensor) -> Tensor:
        """Project points z (*batch, n)."""
        check_dtype(z, self.matrix)
        return z @ self.matrix.mT + self.offset

    def variance(self, variance: Tensor) -> Tensor:
        """Projected marginal variances from those of independent variables, both (*batch, n)."""
        return variance @ self.matrix.square().mT


def check_dtype(z: Tensor, buffer: Tensor) -> None:
    """Reject points of another precision than the buffers, which an exported graph would not accept.

    Raises:
        ParameterError: The dtypes differ.
    """
    if z.dtype != buffer.dtype:
        raise ParameterError(
            f"A frozen projection of dtype {buffer.dtype} got points of dtype {z.dtype}.",
            "Its matrices have one precision, that of the exported graph.",
            f"Call freeze(constraint, dtype={z.dtype}), or .to({z.dtype}) on the frozen module.",
        )
