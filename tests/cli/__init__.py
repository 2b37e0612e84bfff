"""Tests of the command line, over the programs `dlcmd` and `diesel-server`."""
