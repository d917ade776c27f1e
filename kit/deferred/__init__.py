"""The deferred MTP-prefill queue for ExLlamaV3, and the unblocked inputs that go with it.

`kit.deferred.install` says what is interposed and why it is exact. Importing this package imports neither torch nor
ExLlamaV3; `install` and `unblock` import the engine when they are called.
"""

from .install import DeferError, Settings, counters, install, installed, unblock, uninstall

__all__ = ["DeferError", "Settings", "counters", "install", "installed", "unblock", "uninstall"]
