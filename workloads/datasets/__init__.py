"""Files that others publish, and our own: one module a format, all read as `Recording`s."""
