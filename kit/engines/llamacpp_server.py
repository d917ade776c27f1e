"""The llama.cpp server's own process: settings on stdin, one line out when it listens, then it serves until ended.

Run by :mod:`kit.engines.llamacpp` as ``python -m kit.engines.llamacpp_server``. The server computes in threads of this
process, so that it must not be the client's.
"""

from __future__ import annotations

import json
import signal
import sys

import xllamacpp

from kit.engines.llamacpp import ANNOUNCEMENT, LlamaCppSettings, default_threads

NO_FOLDER = "/nonexistent/"
"""Where slots are saved: the server empties a slot only if such a folder is named, and nothing is to be saved."""


def parameters(settings: LlamaCppSettings) -> xllamacpp.CommonParams:
    """llama.cpp's own parameters for these settings."""
    kinds = xllamacpp.common_speculative_type
    threads = settings.threads or default_threads()
    p = xllamacpp.CommonParams()
    p.model.path = str(settings.model)
    p.model_alias = {settings.model.stem}
    p.hostnames = ["127.0.0.1"]
    p.port = 0
    p.ui = False
    # No page in a browser on this machine may talk to the server; llama.cpp's default lets all.
    p.cors_origins = "http://127.0.0.1"
    p.endpoint_metrics = True
    p.endpoint_slots = True
    p.slot_save_path = NO_FOLDER
    p.n_parallel = settings.slots
    p.n_ctx = settings.tokens_per_slot * settings.slots
    p.kv_unified = False
    p.n_batch = settings.batch_tokens
    p.n_ubatch = settings.ubatch_tokens
    p.cache_ram_mib = settings.prompt_cache_mib
    p.cache_idle_slots = settings.prompt_cache_mib > 0
    # The context asked for, or an error: never a smaller one that happens to fit.
    p.fit_params = False
    p.n_gpu_layers = 0
    p.cpuparams.n_threads = threads
    p.cpuparams_batch.n_threads = threads
    p.speculative.draft.cpuparams.n_threads = threads
    p.speculative.draft.cpuparams_batch.n_threads = threads
    p.load_mtp = settings.mtp_drafts if settings.load_mtp is None else settings.load_mtp
    types = []
    if settings.ngram_drafts:
        types.append(kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE)
        p.speculative.ngram_simple.size_n = settings.ngram_match
        p.speculative.ngram_simple.size_m = settings.ngram_max
    if settings.mtp_drafts:
        types.append(kinds.COMMON_SPECULATIVE_TYPE_DRAFT_MTP)
        p.speculative.draft.n_max = settings.draft_width
    if types:
        p.speculative.types = types
    if settings.forced_acceptance is not None:
        p.speculative.synth_rates = list(settings.forced_acceptance)
    return p


def read_back(p: xllamacpp.CommonParams) -> dict[str, str | int | float | bool | None]:
    """What the server runs with, from its parameters after loading: a value it changed shows.

    One switch is one entry (no drafting is ``draft_width`` 0 and no ``ngram``), so that two arms that differ in one
    switch differ in one entry.
    """
    kinds = xllamacpp.common_speculative_type
    types = set(p.speculative.types)
    mtp = kinds.COMMON_SPECULATIVE_TYPE_DRAFT_MTP in types
    ngram = kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE in types
    forced = list(p.speculative.synth_rates)
    lookup = p.speculative.ngram_simple
    return {
        "xllamacpp": xllamacpp.__version__,
        "threads": p.cpuparams.n_threads,
        "threads_prefill": p.cpuparams_batch.n_threads,
        "threads_draft": p.speculative.draft.cpuparams.n_threads,
        "batch_tokens": p.n_batch,
        "ubatch_tokens": p.n_ubatch,
        "prompt_cache_mib": p.cache_ram_mib,
        "state_checkpoints": p.n_ctx_checkpoints,
        "mtp_loaded": p.load_mtp,
        "draft_width": p.speculative.draft.n_max if mtp else 0,
        "ngram": f"match {lookup.size_n}, draft {lookup.size_m}" if ngram else None,
        "forced_acceptance": ",".join(f"{rate:g}" for rate in forced) if forced else None,
    }


def main() -> int:
    """Serve until a signal ends the process. Status 1 if the server cannot start: llama.cpp has then logged why."""
    settings = LlamaCppSettings.model_validate_json(sys.stdin.read())
    p = parameters(settings)
    try:
        server = xllamacpp.Server(p)
    except RuntimeError:
        return 1
    ready = {"address": server.listening_address, "model": settings.model.stem, "resolved": read_back(p)}
    # llama.cpp logs to the same file from threads of its own, hence a line begun anew, in one write.
    sys.stdout.write(f"\n{ANNOUNCEMENT}{json.dumps(ready)}\n")
    sys.stdout.flush()
    # SIGTERM keeps its default and ends the process at once: an orderly end would wait for running requests.
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
