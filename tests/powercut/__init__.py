"""A real loss of what was not synced: the project under a kernel whose power is cut."""
