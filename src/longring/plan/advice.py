"""What decides how fast and how safely NCCL and Gloo carry a ring: variables and versions, each with its source.

Data only. `environment` holds a given environment against it; docs/networks.md shows it as tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NCCL_GUIDE = "NCCL User Guide, Environment Variables (2.30)"
NCCL_NETWORKING = "NCCL User Guide, Networking Troubleshooting (2.30)"
NCCL_TYPES = "NCCL User Guide, Types (2.30)"
NCCL_SOURCE = "NCCL 2.30.7, source; not documented"
TORCH_NCCL = "PyTorch documentation, ProcessGroupNCCL Environment Variables"
TORCH_DISTRIBUTED = "PyTorch documentation, torch.distributed"
TORCH_RUN = "PyTorch documentation, torchrun (Elastic Launch)"
CUDA_GUIDE = "CUDA Programming Guide, CUDA Environment Variables"
CUDA_MPS = "NVIDIA Multi-Process Service, Environment Variables"
MEASURED = "measured with torch 2.13"


class Variable(NamedTuple):
    """An environment variable, and what to do with it."""

    name: str
    reader: str  # who reads it: NCCL, Gloo, torch or CUDA
    does: str
    matters: str  # when, for a ring
    recommended: str
    since: str  # of its reader; empty: of old
    source: str


class Milestone(NamedTuple):
    """A version from which on something is different for a ring."""

    library: str
    version: tuple[int, int]
    brings: str
    source: str


VARIABLES = (
    Variable(
        "NCCL_P2P_DISABLE",
        "NCCL",
        "1 turns off direct access between the GPUs of a machine, over NVLink or PCI",
        "ranks on one machine: every block then goes through host memory",
        "unset; 1 only to find out whether direct access is what fails",
        "",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_P2P_LEVEL",
        "NCCL",
        "the greatest distance between two GPUs at which they access each other directly "
        "(LOC, NVL, PIX, PXB, PHB, SYS)",
        "ranks on one machine; LOC is never, as NCCL_P2P_DISABLE=1",
        "unset: NCCL knows the machine; if at all, a name, since the meaning of numbers changes",
        "2.3.4",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_P2P_USE_CUDA_MEMCPY",
        "NCCL",
        "1 copies between the GPUs of a machine by copy engines instead of kernels",
        "ranks on one machine: transfers would take no SM from the attention kernels",
        "unset, or measured: it is no documented interface",
        "",
        NCCL_SOURCE,
    ),
    Variable(
        "NCCL_SHM_DISABLE",
        "NCCL",
        "1 turns off shared memory between GPUs that cannot access each other; the network is used instead",
        "ranks on one machine without NVLink or PCI peer access",
        "unset",
        "",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_SOCKET_IFNAME",
        "NCCL",
        "which IP interfaces NCCL uses: prefixes, `=` before exact names, `^` before those to avoid",
        "several machines: for meeting in any case, for the data where there is no InfiniBand or RoCE. "
        "An interface that is up but reaches nobody makes NCCL fail or hang",
        "the interface that all machines share, exactly: `=eth0`",
        "",
        f"{NCCL_GUIDE}; {NCCL_NETWORKING}",
    ),
    Variable(
        "NCCL_IB_DISABLE",
        "NCCL",
        "1 uses IP sockets instead of InfiniBand or RoCE",
        "several machines: a ring moves whole blocks, and sockets carry them without RDMA",
        "unset where there is InfiniBand or RoCE",
        "",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_IB_HCA",
        "NCCL",
        "which InfiniBand or RoCE adapters NCCL uses: prefixes, `=` before exact names, `^` before those to avoid",
        "several machines with adapters for other purposes (storage, management)",
        "unset, or exact: `=mlx5_0,mlx5_1`; without `=`, mlx5_1 is mlx5_10, too",
        "",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_IB_GID_INDEX",
        "NCCL",
        "the entry of the address table that RoCE uses",
        "several machines with RoCE; chosen at run time since 2.21",
        "unset with NCCL 2.21 or newer",
        "2.1.4",
        f"{NCCL_GUIDE}; {NCCL_NETWORKING}",
    ),
    Variable(
        "NCCL_IB_TIMEOUT",
        "NCCL",
        "how long InfiniBand waits for an answer, 4.096 us x 2^value, times NCCL_IB_RETRY_CNT",
        "a machine that is cut off: with 20 and 7 tries, the defaults, NCCL notices after 30 s; 0 is never",
        "unset; more only on very large networks",
        "default 20 since 2.23, 18 since 2.14",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_NET_GDR_LEVEL",
        "NCCL",
        "the greatest distance between GPU and adapter at which data goes straight from one to the other "
        "(LOC, PIX, PXB, PHB, SYS)",
        "several machines: without it every block takes a detour through host memory",
        "unset; instead see that nvidia-peermem is loaded, or DMA-BUF is there",
        "2.3.4",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_CROSS_NIC",
        "NCCL",
        "whether a flow may leave by one adapter and arrive at another: 0 never, 1 yes, 2 if that is faster",
        "several machines with several adapters each; depends on how the switches are wired",
        "unset (2), or what the owner of the network says",
        "",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_NCHANNELS_PER_NET_PEER",
        "NCCL",
        "over how many channels a pair of ranks exchanges data across the network; the default suits all-to-all",
        "several machines: a ring is two flows per rank, not p, and may not fill a fast adapter with the default",
        "unset for exchange and ulysses; for rings across fast networks try 2 and 4, and measure",
        "",
        f"{NCCL_TYPES}, nChannelsPerNetPeer; the gain for a ring: unverified",
    ),
    Variable(
        "NCCL_MAX_CTAS",
        "NCCL",
        "the most CUDA blocks NCCL takes for itself",
        "overlap on GPUs: what NCCL takes is missing in the attention kernel; too few do not fill the link",
        "unset; lower it if a profile shows attention slowed down by transfers that are hidden anyway",
        "2.17; up to 64 since 2.25",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_MAX_NCHANNELS",
        "NCCL",
        "the older name of NCCL_MAX_CTAS; the lower of the two counts",
        "as NCCL_MAX_CTAS",
        "unset",
        "2.5, deprecated in 2.17",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_LAUNCH_ORDER_IMPLICIT",
        "NCCL",
        "1 orders the operations of several communicators on a device as the program issued them",
        "a ring beside other groups on the same GPUs (data parallel, FSDP): in different orders they can deadlock",
        "1 where groups overlap",
        "2.26; without serialising since CUDA 12.3",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_MULTI_RANK_GPU_ENABLE",
        "NCCL",
        "1 lets several ranks share a GPU (experimental)",
        "trying a ring on fewer GPUs than ranks; without it NCCL refuses",
        "unset, except to try",
        "2.30",
        NCCL_GUIDE,
    ),
    Variable(
        "NCCL_DEBUG",
        "NCCL",
        "what NCCL prints: VERSION, WARN, INFO or TRACE",
        "WARN tells why a call failed; INFO, once, which links it found",
        "WARN",
        "",
        NCCL_GUIDE,
    ),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "Gloo",
        "the interface on which Gloo listens; otherwise the one that the host's name points to",
        "several machines, and any machine whose name points to 127.0.1.1 or nowhere",
        "the interface that all machines share: `eth0`. longring.launch takes loopback",
        "",
        f"{TORCH_DISTRIBUTED}; PyTorch source, ProcessGroupGloo.cpp",
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "torch",
        "what torch does when NCCL reports an error: 0 nothing, 1 abort and end the process, 2 abort only, "
        "3 end the process",
        "a lost peer: with 1 and 3 the process may end before your program has saved anything; with 0 nobody notices",
        "2 if your program does something after PeerLost, else unset",
        "default 3",
        TORCH_NCCL,
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        "torch",
        "1 makes wait() block the host until the transfer is over",
        "always: the host no longer runs ahead of the GPU. longring has its own time limits",
        "unset",
        "",
        TORCH_NCCL,
    ),
    Variable(
        "TORCH_NCCL_HIGH_PRIORITY",
        "torch",
        "1 gives NCCL's streams high priority",
        "overlap on GPUs: a transfer that starts beside a full attention kernel gets its blocks sooner",
        "1 if a profile shows transfers waiting for attention kernels",
        "",
        f"{TORCH_NCCL}; the gain for a ring: unverified",
    ),
    Variable(
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "torch",
        "once kept buffers alive by reference instead of by record_stream",
        "never: it is the only way now, and the variable is ignored with a warning",
        "unset",
        "ignored since torch 2.8",
        "pytorch/pytorch pull requests 150352 and 194701",
    ),
    Variable(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA",
        "how many queues lead from the host to a GPU",
        "overlap on GPUs: with 1, what some recipes for tensor parallelism ask for, work of all streams starts in the "
        "order in which it was issued",
        "unset",
        "",
        f"{CUDA_MPS}; the effect of 1 on a ring: unverified",
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        "CUDA",
        "1 makes every launch wait for its kernel",
        "always: nothing overlaps any more",
        "unset, except to find an error",
        "",
        CUDA_GUIDE,
    ),
    Variable(
        "OMP_NUM_THREADS",
        "torch",
        "how many threads a process computes with on the CPU",
        "several ranks on one machine's CPU: with all cores each, four ranks on two cores took 2.8 times as long",
        "cores / ranks; longring.launch sets that, torchrun sets 1",
        "",
        f"{MEASURED}; {TORCH_RUN}",
    ),
)

MILESTONES = (
    Milestone(
        "torch", (2, 8), "transfers on NCCL hold their buffers without record_stream", "pytorch pull request 150352"
    ),
    Milestone("NCCL", (2, 21), "RoCE finds its address by itself", NCCL_NETWORKING),
    Milestone("NCCL", (2, 22), "connections are made when first used, not all at the start", NCCL_GUIDE),
    Milestone("NCCL", (2, 23), "InfiniBand gives a silent peer 30 s instead of 7.5", NCCL_GUIDE),
    Milestone("NCCL", (2, 26), "rings and other groups on one GPU can be kept in order", NCCL_GUIDE),
    Milestone("NCCL", (2, 27), "a GPU reaches an adapter behind its own CPU directly (C2C)", NCCL_GUIDE),
    Milestone("NCCL", (2, 30), "several ranks can share a GPU, as an experiment", NCCL_GUIDE),
)


def variable_table() -> str:
    """In Markdown."""
    rows = ((f"`{v.name}`", v.does, v.matters, v.recommended, v.since, v.source) for v in VARIABLES)
    return _table(("variable", "what it does", "when it matters for a ring", "recommended", "since", "source"), rows)


def milestone_table() -> str:
    """In Markdown."""
    rows = ((f"{m.library} {'.'.join(map(str, m.version))}", m.brings, m.source) for m in MILESTONES)
    return _table(("from", "it", "source"), rows)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = tuple(header)
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
