"""The page of `dlcmd dashboard` in a real browser: `make test-browser`."""
