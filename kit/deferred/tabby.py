"""Start TabbyAPI with MTP prefill deferred, without changing it or installing anything into it.

::

    python -m kit.deferred.tabby [--depth 8] [--where device|pinned] [--coalesce] [--rolling] [--unblock] PATH
    [TabbyAPI's arguments]

PATH is TabbyAPI's folder (its ``main.py`` is run) or a script in it (``start.py``). Run it with the Python that
TabbyAPI runs with. The queue pays where TabbyAPI splits a model with an MTP head over GPUs layer by layer; in its
``config.yml``::

    model:
      model_name: Qwen3.8-27B-exl3-7.00bpw
      max_seq_len: 131072
      cache_size: 131072
      cache_mode: Q4
      chunk_size: 3072          # tokens per prompt chunk; a queued chunk is tokens × hidden size × 2 bytes
      tensor_parallel: false    # with tensor parallelism there is nothing to defer
      gpu_split_auto: false
      gpu_split: [14.5, 13.5]   # leave room for the queue: autosplit does not count it
    draft_model:
      draft_mode: mtp
      dynamic_draft: true
      draft_num_tokens: 7
      draft_cache_mode: Q4
      draft_gpu_split: [0, 4]   # with --unblock: the MTP head on the last GPU

On fast GPUs it can be the host that sets the pace (`notebooks/prefill.ipynb` shows how to tell). ExLlamaV3's own
``EXL3_GDN_SUB_CHUNK`` then helps models with linear attention: set to ``chunk_size``, it scans a chunk in one pass
instead of 2048 tokens at a time, with fewer kernels to launch for the same result and more scratch memory.

The same switches as environment variables (`kit.deferred.autoload`) reach a TabbyAPI that is started some other way.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from kit.errors import KitError

from . import autoload
from .install import DEFAULT_MAX_BYTES


def script(path: Path) -> Path:
    """The script that starts TabbyAPI at ``path``.

    Raises:
        KitError: If there is none.
    """
    main_script = path / "main.py" if path.is_dir() else path
    if not main_script.is_file():
        raise KitError(f"no TabbyAPI at {path}: give its folder (with main.py in it) or one of its scripts")
    return main_script.resolve()


def main(argv: Sequence[str] | None = None) -> int:
    """Set the switches, then run TabbyAPI in this process as if it had been started directly."""
    parser = argparse.ArgumentParser(prog="python -m kit.deferred.tabby", description=__doc__.split("\n")[0])
    parser.add_argument("--depth", default="8", help="chunks to defer, or 'all' (default 8; 1 is stock)")
    parser.add_argument("--where", choices=sorted(DEFAULT_MAX_BYTES), default="device", help="where queued rows wait")
    parser.add_argument("--coalesce", action="store_true", help="run queued chunks as fewer, longer passes")
    parser.add_argument("--rolling", action="store_true", help="replay only the oldest pass of a full queue")
    parser.add_argument("--unblock", action="store_true", help="upload prefill inputs without blocking as well")
    parser.add_argument("path", type=Path, metavar="PATH", help="TabbyAPI's folder, or a script in it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on to TabbyAPI")
    given = parser.parse_args(argv)
    try:
        target = script(given.path)
        autoload.parse_depth(given.depth)
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    os.environ[autoload.DEPTH] = given.depth
    os.environ["KIT_DEFER_WHERE"] = given.where
    os.environ["KIT_DEFER_COALESCE"] = str(int(given.coalesce))
    os.environ["KIT_DEFER_ROLLING"] = str(int(given.rolling))
    os.environ["KIT_DEFER_UNBLOCK"] = str(int(given.unblock))
    autoload.activate()
    os.chdir(target.parent)  # TabbyAPI reads config.yml and finds its packages from there
    sys.path[0] = str(target.parent)
    sys.argv = [str(target), *given.arguments]
    runpy.run_path(str(target), run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
