"""Builds the sdist and the wheel (`dist`), and the Debian package (`debian`), in `dist/`.

Read `share` first: it makes the man pages and the completions from the programs themselves.
"""
