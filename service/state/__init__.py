"""The database: the one source of truth for uploads, artifacts, conversions, events, steps and the cache."""
