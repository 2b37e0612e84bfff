"""The steps of `deploy/Dockerfile`, run in a root of Debian's, and the programs of that image."""
