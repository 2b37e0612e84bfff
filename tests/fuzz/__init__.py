"""Coverage-guided fuzzing of all parsers of untrusted bytes: `make fuzz`."""
