"""Coverage-guided fuzzing of every parser of bytes from outside: `make fuzz`."""
