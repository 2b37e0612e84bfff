"""What brings the project up on a machine: system packages, and the demo."""
