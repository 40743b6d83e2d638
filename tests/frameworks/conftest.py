"""One framework at a time, each in its own environment: `pytest tests/frameworks --framework torch`."""

import pytest
from frames import FRAMES


def pytest_addoption(parser):
    parser.addoption("--framework", choices=sorted(FRAMES), help="the framework whose environment this is")


def pytest_configure(config):
    # Paddle says so wherever no ccache is installed, when it is imported
    config.addinivalue_line("filterwarnings", "ignore:No ccache found:UserWarning")


def pytest_collection_modifyitems(config, items):
    name = config.getoption("--framework")
    if name is None:
        raise pytest.UsageError("these tests need --framework NAME, and that framework's environment")
    ours = [item for item in items if item.path.stem == "test_conformance" or item.path.stem.startswith(f"test_{name}")]
    config.hook.pytest_deselected(items=[item for item in items if item not in ours])
    items[:] = ours


@pytest.fixture(scope="session")
def frame(pytestconfig):
    return FRAMES[pytestconfig.getoption("--framework")]()
