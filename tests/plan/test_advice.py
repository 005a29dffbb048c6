"""Advice on networks: complete, in the documents as it is in the data, and checks that say what is wrong."""

import importlib.util
from pathlib import Path

import pytest

from longring.plan import environment
from longring.plan.advice import MILESTONES, VARIABLES
from longring.plan.environment import Concern, Place, concerns

DOCS = Path(__file__).parents[2] / "docs"
KNOWN = {variable.name for variable in VARIABLES}


def said(name, value, **place):
    """What is said of one variable, in an environment that is otherwise in order."""
    calm = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    found = concerns(Place({**calm, name: value}, **place))
    assert all(concern.name == name and f"{name}={value}: " in concern.text for concern in found)
    return [concern.level for concern in found]


def test_every_entry_is_complete():
    for variable in VARIABLES:
        assert all((variable.name, variable.does, variable.matters, variable.recommended, variable.source))
        assert variable.reader in ("NCCL", "Gloo", "torch", "CUDA")
    for milestone in MILESTONES:
        assert all(milestone)
    assert len(KNOWN) == len(VARIABLES)


def test_the_documents_tables_are_current():
    spec = importlib.util.spec_from_file_location("write_tables", DOCS / "write_tables.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = (DOCS / "networks.md").read_text()
    assert text == script.renewed(text), "run python docs/write_tables.py"
    assert all(f"`{name}`" in text for name in KNOWN)


def test_only_what_the_table_explains_is_checked():
    assert set(environment._CHECKS) | set(environment._WHEN_MISSING) <= KNOWN


@pytest.mark.parametrize(
    ("name", "value", "place", "levels"),
    [
        ("NCCL_P2P_DISABLE", "1", {}, ["slow"]),
        ("NCCL_P2P_DISABLE", "0", {}, []),
        ("NCCL_P2P_LEVEL", "LOC", {}, ["slow"]),
        ("NCCL_P2P_LEVEL", "3", {}, ["note"]),
        ("NCCL_P2P_LEVEL", "NVL", {}, []),
        ("NCCL_IB_DISABLE", "1", {"machines": 2}, ["slow"]),
        ("NCCL_IB_DISABLE", "1", {"machines": 1}, []),
        ("NCCL_NET_GDR_LEVEL", "loc", {"machines": 2}, ["slow"]),
        ("NCCL_SOCKET_IFNAME", "lo", {"machines": 2}, ["wrong"]),
        ("NCCL_SOCKET_IFNAME", "lo", {"machines": 1, "interfaces": ["lo", "eth0"]}, []),
        ("NCCL_SOCKET_IFNAME", "eth", {"machines": 2, "interfaces": ["lo", "eth0"]}, []),
        ("NCCL_SOCKET_IFNAME", "=eth", {"machines": 2, "interfaces": ["lo", "eth0"]}, ["wrong"]),
        ("NCCL_SOCKET_IFNAME", "^docker", {"machines": 2, "interfaces": ["lo", "eth0"]}, []),
        ("NCCL_IB_HCA", "mlx5_1", {"machines": 2}, ["note"]),
        ("NCCL_IB_HCA", "=mlx5_1", {"machines": 2}, []),
        ("NCCL_IB_HCA", "mlx5", {"machines": 2}, []),
        ("NCCL_IB_GID_INDEX", "3", {"machines": 2}, ["note"]),
        ("NCCL_IB_GID_INDEX", "3", {"machines": 2, "nccl": (2, 20, 5)}, []),
        ("NCCL_IB_TIMEOUT", "0", {"machines": 2}, ["wrong"]),
        ("NCCL_IB_TIMEOUT", "22", {"machines": 2}, []),
        ("NCCL_MAX_CTAS", "1", {}, ["slow"]),
        ("NCCL_MAX_CTAS", "16", {}, []),
        ("NCCL_MAX_NCHANNELS", "8", {}, ["note"]),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", {}, ["wrong"]),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", {}, ["note"]),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", {}, []),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", {}, ["slow"]),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", {}, ["note"]),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", {}, ["note"]),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "32", {}, []),
        ("CUDA_LAUNCH_BLOCKING", "1", {}, ["slow"]),
        ("GLOO_SOCKET_IFNAME", "lo", {"backend": "gloo", "machines": 2}, ["wrong"]),
        ("GLOO_SOCKET_IFNAME", "lo", {"backend": "gloo"}, []),
        ("GLOO_SOCKET_IFNAME", "eth7", {"backend": "gloo", "interfaces": ["lo", "eth0"]}, ["wrong"]),
        ("GLOO_SOCKET_IFNAME", "eth7", {"backend": "cpu:gloo,cuda:nccl", "interfaces": ["lo"]}, ["wrong"]),
        ("OMP_NUM_THREADS", "2", {"backend": "gloo", "ranks_here": 4, "cores": 2}, ["slow"]),
        ("OMP_NUM_THREADS", "2", {"backend": "gloo", "ranks_here": 1, "cores": 2}, []),
        ("NCCL_P2P_DISABLE", "1", {"backend": "gloo"}, []),
    ],
)
def test_a_value_is_judged(name, value, place, levels):
    assert said(name, value, **place) == levels


def test_what_is_missing_is_named():
    def names(**place):
        return [(concern.name, concern.level) for concern in concerns(Place({}, **place))]

    assert names(backend="gloo", machines=2) == [("GLOO_SOCKET_IFNAME", "note")]
    assert names(backend="gloo", ranks_here=4) == [("OMP_NUM_THREADS", "slow")]
    assert names(backend="nccl", machines=2) == [("TORCH_NCCL_ASYNC_ERROR_HANDLING", "note")]
    assert names(backend="gloo") == []


def test_the_worst_comes_first():
    found = concerns(
        Place({"NCCL_MAX_NCHANNELS": "8", "NCCL_P2P_DISABLE": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    )
    assert [concern.level for concern in found] == ["wrong", "slow", "note"]
    assert all(isinstance(concern, Concern) for concern in found)


def test_an_error_names_what_the_machine_has():
    [concern] = concerns(Place({"GLOO_SOCKET_IFNAME": "ib0"}, backend="gloo", interfaces=["lo", "eth0"]))
    assert concern.text == "GLOO_SOCKET_IFNAME=ib0: this machine has no interface ib0; it has eth0, lo"
