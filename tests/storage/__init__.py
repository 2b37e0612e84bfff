"""Tests of the object, metadata and account stores: suites for all kinds, then for each."""
