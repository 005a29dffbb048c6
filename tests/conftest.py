"""Standing here, this file puts tests/ on the import path, so that every test can `import strategies`."""

import os
from importlib.util import find_spec

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # without a GPU its kernels are interpreted; asked for when it is imported
torch.set_num_threads(1)  # tensors are tiny: threads that wait for each other on a busy machine cost a tenfold

# One settled set of examples keeps main green or red for a reason; HYPOTHESIS_PROFILE=search looks further.
_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("settled", derandomize=True, max_examples=50, **_common)
settings.register_profile("search", max_examples=1000, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "settled"))


def pytest_addoption(parser):
    if find_spec("pytest_timeout") is None:
        parser.addini("timeout", "of pytest-timeout, which is not installed: tests run without time limits")


def pytest_configure(config):
    if find_spec("pytest_timeout") is None:
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")
