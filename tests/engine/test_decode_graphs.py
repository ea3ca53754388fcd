"""Decode steps from graphs. A recorder on the CPU stands in for CUDA: it keeps the work and runs it again."""

import gc
import logging
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.attention.metadata import AttentionMetadata, AttentionSpec
from engine.attention.torch_reference import TorchReferenceAttention
from engine.decode_graphs import DecodeGraphs, GraphPool, StepTensors, graph_sizes
from tests.engine.paged_runs import BLOCK_SIZE, load
from tests.engine.tiny_models import VOCAB_SIZE, write_tiny

MAX_LEN, MAX_BLOCKS, NUM_SEQS = 64, 4, 20
CPU = torch.device("cpu")


class CapturableAttention(TorchReferenceAttention):
    """Decodes from the tensors of the metadata alone, each time it runs; nothing is looked up when it is prepared."""

    captures_decode = True

    def prepare(self, metadata):
        self.is_decode = metadata.max_query_len == 1
        if self.is_decode:
            self.metadata = metadata
            assert metadata.host_seq_lens.max() > 0
        else:
            super().prepare(metadata)

    def write_kv(self, layer, k, v):
        if not self.is_decode:
            return super().write_kv(layer, k, v)
        slots = self.metadata.slot_mapping
        stored = (slots >= 0)[:, None, None]
        for new, cache in ((k, self.cache.keys[layer]), (v, self.cache.values[layer])):
            flat = cache.flatten(0, 1)
            flat[slots.clamp(min=0)] = torch.where(stored, new, flat[slots.clamp(min=0)])
        return None

    def forward(self, layer, q):
        if not self.is_decode:
            return super().forward(layer, q)
        blocks, lengths = self.metadata.block_table.long(), self.metadata.seq_lens
        k, v = (each[layer][blocks].flatten(1, 2) for each in (self.cache.keys, self.cache.values))  # [n, K, G, d]
        is_key = (torch.arange(k.shape[1]) < lengths[:, None])[:, None, None]
        scores = torch.einsum("nghd,nkgd->nghk", q.unflatten(1, (k.shape[2], -1)), k) * self.spec.scale
        weights = scores.masked_fill(~is_key, -torch.inf).softmax(-1).nan_to_num(0.0)
        return torch.einsum("nghk,nkgd->nghd", weights, v).flatten(1, 2)


class Recorder:
    """Runs work twice to warm up and once as the capture, which is what `GraphPool` does; then on demand, with what
    `backend` had prepared by then, as the kernels of a graph keep the addresses that they were launched with."""

    def __init__(self, backend=None, fails=(), num_runs=3):
        self.num_records = 0
        self.backend, self.fails, self.num_runs = backend or SimpleNamespace(), fails, num_runs

    def __call__(self, work):
        self.num_records += 1
        for _ in range(self.num_runs):
            if self.num_records in self.fails:
                raise torch.OutOfMemoryError("no memory")
            work()
        captured = dict(vars(self.backend))

        def replay():
            now = dict(vars(self.backend))
            vars(self.backend).update(captured)
            work()
            vars(self.backend).update(now)

        return replay


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder)
    return load(folder)


def attention(decoder, backend=CapturableAttention):
    config = decoder.config
    spec = AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=CPU,
        block_size=BLOCK_SIZE,
        windows=(None,) * config.num_layers,
        scale=config.head_dim**-0.5,
    )
    made = backend(spec)
    cache = made.allocate(1 + NUM_SEQS * MAX_BLOCKS)
    for number, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
    return made


def computing(decoder, backend, seen=None):
    def compute(step):
        if seen is not None:
            seen.append(step)
        every = torch.arange(len(step.token_ids))
        hidden = decoder.forward(step.token_ids, step.positions, step.rope_lengths, every, backend)
        return decoder.compute_logits(hidden)

    return compute


def decode_step(seqs, lengths, query_len=1):
    """Of sequences by number, which own MAX_BLOCKS blocks each, with the lengths that they have behind the step."""
    seqs, lengths = np.array(seqs), np.array(lengths)
    positions = (lengths[:, None] - query_len + np.arange(query_len)).flatten()
    owners = np.repeat(seqs, query_len)
    blocks = 1 + owners * MAX_BLOCKS + positions // BLOCK_SIZE
    columns = -(-int(lengths.max()) // BLOCK_SIZE)
    metadata = AttentionMetadata.from_host(
        query_start_loc=np.arange(len(seqs) + 1, dtype=np.int32) * query_len,
        seq_lens=lengths.astype(np.int32),
        block_table=(1 + seqs[:, None] * MAX_BLOCKS + np.arange(columns)).astype(np.int32),
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
    )
    token_ids = (owners * 31 + positions * 7) % VOCAB_SIZE
    tensors = [torch.from_numpy(each) for each in (token_ids, positions, positions + 1)]
    return StepTensors(*tensors, metadata)


def graphs_of(compute, backend, record, max_num_seqs=NUM_SEQS):
    return DecodeGraphs(
        compute,
        backend,
        max_num_seqs=max_num_seqs,
        max_blocks=MAX_BLOCKS,
        max_model_len=MAX_LEN,
        device=CPU,
        record=record,
    )


def rowwise(step):
    """A row of each token, which depends on nothing else."""
    return torch.stack((step.token_ids, step.positions, step.rope_lengths), 1).float()


def stub(**attributes):
    return SimpleNamespace(captures_decode=True, prepare=lambda metadata: None, **attributes)


@pytest.mark.parametrize("most", [1, 2, 3, 8, 20, 64, 250, 256, 1000])
def test_sizes_end_with_the_largest_batch_and_pad_by_less_than_half_or_16(most):
    sizes = graph_sizes(most)
    assert sizes[-1] == min(most, 256)
    for rows in range(1, sizes[-1] + 1):
        size = min(size for size in sizes if size >= rows)
        assert size < max(2 * rows, rows + 16)


# Steps of growing, shrinking and changing batches; what an earlier step left must not be seen.
STEPS = [
    (range(3), [5, 40, 17]),
    ([0, 1, 2], [6, 41, 18]),
    (range(13), range(30, 43)),
    ([7], [3]),
    ([12, 3, 5, 0, 9], [1, 64, 16, 33, 32]),
    (range(20), [10] * 20),
    ([19, 18], [11, 2]),
]


@torch.inference_mode()
def test_replays_equal_eager_steps_and_store_the_same_keys(decoder):
    eager, captured = attention(decoder, TorchReferenceAttention), attention(decoder)
    graphs = graphs_of(computing(decoder, captured), captured, Recorder(captured))
    for seqs, lengths in STEPS:
        step = decode_step(seqs, lengths)
        eager.prepare(step.metadata)
        expected = computing(decoder, eager)(step)
        torch.testing.assert_close(graphs.run(step), expected, rtol=1e-4, atol=1e-4)
        graphs.run(step).zero_()  # as the sampler overwrites it
        for ours, theirs in zip(captured.cache.keys, eager.cache.keys, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_replays_of_the_triton_kernels_equal_eager_steps(decoder):
    triton_paged = pytest.importorskip("engine.attention.triton_paged")
    eager = attention(decoder, TorchReferenceAttention)
    captured = attention(decoder, triton_paged.TritonAttention)
    graphs = graphs_of(computing(decoder, captured), captured, Recorder(captured, num_runs=1), max_num_seqs=3)
    for seqs, lengths in (([4, 0, 1], [18, 40, 5]), ([1, 2, 0], [6, 64, 41])):
        step = decode_step(seqs, lengths)
        eager.prepare(step.metadata)
        expected = computing(decoder, eager)(step)
        torch.testing.assert_close(graphs.run(step), expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_capturing_stores_nothing(decoder):
    backend = attention(decoder)
    before = [tensor.clone() for tensor in (*backend.cache.keys, *backend.cache.values)]
    graphs = graphs_of(computing(decoder, backend), backend, Recorder(backend))
    graphs.run(decode_step([3], [9]))
    slot = (1 + 3 * MAX_BLOCKS) * BLOCK_SIZE + 8
    for tensor, old in zip((*backend.cache.keys, *backend.cache.values), before, strict=True):
        changed = (tensor != old).flatten(0, 1).any(-1).any(-1).nonzero().flatten()
        assert changed.tolist() == [slot]


def test_steps_are_padded_to_the_next_size_and_the_largest_is_captured_first():
    sizes = []
    graphs = graphs_of(lambda step: sizes.append(len(step.token_ids)) or rowwise(step), stub(), Recorder())
    for rows in (3, 3, 4, 1, 9, 17):
        graphs.run(decode_step(range(rows), [20] * rows))
    captures = [20] * 3 + [4] * 3
    assert sizes == captures + [4] + [4] + [4] + [1] * 3 + [1] + [16] * 3 + [16] + [20]


def test_each_replay_reads_the_same_addresses_and_nothing_stale():
    seen = []

    def compute(step):
        metadata = step.metadata
        tensors = (step.token_ids, step.positions, step.rope_lengths, metadata.query_start_loc)
        tensors += (metadata.seq_lens, metadata.block_table, metadata.slot_mapping)
        seen.append(([each.data_ptr() for each in tensors], [each.clone() for each in tensors]))
        return rowwise(step)

    graphs = graphs_of(compute, stub(), Recorder(), max_num_seqs=4)
    results = set()
    for seqs, lengths in (([5, 6, 7, 8], [64, 3, 9, 4]), ([1, 2, 3], [40, 8, 8]), ([0, 1, 2, 3], [5, 5, 5, 5])):
        seen.clear()
        step = decode_step(seqs, lengths)
        result = graphs.run(step)
        results.add(result.data_ptr())
        torch.testing.assert_close(result, rowwise(step), rtol=0, atol=0)
        addresses, (token_ids, positions, rope_lengths, starts, seq_lens, table, slots) = seen[-1]
        assert addresses == seen[0][0]
        rows, (_, columns) = len(seqs), step.metadata.block_table.shape
        for found, given in (
            (token_ids, step.token_ids),
            (positions, step.positions),
            (rope_lengths, step.rope_lengths),
            (seq_lens, step.metadata.seq_lens),
        ):
            assert found.tolist() == given.tolist() + [0] * (4 - rows)
        assert slots.tolist() == step.metadata.slot_mapping.tolist() + [-1] * (4 - rows)
        assert starts.tolist() == [0, 1, 2, 3, 4]
        assert table[:rows, :columns].tolist() == step.metadata.block_table.tolist()
        assert not table[rows:].any()
        assert not table[:, columns:].any()
    assert len(results) == 1


def test_captured_metadata_holds_the_largest_lengths():
    prepared = []
    backend = SimpleNamespace(captures_decode=True, prepare=prepared.append)
    graphs_of(rowwise, backend, Recorder(), max_num_seqs=2).run(decode_step([0], [7]))
    assert [(each.max_query_len, each.host_seq_lens.max(), len(each.seq_lens)) for each in prepared] == [
        (1, MAX_LEN, 2),
        (1, MAX_LEN, 1),
    ]


def test_replays_do_not_prepare_and_keep_what_was_prepared():
    backend = stub()
    alive = []

    def prepare(metadata):
        backend.workspace = torch.zeros(3)
        alive.append(backend.workspace.data_ptr())

    backend.prepare = prepare
    graphs = graphs_of(rowwise, backend, Recorder(), max_num_seqs=1)
    graphs.run(decode_step([0], [7]))
    captured = backend.workspace
    backend.prepare(None)  # of an eager step
    graphs.run(decode_step([0], [8]))
    assert len(alive) == 2
    holders = [each for each in gc.get_referrers(captured) if isinstance(each, dict) and "workspace" in each]
    assert [each["workspace"] is captured for each in holders] == [True]


@pytest.mark.parametrize(
    ("backend", "step"),
    [
        (stub(), decode_step(range(5), [9] * 5)),
        (stub(), decode_step([0, 1], [9, 9], query_len=2)),
        (SimpleNamespace(captures_decode=False), decode_step([0], [9])),
    ],
    ids=["more rows than sequences may run", "several tokens of a sequence", "a backend that cannot be captured"],
)
def test_no_graph_serves(backend, step):
    recorder = Recorder()
    assert graphs_of(rowwise, backend, recorder, max_num_seqs=4).run(step) is None
    assert recorder.num_records == 0


def test_a_capture_that_fails_leaves_its_size_to_eager_steps(caplog):
    recorder = Recorder(fails=(1, 3))  # the largest, and the second size that a step asks for
    graphs = graphs_of(rowwise, stub(), recorder, max_num_seqs=8)
    with caplog.at_level(logging.WARNING, "octavo.engine"):
        for _ in range(2):
            assert graphs.run(decode_step([0], [9])) is not None
            assert graphs.run(decode_step([0, 1], [9, 9])) is None
            assert graphs.run(decode_step(range(7), [9] * 7)) is None
            assert graphs.run(decode_step(range(3), [9] * 3)) is not None
    assert [record.args[0] for record in caplog.records] == [8, 2]
    assert "no memory" in caplog.text


class FakeCUDA:
    """What `GraphPool` asks of torch.cuda, as a log."""

    def __init__(self, monkeypatch):
        self.log, self.streams, self.pools = [], 0, 0
        self.current = SimpleNamespace(
            name="main", wait_stream=lambda other: self.log.append(f"main waits {other.name}")
        )
        monkeypatch.setattr(torch.cuda, "Stream", self.make_stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", self.make_pool)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.log.append("replay")))
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def make_stream(self, device):
        self.streams += 1
        name = f"side {self.streams}"
        return SimpleNamespace(name=name, wait_stream=lambda other: self.log.append(f"{name} waits {other.name}"))

    def make_pool(self):
        self.pools += 1
        return (0, self.pools)

    @contextmanager
    def stream(self, stream):
        self.log.append(f"on {stream.name}")
        yield
        self.log.append("off")

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.log.append(f"capture in pool {pool[1]} on {stream.name} {capture_error_mode}")
        yield
        self.log.append("captured")


def test_work_is_warmed_up_and_captured_on_a_side_stream(monkeypatch):
    cuda = FakeCUDA(monkeypatch)
    pool = GraphPool(CPU)
    assert gc.isenabled()
    replay = pool.record(lambda: cuda.log.append(f"work, collector {gc.isenabled()}"))
    assert gc.isenabled()
    replay()
    work = "work, collector False"
    assert cuda.log == [
        *("side 1 waits main", "on side 1", work, work, "capture in pool 1 on side 1 thread_local", work, "captured"),
        *("off", "main waits side 1", "replay"),
    ]
    pool.record(lambda: None)
    assert "capture in pool 1 on side 1 thread_local" in cuda.log[-4:]


def test_after_a_broken_capture_stream_and_pool_are_new_ones(monkeypatch):
    cuda = FakeCUDA(monkeypatch)
    pool = GraphPool(CPU)
    with pytest.raises(torch.OutOfMemoryError):
        pool.record(lambda: (_ for _ in ()).throw(torch.OutOfMemoryError))
    assert gc.isenabled()
    pool.record(lambda: None)
    assert "capture in pool 2 on side 2 thread_local" in cuda.log
