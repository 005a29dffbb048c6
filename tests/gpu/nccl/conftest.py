"""Everything here runs NCCL ranks that share the first GPU. Where they cannot, it is skipped and says why.

Where LONGRING_TEST_NCCL names a library, ranks have to be able to: what keeps them from it fails the tests.
"""

import os
import sys
from pathlib import Path

import pytest

import shared_gpu

TESTS = Path(shared_gpu.__file__).parent
sys.path += [str(TESTS / "integrations"), str(TESTS / "train")]  # whose runs these tests repeat over NCCL


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for mark in (pytest.mark.gpu, pytest.mark.processes, pytest.mark.timeout(400)):
                item.add_marker(mark)


@pytest.fixture(scope="session", autouse=True)
def shared():
    with shared_gpu.multi_process_service():
        if reason := shared_gpu.refusal():
            (pytest.fail if shared_gpu.LIBRARY in os.environ else pytest.skip)(reason)
        yield
