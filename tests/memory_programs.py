"""What real ranks run to say how much they held; importable by the processes that longring.launch starts."""

from __future__ import annotations

import torch
import torch.distributed as dist

import longring as lr
from longring.bench.memory import measured_peak


def measured(pattern, *, layout, schedule, length, batch, heads, kv_heads, head_dim, dtype):
    """(forward, backward): peak bytes by the allocator's events, workspaces and the rank's own rows included."""
    torch.set_num_threads(1)
    group = dist.group.WORLD if dist.is_initialized() else None
    s = lr.Sharding(length, group, layout)

    def tensor(heads):
        return torch.randn(batch, s.local_length, heads, head_dim, dtype=dtype).requires_grad_()

    with measured_peak() as forward:
        q, k, v = tensor(heads), tensor(kv_heads), tensor(kv_heads)
        out, lse = lr.attention(q, k, v, pattern=pattern, sharding=s, schedule=schedule, return_lse=True)
    lr.release_buffers()  # those of the forward would be there before the backward is measured
    dout = torch.ones_like(out)
    with measured_peak() as backward:
        out.backward(dout)
    kept = sum(x.nbytes for x in (q, k, v, out, lse, dout))
    return forward.bytes, kept + backward.bytes
