"""Where a run's numbers come from, taken when measuring.

Everything here is best effort: what cannot be found out is ``None``. Nothing secret is ever taken: argv is
scrubbed of values that follow key-like options and of URLs' user part, and the home directory is written ``~``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from kit.records.schema import Gpu, Provenance

_SECRET_OPTION = re.compile(r"^--?[\w-]*(key|token|secret|password)[\w-]*(=.*)?$", re.IGNORECASE)
_URL_USER = re.compile(r"(\w+://)[^/@\s]+@")


def scrub(argv: Sequence[str]) -> list[str]:
    """argv without keys, tokens, URL credentials or the home directory."""
    clean: list[str] = []
    hide_next = False
    for word in argv:
        secret = _SECRET_OPTION.match(word)
        if hide_next:
            word = "***"
        elif secret and secret.group(2):
            word = word.split("=", 1)[0] + "=***"
        # An option that names an environment variable (--key-env NAME) holds no secret.
        hide_next = bool(secret and not secret.group(2) and not word.endswith("-env"))
        clean.append(without_home(_URL_USER.sub(r"\1***@", word)))
    return clean


def without_home(text: str) -> str:
    """The text with the home directory written as ``~``."""
    home = os.path.expanduser("~")
    return text.replace(home, "~") if len(home) > 1 else text


def model_stamp(folder: Path) -> str | None:
    """A short hash that names a model's weights without reading them all; None if there is nothing to hash.

    Of a checkpoint folder: config.json and the weight index (or, without an index, each safetensors file's header,
    which holds every tensor's name, shape and offset). Of a GGUF file: its size and first and last MiB.
    """
    digest = hashlib.sha256()
    if folder.is_file():
        size = folder.stat().st_size
        digest.update(str(size).encode())
        with folder.open("rb") as handle:
            digest.update(handle.read(1 << 20))
            handle.seek(max(0, size - (1 << 20)))
            digest.update(handle.read())
        return digest.hexdigest()[:16]
    found = False
    for name in ("config.json", "model.safetensors.index.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
            found = True
    if found and not (folder / "model.safetensors.index.json").is_file():
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                digest.update(handle.read(min(length, 1 << 26)))
                digest.update(handle.read(1 << 20))
    return digest.hexdigest()[:16] if found else None


def workload_hash(definition: Mapping[str, object]) -> str:
    """Hash of a workload's definition: sorted JSON, so that key order does not matter."""
    return hashlib.sha256(json.dumps(definition, sort_keys=True, default=str).encode()).hexdigest()[:16]


def collect(argv: Sequence[str], versions: Mapping[str, str] | None = None, model: Path | None = None) -> Provenance:
    """Take the provenance of this machine and checkout now.

    ``versions`` adds what only the caller knows (the engine's own); ``model`` is the weights' folder or file.
    """
    commit, dirty = _git_state()
    return Provenance(
        commit=commit,
        dirty=dirty,
        versions={**_versions(), **(versions or {})},
        machine=f"{platform.system()} {platform.release()} {platform.machine()}",
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory_gib=_memory_gib(),
        gpus=gpus(),
        model_stamp=model_stamp(model) if model else None,
        argv=scrub(argv),
    )


def gpus() -> list[Gpu]:
    """The GPUs as ``nvidia-smi`` lists them; an empty list where there are none (or no driver)."""
    fields = "name,memory.total,driver_version,clocks.sm,clocks.mem,clocks_event_reasons.active"
    out = _run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
    found = []
    for line in (out or "").splitlines():
        parts = [p.strip() for p in line.split(",")]
        if len(parts) == 6:
            found.append(
                Gpu(
                    name=parts[0],
                    memory_mib=int(parts[1]) if parts[1].isdigit() else None,
                    driver=parts[2],
                    sm_clock_mhz=_number(parts[3]),
                    memory_clock_mhz=_number(parts[4]),
                    throttle_reasons=parts[5] if parts[5].startswith("0x") else None,
                )
            )
    return found


def _git_state() -> tuple[str | None, bool | None]:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return os.environ.get("KIT_COMMIT"), None  # a copy without git history (a GPU host): told by whoever copied it
    commit = _run(["git", "-C", str(root), "rev-parse", "HEAD"])
    status = _run(["git", "-C", str(root), "status", "--porcelain"])
    return (commit.strip() if commit else None), (bool(status.strip()) if status is not None else None)


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("mtp-kit", "xllamacpp", "sglang", "exllamav3", "torch", "transformers", "triton", "numpy", "aiohttp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")  # never imported for this: only an engine's process has it
    if torch is not None and getattr(torch.version, "cuda", None):
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or None
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.processor() or None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
