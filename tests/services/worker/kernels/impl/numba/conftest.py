"""These kernels need what the provider needs; where it is not there, the worker uses torch and says why."""

import pytest

from services.worker.kernels.impl.numba._team import unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable()
    if reason is not None:
        for item in items:
            if "kernels/impl/numba" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=f"provider numba: {reason}"))
