"""The C++ kernels as other CPUs get them: compiled for less, they pass the tests of the native ones."""

import platform
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.attention import cpu as attention
from engine.kernels.cpu import build, ops
from tests.engine import test_cpu_kernels as kernels
from tests.engine import test_cpu_quantised as quantised
from tests.engine import test_quantised_weights as weights
from tests.engine import test_sampler as sampler

LEVELS = {"AVX2": "-march=x86-64-v3", "SSE4": "-march=x86-64-v2"}
NEEDED = {"avx2", "bmi2", "f16c", "fma", "movbe"}

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or NEEDED - set(build._cpu_flags().split()), reason="needs AVX2"
)


test_layer_operations = kernels.test_layer_operations_equal_their_torch_twins
test_logits = kernels.test_logits_equal_their_torch_twin
test_rows = kernels.test_a_row_has_the_same_bits_alone_and_in_a_batch
test_not_a_number = kernels.test_not_a_number_stays_in_its_row
test_attention = kernels.test_paged_attention_equals_the_reference
test_chunks = kernels.test_a_token_has_the_same_bits_in_any_chunk
test_shared_keys = kernels.test_the_result_has_the_same_bits_however_many_threads_share_the_keys
test_quantised_layer_operations = quantised.test_layer_operations_equal_their_arithmetic
test_embedding = kernels.test_a_tied_head_embeds_as_a_table_does
test_quantised_embedding = quantised.test_a_quantised_head_embeds_what_it_stands_for
test_quantised_logits = quantised.test_logits_equal_their_arithmetic
test_quantised_rows = quantised.test_a_row_has_the_same_bits_alone_and_in_a_batch
test_quantised_not_a_number = quantised.test_what_is_no_number_stays_in_its_row
test_quantised_networks = weights.test_gguf_file_gives_the_logits_of_its_dequantised_weights
test_sampled_rows = sampler.test_mixed_rows_equal_the_plain_model
test_sampled_wide_nucleus = sampler.test_a_wide_nucleus_falls_back_on_the_whole_vocabulary


@pytest.fixture(scope="module")
def libraries():
    """Compiled side by side, and with little optimisation: that takes seconds, as vectors are spelled out."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(LEVELS, pool.map(lambda flag: build.load_library(flag, "-O1"), LEVELS.values()), strict=True))


@pytest.fixture(autouse=True, params=LEVELS)
def library(request, libraries, monkeypatch):
    torch.manual_seed(0)
    for module in (attention, ops):
        monkeypatch.setattr(module, "load_library", lambda: libraries[request.param])
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "norm_eps": 1e-5}
    monkeypatch.setattr(sampler, "chosen_ops", ops.CPUOps(**sizes, dtype=torch.float32), raising=False)


def test_the_libraries_differ(libraries):
    assert len({library._name for library in (*libraries.values(), build.load_library())}) == 3
