"""One daemon for all tests that start containers, with a base image, or a loud skip."""

import contextlib
import faulthandler
import sys
from collections.abc import Iterator

import pytest

from tests.compose import daemon
from tests.compose.daemon import Unavailable


@pytest.fixture(scope="session")
def docker(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The environment for docker and Compose. Skipped, loudly, only where there is no daemon and none can be started:
    what fails after that is a failure."""
    faulthandler.cancel_dump_traceback_later()  # a test may take five minutes, and images take more
    with contextlib.ExitStack() as held:
        try:
            environment = held.enter_context(daemon.daemon())
            environment |= {"COMPOSE_DOCKER_CLI_BUILD": "0"} | daemon.limits()  # the old one shall not need buildx
            environment |= {"PYTHON_BASE": daemon.base_image(environment), "TORCH_INDEX": daemon.torch_index()}
            daemon.compose(environment)
        except Unavailable as reason:
            with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                print(daemon.words_of(str(reason)), file=sys.stderr)
            pytest.skip(f"no containers here: {reason}")
        yield environment
