"""Groups over NCCL: parts of the world, meshes of two dimensions, FSDP2 beside rings, and training that is killed."""

import pytest
import torch
from kill_programs import Kill, begun, newest_whole, start
from training_curves import losses, write_corpus
from training_runs import check

import shared_gpu
from worlds import results

LIMIT = 150.0
EXACT = 1e-9  # between float64 runs, as on CPUs


def on_nccl(size, program, *args):
    return results(size, "programs:on_nccl", program, *args, limit=LIMIT, **shared_gpu.world(size))


def around(rank, ranks):
    """What a rank meets when everybody's number goes once around."""
    at, size = ranks.index(rank), len(ranks)
    return [[float((at - step) % size)] for step in range(1, size)]


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring_meets_every_rank(size):
    assert on_nccl(size, "ring", 2) == [2 * around(rank, range(size)) for rank in range(size)]


@pytest.mark.parametrize(
    ("program", "args", "expected"),
    [
        ("three_letters", (), [None, [[1, 2, 3]] * 3]),
        ("every_dtype", (), [[1] * 6, [0] * 6]),
        ("two_buffers", (20,), [[float(step + 100 * (1 - rank)) for step in range(20)] for rank in (0, 1)]),
        ("sizes", ([1, 4097, 3_000_001, 0],), [0, 0]),
    ],
)
def test_the_contract_of_transports(program, args, expected):
    assert on_nccl(2, program, *args) == expected


def test_parts_of_the_world_are_rings_of_their_own():
    for rank, (place, met, refused) in enumerate(on_nccl(4, "sub_groups")):
        assert place == rank // 2
        assert met == 2 * around(place, range(2))
        assert "not in the group" in refused


def test_meshes_of_two_dimensions():
    for rank, found in enumerate(on_nccl(4, "meshes")):
        assert found["row"] == (rank % 2, 2, 2, around(rank % 2, range(2)))
        assert found["whole"] == (rank, 4, 2, around(rank, range(4)))
        assert found["part"] == (rank % 2, 2, 2, around(rank % 2, range(2)))


@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
def test_attention_in_rows_of_a_mesh_and_over_all_of_it(shape):
    """Two rings side by side, each with sequences of its own; and nodes of a mesh as one ring."""
    size = shape[0] * shape[1]
    assert (
        results(size, "nccl_programs:attention_on_a_mesh", shape, limit=LIMIT, **shared_gpu.world(size)) == [[]] * size
    )


def test_ranks_that_were_given_different_batches_all_hear_it():
    """With checksums of CUDA tensors, and in a group that has no way for those of the host."""
    for said in results(2, "nccl_programs:different_batches", limit=LIMIT, **shared_gpu.world(2)):
        assert len(said) == 2
        assert all("ranks disagree: input_ids is [3, 1000] with checksum" in each for each in said)


def test_fsdp2_beside_rings_trains_as_one_process():
    for run in results(4, "nccl_programs:fsdp2", limit=LIMIT, **shared_gpu.world(4)):
        check(run, torch.float64)


def test_training_that_is_killed_goes_on_to_the_losses_of_a_run_that_is_not(tmp_path):
    corpus = str(write_corpus(tmp_path / "corpus"))
    words = {"data": corpus, "dtype": "fp64", "steps": 12, "save_every": 3, "keep": 3, "timeout": 30.0, "batch": 1}
    words |= {"context_ranks": None, "device": "cuda"}
    out, whole = tmp_path / "killed", tmp_path / "whole"
    killed = start(4, out, words, Kill((2,), steps=5), limit=LIMIT, **shared_gpu.world(4))
    assert killed[2].status == -9
    for rank in (0, 1, 3):
        assert (killed[rank].error, killed[rank].status) == ("PeerLost", 0), killed[rank].printed
    expected = newest_whole(out)
    assert 3 <= expected < 12
    for outcome in start(4, out, words, limit=LIMIT, **shared_gpu.world(4)):
        assert outcome.error is None, outcome.printed
        assert outcome.value[:2] == (12, expected)
    assert begun(out) == [0, expected]
    assert {outcome.value[1] for outcome in start(4, whole, words, limit=LIMIT, **shared_gpu.world(4))} == {None}
    assert len(losses(out)) == 12
    assert max(abs(a - b) for a, b in zip(losses(out), losses(whole), strict=True)) < EXACT
