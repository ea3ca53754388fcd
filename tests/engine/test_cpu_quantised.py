"""Products with 8- and 4-bit weights against the same arithmetic in torch."""

import pytest
import torch

from engine.kernels.cpu.ops import CPUOps
from engine.kernels.ops import LayerWeights
from engine.kernels.quantised import GROUP_SIZE, QuantisedWeight

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 96, 160, 4, 2, 32, 77
BITS = [8, 4]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def random_weight(bits: int, rows: int, columns: int, seed: int) -> QuantisedWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = (rows, columns // GROUP_SIZE)
    q = torch.randint(0, 2**bits, (rows, columns), generator=generator, dtype=torch.uint8)
    scale = (torch.rand(groups, generator=generator).add(0.5) * 4 / 2**bits / columns**0.5).half()
    symmetric = seed % 2 == 0
    return QuantisedWeight(bits, q, scale, scale * -(2 ** (bits - 1)) + (0 if symmetric else 0.01))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations as the kernel takes them: 8 bits in groups of 32."""
    groups = x.float().unflatten(-1, (-1, GROUP_SIZE))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale).nan_to_num(0).round() * scale).flatten(-2)


def make_ops(dtype: torch.dtype) -> CPUOps:
    return CPUOps(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, norm_eps=1e-5, dtype=dtype)


def make_layer(ops: CPUOps, bits: int) -> tuple[dict[str, torch.Tensor], object]:
    """The dequantised weights, and the layer of their quantised form; norms are 1."""
    shapes = {
        "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
        "output": (HIDDEN, HEADS * HEAD_DIM),
        "gate_up": (2 * INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
    }
    weights = {name: random_weight(bits, *shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    layer = LayerWeights(
        input_norm=torch.ones(HIDDEN),
        q_norm=None,
        k_norm=None,
        post_attention_norm=torch.ones(HIDDEN),
        **{name: ops.pack_quantised(name, weight, None) for name, weight in weights.items()},
    )
    return {name: weight.dequantise() for name, weight in weights.items()}, ops.bind(layer)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_quantised_head_embeds_what_it_stands_for(bits: int, symmetric: bool) -> None:
    weight, ops = random_weight(bits, VOCAB, HIDDEN, seed=0 if symmetric else 1), make_ops(torch.float32)
    head = ops.pack_quantised("head", weight, None)
    assert (head.minimum is None) == symmetric
    token_ids = torch.tensor([VOCAB - 1, 0, 5, 5, 16, 15])
    torch.testing.assert_close(ops.embed(token_ids, head), weight.dequantise()[token_ids], rtol=0, atol=1e-6)


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    """A value in the middle between two steps may round either way, which moves what it is part of by 1 / 127."""
    assert actual.shape == wanted.shape
    assert (actual - wanted).norm() <= 5e-3 * wanted.norm()


def normed(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (HIDDEN,), eps=1e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 6, 7, 13, 60])  # 60: each thread takes rows of its own
def test_layer_operations_equal_their_arithmetic(bits, num_tokens):
    ops = make_ops(torch.float32)
    weights, layer = make_layer(ops, bits)
    hidden = torch.randn(num_tokens, HIDDEN)
    no_rotation = torch.cat((torch.ones(num_tokens, HEAD_DIM // 2), torch.zeros(num_tokens, HEAD_DIM // 2)), dim=1)
    q, k, v = ops.attention_input(hidden.clone(), layer, no_rotation)
    expected = rounded(normed(hidden)) @ weights["qkv"].T
    assert_near(torch.cat((q, k, v), dim=1).flatten(1), expected)

    attention = torch.randn(num_tokens, HEADS, HEAD_DIM)
    wanted = hidden + rounded(attention.flatten(1)) @ weights["output"].T
    gate, up = (rounded(normed(wanted)) @ weights["gate_up"].T).chunk(2, dim=1)
    wanted = wanted + rounded(torch.nn.functional.silu(gate) * up) @ weights["down"].T
    assert_near(ops.attention_output(hidden.clone(), attention, layer), wanted)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [0, 1, 5, 40])
@pytest.mark.parametrize("seed", [8, 9], ids=["symmetric", "with minimum"])
def test_logits_equal_their_arithmetic(bits, rows, seed):
    ops = make_ops(torch.float32)
    weight = random_weight(bits, VOCAB, HIDDEN, seed)
    hidden = torch.randn(rows, HIDDEN)
    actual = ops.logits(hidden, torch.ones(HIDDEN), ops.pack_quantised("head", weight, None))
    assert_near(actual, rounded(normed(hidden)) @ weight.dequantise().T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(bits, dtype):
    ops = make_ops(dtype)
    _, layer = make_layer(ops, bits)
    hidden, attention = torch.randn(70, HIDDEN), torch.randn(70, HEADS, HEAD_DIM).to(dtype)
    together = ops.attention_output(hidden.clone(), attention, layer)
    for rows in (slice(0, 1), slice(3, 10), slice(20, 70)):
        alone = ops.attention_output(hidden[rows].clone(), attention[rows].contiguous(), layer)
        assert torch.equal(alone, together[rows])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(value):
    ops = make_ops(torch.float32)
    _, layer = make_layer(ops, 4)
    attention = torch.randn(9, HEADS, HEAD_DIM)
    attention[4, 1, 3] = value
    out = ops.attention_output(torch.randn(9, HIDDEN), attention, layer)
    assert out.isnan().any(dim=1).tolist() == [row == 4 for row in range(9)]


def test_a_row_of_zeros_gives_zeros():
    ops = make_ops(torch.float32)
    head = ops.pack_quantised("head", random_weight(8, VOCAB, HIDDEN, 1), None)
    assert ops.logits(torch.zeros(2, HIDDEN), torch.ones(HIDDEN), head).abs().max() == 0
