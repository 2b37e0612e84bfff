"""Builds what is installed: the sdist and the wheel (`dist`), and the Debian package (`debian`).

Read `share` first: the man pages and the completions, which all three carry, are made from the
programs themselves. Everything lies in `dist/` afterwards.
"""
