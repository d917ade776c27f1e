"""Run SGLang's own argument parser on the command lines given on stdin (a JSON list of word lists).

Its modules import much that only a GPU host has. None of that takes part in parsing, so packages that are missing
here are replaced by ones that hold nothing. Writes the parsed values as a JSON list.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types

import transformers
import transformers.utils.import_utils as availability
from pydantic_core import core_schema

HOLLOW = (
    "compressed_tensors cuda deep_gemm dill einops fastapi flashinfer gguf interegular llguidance numba openai "
    "openai_harmony outlines partial_json_parser prometheus_client pybase64 python_multipart sentencepiece "
    "setproctitle sgl_kernel soundfile starlette tiktoken torchao torchvision triton tvm_ffi uvicorn uvloop watchfiles "
    "xgrammar zmq sglang_router.sglang_router_rs"
).split()


class _HollowType(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Hollow,), {})

    def __or__(cls, _):
        return cls

    __ror__ = __or__

    def __getitem__(cls, _):
        return cls


class Hollow(metaclass=_HollowType):
    def __new__(cls, *args, **kwargs):
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType):
            return args[0]  # used as a decorator
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __init_subclass__(cls, **kwargs):
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_):
        return core_schema.any_schema()

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()

    def __getitem__(self, _):
        return self


class HollowModule(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (Hollow,), {}))
        return getattr(self, name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last in line: only what nobody else has found comes here."""

    def find_spec(self, name, path=None, target=None):
        hollow = any(name == top or name.startswith(f"{top}.") for top in HOLLOW)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if hollow else None

    def create_module(self, spec):
        return HollowModule(spec.name)

    def exec_module(self, module):
        pass


def prepare():
    # transformers must not take the hollow torchvision for a real one (it remembers what it found), nor mind that
    # SGLang registers configurations that a newer transformers has itself.
    availability.is_torchvision_available()
    availability.is_torchvision_greater_or_equal("0.1")
    for name in ("AutoConfig", "AutoProcessor", "AutoImageProcessor", "AutoTokenizer", "AutoModel"):
        getattr(transformers, name).register = classmethod(lambda cls, *args, **kwargs: None)
    sys.meta_path.append(Finder())
    if importlib.util.find_spec("triton").loader.__class__ is Finder:
        import triton

        target = types.SimpleNamespace(backend="cpu", warp_size=32, arch=0)
        active = types.SimpleNamespace(get_current_target=lambda: target)
        triton.runtime.driver = types.SimpleNamespace(active=active)
        triton.__version__ = "3.6.0"
    try:
        import dill

        dill.dumps(0)[:0] + b""
    except TypeError:
        dill.dumps = lambda *args, **kwargs: b""


def main():
    prepare()
    parser = argparse.ArgumentParser()
    if sys.argv[1] == "router":
        from sglang_router.router_args import RouterArgs

        parser.add_argument("--host")
        parser.add_argument("--port", type=int)
        RouterArgs.add_cli_args(parser, exclude_host_port=True)
    else:
        from sglang.srt.server_args import ServerArgs

        ServerArgs.add_cli_args(parser)
    parsed = [vars(parser.parse_args(words)) for words in json.load(sys.stdin)]
    print("PARSED" + json.dumps(parsed, default=str))


if __name__ == "__main__":
    main()
