"""The standard pattern at S = 131072, 16/2 heads, d 128, bf16, against sampled rows computed directly in fp64."""

import pytest
import torch
from direct import BLOCK, Direct, random_inputs, results, sampled
from helpers import operator_of
from kernel_cases import module_of
from standard_pattern import pattern_index, standard_pattern

S, N, H, D = 131072, 16, 2, 128
SAMPLES = 64

pytestmark = pytest.mark.gpu


class Standard(Direct):
    """Kept pairs are read from the pattern's lists, not from the index that the operator gets."""

    def __init__(self, device="cuda"):
        super().__init__(random_inputs(S, N, H, D, device))
        self.position, self.offsets = standard_pattern(S, N)
        self.index = pattern_index(self.position, self.offsets, S, BLOCK, device)

    def kept(self, head: int, distance: torch.Tensor) -> torch.Tensor:
        """bool: does a kept diagonal cross pairs of blocks this far apart? From the offsets, in tokens."""
        crossed = torch.zeros(2 * S // BLOCK, dtype=torch.bool, device=distance.device)
        offsets = self.offsets[head].to(distance.device)
        crossed[offsets // BLOCK] = True
        crossed[(offsets + BLOCK - 1) // BLOCK] = True
        return (distance >= 0) & crossed[distance.clamp_min(0)]

    def row_mask(self, head, row):
        seen = self.kept(head, row // BLOCK - self.tokens // BLOCK)
        seen[self.position[head].long().to(seen.device)] = True
        return seen & (self.tokens <= row)

    def key_mask(self, head, key):
        is_column = bool((self.position[head] == key).any())
        return (self.kept(head, self.tokens // BLOCK - key // BLOCK) | is_column) & (self.tokens >= key)


@pytest.fixture(scope="module", params=["triton", "cute", "cuda"])
def case(request):
    """The inputs, and the operator's out, lse and gradients."""
    module_of(request.param)
    standard = Standard()
    return standard, results(operator_of(standard.index, device_type="cuda", backend=request.param), standard.inputs)


def test_out_lse_and_dq_of_sampled_rows(case):
    standard, got = case
    standard.check_rows(got, sampled(S, SAMPLES), range(N))


def test_dk_and_dv_of_sampled_keys(case):
    standard, got = case
    columns = standard.position[3, ::101].tolist() + standard.position[12, ::101].tolist()
    standard.check_keys(got, sampled(S, SAMPLES, seed=1) + columns, range(H))


def test_density_is_the_documented_one(case):
    assert case[0].index.density(S).item() == pytest.approx(0.0449, abs=5e-5)
