"""Stands in for SGLang in tests: answers over HTTP as SGLang does, generates text by a rule, measures nothing."""
