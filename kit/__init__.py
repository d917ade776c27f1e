"""Measure whether multi-token prediction (MTP) helps a language-model service, and why."""
