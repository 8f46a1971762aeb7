"""Every test of the formats runs on the CPU and, where there is one, on the GPU: the bits must not differ."""

import pytest
import torch

GPU = [pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else []


@pytest.fixture(params=["cpu", *GPU])
def device(request: pytest.FixtureRequest) -> str:
    """Device the inputs are put on."""
    return request.param
