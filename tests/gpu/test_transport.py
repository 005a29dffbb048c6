"""What of the transport one GPU can show: streams in order, NCCL's group of one."""

import threading

import pytest
import torch

from worlds import results

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.processes,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_copy_on_the_transports_stream_comes_after_what_computed_it_and_before_what_uses_it():
    from longring.transport.streams import OnDevice, crossing

    device = torch.device("cuda", 0)
    for _ in range(20):
        source, target = torch.zeros(1 << 22, device=device), torch.zeros(1 << 22, device=device)
        torch.cuda._sleep(20_000_000)  # the source is ready only after a while
        source.fill_(7)
        way = crossing([source])
        assert isinstance(way, OnDevice)

        def carry(way=way, source=source, target=target):
            with way.posting():
                torch.cuda._sleep(20_000_000)
                target.copy_(source)
                way.mark_done()

        carrier = threading.Thread(target=carry)
        carrier.start()
        carrier.join()
        way.hand_over()
        assert target.eq(7).all()
        way.watch()


def test_a_group_of_nccl_alone_has_a_companion_and_can_be_closed():
    patience, met, companion = results(1, "programs:nccl_alone")[0]
    assert patience == 600.0
    assert met == []
    assert companion == "gloo"
