"""For all tests: Ctrl-C works in them, however they were started."""

import signal


def pytest_configure() -> None:
    """A shell starts what it puts in the background with SIGINT ignored, and every process started from there inherits
    that: the tests that send it would fail in ``make test &`` alone."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
