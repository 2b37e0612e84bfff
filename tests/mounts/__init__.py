"""The mount: semantics over every session, life and death of the daemon."""
