"""Start, attach to, observe and stop an inference server: one module per engine, one shape for all.

:mod:`kit.engines.base` says what every engine hands out (:class:`~kit.engines.base.Server`),
:mod:`kit.engines.process` runs a server as a child that cannot outlive the kit. Importing this package imports no
engine.
"""
