"""Tests of the object and metadata stores: contract suites first, then what is each one's own."""
