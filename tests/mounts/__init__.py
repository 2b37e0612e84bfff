"""The mount: its semantics over every session, its start and its end."""
