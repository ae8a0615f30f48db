"""The life of what is stored: pins, retention, collection, compaction and verification. Saving needs none of it."""
