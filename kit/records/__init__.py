"""The measured record: schema, store, metrics, statistics, provenance and comparability."""
